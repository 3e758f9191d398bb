"""Attention of few columns (decode and verification) over paged keys and values.

The keys of a column are cut into splits of whole pages, of equal length but the last: `target` of them or
fewer (`split_target`), as a function of the column's own length alone. A split yields the reference score,
the mass and the weighted values of each column and query head (float32); a second kernel folds a column's
splits in ascending order, turns the sum back where values are rotated, and rounds once. Lengths are read on
the device; launches and scratch follow from shapes and `extent`.

Roofline: the bytes of K and V. INT8 at 85,000 keys of 4 heads of 256: 179.5 MB, 40 us on an H200.
"""

from __future__ import annotations

import functools

import torch

from ninfer.errors import OptionError
from ninfer.ops.attention import PAGE, KvPages
from ninfer.ops.cuda import attend_few_triton

MOST_COLUMNS = 16
"""Columns of a request that this route takes."""
_PER_SM = 2
"""Splits of a request, all key heads together, for each multiprocessor."""
_ASSUMED_SMS = 8
"""Multiprocessors of a device that is none (Triton's interpreter)."""


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":
        return _ASSUMED_SMS
    return torch.cuda.get_device_properties(device).multi_processor_count


def split_target(device: torch.device, heads: int) -> int:
    """Most splits of a column's keys for so many key heads."""
    return max(1, _PER_SM * _multiprocessors(device) // heads)


def launched_splits(device: torch.device, heads: int, table_pages: int, extent: int | None) -> int:
    """Splits for which programs are launched and scratch is there: those with keys come first."""
    pages = table_pages if extent is None else min(table_pages, -(-extent // PAGE))
    return max(1, min(split_target(device, heads), pages))


def paged_attention_few(
    q: torch.Tensor,
    pages: KvPages,
    page_table: torch.Tensor,
    cache_positions: torch.Tensor,
    scale: float,
    gate: torch.Tensor | None = None,
    extent: int | None = None,
) -> torch.Tensor:
    """`ops.paged_attention` for at most 16 columns a request: `[T, Hq, D]` bf16.

    With `gate [T, Hq * D]` (bf16, rows may be strided) the result, rounded, is multiplied by `sigmoid(gate)`
    and rounded again. Capture-safe.
    """
    columns, q_heads, width = q.shape
    pages.check(q_heads // (q_heads // pages.heads), width, q.dtype)
    if q.dtype != torch.bfloat16:
        raise OptionError(f"attention on CUDA takes bf16 queries, got {q.dtype}")
    if q.stride(2) != 1 or q.stride(1) != width:
        q = q.contiguous()
    if gate is not None and gate.stride(1) != 1:
        gate = gate.contiguous()
    target = split_target(q.device, pages.heads)
    splits = launched_splits(q.device, pages.heads, page_table.shape[1], extent)
    out = torch.empty((columns, q_heads, width), dtype=q.dtype, device=q.device)
    rows = columns * q_heads * splits
    sums = torch.empty(rows * width, dtype=torch.float32, device=q.device)
    tops = torch.empty(rows * 2, dtype=torch.float32, device=q.device)
    attend_few_triton.attend(
        q, pages, page_table, cache_positions, scale, gate, target, splits, sums, tops, out
    )
    return out


def few_bytes(device: torch.device, columns: int, context: int, heads: int, kv_heads: int, width: int) -> int:
    """Output and scratch of a call with tables for `context` tokens."""
    splits = launched_splits(device, kv_heads, -(-context // PAGE), None)
    return columns * heads * (2 * width + splits * (4 * width + 8))
