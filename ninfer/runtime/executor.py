"""The part of a Program that touches tensors: fixed buffers, one unit of work at a time."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import permutations

import numpy as np
import torch

from ninfer import ops
from ninfer.errors import ModelError
from ninfer.models import Batch, Model
from ninfer.runtime.memory import allocate, zeros
from ninfer.runtime.plan import Plan
from ninfer.runtime.records import Draw, Egress, Ingress, penalized


class Executor:
    """Owns KV pages, state slots, page table and penalty counts of one sequence; runs units of work on them.

    Page b of the sequence is page b of the pool. A slot also keeps the hidden state of the last column fed.
    """

    def __init__(self, model: Model, plan: Plan) -> None:
        device = model.device
        self._model = model
        self._cache = allocate(
            model.kv_layout(), model.state_layout(), pages=plan.pages, slots=plan.slots, device=device
        )
        self._hidden = [zeros((1, model.hidden_size), model.dtype, device) for _ in range(plan.slots)]
        self._counts = zeros((1, model.public_tokens), torch.int32, device)
        self._page_table = torch.arange(plan.pages, dtype=torch.int32, device=device).view(1, -1)
        self._slots = [torch.tensor([slot], dtype=torch.int32, device=device) for slot in range(plan.slots)]
        self._staging = zeros((2, plan.prefill_chunk), torch.int32, torch.device("cpu"))
        self._staged = self._staging.numpy()
        self._columns = self._staging.to(device)
        """Token ids and positions of the columns being fed; on the CPU the staging buffer itself."""
        self._steps = {
            (source, target): ops.Recording(partial(self._step, self._batch(1, source, target)), device)
            for source, target in permutations(range(plan.slots), 2)
        }

    def run(self, ingress: Ingress) -> Egress:
        """Feed the columns and draw; the source slot and everything before the frontier stay as they are."""
        with torch.inference_mode():
            logits = None
            if len(ingress.tokens) == 1:
                self._stage(ingress)
                hidden, logits = self._steps[ingress.source_slot, ingress.target_slot]()
            elif ingress.tokens:
                hidden = self._forward(ingress)[-1:]
            else:
                hidden = self._hidden[ingress.source_slot]
            if ingress.tokens:
                self._hidden[ingress.target_slot].copy_(hidden)
            if ingress.draw is None:
                return Egress(())
            if logits is None:
                logits = self._model.logits(hidden)
            return Egress((self._draw(logits, ingress.draw),))

    def score(self, ingress: Ingress, targets: Sequence[int], tile: int) -> np.ndarray:
        """Feed the columns; FP32 log-probability of `targets[i]` after column i, `[len(targets)]`."""
        scores = np.empty(len(targets), np.float32)
        with torch.inference_mode():
            hidden = self._forward(ingress)
            wanted = torch.tensor(targets, dtype=torch.int64, device=self._model.device)
            for begin in range(0, len(targets), tile):
                end = min(begin + tile, len(targets))
                logits = self._model.logits(hidden[begin:end])
                chosen = logits.gather(1, wanted[begin:end, None])[:, 0]
                scores[begin:end] = (chosen - logits.logsumexp(1)).cpu().numpy()
        return scores

    def clear_state(self, slot: int) -> None:
        """Make a slot the state before the first token."""
        for states in (*self._cache.conv, *self._cache.recurrent):
            states[slot].zero_()

    def clear_counts(self) -> None:
        self._counts.zero_()

    def count(self, tokens: Sequence[int]) -> None:
        """Count committed tokens for the penalties."""
        for token in tokens:
            self._counts[0, token] += 1

    def _stage(self, ingress: Ingress) -> None:
        """Put the columns where every batch reads them."""
        width = len(ingress.tokens)
        self._staged[0, :width] = ingress.tokens
        self._staged[1, :width] = range(ingress.frontier, ingress.frontier + width)
        if self._columns is not self._staging:
            self._columns[:, :width].copy_(self._staging[:, :width])

    def _forward(self, ingress: Ingress) -> torch.Tensor:
        self._stage(ingress)
        batch = self._batch(len(ingress.tokens), ingress.source_slot, ingress.target_slot)
        return self._model.forward(batch, self._cache)

    def _step(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """Hidden state and logits of a single column: a decode step, whose launches are recorded."""
        hidden = self._model.forward(batch, self._cache)
        return hidden, self._model.logits(hidden)

    def _batch(self, width: int, source: int, target: int) -> Batch:
        return Batch(
            tokens=self._columns[0, :width],
            positions=self._columns[1, :width],
            rows=1,
            page_table=self._page_table,
            source_slots=self._slots[source],
            target_slots=self._slots[target],
        )

    def _draw(self, logits: torch.Tensor, draw: Draw) -> int:
        [token] = ops.sample(
            logits,
            [draw.sampling],
            [draw.position],
            draw.purpose,
            self._counts if penalized(draw.sampling) else None,
        )
        if token < 0:
            raise ModelError(
                f"the model's scores for position {draw.position} aren't finite; the weights are damaged"
            )
        return token
