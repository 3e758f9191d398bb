"""What a speculative round does between its forward passes: which drafts stand, what goes on from there.

Integers and copies only, nothing is rounded, so these are exact on every backend. B requests of W columns
each; a column at a negative position is masked.
"""

from __future__ import annotations

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
    drawn: torch.Tensor, tokens: torch.Tensor, positions: torch.Tensor, produced: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Decide how many of each request's draws stand: one, and one more for each draft that its draw agrees
    with.

    `drawn`, `tokens`, `positions` int32 `[T]`: what each column drew, was fed and where; columns after a
    request's first one are drafts. A draft stands if the column before it drew the same. With one certain
    proposal that is the exact rejection rule: it stands with its probability, and otherwise the draw has the
    distribution without it. `produced` int32 `[B]` receives the counts.

    Returns int32 `following [T]`, the token after each column that stands (0 elsewhere, and where nothing
    could be drawn), `kept [T]`, its position (-1 elsewhere), and `last [B]`, the position of the last one.
    """
    return backend(drawn.device.type).accept(drawn, tokens, positions, produced)


def count_drafts(
    tokens: torch.Tensor,
    positions: torch.Tensor,
    count_rows: torch.Tensor,
    counts: torch.Tensor,
    rows: int,
    stand: torch.Tensor | None = None,
) -> None:
    """Keep a row of counts for each column of `rows` requests (`count_rows` int32 `[T]`, -1: none), as if its
    drafts were said.

    Before a round's draws all rows of a request in `counts` (int32 `[R, V]`) are equal; then that of column i
    also counts the request's tokens up to column i (`tokens`, `positions` as in `accept`). Afterwards, with
    `stand` int32 `[B]`, all rows are equal again, and have counted the first `stand[b]` tokens.
    """
    backend(tokens.device.type).count_drafts(tokens, positions, count_rows, counts, rows, stand)


def keep_last(
    columns: torch.Tensor,
    counts: torch.Tensor,
    states: torch.Tensor | None = None,
    target_slots: torch.Tensor | None = None,
) -> torch.Tensor:
    """Column `counts[b] - 1` of each request (the first one where a count is 0): `[B, H]` of `columns [T,
    H]`.

    With `states [slots, H]` it is also left in slot `target_slots[b]` (int32 `[B]`), unless the count is 0.
    `counts` int32 `[B]`, at most W.
    """
    return backend(columns.device.type).keep_last(columns, counts, states, target_slots)


def next_draft(
    drawn: torch.Tensor,
    positions: torch.Tensor,
    limits: torch.Tensor,
    drafts: torch.Tensor,
    step: int,
    token_ids: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Note a draft of each request, and say where it is fed. What was drawn are rows of a proposal head,
    whose tokens are `token_ids` (int32 `[rows]`), or tokens.

    `drafts[b, step]` becomes the token of `drawn[b]` (int32 `[R, K]`, R at least B; -1 where nothing could be
    drawn). Returns int32 `[B]` tokens (0 for -1) and positions: one higher, or -1 where that isn't below
    `limits[b]` or was masked.
    """
    return backend(drawn.device.type).next_draft(drawn, positions, limits, drafts, step, token_ids)
