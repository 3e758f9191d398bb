"""Products of many columns: a panel of the matrix is decoded once to row-major scratch, then cuBLAS.

Floor at [34816, 5120], T = 4096: 1.46 TFLOP at 800 TFLOP/s, 1.82 ms; decoding writes 356 MB, 0.14 ms at
2.5 TB/s; SwiGLU reads 570 MB of sums and writes 143, 0.17 ms. Weights round to bf16 on the way, sums are
float32. Where cuBLAS may split a sum over K (few columns), products stay float32 until the residual is added:
it would add parts up in bf16 otherwise. Factors of rows wait until then, too.

Matrices of FP8 rows whose policy allows A8 keep their codes, the columns get E4M3 codes and a scale each, and
the product is one of FP8 where the device has it (sm_89), with full sums: `use_fast_accum` gains 7 %.

Measured on an H200 (2026-11-30, `python -m bench.ops.wide --wide`), microseconds of SwiGLU [34816, 5120] and
of [5120, 17408] with a residual: NVFP4 T = 4096 2,124 and 988, T = 512 393 and 198, T = 128 259 and 143; Q4_K
2,197 and 1,005 at T = 4096; FP8 rows with A8 1,349 and 681 (1,080 TFLOP/s) at T = 4096, 169 and 94 at 128.
At T = 64 the small route takes 158 and 98 (NVFP4).
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

import torch

from ninfer.ops.cuda import decode, finish
from ninfer.ops.cuda.decode import Form
from ninfer.ops.cuda.packed import TILE, Packed, Segment
from ninfer.ops.weights import ActivationPolicy

PANEL = 192 << 20
"""Weights that are decoded at a time: smaller panels cost launches, and 3 to 7 % at T = 4096."""
PRODUCT = 96 << 20
"""Float32 sums of one product that are kept, at least 512 rows of the matrix wide."""
DIRECT = 1024
"""From this many columns on cuBLAS itself rounds to bf16."""


def linear(
    x: torch.Tensor,
    packed: Packed,
    policy: ActivationPolicy,
    residual: torch.Tensor | None,
    out: torch.Tensor,
) -> None:
    """`out` (bf16 `[T, N]`) = bf16(x W^T + residual)."""
    inputs = _Inputs(x)
    for segment in packed.segments:
        codes = takes_codes(segment, policy, x.device)
        plain = not codes and segment.row_map is None and segment.packing.kernel != "Dense"
        direct = plain and len(x) >= DIRECT
        form = Form.CODES if codes else Form.WHOLE if direct else Form.BARE
        for begin, end, weights in _panels(segment, PANEL if direct else _limit(len(x)), form, segment.rows):
            first, last = segment.first + begin, segment.first + end
            if direct:
                _into(out[:, first:last], x, weights, None if residual is None else residual[:, first:last])
                continue
            product, tokens = inputs.times(weights)
            row_map = None if segment.row_map is None else segment.row_map[begin:end]
            finish.finish(product, out, first, residual, row_map, _factors(segment, begin, end), tokens)
            del product  # the next one can have its place


def swiglu(x: torch.Tensor, packed: Packed, policy: ActivationPolicy, out: torch.Tensor) -> None:
    """`out` (bf16 `[T, I]`) = bf16(silu(x G^T) (x U^T))."""
    if not packed.interleaved:
        _swiglu_apart(x, packed, out)
        return
    inputs, segment = _Inputs(x), packed.segments[0]
    form = Form.CODES if takes_codes(segment, policy, x.device) else Form.BARE
    for begin, end, weights in _panels(segment, _limit(len(x)), form):
        product, tokens = inputs.times(weights)
        finish.swiglu(product, out[:, begin // 2 : end // 2], True, _factors(segment, begin, end), tokens)
        del product


def takes_codes(segment: Segment, policy: ActivationPolicy, device: torch.device) -> bool:
    """Do products with this segment take E4M3 codes of the columns?"""
    return policy >= ActivationPolicy.A8 and segment.packing.kernel == "Fp8Row" and _has_fp8(device)


@functools.cache
def _has_fp8(device: torch.device) -> bool:
    return device.type == "cpu" or torch.cuda.get_device_capability(device) >= (8, 9)


def _limit(columns: int) -> int:
    """Rows whose float32 sums are kept at a time."""
    return max(512, PRODUCT // columns)


def _swiglu_apart(x: torch.Tensor, packed: Packed, out: torch.Tensor) -> None:
    """Halves of different formats: all sums of some columns at a time, and the matrix decoded for each."""
    step = columns_apart(packed.rows)
    for start in range(0, len(x), step):
        part = x[start : start + step]
        inputs, sums = _Inputs(part), torch.empty(len(part), packed.rows, device=x.device)
        for segment in packed.segments:
            for begin, end, weights in _panels(segment, _limit(len(part)), Form.WHOLE, segment.rows):
                product, _ = inputs.times(weights)
                if segment.row_map is None:
                    sums[:, segment.first + begin : segment.first + end] = product
                else:
                    sums.index_copy_(1, segment.row_map[begin:end].long(), product)
                del product
        finish.swiglu(sums, out[start : start + step], False)


def columns_apart(rows: int) -> int:
    """Columns at a time where gate and up have different formats."""
    return max(64, PRODUCT // rows)


def scratch_bytes(columns: int, inputs: int, outputs: int) -> int:
    """What a call takes at most beside its output: a panel, the float32 sums that it gives, codes and scales
    of the columns."""
    width = -(-inputs // 256) * 256
    weights = min(max(PANEL, TILE * width), (outputs + TILE) * width)
    return 2 * weights + 4 * columns * min(_limit(columns), outputs + TILE) + columns * (width + 4)


class _Inputs:
    """The columns in the types that products want, made once."""

    def __init__(self, x: torch.Tensor) -> None:
        self._x = x
        self._codes: tuple[torch.Tensor, torch.Tensor] | None = None

    def times(self, weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Float32 `[T, n]`, and what its tokens are still to be multiplied by."""
        if weights.dtype == torch.float32:
            return self._x.float() @ weights.t(), None
        if weights.dtype == torch.bfloat16:
            if not self._x.is_cuda:
                return self._x.float() @ weights.float().t(), None
            return torch.mm(self._x, weights.t(), out_dtype=torch.float32), None
        if self._codes is None:
            self._codes = finish.quantize(self._x, weights.shape[1])
        codes, scales = self._codes
        return _product8(codes, weights), scales


def _factors(segment: Segment, begin: int, end: int) -> torch.Tensor | None:
    return None if segment.row_scales is None else segment.row_scales[begin:end]


def _into(out: torch.Tensor, x: torch.Tensor, weights: torch.Tensor, residual: torch.Tensor | None) -> None:
    """`out` = bf16(x W^T + residual); cuBLAS adds the residual to its float32 sums."""
    if residual is None:
        torch.mm(x, weights.t(), out=out)
    else:
        torch.addmm(residual, x, weights.t(), out=out)


def _product8(codes: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Float32 `[T, n]` of E4M3 codes, uint8 `[T, K]` and `[n, K]`."""
    a, b = codes.view(torch.float8_e4m3fn), weights.view(torch.float8_e4m3fn)
    if not codes.is_cuda:
        return a.float() @ b.float().t()
    one = torch.ones((), device=codes.device)
    product = torch._scaled_mm  # pyright: ignore[reportPrivateImportUsage]
    return product(a, b.t(), one, one, out_dtype=torch.float32, use_fast_accum=False)


def _panels(
    segment: Segment, limit: int, form: Form, rows: int | None = None
) -> Iterator[tuple[int, int, torch.Tensor]]:
    """`(begin, end, weights)`: packed rows of the segment, `limit` at most, and their numbers (or E4M3 codes)
    `[end - begin, K]`, in scratch that the next panel overwrites. `rows`: where padding begins, if it is no
    part of what follows."""
    if segment.packing.kernel == "Dense":
        yield 0, segment.rows, segment.data.view(torch.float32).view(segment.rows, segment.columns)
        return
    width = decode.width(segment)
    tiles = segment.data.numel() // (segment.units * segment.packing.unit_bytes)
    step = max(1, min(PANEL // width, limit) // TILE)
    step = -(-tiles // -(-tiles // step))
    kind = torch.uint8 if form is Form.CODES else torch.bfloat16
    scratch = torch.empty(step * TILE, width, dtype=kind, device=segment.data.device)
    for tile in range(0, tiles, step):
        until = min(tile + step, tiles)
        decode.panel(segment, tile, until, scratch, form)
        begin, end = tile * TILE, until * TILE if rows is None else min(until * TILE, rows)
        yield begin, end, scratch[: end - begin, : width if form is Form.CODES else segment.columns]
