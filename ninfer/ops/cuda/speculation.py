"""Between the passes of a speculative round, on a GPU: PyTorch's own kernels, all of them capturable.

Integers are chosen by multiplication: `torch.where` with a Python number copies it from the host.
"""

from __future__ import annotations

import torch

from ninfer.ops.cuda.norms import rms_norm


def norm_pair(
    a: torch.Tensor, b: torch.Tensor, a_gain: torch.Tensor, b_gain: torch.Tensor, eps: float
) -> torch.Tensor:
    return torch.cat([rms_norm(a, a_gain, eps, True), rms_norm(b, b_gain, eps, True)], 1)


def accept(
    drawn: torch.Tensor, tokens: torch.Tensor, positions: torch.Tensor, produced: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    rows = produced.numel()
    drawn, tokens, positions = (x.view(rows, -1) for x in (drawn, tokens, positions))
    agree = (drawn[:, :-1] == tokens[:, 1:]) & (positions[:, 1:] >= 0)
    counts = agree.to(torch.int32).cumprod(1, dtype=torch.int32).sum(1, dtype=torch.int32) + 1
    produced.copy_(counts)
    first = positions[:, :1]
    columns = torch.arange(drawn.shape[1], dtype=torch.int32, device=drawn.device)
    fed = (first >= 0).to(torch.int32)
    live = (columns < counts[:, None]).to(torch.int32) * fed
    following = drawn.clamp(min=0) * live
    kept = (first + columns + 1) * live - 1
    last = ((first + counts[:, None]) * fed - 1)[:, 0]
    return following.view(-1), kept.view(-1), last.contiguous()


def count_drafts(
    tokens: torch.Tensor,
    positions: torch.Tensor,
    count_rows: torch.Tensor,
    counts: torch.Tensor,
    rows: int,
    stand: torch.Tensor | None,
) -> None:
    width = tokens.numel() // rows
    columns = torch.arange(width, dtype=torch.int32, device=tokens.device)
    live = (positions.view(rows, 1, width) >= 0).expand(rows, width, width)
    change = (live & (columns <= columns[:, None])).to(torch.int32)
    if stand is not None:
        change = (live & (columns < stand[:, None, None])).to(torch.int32) - change
    own = count_rows.view(rows, width, 1)
    change = change * (own >= 0).to(torch.int32)
    places = own.clamp(min=0).long() * counts.shape[1] + tokens.view(rows, 1, width).clamp(min=0)
    counts.view(-1).index_add_(0, places.view(-1), change.reshape(-1))


def keep_last(
    columns: torch.Tensor,
    counts: torch.Tensor,
    states: torch.Tensor | None,
    target_slots: torch.Tensor | None,
) -> torch.Tensor:
    rows, width = counts.numel(), columns.shape[1]
    index = counts.clamp(min=1).long() - 1
    out = columns.view(rows, -1, width).gather(1, index.view(rows, 1, 1).expand(rows, 1, width))[:, 0]
    if states is not None and target_slots is not None:
        # A request that keeps nothing writes its slot's own content back.
        slots = target_slots.long()
        states.index_copy_(0, slots, torch.where(counts[:, None] > 0, out, states.index_select(0, slots)))
    return out


def next_draft(
    drawn: torch.Tensor,
    positions: torch.Tensor,
    limits: torch.Tensor,
    drafts: torch.Tensor,
    step: int,
    token_ids: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    if token_ids is not None:
        found = (drawn >= 0).to(torch.int32)
        drawn = (token_ids.index_select(0, drawn.clamp(min=0).long()) + 1) * found - 1
    drafts[: drawn.numel(), step].copy_(drawn.clamp(min=-1))
    ahead = positions + 1
    live = ((positions >= 0) & (ahead < limits)).to(torch.int32)
    return drawn.clamp(min=0), (ahead + 1) * live - 1
