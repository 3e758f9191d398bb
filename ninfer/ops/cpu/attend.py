"""Softmax attention over pages: few columns by one kernel, many by PyTorch's fused attention."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from ninfer.errors import OptionError
from ninfer.ops.attention import KvPages
from ninfer.ops.cpu.attend_small import attend_small
from ninfer.ops.cpu.gather import gather

SMALL_COLUMNS = 16


def paged_attention(
    q: torch.Tensor,
    pages: KvPages,
    page_table: torch.Tensor,
    cache_positions: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    columns, q_heads, width = q.shape
    requests = page_table.shape[0]
    pages.check(pages.heads, width, q.dtype)
    if columns % requests or q_heads % pages.heads or len(cache_positions) != columns:
        raise OptionError(
            f"queries {tuple(q.shape)} at {len(cache_positions)} positions of {requests} requests do not fit "
            f"pages of {pages.heads} heads"
        )
    if columns // requests > SMALL_COLUMNS:
        return _many_columns(q, pages, page_table, cache_positions, scale)
    return attend_small(q, pages, page_table, cache_positions, scale)


def _many_columns(q, pages: KvPages, page_table, cache_positions, scale: float) -> torch.Tensor:
    requests = page_table.shape[0]
    out = torch.zeros(q.shape, dtype=q.dtype)
    for b, (queries, places) in enumerate(
        zip(q.chunk(requests), cache_positions.chunk(requests), strict=True)
    ):
        seen = places >= 0
        first = b * len(places)
        if bool(seen.all()):
            result = _one_request(queries, pages, page_table[b], int(places[0]), scale)
            out[first : first + len(places)] = result
        elif bool(seen.any()):
            chosen = seen.nonzero()[:, 0]
            result = _one_request(queries[chosen], pages, page_table[b], int(places[chosen[0]]), scale)
            out[first + chosen] = result
    return out


def _one_request(q, pages: KvPages, table, start: int, scale: float) -> torch.Tensor:
    """Neighbouring columns of which the first is at position `start`."""
    columns = len(q)
    visible = start + columns
    keys, values = gather(pages, table, visible, q.dtype)
    mask = None
    if start:
        mask = torch.ones(columns, visible, dtype=torch.bool).tril_(start)
    result = F.scaled_dot_product_attention(
        q.transpose(0, 1)[None], keys[None], values[None], attn_mask=mask, is_causal=mask is None,
        scale=scale, enable_gqa=True,
    )  # fmt: skip
    return result[0].transpose(0, 1)
