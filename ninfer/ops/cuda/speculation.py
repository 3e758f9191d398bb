"""Between the passes of a speculative round, on a GPU: one launch an operator, and all may be captured.

Roofline: a launch each, about 1 us. What is read are a few integers and vectors; of a proposal head 4 bytes a
score, which the head has just written.

Reached on an H200 (2026-11-30, `python -m bench.ops.speculation`, 27B, 3 drafts), us for one request and for
eight: count_drafts 0.6 and 0.6, accept 1.1 and 1.2, last_columns 1.0 and 1.2, next_draft of 131,072 scores
2.1 and 3.3 (two launches).

`last_columns` and `norm_pair` don't let in what follows them (see `dependent`): that is attention, which
reads keys from before the column, and a product.
"""

# pyright: reportArgumentType=false, reportIndexIssue=false, reportAttributeAccessIssue=false
# pyright: reportCallIssue=false, reportOperatorIssue=false, reportGeneralTypeIssues=false
# pyright: reportUnreachable=false

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import triton
import triton.language as tl

from ninfer.errors import OptionError
from ninfer.ops.cuda.best import id_in, is_number, key_of, order_in, order_of, padded_tiles, score_of
from ninfer.ops.cuda.dependent import allow_next, start, wait_for_previous
from ninfer.ops.cuda.norms import norm_pair
from ninfer.ops.cuda.specimens import Specimen

__all__ = ["accept", "count_drafts", "keep_last", "last_columns", "next_draft", "norm_pair"]

_PART = 512
"""Elements of a row that a program copies."""
_TILE = 1024
"""Scores of a program."""
_WARPS = 4
_SIZES = [
    "width", "size", "step", "tiles", "a_width", "b_width", "c_width", "a_stride", "b_stride",
    "c_stride", "hidden_width", "drafts_stride",
]  # fmt: skip
_FIELDS = [
    "drawn", "tokens", "positions", "produced", "count_rows", "target_slots", "counts", "limits", "drafts"
]  # fmt: skip


@triton.jit
def _count(rows, tokens, counts, size, change, begin, own, other, inside):
    """Add `change` [columns, tokens] where a column has a row of counts; the same token may come twice."""
    row = tl.load(rows + begin + own, mask=inside[:, None], other=-1)
    token = tl.maximum(tl.load(tokens + begin + other, mask=inside[None, :], other=0), 0)
    at = counts + tl.maximum(row, 0).to(tl.int64) * size + token
    tl.atomic_add(at, change, mask=(change != 0) & (row >= 0), sem="relaxed")


@triton.jit(do_not_specialize=_SIZES, do_not_specialize_on_alignment=_FIELDS)
def _accept_kernel(
    drawn, tokens, positions, produced, following, kept, last, count_rows, counts, size, hidden, states,
    target_slots, hidden_width, width,
    COLUMNS: tl.constexpr, COUNTS: tl.constexpr, STATES: tl.constexpr, PART: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """A request, and for programs behind its first one a part of its last hidden state."""
    allow_next(EARLY)
    wait_for_previous(EARLY)
    row, part = tl.program_id(0), tl.program_id(1)
    column, begin = tl.arange(0, COLUMNS), row * width
    inside = column < width
    draft = inside & (column > 0)
    place = tl.load(positions + begin + column, mask=inside, other=-1)
    token = tl.load(tokens + begin + column, mask=inside, other=0)
    before = tl.load(drawn + begin + column - 1, mask=draft, other=0)
    first = tl.load(positions + begin)
    count = tl.min(tl.where(draft & ((before != token) | (place < 0)), column, width), axis=0)
    if part == 0:
        own = tl.load(drawn + begin + column, mask=inside, other=0)
        live = (column < count) & (first >= 0)
        tl.store(following + begin + column, tl.where(live, tl.maximum(own, 0), 0), mask=inside)
        tl.store(kept + begin + column, tl.where(live, first + column, -1), mask=inside)
        tl.store(produced + row, count)
        tl.store(last + row, tl.where(first >= 0, first + count - 1, -1))
        if COUNTS:
            # Column i has counted tokens 0 .. i; now each counts those that stand.
            i, j = tl.arange(0, COLUMNS)[:, None], tl.arange(0, COLUMNS)[None, :]
            fed = tl.load(positions + begin + j, mask=j < width, other=-1) >= 0
            change = ((j < count) & fed).to(tl.int32) - ((j <= i) & fed).to(tl.int32)
            _count(count_rows, tokens, counts, size, change, begin, i, j, inside)
    if STATES:
        at = part * PART + tl.arange(0, PART)
        slot = tl.load(target_slots + row).to(tl.int64)
        source = hidden + (begin + count - 1).to(tl.int64) * hidden_width
        value = tl.load(source + at, mask=at < hidden_width, other=0.0)
        tl.store(states + slot * hidden_width + at, value, mask=at < hidden_width)


@triton.jit(do_not_specialize=_SIZES, do_not_specialize_on_alignment=_FIELDS)
def _count_kernel(
    tokens, positions, count_rows, counts, size, width, COLUMNS: tl.constexpr, EARLY: tl.constexpr
):
    """Of one request."""
    allow_next(EARLY)
    wait_for_previous(EARLY)
    begin = tl.program_id(0) * width
    inside = tl.arange(0, COLUMNS) < width
    i, j = tl.arange(0, COLUMNS)[:, None], tl.arange(0, COLUMNS)[None, :]
    fed = tl.load(positions + begin + j, mask=j < width, other=-1) >= 0
    _count(count_rows, tokens, counts, size, ((j <= i) & fed).to(tl.int32), begin, i, j, inside)


@triton.jit
def _copy(source, out, width, part, PART: tl.constexpr):
    at = part * PART + tl.arange(0, PART)
    tl.store(out + at, tl.load(source + at, mask=at < width, other=0.0), mask=at < width)


@triton.jit(do_not_specialize=_SIZES, do_not_specialize_on_alignment=_FIELDS)
def _last_kernel(
    counts, a, b, c, a_out, b_out, c_out, a_width, b_width, c_width, a_stride, b_stride, c_stride, width,
    PART: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """A part of one request's column of one of the tensors."""
    wait_for_previous(EARLY)
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    place = row * width + tl.maximum(tl.load(counts + row), 1) - 1
    a_parts, b_parts = tl.cdiv(a_width, PART), tl.cdiv(b_width, PART)
    if part < a_parts:
        _copy(a + place * a_stride, a_out + row * a_width, a_width, part, PART)
    elif part < a_parts + b_parts:
        _copy(b + place * b_stride, b_out + row * b_width, b_width, part - a_parts, PART)
    else:
        _copy(c + place * c_stride, c_out + row * c_width, c_width, part - a_parts - b_parts, PART)


@triton.jit(do_not_specialize=_SIZES, do_not_specialize_on_alignment=_FIELDS)
def _keep_kernel(
    hidden, counts, states, target_slots, hidden_width, width, PART: tl.constexpr, EARLY: tl.constexpr
):  # fmt: skip
    wait_for_previous(EARLY)
    row = tl.program_id(0).to(tl.int64)
    count = tl.load(counts + row)
    if count > 0:
        slot = tl.load(target_slots + row).to(tl.int64)
        source = hidden + (row * width + count - 1) * hidden_width
        _copy(source, states + slot * hidden_width, hidden_width, tl.program_id(1), PART)


@triton.jit(do_not_specialize=_SIZES)
def _best_kernel(scores, size, best, TILE: tl.constexpr, EARLY: tl.constexpr):
    """The best key of one tile of one row."""
    allow_next(EARLY)
    wait_for_previous(EARLY)
    tile, row = tl.program_id(0), tl.program_id(1)
    ids = tile * TILE + tl.arange(0, TILE)
    x = tl.load(scores + row.to(tl.int64) * size + ids, mask=ids < size, other=0.0)
    tl.store(best + row * tl.num_programs(0) + tile, tl.max(key_of(order_of(x, ids < size), ids), axis=0))


@triton.jit(do_not_specialize=_SIZES, do_not_specialize_on_alignment=_FIELDS)
def _draft_kernel(
    best, tiles, token_ids, positions, limits, drafts, drafts_stride, step, tokens, ahead,
    TILES: tl.constexpr, MAPPED: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """What one row drafts, and where that is fed."""
    allow_next(EARLY)
    wait_for_previous(EARLY)
    row, tile = tl.program_id(0), tl.arange(0, TILES)
    place, limit = tl.load(positions + row), tl.load(limits + row)
    key = tl.max(tl.load(best + row * tiles + tile, mask=tile < tiles, other=-(1 << 63)), axis=0)
    value = score_of(order_in(key))
    fine = is_number(order_in(key)) & (value - value == 0.0)
    token = id_in(key)
    if MAPPED:
        token = tl.load(token_ids + token, mask=fine, other=0)
    tl.store(drafts + row * drafts_stride + step, tl.where(fine, token, -1))
    tl.store(tokens + row, tl.where(fine, token, 0))
    tl.store(ahead + row, tl.where((place >= 0) & (place + 1 < limit), place + 1, -1))


def accept(
    drawn: torch.Tensor,
    tokens: torch.Tensor,
    positions: torch.Tensor,
    produced: torch.Tensor,
    count_rows: torch.Tensor | None = None,
    counts: torch.Tensor | None = None,
    hidden: torch.Tensor | None = None,
    states: torch.Tensor | None = None,
    target_slots: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    rows = produced.numel()
    following, kept, last = torch.empty_like(drawn), torch.empty_like(drawn), torch.empty_like(produced)
    counted, stored = counts is not None, states is not None
    if hidden is not None:
        hidden = hidden.contiguous()
    parts = 1 if hidden is None or not stored else triton.cdiv(hidden.shape[1], _PART)
    start(
        _accept_kernel, (rows, parts), drawn.device,
        drawn, tokens, positions, produced, following, kept, last,
        drawn if count_rows is None else count_rows, drawn if counts is None else counts,
        0 if counts is None else counts.shape[1],
        drawn if hidden is None else hidden, drawn if states is None else states,
        drawn if target_slots is None else target_slots, 0 if hidden is None else hidden.shape[1],
        drawn.numel() // rows, COLUMNS=_columns(drawn.numel() // rows), COUNTS=counted, STATES=stored,
        PART=_PART, num_warps=_WARPS,
    )  # fmt: skip
    return following, kept, last


def count_drafts(
    tokens: torch.Tensor, positions: torch.Tensor, count_rows: torch.Tensor, counts: torch.Tensor, rows: int
) -> None:
    width = tokens.numel() // rows
    start(
        _count_kernel, (rows,), tokens.device,
        tokens, positions, count_rows, counts, counts.shape[1], width, COLUMNS=_columns(width), num_warps=1,
    )  # fmt: skip


def last_columns(columns: Sequence[torch.Tensor], counts: torch.Tensor) -> tuple[torch.Tensor, ...]:
    rows, width = counts.numel(), len(columns[0]) // counts.numel()
    if not 1 <= len(columns) <= 3:
        raise OptionError(f"columns of 1 to 3 tensors are taken at a time, got {len(columns)}")
    flat = [_rows_of(x) for x in columns]
    out = [torch.empty((rows, *x.shape[1:]), dtype=x.dtype, device=x.device) for x in columns]
    sizes = [x.shape[1] for x in flat]
    none = 3 - len(flat)
    start(
        _last_kernel, (rows, sum(triton.cdiv(size, _PART) for size in sizes)), counts.device,
        counts, *flat, *flat[:1] * none, *out, *out[:1] * none, *sizes, *[0] * none,
        *(x.stride(0) for x in flat), *[0] * none, width, PART=_PART, num_warps=_WARPS,
    )  # fmt: skip
    return tuple(out)


def keep_last(
    hidden: torch.Tensor, counts: torch.Tensor, states: torch.Tensor, target_slots: torch.Tensor
) -> None:
    rows, (total, width) = counts.numel(), hidden.shape
    start(
        _keep_kernel, (rows, triton.cdiv(width, _PART)), hidden.device,
        hidden.contiguous(), counts, states, target_slots, width, total // rows, PART=_PART, num_warps=_WARPS,
    )  # fmt: skip


def next_draft(
    scores: torch.Tensor,
    positions: torch.Tensor,
    limits: torch.Tensor,
    drafts: torch.Tensor,
    step: int,
    token_ids: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    rows, size = scores.shape
    tiles, device = triton.cdiv(size, _TILE), scores.device
    best = torch.empty((rows, tiles), dtype=torch.int64, device=device)
    tokens = torch.empty(rows, dtype=torch.int32, device=device)
    ahead = torch.empty_like(tokens)
    start(_best_kernel, (tiles, rows), device, scores.contiguous(), size, best, TILE=_TILE, num_warps=_WARPS)
    start(
        _draft_kernel, (rows,), device,
        best, tiles, drafts if token_ids is None else token_ids, positions, limits, drafts, drafts.stride(0),
        step, tokens, ahead, TILES=padded_tiles(tiles), MAPPED=token_ids is not None, num_warps=1,
    )  # fmt: skip
    return tokens, ahead


def _columns(width: int) -> int:
    return max(2, triton.next_power_of_2(width))


def _rows_of(x: torch.Tensor) -> torch.Tensor:
    """`[T, n]`, the numbers of a row side by side."""
    x = x if x.dim() == 2 else x.reshape(len(x), -1)
    return x if x.stride(1) == 1 else x.contiguous()


def specimens() -> Iterator[Specimen]:
    types = dict.fromkeys(("hidden", "states", "a", "b", "c", "a_out", "b_out", "c_out"), "*bf16")
    types |= dict.fromkeys(_SIZES, "i32") | {"scores": "*fp32", "best": "*i64"}
    for kernel, constants, warps in (
        (_accept_kernel, {"COLUMNS": 4, "COUNTS": True, "STATES": True, "PART": _PART}, _WARPS),
        (_count_kernel, {"COLUMNS": 4}, 1),
        (_last_kernel, {"PART": _PART}, _WARPS),
        (_keep_kernel, {"PART": _PART}, _WARPS),
        (_best_kernel, {"TILE": _TILE}, _WARPS),
        (_draft_kernel, {"TILES": 128, "MAPPED": True}, 1),
    ):
        signature = {name: types.get(name, "*i32") for name in kernel.arg_names if not name.isupper()}
        yield Specimen(kernel, signature, constants, {"num_warps": warps})
