"""Paged attention on CUDA: which route, the output gate, and what memory they take.

Up to 16 columns a request (decode, verification) keys are split over the device (`attend_few`); more columns
share them in tiles (`attend_wide`).
"""

# pyright: reportGeneralTypeIssues=false, reportArgumentType=false, reportOperatorIssue=false
# pyright: reportIndexIssue=false, reportCallIssue=false
from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl

from ninfer.errors import OptionError
from ninfer.ops.attention import KvPages
from ninfer.ops.cuda.attend_few import MOST_COLUMNS, few_bytes, paged_attention_few
from ninfer.ops.cuda.bf16 import to_bf16, to_f32
from ninfer.ops.cuda.specimens import Specimen

_BLOCK = 1024


def paged_attention(
    q: torch.Tensor,
    pages: KvPages,
    page_table: torch.Tensor,
    cache_positions: torch.Tensor,
    scale: float,
    extent: int | None = None,
) -> torch.Tensor:
    """`ops.paged_attention`."""
    if len(q) <= MOST_COLUMNS * len(page_table):
        return paged_attention_few(q, pages, page_table, cache_positions, scale, None, extent)
    from ninfer.ops.cuda.attend_wide import paged_attention_wide

    return paged_attention_wide(q, pages, page_table, cache_positions, scale, extent)


def gated_attention(
    q: torch.Tensor,
    gate: torch.Tensor,
    pages: KvPages,
    page_table: torch.Tensor,
    cache_positions: torch.Tensor,
    scale: float,
    extent: int | None = None,
) -> torch.Tensor:
    """`ops.gated_attention`: `[T, Hq * D]`; few columns are gated where their splits are merged."""
    if len(q) <= MOST_COLUMNS * len(page_table):
        out = paged_attention_few(q, pages, page_table, cache_positions, scale, gate, extent)
        return out.view(gate.shape)
    out = paged_attention(q, pages, page_table, cache_positions, scale, extent)
    return sigmoid_mul(out.view(gate.shape), gate)


@triton.jit
def _gate_kernel(a, gate, gate_stride, out, columns, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < columns
    x = to_f32(tl.load(a + row * columns + at, mask=inside, other=0.0))
    g = to_f32(tl.load(gate + row * gate_stride + at, mask=inside, other=0.0))
    tl.store(out + row * columns + at, to_bf16(x / (1.0 + tl.exp(-g))), mask=inside)


def sigmoid_mul(a: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """`ops.sigmoid_mul`: float32 inside, one rounding. Three passes over the bytes of `a`."""
    if a.dtype != torch.bfloat16 or gate.dtype != torch.bfloat16:
        raise OptionError(f"the gate on CUDA is for bf16, got {a.dtype} and {gate.dtype}")
    if gate.numel() != a.numel():
        raise OptionError(f"a gate {tuple(gate.shape)} does not fit {tuple(a.shape)}")
    a = a.contiguous()
    rows = a.shape[0]
    columns = a.numel() // rows
    if not gate[0].is_contiguous():
        gate = gate.contiguous()
    out = torch.empty_like(a)
    grid = (rows, triton.cdiv(columns, _BLOCK))
    _gate_kernel[grid](a, gate, gate.stride(0), out, columns, _BLOCK, num_warps=4)
    return out


def attention_bytes(
    device: torch.device, columns: int, context: int, heads: int, kv_heads: int, width: int
) -> int:
    """Most bytes of outputs and scratch of one call of `columns` (all requests together) over tables for
    `context` tokens: of few columns a request those of all splits; more columns have only an output."""
    return few_bytes(device, columns, context, heads, kv_heads, width)


def specimens() -> Iterator[Specimen]:
    """The gate."""
    yield Specimen(
        _gate_kernel,
        {"a": "*bf16", "gate": "*bf16", "gate_stride": "i32", "out": "*bf16", "columns": "i32"},
        {"BLOCK": _BLOCK},
        {"num_warps": 4},
    )
