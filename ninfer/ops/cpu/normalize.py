"""RMS norms: a row is read once, its squares summed in float32, and rounded once on the way out.

Roofline: 4 bytes an element in bf16; one row of 576 takes 0.1 us, so at T = 1 the call itself is what counts.
"""

from __future__ import annotations

import torch

from ninfer.errors import OptionError
from ninfer.ops.checks import check_gate
from ninfer.ops.cpu.access import kind_of, read_row, size_of, write_row
from ninfer.ops.cpu.block import argument, next_shared
from ninfer.ops.cpu.functions import silu
from ninfer.ops.cpu.instructions import device
from ninfer.ops.cpu.kernel import Kernel, bits, launch, threads
from ninfer.ops.cpu.simd import (
    add,
    fma,
    get_f64,
    get_i32,
    load_f32,
    mul,
    splat,
    square_root,
    stack,
    store_f32,
    total,
    zeros,
)

_PARALLEL = 1 << 14  # elements


@device
def inverse_rms(row, width, eps):
    """`1 / sqrt(mean(x^2) + eps)` of a zero-padded float32 row."""
    even, odd = zeros(), zeros()
    for start in range(0, width & -32, 32):
        a, b = load_f32(row + 4 * start), load_f32(row + 4 * start + 64)
        even, odd = fma(a, a, even), fma(b, b, odd)
    for start in range(width & -32, width, 16):
        a = load_f32(row + 4 * start)
        even = fma(a, a, even)
    return splat(1.0 / square_root(total(add(even, odd)) / width + eps))


def norm_kernel(data):
    """An item is a row.

    Arguments: 0 x, 1 weight, 2 out, 3 rows, 4 width, 5 kind, 6 kind of weight, 7 added to weight, 8 eps, 9 z
    or 0, 10 heads (rows that share a row of z), 11 row stride of z in elements, 12 order of the heads or 0.
    """
    x, weight, out, rows = argument(data, 0), argument(data, 1), argument(data, 2), argument(data, 3)
    width, kind, weight_kind, offset = (
        argument(data, 4),
        argument(data, 5),
        argument(data, 6),
        argument(data, 7),
    )
    eps, gate, group, gate_stride = (
        get_f64(data + 64),
        argument(data, 9),
        argument(data, 10),
        argument(data, 11),
    )
    order = argument(data, 12)
    row, factors, gates = stack(4 * width + 64), stack(4 * width + 64), stack(4 * width + 64)
    read_row(weight, weight_kind, width, factors)
    for start in range(0, width, 16):
        store_f32(factors + 4 * start, add(load_f32(factors + 4 * start), splat(offset)))
    step = 8 if rows >= 64 else 1
    while True:
        begin = next_shared(data, step)
        if begin >= rows:
            break
        for item in range(begin, min(rows, begin + step)):
            source = item
            if order:
                source = item - item % group + get_i32(order + 4 * (item % group))
            read_row(x + source * width * size_of(kind), kind, width, row)
            inverse = inverse_rms(row, width, eps)
            for start in range(0, width, 16):
                place = row + 4 * start
                store_f32(place, mul(mul(load_f32(place), inverse), load_f32(factors + 4 * start)))
            if gate:
                place = source // group * gate_stride + source % group * width
                read_row(gate + size_of(kind) * place, kind, width, gates)
                for start in range(0, width, 16):
                    place = row + 4 * start
                    store_f32(place, mul(load_f32(place), silu(load_f32(gates + 4 * start))))
            write_row(row, out + item * width * size_of(kind), kind, width)


_norm = Kernel(norm_kernel)


def _team(elements: int) -> int:
    return threads() if elements > _PARALLEL else 1


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, unit_offset: bool) -> torch.Tensor:
    return _run(x, weight, eps, int(unit_offset), (0, 1, 0, 0))


def gated_rms_norm(
    o: torch.Tensor, z: torch.Tensor, weight: torch.Tensor, eps: float, head_order: torch.Tensor | None
) -> torch.Tensor:
    heads = check_gate(o, z, head_order)
    if not z[0].is_contiguous():
        z = z.contiguous()
    order = 0 if head_order is None else head_order.data_ptr()
    return _run(o, weight, eps, 0, (z.data_ptr(), heads, z.stride(0), order))


def _run(
    x: torch.Tensor, weight: torch.Tensor, eps: float, offset: int, gate: tuple[int, int, int, int]
) -> torch.Tensor:
    width = x.shape[-1]
    if weight.numel() != width:
        raise OptionError(f"a norm of {weight.numel()} weights does not fit rows of {width}")
    x = x.contiguous()
    out = torch.empty_like(x)
    count = x.numel()
    launch(
        _norm.address, _team(count), 0, x.data_ptr(), weight.data_ptr(), out.data_ptr(), count // width,
        width, kind_of(x), kind_of(weight), offset, bits(eps), *gate,
    )  # fmt: skip
    return out
