"""Running a model's predictor beside it: what each unit of work leaves for it, and the drafts that it makes.

Between units the predictor's keys and values are those of all positions before a sequence's frontier F:
position p pairs the hidden state there with the token at p + 1. The hidden state at F - 1 stands in the state
slot, so whoever resumes there, with whatever token, makes the pair of F - 1 anew. A page that ends there is
therefore shared only by those who go on with the same token (`PrefixCache`, `ahead`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch

from ninfer import ops
from ninfer.models import Batch, Cache, Model


class Predict:
    """Works on the Program's cache and buffers; `drafts` int32 `[rows, drafts]` receives what it proposes."""

    def __init__(
        self,
        model: Model,
        cache: Cache,
        fields: Mapping[str, torch.Tensor],
        drafts: torch.Tensor,
    ) -> None:
        assert model.predictor is not None, "the plan counted a predictor"
        assert cache.hidden is not None, "the plan counted hidden states"
        self._predictor = model.predictor
        self._pages, self._states = cache.kv[-1], cache.hidden
        self._fields, self._drafts = fields, drafts

    def follow(self, batch: Batch, hidden: torch.Tensor, source: int, target: int) -> None:
        """After columns of one row that are committed as they are: pair them with the hidden states before
        them, the first one that of the source slot (-1: the start, which has none), and keep the last one."""
        before = self._states[source : source + 1] if source >= 0 else torch.zeros_like(hidden[:1])
        moved = torch.cat([before, hidden[:-1]])
        self._predictor.fill(replace(batch, positions=batch.positions - 1), moved, self._pages)
        self._states[target].copy_(hidden[-1])

    def propose(self, tokens: torch.Tensor, hidden: torch.Tensor, positions: torch.Tensor, rows: int) -> None:
        """Draft for the first `rows` rows: `tokens` int32 `[rows]` follow the hidden states at
        `positions`."""
        batch = self._batch(tokens, positions, rows)
        self._draft(self._predictor.forward(batch, hidden, self._pages), positions, rows)

    def round(self, batch: Batch, hidden: torch.Tensor, stand: torch.Tensor, last: torch.Tensor) -> None:
        """Draft after a round: `batch` has the tokens that follow those that stand and their positions,
        `hidden` is the model's; the rest as `ops.accept` returns it, which has kept a hidden state of each
        row."""
        self._draft(self._predictor.forward(batch, hidden, self._pages, (stand, last)), last, batch.rows)

    def keep(self, hidden: torch.Tensor, counts: torch.Tensor) -> None:
        """Leave the hidden state of the last committed column of each row in its target slot."""
        ops.keep_last(hidden, counts, self._states, self._fields["target_slots"][: len(counts)])

    def _draft(self, guesses: torch.Tensor, positions: torch.Tensor, rows: int) -> None:
        limits, steps = self._fields["limits"][:rows], self._drafts.shape[1]
        for step in range(steps):
            scores, hidden = self._predictor.score(guesses)
            tokens, positions = ops.next_draft(
                scores, positions, limits, self._drafts, step, self._predictor.token_ids
            )
            if step + 1 < steps:
                guesses = self._predictor.forward(self._batch(tokens, positions, rows), hidden, self._pages)

    def _batch(self, tokens: torch.Tensor, positions: torch.Tensor, rows: int) -> Batch:
        f = self._fields
        return Batch(
            tokens,
            positions,
            rows,
            f["page_table"][:rows],
            f["source_slots"][:rows],
            f["target_slots"][:rows],
        )
