"""What follows a library product in float32: factors, residual or SwiGLU, one rounding; and its FP8 inputs.

Roofline: bytes. A product of `[T, N]` is read once (4 bytes an element) and written once as bf16.
Measured on an H200 (2026-11-30, `python -m bench.ops.wide --gemm`): SwiGLU of [4096, 34816] 186 us, 3.8 TB/s;
rounding with a residual 275 us, 4.1 TB/s; codes of [4096, 5120] 35 us.
"""

# pyright: reportArgumentType=false, reportIndexIssue=false, reportCallIssue=false, reportAttributeAccessIssue=false
# pyright: reportOperatorIssue=false, reportPossiblyUnboundVariable=false

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl

from ninfer.ops.cuda.specimens import Specimen

_BLOCK = 1024


@triton.jit
def _rounded(value):
    """A float32 rounded to the nearest bf16, half to even, as its 16 bits; a NaN stays one."""
    bits = value.to(tl.int32, bitcast=True)
    even = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return tl.where(value == value, even, 0x7FC0).to(tl.int16)


@triton.jit
def finish_kernel(
    product, token_scales, row_scales, residual, row_map, out, columns, stride, out_stride, first,
    SCALED: tl.constexpr, TOKENS: tl.constexpr, ADDED: tl.constexpr, MAPPED: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """out[t, place(n)] = bf16(product[t, n] * scales + residual[t, place(n)])."""
    t = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = n < columns
    value = tl.load(product + t * stride + n, mask, 0.0)
    if SCALED:
        value = value * (tl.load(row_scales + n, mask, 0.0) * (tl.load(token_scales + t) if TOKENS else 1.0))
    place = tl.load(row_map + n, mask, 0) if MAPPED else first + n
    at = t * out_stride + place
    if ADDED:
        value += tl.load(residual + at, mask, 0.0).to(tl.float32)
    tl.store(out.to(tl.pointer_type(tl.int16)) + at, _rounded(value), mask)


@triton.jit
def swiglu_kernel(
    product, token_scales, row_scales, out, columns, stride, out_stride, up,
    SCALED: tl.constexpr, TOKENS: tl.constexpr, INTERLEAVED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """out[t, i] = bf16(silu(gate) up); gate and up stand in turns of 8 columns, or `up` columns apart."""
    t = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = i < columns
    a = i // 8 * 16 + i % 8 if INTERLEAVED else i
    b = a + 8 if INTERLEAVED else a + up
    gate, value = tl.load(product + t * stride + a, mask, 0.0), tl.load(product + t * stride + b, mask, 0.0)
    if SCALED:
        scale = tl.load(token_scales + t) if TOKENS else 1.0
        gate = gate * (scale * tl.load(row_scales + a, mask, 0.0))
        value = value * (scale * tl.load(row_scales + b, mask, 0.0))
    value = gate / (1.0 + tl.exp(-gate)) * value
    tl.store(out.to(tl.pointer_type(tl.int16)) + t * out_stride + i, _rounded(value), mask)


@triton.jit
def quantize_kernel(x, codes, scales, columns, width, BLOCK: tl.constexpr):
    """A token's E4M3 codes `[width]` and its scale, its largest magnitude / 448."""
    t = tl.program_id(0).to(tl.int64)
    n = tl.arange(0, BLOCK)
    largest = tl.zeros((BLOCK,), tl.float32)
    for begin in range(0, columns, BLOCK):
        value = tl.load(x + t * columns + begin + n, begin + n < columns, 0.0).to(tl.float32)
        largest = tl.maximum(largest, tl.abs(value))
    scale = tl.max(largest, 0) / 448.0
    tl.store(scales + t, scale)
    inverse = tl.where(scale > 0, 1.0 / scale, 0.0)
    for begin in range(0, width, BLOCK):
        value = tl.load(x + t * columns + begin + n, begin + n < columns, 0.0).to(tl.float32) * inverse
        bits = value.to(tl.int32, bitcast=True)
        size = tl.minimum(tl.abs(value), 448.0)
        of = size.to(tl.int32, bitcast=True)
        # Three bits of mantissa, half to even; below 2^-6 a multiple of 2^-9, which 2^14 has as its last bit.
        normal = ((of + 0x7FFFF + ((of >> 20) & 1)) >> 20) - 960
        small = (size + 16384.0).to(tl.int32, bitcast=True) & 15
        code = tl.where(size < 0.015625, small, normal) | ((bits >> 24) & 128)
        tl.store(codes + t * width + begin + n, code.to(tl.uint8), begin + n < width)


def finish(
    product: torch.Tensor,
    out: torch.Tensor,
    first: int = 0,
    residual: torch.Tensor | None = None,
    row_map: torch.Tensor | None = None,
    rows: torch.Tensor | None = None,
    tokens: torch.Tensor | None = None,
) -> None:
    """Columns `first + n`, or `row_map[n]`, of `out` (bf16 `[T, N]`) from `product` (float32 `[T, n]`).

    `rows` `[n]` and `tokens` `[T]`: float32 factors, the latter only with the former. `residual`: like `out`,
    contiguous.
    """
    columns = product.shape[1]
    finish_kernel[(len(product), triton.cdiv(columns, _BLOCK))](
        product, product if tokens is None else tokens, product if rows is None else rows,
        out if residual is None else residual,
        product if row_map is None else row_map, out, columns, product.stride(0), out.stride(0), first,
        rows is not None, tokens is not None, residual is not None, row_map is not None, _BLOCK, num_warps=4,
    )  # fmt: skip


def swiglu(
    product: torch.Tensor,
    out: torch.Tensor,
    interleaved: bool,
    rows: torch.Tensor | None = None,
    tokens: torch.Tensor | None = None,
) -> None:
    """`out` (bf16 `[T, n]`, rows may be strided) from gate and up, float32 `[T, >= 2 n]`; factors so."""
    columns = out.shape[1]
    swiglu_kernel[(len(product), triton.cdiv(columns, _BLOCK))](
        product, product if tokens is None else tokens, product if rows is None else rows, out, columns,
        product.stride(0), out.stride(0), columns,
        rows is not None, tokens is not None, interleaved, _BLOCK, num_warps=4,
    )  # fmt: skip


def quantize(x: torch.Tensor, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """E4M3 codes uint8 `[T, width]`, zeros beyond the columns of `x` (bf16 `[T, K]`), and scales `[T]`."""
    x = x.contiguous()
    codes = torch.empty(len(x), width, dtype=torch.uint8, device=x.device)
    scales = torch.empty(len(x), device=x.device)
    quantize_kernel[(len(x),)](x, codes, scales, x.shape[1], width, 2048, num_warps=8)
    return codes, scales


def specimens() -> Iterator[Specimen]:
    """One of each."""
    pointers = {"product": "*fp32", "token_scales": "*fp32", "row_scales": "*fp32", "residual": "*bf16"}
    pointers |= {"row_map": "*i32", "out": "*bf16", "x": "*bf16", "codes": "*u8", "scales": "*fp32"}
    for kernel, constants in (
        (finish_kernel, {"SCALED": True, "TOKENS": True, "ADDED": True, "MAPPED": True, "BLOCK": _BLOCK}),
        (swiglu_kernel, {"SCALED": True, "TOKENS": True, "INTERLEAVED": True, "BLOCK": _BLOCK}),
        (quantize_kernel, {"BLOCK": 2048}),
    ):
        names = [name for name in kernel.arg_names if not name.isupper()]
        yield Specimen(
            kernel, {name: pointers.get(name, "i32") for name in names}, constants, {"num_warps": 4}
        )
