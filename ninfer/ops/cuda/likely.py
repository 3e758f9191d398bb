"""Log-probabilities on the GPU: each tile of a row finds its maximum, its sum and its best 20, then one
program a row puts them together.

Roofline as in `choose.py`; an exponential more for every score. A tile's sum is a float32 tree over at most
2,048 terms; those of all tiles are added in float64. Rows that ask for nothing leave at once, and those that
ask for no alternatives sort nothing.

Reached on an H200, 30 November 2026 (`python -m bench.ops.sampling`), rows of 248,077: 6.5 us for one row
without alternatives and 16.0 with 20, 9.1 and 41.1 for 8 rows, 2.2 where no row asks.
"""

# pyright: reportUnreachable=false, reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false
# pyright: reportIndexIssue=false, reportAttributeAccessIssue=false

from __future__ import annotations

from collections.abc import Iterable

import torch
import triton
import triton.language as tl

from ninfer.ops.cuda.best import (
    GROUP,
    TILE,
    best_groups,
    id_in,
    is_number,
    key_of,
    merged,
    order_in,
    order_of,
    padded_tiles,
    score_of,
)
from ninfer.ops.cuda.dependent import allow_next, start, wait_for_previous
from ninfer.ops.cuda.specimens import Specimen
from ninfer.ops.sampling import CANDIDATES
from ninfer.ops.sampling_checks import check_reports

_BEST = tl.constexpr(CANDIDATES)
_SORTED = tl.constexpr(32)
_WARPS = 4
_SIZES, _ROWS = ["size", "tiles"], ["tokens", "wanted", "logprob", "top_ids", "top_logprobs"]


@triton.jit(do_not_specialize=_SIZES, do_not_specialize_on_alignment=_ROWS)
def _tile_kernel(
    logits, size, tokens, wanted, partial, tops, sums,
    TILE: tl.constexpr, GROUP: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Of one tile of one row: the best key, the sum of e^(score - best), and the best 20 keys."""
    allow_next(EARLY)
    wait_for_previous(EARLY)
    tile, row = tl.program_id(0), tl.program_id(1)
    many = tl.load(wanted + row)
    if (tl.load(tokens + row) >= 0) & (many >= 0):
        scores = logits + row.to(tl.int64) * size
        groups, members = tl.arange(0, TILE // GROUP), tl.arange(0, GROUP)
        ids = tile * TILE + groups[:, None] * GROUP + members[None, :]
        x = tl.load(scores + ids, mask=ids < size, other=0.0)
        order = order_of(x, ids < size)
        top = tl.max(tl.max(order, axis=1), axis=0)
        # Where a difference is no number, or far below, a term counts as e^-87.
        terms = tl.exp(tl.maximum(x - score_of(top), -87.0))
        at = row.to(tl.int64) * tl.num_programs(0) + tile
        tl.store(tops + at, top)
        tl.store(sums + at, tl.sum(tl.sum(tl.where(is_number(order), terms, 0.0), axis=1), axis=0))
        if many > 0:
            chosen = best_groups(order, TILE // GROUP)
            few = tile * TILE + chosen[:, None] * GROUP + members[None, :]
            again = tl.load(scores + few, mask=few < size, other=0.0)
            keys = tl.reshape(key_of(order_of(again, few < size), few), (_SORTED * GROUP,))
            lane = tl.arange(0, _SORTED)
            tl.store(partial + at * _BEST + lane, tl.topk(keys, _SORTED), mask=lane < _BEST)


@triton.jit(do_not_specialize=_SIZES, do_not_specialize_on_alignment=_ROWS)
def _row_kernel(
    logits, size, tokens, wanted, partial, tops, sums, tiles, logprob, top_ids, top_logprobs,
    TILES: tl.constexpr, TILE: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """What one row is told."""
    allow_next(EARLY)
    wait_for_previous(EARLY)
    row = tl.program_id(0)
    token, many = tl.load(tokens + row), tl.load(wanted + row)
    if (token >= 0) & (many >= 0):
        tile = tl.arange(0, TILES)
        at = row.to(tl.int64) * tiles
        top = tl.load(tops + at + tile, mask=tile < tiles, other=-(1 << 31))
        most = tl.max(top, axis=0)
        best = tl.where(is_number(most), score_of(most), float("nan")).to(tl.float64)
        # Equal infinities have no difference.
        share = tl.where(top == most, 1.0, tl.exp(score_of(top).to(tl.float64) - best))
        mass = tl.load(sums + at + tile, mask=tile < tiles, other=0.0).to(tl.float64)
        mass = tl.where(is_number(top), mass * share, 0.0)
        normalizer = tl.log(tl.sum(mass, axis=0))
        own = tl.load(logits + row.to(tl.int64) * size + token).to(tl.float64)
        tl.store(logprob + row, (own - best - normalizer).to(tl.float32))
        if many > 0:
            keys = merged(partial + at * _BEST, tiles, TILES, TILE)
            order, lane = order_in(keys), tl.arange(0, _SORTED)
            asked = lane < tl.minimum(tl.minimum(many, _BEST), size)
            number = is_number(order)
            value = (score_of(order).to(tl.float64) - best - normalizer).to(tl.float32)
            tl.store(top_ids + row * _BEST + lane, tl.where(number, id_in(keys), -1), mask=asked)
            value = tl.where(number, value, float("-inf"))
            tl.store(top_logprobs + row * _BEST + lane, value, mask=asked)


def token_logprobs(
    logits: torch.Tensor,
    tokens: torch.Tensor,
    wanted: torch.Tensor,
    logprob: torch.Tensor,
    top_ids: torch.Tensor,
    top_logprobs: torch.Tensor,
) -> None:
    check_reports(logits, tokens, wanted, logprob, top_ids, top_logprobs)
    rows, size = logits.shape
    if rows == 0:
        return
    tiles = triton.cdiv(size, TILE)
    device = logits.device
    partial = torch.empty((rows, tiles, CANDIDATES), dtype=torch.int64, device=device)
    tops = torch.empty((rows, tiles), dtype=torch.int32, device=device)
    sums = torch.empty((rows, tiles), dtype=torch.float32, device=device)
    start(
        _tile_kernel, (tiles, rows), device,
        logits, size, tokens, wanted, partial, tops, sums, TILE=TILE, GROUP=GROUP, num_warps=_WARPS,
    )  # fmt: skip
    start(
        _row_kernel, (rows,), device,
        logits, size, tokens, wanted, partial, tops, sums, tiles, logprob, top_ids, top_logprobs,
        TILES=padded_tiles(tiles), TILE=TILE, num_warps=_WARPS,
    )  # fmt: skip


def specimens() -> Iterable[Specimen]:
    types = {
        "logits": "*fp32", "size": "i32", "tokens": "*i32", "wanted": "*i32", "partial": "*i64",
        "tops": "*i32", "sums": "*fp32", "tiles": "i32", "logprob": "*fp32", "top_ids": "*i32",
        "top_logprobs": "*fp32",
    }  # fmt: skip
    for kernel, constants in (
        (_tile_kernel, {"TILE": TILE, "GROUP": GROUP}), (_row_kernel, {"TILES": 128, "TILE": TILE})
    ):  # fmt: skip
        signature = {name: types[name] for name in kernel.arg_names if name in types}
        yield Specimen(kernel, signature, constants, {"num_warps": _WARPS})
