"""The part of a Program that touches tensors: fixed buffers, one unit of work at a time."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from ninfer import ops
from ninfer.errors import ModelError
from ninfer.models import Batch, Model
from ninfer.runtime.memory import allocate, zeros
from ninfer.runtime.plan import Plan
from ninfer.runtime.records import Draw, Egress, Ingress


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
        self._hidden = zeros((plan.slots, model.hidden_size), model.dtype, device)
        self._counts = zeros((1, model.public_tokens), torch.int32, device)
        self._page_table = torch.arange(plan.pages, dtype=torch.int32, device=device).view(1, -1)
        self._slots = [torch.tensor([slot], dtype=torch.int32, device=device) for slot in range(plan.slots)]
        self._staging = zeros((2, plan.prefill_chunk), torch.int32, torch.device("cpu"))
        self._staged = self._staging.numpy()
        self._columns = self._staging.to(device)
        """Token ids and positions of the columns being fed; on the CPU the staging buffer itself."""
        self._decode_batches = {
            (source, target): self._batch(1, source, target)
            for source in range(plan.slots)
            for target in range(plan.slots)
        }

    def run(self, ingress: Ingress) -> Egress:
        """Feed the columns and draw; the source slot and everything before the frontier stay as they are."""
        with torch.inference_mode():
            if ingress.tokens:
                last = self._forward(ingress)[-1:]
                self._hidden[ingress.target_slot] = last[0]
            else:
                last = self._hidden[ingress.source_slot : ingress.source_slot + 1]
            return Egress(() if ingress.draw is None else (self._draw(last, ingress.draw),))

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

    def _forward(self, ingress: Ingress) -> torch.Tensor:
        width, slots = len(ingress.tokens), (ingress.source_slot, ingress.target_slot)
        batch = self._decode_batches[slots] if width == 1 else self._batch(width, *slots)
        self._staged[0, :width] = ingress.tokens
        self._staged[1, :width] = range(ingress.frontier, ingress.frontier + width)
        if self._columns is not self._staging:
            self._columns[:, :width].copy_(self._staging[:, :width])
        return self._model.forward(batch, self._cache)

    def _batch(self, width: int, source: int, target: int) -> Batch:
        return Batch(
            tokens=self._columns[0, :width],
            positions=self._columns[1, :width],
            rows=1,
            page_table=self._page_table,
            source_slots=self._slots[source],
            target_slots=self._slots[target],
        )

    def _draw(self, hidden: torch.Tensor, draw: Draw) -> int:
        penalized = draw.sampling.presence_penalty != 0 or draw.sampling.frequency_penalty != 0
        [token] = ops.sample(
            self._model.logits(hidden),
            [draw.sampling],
            [draw.position],
            draw.purpose,
            self._counts if penalized else None,
        )
        if token < 0:
            raise ModelError(
                f"the model's scores for position {draw.position} aren't finite; the weights are damaged"
            )
        return token
