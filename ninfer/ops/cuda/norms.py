"""RMS norms: a program holds whole rows in registers and reads each once; squares are summed in float32.

Roofline: 4 bytes an element in bf16. At T = 1 the launch counts (about 2 us); 4,096 rows of 5,120 are 84 MB,
20 us at 4.2 TB/s. How a row is summed depends on its width only.

Reached on an H200 (2026-11-30, copy 4.2 TB/s): one row of 5,120 in 1.9 us; 4,096 rows of
5,120 in 25.7 us (3.3 TB/s); 4,096 x 48 gated heads of 128 in 38 us (4.0 TB/s).
"""

# pyright: reportArgumentType=false, reportIndexIssue=false, reportAttributeAccessIssue=false
# pyright: reportCallIssue=false, reportOperatorIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl

from ninfer.errors import OptionError
from ninfer.ops.checks import check_gate
from ninfer.ops.cuda.bf16 import to_bf16, to_f32
from ninfer.ops.cuda.dependent import start, wait_for_previous
from ninfer.ops.cuda.specimens import Specimen

_WIDEST = 1 << 16
_TILE = 1024
"""Elements of a program whose rows are narrow."""


@triton.jit
def _load(x, place, column, inside, WIDTH: tl.constexpr):
    """float32 elements `column` of rows that begin at `place`; zeros outside."""
    mask = inside[:, None] & (column < WIDTH)[None, :]
    return to_f32(tl.load(x + place[:, None] + column[None, :], mask=mask, other=0.0))


@triton.jit
def _finish(
    a, inverse, w, z, gate, out, target, column, inside, WIDTH: tl.constexpr, OFFSET: tl.constexpr,
    GATED: tl.constexpr,
):  # fmt: skip
    w = to_f32(w)
    if OFFSET:
        w += 1.0
    y = a * inverse[:, None] * w[None, :]
    if GATED:
        g = _load(z, gate, column, inside, WIDTH)
        y *= g / (1.0 + tl.exp(-g))
    mask = inside[:, None] & (column < WIDTH)[None, :]
    tl.store(out + target[:, None] + column[None, :], to_bf16(y), mask=mask)


@triton.jit
def _norm_rows(
    x, weight, out, out_stride, z, order, rows, eps, heads, z_stride,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, REST: tl.constexpr, ROWS: tl.constexpr, OFFSET: tl.constexpr,
    GATED: tl.constexpr, ORDERED: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """`ROWS` rows of `WIDTH` elements, in two parts of `BLOCK` and `REST` (or 0), which are powers of two.

    Row r of a gate is at `z + r // heads * z_stride + r % heads * WIDTH`, of the result at
    `out + r * out_stride`.
    """
    column, further = tl.arange(0, BLOCK), BLOCK + tl.arange(0, REST if REST else BLOCK)
    first = tl.load(weight + column, mask=column < WIDTH, other=0.0)
    if REST:
        second = tl.load(weight + further, mask=further < WIDTH, other=0.0)
    wait_for_previous(EARLY)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = row < rows
    source = row
    if ORDERED:
        head = row % heads
        source = row - head + tl.load(order + head, mask=inside, other=0)
    gate = (source // heads).to(tl.int64) * z_stride + (source % heads) * WIDTH
    place, target = source.to(tl.int64) * WIDTH, row.to(tl.int64) * out_stride
    a = _load(x, place, column, inside, WIDTH)
    squares = tl.sum(a * a, axis=1)
    if REST:
        b = _load(x, place, further, inside, WIDTH)
        squares += tl.sum(b * b, axis=1)
        inverse = 1.0 / tl.sqrt(squares / WIDTH + eps)
        _finish(a, inverse, first, z, gate, out, target, column, inside, WIDTH, OFFSET, GATED)
        _finish(b, inverse, second, z, gate, out, target, further, inside, WIDTH, OFFSET, GATED)
    else:
        inverse = 1.0 / tl.sqrt(squares / WIDTH + eps)
        _finish(a, inverse, first, z, gate, out, target, column, inside, WIDTH, OFFSET, GATED)


@triton.jit
def _norm_kernel(
    x, weight, out, z, order, rows, eps, heads, z_stride,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, REST: tl.constexpr, ROWS: tl.constexpr, OFFSET: tl.constexpr,
    GATED: tl.constexpr, ORDERED: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    _norm_rows(
        x, weight, out, WIDTH, z, order, rows, eps, heads, z_stride, WIDTH, BLOCK, REST, ROWS, OFFSET, GATED,
        ORDERED, EARLY,
    )  # fmt: skip


@triton.jit
def _pair_kernel(
    a, b, a_gain, b_gain, out, rows, eps,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, REST: tl.constexpr, ROWS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Rows of one of two tensors, side by side in the result."""
    if tl.program_id(1) == 0:
        _norm_rows(
            a, a_gain, out, 2 * WIDTH, a, a, rows, eps, 1, 0, WIDTH, BLOCK, REST, ROWS, True, False, False,
            EARLY,
        )  # fmt: skip
    else:
        _norm_rows(
            b, b_gain, out + WIDTH, 2 * WIDTH, b, b, rows, eps, 1, 0, WIDTH, BLOCK, REST, ROWS, True, False,
            False, EARLY,
        )  # fmt: skip


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, unit_offset: bool) -> torch.Tensor:
    """`ninfer.ops.rms_norm` for bf16."""
    return _run(x, weight, eps, unit_offset, None, 0, 1, None)


def gated_rms_norm(
    o: torch.Tensor,
    z: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    head_order: torch.Tensor | None = None,
) -> torch.Tensor:
    """`ninfer.ops.gated_rms_norm` for bf16; rows of z may be strided."""
    heads = check_gate(o, z, head_order)
    if not z[0].is_contiguous():
        z = z.contiguous()
    return _run(o, weight, eps, False, z, z.stride(0), heads, head_order)


def norm_pair(
    a: torch.Tensor, b: torch.Tensor, a_gain: torch.Tensor, b_gain: torch.Tensor, eps: float
) -> torch.Tensor:
    """`ninfer.ops.norm_pair` for bf16, in one launch."""
    rows, width = a.shape
    if b.shape != a.shape:
        raise OptionError(f"{tuple(a.shape)} and {tuple(b.shape)} can't be normalized side by side")
    for x, gain in ((a, a_gain), (b, b_gain)):
        _check(x, gain)
    out = torch.empty((rows, 2 * width), dtype=a.dtype, device=a.device)
    block, rest, rows_each, warps = shape_of(width)
    start(
        _pair_kernel, (triton.cdiv(rows, rows_each), 2), a.device,
        a.contiguous(), b.contiguous(), a_gain, b_gain, out, rows, eps,
        WIDTH=width, BLOCK=block, REST=rest, ROWS=rows_each, num_warps=warps,
    )  # fmt: skip
    return out


def _check(x: torch.Tensor, weight: torch.Tensor) -> None:
    width = x.shape[-1]
    if x.dtype != torch.bfloat16:
        raise OptionError(f"activations on a GPU are bf16, got {x.dtype}")
    if weight.numel() != width:
        raise OptionError(f"a norm of {weight.numel()} weights does not fit rows of {width}")
    if width > _WIDEST:
        raise OptionError(f"rows of a norm may have {_WIDEST} elements, got {width}")


def _run(
    x: torch.Tensor, weight: torch.Tensor, eps: float, offset: bool,
    z: torch.Tensor | None, z_stride: int, heads: int, order: torch.Tensor | None,
) -> torch.Tensor:  # fmt: skip
    width = x.shape[-1]
    _check(x, weight)
    x = x.contiguous()
    out = torch.empty_like(x)
    rows = x.numel() // width
    block, rest, rows_each, warps = shape_of(width)
    start(
        _norm_kernel, (triton.cdiv(rows, rows_each),), x.device,
        x, weight, out, x if z is None else z, x if order is None else order, rows, eps, heads, z_stride,
        WIDTH=width, BLOCK=block, REST=rest, ROWS=rows_each, OFFSET=offset, GATED=z is not None,
        ORDERED=order is not None, num_warps=warps,
    )  # fmt: skip
    return out


def shape_of(width: int) -> tuple[int, int, int, int]:
    """Columns of the two parts and rows of a program's tile, and its warps."""
    whole = max(16, triton.next_power_of_2(width))
    if whole <= 512:
        return whole, 0, max(1, _TILE // whole), 4
    block, rest = whole, 0
    if width <= 3 * whole // 4:
        block, rest = whole // 2, max(16, triton.next_power_of_2(width - whole // 2))
    return block, rest, 1, min(16, max(4, whole // 1024))


def specimens() -> Iterator[Specimen]:
    pointers = {"x": "*bf16", "weight": "*bf16", "out": "*bf16", "z": "*bf16", "order": "*i32"}
    scalars = {"rows": "i32", "eps": "fp32", "heads": "i32", "z_stride": "i32"}
    for width, gated in ((5120, False), (256, False), (128, True)):
        block, rest, rows, warps = shape_of(width)
        constants = {
            "WIDTH": width, "BLOCK": block, "REST": rest, "ROWS": rows, "OFFSET": not gated, "GATED": gated,
            "ORDERED": gated,
        }  # fmt: skip
        yield Specimen(_norm_kernel, {**pointers, **scalars}, constants, {"num_warps": warps})
    block, rest, rows, warps = shape_of(5120)
    constants = {"WIDTH": 5120, "BLOCK": block, "REST": rest, "ROWS": rows}
    signature = dict.fromkeys(("a", "b", "a_gain", "b_gain", "out"), "*bf16") | {"rows": "i32", "eps": "fp32"}
    yield Specimen(_pair_kernel, signature, constants, {"num_warps": warps})
