"""Drawing tokens on the GPU: each tile of a row finds its best 20 scores, then one program a row draws.

Roofline: 4 bytes a score, which the head has just written, so that they come from the L2 cache: 1 MB of
248,077 scores is 0.3 us there; what counts are two launches and the latency of two short sorts in each. All
that rows ask for is data: one recorded launch serves greedy, sampled, masked and penalized rows and those
that draw nothing, whose programs leave at once. Penalties are float32 without fused multiply-add and weights
are float64 added up in order, so that the same scores give the token that the CPU draws.

Reached on an H200, 30 November 2026 (`python -m bench.ops.sampling`), rows of 248,077: 15.9 us for one row
that is sampled and 4.9 for a greedy one, 43.6 and 11.1 for 8 rows; counting takes 1.1.
"""

# pyright: reportUnreachable=false, reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false
# pyright: reportIndexIssue=false, reportAttributeAccessIssue=false, reportGeneralTypeIssues=false

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
    is_forbidden,
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
from ninfer.ops.sampling import CANDIDATES, Draws, mask_words
from ninfer.ops.sampling_checks import check_clearing, check_counting, check_draws, drawn_into

_BEST = tl.constexpr(CANDIDATES)
_SORTED = tl.constexpr(32)
_CLEARED = 4096
_TILE_WARPS, _ROW_WARPS = 4, 4
_SIZES = ["size", "tiles", "words", "many", "total"]
_FIELDS = [
    "temperatures", "presences", "frequencies", "top_ps", "min_ps", "top_ks", "seeds", "positions",
    "purposes", "count_rows", "mask_rows", "tokens", "out",
]  # fmt: skip


@triton.jit
def _adjusted(scores, ids, size, mask, mask_row, counts, penalties, presence, frequency):
    """(scores after penalties, whether they take part). Negative `mask_row`, `penalties`: without."""
    ok = ids < size
    x = tl.load(scores + ids, mask=ok, other=0.0)
    words = tl.load(mask + (ids >> 5), mask=tl.where(ok, mask_row, -1) >= 0, other=-1)
    c = tl.load(counts + ids, mask=tl.where(ok, penalties, -1) >= 0, other=0).to(tl.float32)
    x = x - (presence * (c > 0.0).to(tl.float32) + frequency * c)
    return x, ok & (((words >> (ids & 31)) & 1) != 0)


# Compiled once, whatever the sizes and wherever rows begin: a recording must not meet a new kernel.
@triton.jit(do_not_specialize=_SIZES, do_not_specialize_on_alignment=_FIELDS)
def _tile_kernel(
    logits, size, partial, counts, temperatures, presences, frequencies, top_ks, purposes, count_rows,
    mask_rows, masks, words, many,
    TILE: tl.constexpr, GROUP: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """The best keys of one tile of one row: 20, or the first where only that one is asked for."""
    allow_next(EARLY)
    wait_for_previous(EARLY)
    tile, row = tl.program_id(0), tl.program_id(1)
    mask_row = tl.load(mask_rows + row)
    if (tl.load(purposes + row) >= 0) & (mask_row < many):
        presence = tl.load(presences + row).to(tl.float32)
        frequency = tl.load(frequencies + row).to(tl.float32)
        count_row = tl.load(count_rows + row)
        penalties = tl.where((presence != 0.0) | (frequency != 0.0), count_row, -1)
        scores = logits + row.to(tl.int64) * size
        mask = masks + tl.maximum(mask_row, 0).to(tl.int64) * words
        own = counts + tl.maximum(count_row, 0).to(tl.int64) * size
        groups, members = tl.arange(0, TILE // GROUP), tl.arange(0, GROUP)
        ids = tile * TILE + groups[:, None] * GROUP + members[None, :]
        x, allowed = _adjusted(scores, ids, size, mask, mask_row, own, penalties, presence, frequency)
        order = order_of(x, allowed)
        out = partial + (row.to(tl.int64) * tl.num_programs(0) + tile) * _BEST
        if (tl.load(temperatures + row) > 0.0) & (tl.load(top_ks + row) != 1):
            chosen = best_groups(order, TILE // GROUP)
            few = tile * TILE + chosen[:, None] * GROUP + members[None, :]
            again, ok = _adjusted(scores, few, size, mask, mask_row, own, penalties, presence, frequency)
            keys = tl.reshape(key_of(order_of(again, ok), few), (_SORTED * GROUP,))
            lane = tl.arange(0, _SORTED)
            tl.store(out + lane, tl.topk(keys, _SORTED), mask=lane < _BEST)
        else:
            tl.store(out, tl.max(tl.max(key_of(order, ids), axis=1), axis=0))


@triton.jit
def _mix(x):
    """SplitMix64."""
    x = x + 0x9E3779B97F4A7C15
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit
def _uniform(seed, position, purpose):
    """`ninfer.ops.uniform`, sub-draw 0, as float64."""
    low = position.to(tl.uint32, bitcast=True).to(tl.uint64)
    key = _mix(seed.to(tl.uint64, bitcast=True) ^ (low * 0xD1B54A32D192ED03))
    key = _mix(key ^ (purpose.to(tl.uint32, bitcast=True).to(tl.uint64) << 21))
    return (key >> 40).to(tl.float64) * (2.0**-24)


@triton.jit
def _pick(values, found, temperature, top_p, min_p, u):
    """Which of the found scores (32, descending) the number u in [0, 1) stands for."""
    lane = tl.arange(0, _SORTED)
    best = tl.sum(tl.where(lane == 0, values, 0.0), axis=0).to(tl.float64)
    weights = tl.where(lane < found, tl.exp((values.to(tl.float64) - best) / temperature), 0.0)
    total = u * 0.0
    reached = weights
    first = total
    for i in tl.static_range(_BEST):  # in order: that of additions decides the last bit
        weight = tl.sum(tl.where(lane == i, weights, 0.0), axis=0)
        if i == 0:
            first = weight
        total += weight
        reached = tl.where(lane == i, total, reached)
    tail = (lane > 0) & (weights < min_p * first)
    full = reached >= tl.where(top_p < 1.0, top_p * total, float("inf"))
    end = tl.minimum(tl.where(tail, lane, _SORTED), tl.where(full, lane + 1, _SORTED))
    kept = tl.minimum(tl.min(end, axis=0), found)
    mass = tl.sum(tl.where(lane == kept - 1, reached, 0.0), axis=0)
    past = (reached > u * mass) & (lane < kept - 1)
    return tl.min(tl.where(past, lane, kept - 1), axis=0)


@triton.jit(do_not_specialize=_SIZES, do_not_specialize_on_alignment=_FIELDS)
def _row_kernel(
    partial, size, tiles, many, out, temperatures, top_ps, min_ps, top_ks, seeds, positions, purposes,
    mask_rows,
    TILES: tl.constexpr, TILE: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """The draw of one row."""
    allow_next(EARLY)
    wait_for_previous(EARLY)
    row = tl.program_id(0)
    purpose = tl.load(purposes + row)
    result = tl.where(purpose < 0, -2, -3)
    if (purpose >= 0) & (tl.load(mask_rows + row) < many):
        keys = partial + row.to(tl.int64) * tiles * _BEST
        temperature, n = tl.load(temperatures + row), tl.load(top_ks + row)
        if (temperature > 0.0) & (n != 1):
            n = tl.minimum(tl.where((n < 1) | (n > _BEST), _BEST, n), size)
            best = merged(keys, tiles, TILES, TILE)
            order, lane = order_in(best), tl.arange(0, _SORTED)
            found = tl.sum(((lane < n) & is_number(order)).to(tl.int32), axis=0)
            top = tl.max(best, axis=0)
            u = _uniform(tl.load(seeds + row), tl.load(positions + row), purpose)
            values = score_of(tl.where(lane < found, order, order_in(top)))
            top_p, min_p = tl.load(top_ps + row), tl.load(min_ps + row)
            chosen = _pick(values, found, temperature, top_p, min_p, u)
            drawn = id_in(tl.sum(tl.where(lane == chosen, best, 0), axis=0))
        else:
            tile = tl.arange(0, TILES)
            top = tl.max(tl.load(keys + tile * _BEST, mask=tile < tiles, other=-(1 << 63)), axis=0)
            drawn = id_in(top)
        order = order_in(top)
        value = score_of(order)
        fine = is_number(order) & (value - value == 0.0)
        result = tl.where(is_forbidden(order), -3, tl.where(fine, drawn, -1))
    tl.store(out + row, result)


@triton.jit(do_not_specialize=_SIZES, do_not_specialize_on_alignment=_FIELDS)
def _count_kernel(tokens, count_rows, total, counts, size, BLOCK: tl.constexpr, EARLY: tl.constexpr):
    allow_next(EARLY)
    wait_for_previous(EARLY)
    b = tl.arange(0, BLOCK)
    token = tl.load(tokens + b, mask=b < total, other=-1)
    row = tl.load(count_rows + b, mask=b < total, other=-1)
    # The same id may stand in several places.
    at = counts + tl.maximum(row, 0).to(tl.int64) * size + tl.maximum(token, 0)
    tl.atomic_add(at, 1, mask=(token >= 0) & (row >= 0), sem="relaxed")


@triton.jit(do_not_specialize=_SIZES, do_not_specialize_on_alignment=_FIELDS)
def _clear_kernel(count_rows, counts, size, BLOCK: tl.constexpr, EARLY: tl.constexpr):
    allow_next(EARLY)
    wait_for_previous(EARLY)
    row = tl.load(count_rows + tl.program_id(1))
    if row >= 0:
        ids = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        tl.store(counts + row.to(tl.int64) * size + ids, tl.zeros((BLOCK,), tl.int32), mask=ids < size)


def draw(
    logits: torch.Tensor,
    draws: Draws,
    counts: torch.Tensor,
    masks: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    check_draws(logits, draws, counts, masks)
    rows, size = logits.shape
    out = drawn_into(out, logits)
    if rows == 0:
        return out
    tiles, many = triton.cdiv(size, TILE), 0 if masks is None else masks.shape[0]
    partial = torch.empty((rows, tiles, CANDIDATES), dtype=torch.int64, device=logits.device)
    start(
        _tile_kernel, (tiles, rows), logits.device,
        logits, size, partial, counts, draws.temperature, draws.presence, draws.frequency, draws.top_k,
        draws.purpose, draws.count_rows, draws.mask_row, counts if masks is None else masks,
        mask_words(size), many, TILE=TILE, GROUP=GROUP, num_warps=_TILE_WARPS,
        enable_fp_fusion=False,
    )  # fmt: skip
    start(
        _row_kernel, (rows,), logits.device,
        partial, size, tiles, many, out, draws.temperature, draws.top_p, draws.min_p, draws.top_k, draws.seed,
        draws.position, draws.purpose, draws.mask_row, TILES=padded_tiles(tiles),
        TILE=TILE, num_warps=_ROW_WARPS, enable_fp_fusion=False,
    )  # fmt: skip
    return out


def count_tokens(tokens: torch.Tensor, count_rows: torch.Tensor, counts: torch.Tensor) -> None:
    check_counting(tokens, count_rows, counts)
    total = tokens.numel()
    if total:
        block = max(32, triton.next_power_of_2(total))
        start(
            _count_kernel, (1,), counts.device,
            tokens, count_rows, total, counts, counts.shape[1], BLOCK=block, num_warps=1,
        )  # fmt: skip


def clear_counts(count_rows: torch.Tensor, counts: torch.Tensor) -> None:
    check_clearing(count_rows, counts)
    size = counts.shape[1]
    if count_rows.numel() and size:
        grid = triton.cdiv(size, _CLEARED), count_rows.numel()
        start(_clear_kernel, grid, counts.device, count_rows, counts, size, BLOCK=_CLEARED, num_warps=4)


def specimens() -> Iterable[Specimen]:
    reals = dict.fromkeys(("temperatures", "presences", "frequencies", "top_ps", "min_ps"), "*fp64")
    integers = dict.fromkeys(("top_ks", "positions", "purposes", "count_rows", "mask_rows"), "*i32")
    types = reals | integers | {
        "logits": "*fp32", "partial": "*i64", "counts": "*i32", "seeds": "*i64", "masks": "*i32",
        "size": "i32", "words": "i32", "tiles": "i32", "many": "i32", "out": "*i32", "tokens": "*i32",
        "total": "i32",
    }  # fmt: skip
    sampling = {"num_warps": _TILE_WARPS, "enable_fp_fusion": False}
    for kernel, constants, options in (
        (_tile_kernel, {"TILE": TILE, "GROUP": GROUP}, sampling),
        (_row_kernel, {"TILES": 128, "TILE": TILE}, sampling | {"num_warps": _ROW_WARPS}),
        (_count_kernel, {"BLOCK": 32}, {"num_warps": 1}),
        (_clear_kernel, {"BLOCK": _CLEARED}, {"num_warps": 4}),
    ):
        signature = {name: types[name] for name in kernel.arg_names if name in types}
        yield Specimen(kernel, signature, constants, options)
