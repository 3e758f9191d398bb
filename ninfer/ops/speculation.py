"""What a speculative round does between its forward passes: which drafts stand, what goes on from there.

Integers and copies only, nothing is rounded, so these are exact on every backend. B requests of W columns
each; a column at a negative position is masked.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ninfer.ops.dispatch import backend


def norm_pair(
    a: torch.Tensor, b: torch.Tensor, a_gain: torch.Tensor, b_gain: torch.Tensor, eps: float
) -> torch.Tensor:
    """`[rms_norm(a) | rms_norm(b)]`, both with gains 1 + w: `[T, 2 H]` for `a`, `b` `[T, H]`.

    `a`, `b` are contiguous and bf16 or float32; each norm is that of `rms_norm`, bit for bit.
    """
    return backend(a.device.type).norm_pair(a, b, a_gain, b_gain, eps)


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
    """Decide how many of each request's draws stand: one, and one more for each draft that its draw agrees
    with.

    `drawn`, `tokens`, `positions` int32 `[T]`: what each column drew, was fed and where; columns after a
    request's first one are drafts. A draft stands if the column before it drew the same. With one certain
    proposal that is the exact rejection rule: it stands with its probability, and otherwise the draw has the
    distribution without it. `produced` int32 `[B]` receives the numbers.

    Returns int32 `following [T]`, the token after each column that stands (0 elsewhere, and where nothing
    could be drawn), `kept [T]`, its position (-1 elsewhere), and `last [B]`, the position of the last one.

    With `count_rows` and `counts`, as `count_drafts` left them, all rows of a request become equal again, and
    have counted its tokens in the columns that stand. With `hidden [T, H]`, `states` and `target_slots` the
    last of these columns is left in a slot as by `keep_last`.
    """
    return backend(drawn.device.type).accept(
        drawn, tokens, positions, produced, count_rows, counts, hidden, states, target_slots
    )


def count_drafts(
    tokens: torch.Tensor, positions: torch.Tensor, count_rows: torch.Tensor, counts: torch.Tensor, rows: int
) -> None:
    """Keep a row of counts for each column of `rows` requests (`count_rows` int32 `[T]`, -1: none), as if its
    drafts were said.

    All rows of a request in `counts` (int32 `[R, V]`) are equal; then that of column i also counts the
    request's tokens up to column i (`tokens`, `positions` as in `accept`), for the draws of a round.
    """
    backend(tokens.device.type).count_drafts(tokens, positions, count_rows, counts, rows)


def last_columns(columns: Sequence[torch.Tensor], counts: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Column `counts[b] - 1` of each request (the first one where a count is 0) of up to three tensors:
    `[B, ...]` of each `[T, ...]`, whose rows may be strided.

    `counts` int32 `[B]`, at most T / B.
    """
    return backend(counts.device.type).last_columns(columns, counts)


def keep_last(
    hidden: torch.Tensor, counts: torch.Tensor, states: torch.Tensor, target_slots: torch.Tensor
) -> None:
    """Leave column `counts[b] - 1` of `hidden [T, H]` in slot `target_slots[b]` of `states [slots, H]`,
    unless the count is 0.

    `counts`, `target_slots` int32 `[B]`; counts are at most T / B.
    """
    backend(hidden.device.type).keep_last(hidden, counts, states, target_slots)


def next_draft(
    scores: torch.Tensor,
    positions: torch.Tensor,
    limits: torch.Tensor,
    drafts: torch.Tensor,
    step: int,
    token_ids: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draft the likeliest token of each request, and say where it is fed.

    `scores` float32 `[B, n]` are of tokens, or of a proposal head's rows, whose tokens are `token_ids` (int32
    `[n]`). `drafts[b, step]` (int32 `[R, K]`, R at least B) becomes the token with the best score, that of
    the lower place among equals, or -1 where the best is not finite. Returns int32 `[B]` tokens (0 for -1)
    and positions: one higher than `positions` (int32 `[B]`), or -1 where that isn't below `limits[b]` or was
    masked.
    """
    return backend(scores.device.type).next_draft(scores, positions, limits, drafts, step, token_ids)
