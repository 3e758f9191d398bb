"""Causal scoring: the log-probability of every token of a window, which always starts from nothing.

Beside the Program, not part of it: no request, no sampling, no memory of earlier windows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace

import numpy as np
import torch

from ninfer import ops
from ninfer.errors import CapacityError, ModelError, OptionError
from ninfer.formats import KvFormat
from ninfer.models import Batch, KvLayout, Model
from ninfer.ops import PAGE
from ninfer.runtime.memory import allocate, available_bytes

CHUNK = 1024
TILE = 1024
_NORMALIZED_ROWS = 64
_ZERO, _WORK = 0, 1
"""State slots: the first is never written, so that it stays the state before the first token."""


class Scoring:
    """Scores windows of up to `context` tokens on one model; owns the KV pages and state slots of one window.

    `chunk` tokens are fed at a time and `tile` of them go through the output head at once: it is the head's
    FP32 scores that take the memory. Not safe to use from several threads.
    """

    def __init__(
        self,
        model: Model,
        context: int,
        *,
        chunk: int = CHUNK,
        tile: int = TILE,
        kv_format: KvFormat = KvFormat.BF16,
    ) -> None:
        """Take the memory of a window; `OptionError` or `CapacityError` if that can't be done."""
        if context < 2:
            raise OptionError(f"--context must be at least 2 tokens, not {context}")
        if context > model.max_position_embeddings:
            raise CapacityError(
                f"--context {context} is more than the {model.max_position_embeddings} positions that the "
                f"model knows"
            )
        self._model = model
        self._chunk = min(chunk, context)
        self._tile = min(tile, self._chunk)
        self.context = context
        kv, state, pages = _layout(model, kv_format), model.state_layout(), -(-context // PAGE)
        self.bytes = (
            pages * kv.page_bytes
            + 2 * state.slot_bytes
            + 4 * (self._tile + _NORMALIZED_ROWS) * model.public_tokens
            + 2 * self._chunk * model.hidden_size * model.dtype.itemsize
        )
        """What a window takes: pages, slots, scores of a tile and hidden states."""
        free, needed = available_bytes(model.device), self.bytes
        if model.device.type != "cpu":
            needed += model.workspace_bytes(self._chunk, context) + ops.workspace(model.device).fixed_bytes()
        if free is not None and needed > free:
            raise CapacityError(
                f"scoring windows of {context} tokens needs {needed / 2**20:,.0f} MiB, but only "
                f"{free / 2**20:,.0f} MiB are free; lower --context"
            )
        self._cache = allocate(kv, state, pages=pages, slots=2, device=model.device)
        self._page_table = torch.arange(pages, dtype=torch.int32, device=model.device).view(1, -1)
        self._slots = torch.arange(2, dtype=torch.int32, device=model.device)

    def score(
        self, tokens: Sequence[int], first_target: int = 1, progress: Callable[[int], None] | None = None
    ) -> np.ndarray:
        """FP32 log p(tokens[i] | tokens before it) for i in [first_target, n): `[n - first_target]`.

        The state before token 0 is empty. `progress` gets the number of tokens fed after each chunk. Raises
        `CapacityError` for more tokens than the context, `OptionError` for fewer than two, an id outside the
        public domain or a first target outside [1, n), `ModelError` for a score that is not finite.
        """
        self._check(tokens, first_target)
        columns, device = len(tokens) - 1, self._model.device  # nothing follows the last token
        scores = np.empty(len(tokens) - first_target, np.float32)
        there = torch.cuda.device(device) if device.type == "cuda" else nullcontext()
        with there, torch.inference_mode():
            ids = torch.tensor(tokens, dtype=torch.int32, device=device)
            positions = torch.arange(columns, dtype=torch.int32, device=device)
            for begin in range(0, columns, self._chunk):
                end = min(begin + self._chunk, columns)
                hidden = self._model.forward(
                    self._batch(ids[begin:end], positions[begin:end], begin), self._cache
                )
                for first in range(max(begin, first_target - 1), end, self._tile):
                    last = min(first + self._tile, end)
                    found = self._log_probabilities(
                        hidden[first - begin : last - begin], ids[first + 1 : last + 1]
                    )
                    scores[first + 1 - first_target : last + 1 - first_target] = found.cpu().numpy()
                if progress is not None:
                    progress(end)
        self._check_finite(scores, first_target)
        return scores

    def _batch(self, tokens: torch.Tensor, positions: torch.Tensor, begin: int) -> Batch:
        source = _WORK if begin else _ZERO
        return Batch(
            tokens=tokens,
            positions=positions,
            rows=1,
            page_table=self._page_table,
            source_slots=self._slots[source : source + 1],
            target_slots=self._slots[_WORK : _WORK + 1],
            extent=begin + len(tokens),
        )

    def _log_probabilities(self, hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """FP32 `[n]` of the targets. Normalized a few rows at a time: the exponentials need memory too."""
        logits = self._model.logits(hidden)
        chosen = logits.gather(1, targets.to(torch.int64)[:, None])[:, 0]
        return chosen - torch.cat([rows.logsumexp(1) for rows in logits.split(_NORMALIZED_ROWS)])

    def _check(self, tokens: Sequence[int], first_target: int) -> None:
        if len(tokens) < 2:
            raise OptionError(f"scoring needs at least 2 tokens, not {len(tokens)}")
        if len(tokens) > self.context:
            raise CapacityError(
                f"{len(tokens)} tokens can't be scored in a context of {self.context}; raise --context"
            )
        if not 1 <= first_target < len(tokens):
            raise OptionError(
                f"the first token to score must be between 1 and {len(tokens) - 1}, not {first_target}"
            )
        for index, token in enumerate(tokens):
            if not 0 <= token < self._model.public_tokens:
                raise OptionError(
                    f"token id {token} at position {index} is not below {self._model.public_tokens}"
                )

    def _check_finite(self, scores: np.ndarray, first_target: int) -> None:
        bad = np.flatnonzero(~np.isfinite(scores))
        if bad.size:
            raise ModelError(
                f"the log-probability of token {first_target + bad[0]} of a window is {scores[bad[0]]}, "
                f"not a finite number; the weights are damaged"
            )


def _layout(model: Model, kv_format: KvFormat) -> KvLayout:
    """The model's layout in a format."""
    return replace(model.kv_layout(), format=kv_format)
