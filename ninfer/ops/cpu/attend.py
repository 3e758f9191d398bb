"""Softmax attention over pages: our kernel, or PyTorch's fused attention where that has matrix tiles.

Without AMX the kernel is as fast as PyTorch's for 512 columns at 3,584 and up to twice as fast elsewhere (one
core of a Zen 5: both 60 to 80 GFLOP/s), it needs no copies and no masks, and a result depends on nothing but
the column's own keys.
"""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F

from ninfer.errors import OptionError
from ninfer.ops.attention import KvPages
from ninfer.ops.cpu import amx
from ninfer.ops.cpu.attend_pages import FEW_COLUMNS, attend_pages
from ninfer.ops.cpu.gather import gather


def paged_attention(
    q: torch.Tensor,
    pages: KvPages,
    page_table: torch.Tensor,
    cache_positions: torch.Tensor,
    scale: float,
    extent: int | None = None,  # known here anyway
) -> torch.Tensor:
    columns, q_heads, width = q.shape
    requests = page_table.shape[0]
    pages.check(pages.heads, width, q.dtype)
    if columns % requests or q_heads % pages.heads or len(cache_positions) != columns:
        raise OptionError(
            f"queries {tuple(q.shape)} at {len(cache_positions)} positions of {requests} requests do not fit "
            f"pages of {pages.heads} heads"
        )
    if columns // requests > FEW_COLUMNS and q.dtype == torch.bfloat16 and amx.available():
        return fused_attention(q, pages, page_table, cache_positions, scale)
    return attend_pages(q, pages, page_table, cache_positions, scale)


def fused_attention(
    q: torch.Tensor,
    pages: KvPages,
    page_table: torch.Tensor,
    cache_positions: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """By PyTorch, request after request, from decoded copies of the keys and values."""
    requests = page_table.shape[0]
    out = torch.zeros(q.shape, dtype=q.dtype)
    parts = zip(
        out.chunk(requests), q.chunk(requests), cache_positions.chunk(requests), page_table, strict=True
    )
    for result, queries, places, table in parts:
        seen = places >= 0
        if bool(seen.all()):
            result.copy_(_one_request(queries, pages, table, int(places[0]), scale))
        elif bool(seen.any()):
            result[seen] = _one_request(queries[seen], pages, table, int(places[seen][0]), scale)
    return out


def _one_request(q, pages: KvPages, table, start: int, scale: float) -> torch.Tensor:
    """Neighbouring columns of which the first is at position `start`."""
    keys, values = gather(pages, table, start + len(q), q.dtype)
    result = F.scaled_dot_product_attention(
        q.transpose(0, 1)[None], keys[None], values[None],
        attn_mask=_mask(len(q), start) if start else None, is_causal=start == 0, scale=scale, enable_gqa=True,
    )  # fmt: skip
    return result[0].transpose(0, 1)


@functools.lru_cache(maxsize=1)
def _mask(columns: int, start: int) -> torch.Tensor:
    """Which keys a column sees; all layers of a pass ask for the same one."""
    return torch.ones(columns, start + columns, dtype=torch.bool).tril_(start)
