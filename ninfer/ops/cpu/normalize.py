"""RMS norms: a row is read once, its squares summed in float32, and rounded once on the way out.

Roofline: 4 bytes an element in bf16; one row of 576 takes 0.1 us, so at T = 1 the call itself is what counts.
"""

from __future__ import annotations

import torch

from ninfer.errors import OptionError
from ninfer.ops.cpu.access import kind_of, load_some, size_of, store_some
from ninfer.ops.cpu.block import ARGUMENTS, argument, next_shared
from ninfer.ops.cpu.kernel import Kernel, bits, launcher, threads
from ninfer.ops.cpu.simd import add, device, fma, get_f64, mul, silu, splat, square_root, stack, total, zeros

_ROWS = 4
_PARALLEL = 1 << 14  # elements

_launch = launcher()


@device
def inverse_rms(x, kind, width, eps, scratch):
    """`1 / sqrt(mean(x^2) + eps)` of one row."""
    even, odd = zeros(), zeros()
    size = size_of(kind)
    for two in range(width >> 5):
        a = load_some(x + 32 * size * two, kind, 16, scratch)
        b = load_some(x + 32 * size * two + 16 * size, kind, 16, scratch)
        even, odd = fma(a, a, even), fma(b, b, odd)
    for start in range(width & -32, width, 16):
        a = load_some(x + size * start, kind, min(16, width - start), scratch)
        even = fma(a, a, even)
    return 1.0 / square_root(total(add(even, odd)) / width + eps)


def norm_kernel(data):
    """Arguments: 0 x, 1 weight, 2 out, 3 rows, 4 width, 5 kind, 6 kind of weight, 7 added to weight, 8 eps, 9 z or 0."""
    x, weight, out, rows = argument(data, 0), argument(data, 1), argument(data, 2), argument(data, 3)
    width, kind, weight_kind = argument(data, 4), argument(data, 5), argument(data, 6)
    offset, eps, gate = splat(argument(data, 7)), get_f64(data + 64), argument(data, 9)
    size, weight_size = size_of(kind), size_of(weight_kind)
    scratch = stack(64)
    while True:
        begin = next_shared(data, _ROWS)
        if begin >= rows:
            break
        for row in range(begin, min(rows, begin + _ROWS)):
            at = row * width * size
            inverse = splat(inverse_rms(x + at, kind, width, eps, scratch))
            for start in range(0, width, 16):
                count = min(16, width - start)
                place = at + size * start
                value = mul(load_some(x + place, kind, count, scratch), inverse)
                w = load_some(weight + weight_size * start, weight_kind, count, scratch)
                value = mul(value, add(w, offset))
                if gate:
                    value = mul(value, silu(load_some(gate + place, kind, count, scratch)))
                store_some(out + place, kind, value, count, scratch)


_norm = Kernel(norm_kernel)


def _team(elements: int) -> int:
    return threads() if elements > _PARALLEL else 1


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, unit_offset: bool) -> torch.Tensor:
    return _run(x, weight, eps, int(unit_offset), 0)


def gated_rms_norm(o: torch.Tensor, z: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    if z.numel() != o.numel() or z.dtype != o.dtype:
        raise OptionError(f"a gate {tuple(z.shape)} {z.dtype} does not fit {tuple(o.shape)} {o.dtype}")
    z = z.contiguous()
    return _run(o, weight, eps, 0, z.data_ptr())


def _run(x: torch.Tensor, weight: torch.Tensor, eps: float, offset: int, gate: int) -> torch.Tensor:
    width = x.shape[-1]
    if weight.numel() != width:
        raise OptionError(f"a norm of {weight.numel()} weights does not fit rows of {width}")
    x = x.contiguous()
    out = torch.empty_like(x)
    count = x.numel()
    _launch(
        _norm.address, _team(count), 0, x.data_ptr(), weight.data_ptr(), out.data_ptr(), count // width, width,
        kind_of(x), kind_of(weight), offset, bits(eps), gate,
    )  # fmt: skip
    return out
