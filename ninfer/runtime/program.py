"""One sequence on one device: prompt in, tokens out, state kept for the next prompt."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ninfer.errors import CapacityError, OptionError
from ninfer.models import Model
from ninfer.ops import Purpose, SamplingParams
from ninfer.runtime.executor import Executor
from ninfer.runtime.memory import available_bytes
from ninfer.runtime.plan import DEFAULT_CHUNK, Plan, make_plan
from ninfer.runtime.records import Admission, Decoded, Draw, Ingress, Prefilled, penalized
from ninfer.runtime.reuse import output_limit, reusable_tokens

_SCORE_TILE = 256


class Program:
    """Runs one sequence at a time. Owns its memory from start to end and the record of what is in it.

    A request: `start`, `prefill` until it returns a token, then `commit` and `decode` in turn. Tokens that
    `prefill` or `decode` return are provisional: `commit(1)` takes them into the sequence, `commit(0)` drops
    them. Each unit of work is atomic: if it is interrupted, the sequence stands where it stood before.

    `plan` says what memory was taken.
    """

    def __init__(self, model: Model, max_context: int, prefill_chunk: int = DEFAULT_CHUNK) -> None:
        self.plan: Plan = make_plan(
            model.kv_layout(),
            model.state_layout(),
            max_context=max_context,
            prefill_chunk=prefill_chunk,
            context_limit=model.max_position_embeddings,
            public_tokens=model.public_tokens,
            hidden_size=model.hidden_size,
            available_bytes=available_bytes(model.device),
        )
        self._executor = Executor(model, self.plan)
        self._public_tokens = model.public_tokens
        self._recurrent = model.state_layout().layers > 0
        self._ledger: list[int] = []
        """Committed tokens; those from the frontier on wait to be fed: prompt, or the latest output."""
        self._frontier = 0
        self._produced: tuple[int, ...] = ()
        self._slot = 0
        self._prompt_tokens = 0
        self._sampling = SamplingParams()

    @property
    def frontier(self) -> int:
        """Number of tokens whose KV and state are in memory."""
        return self._frontier

    def reset(self) -> None:
        """Forget the sequence: the next prompt starts anew."""
        self._ledger, self._frontier, self._produced = [], 0, ()
        self._executor.clear_state(self._slot)

    def start(
        self, prompt: Sequence[int], sampling: SamplingParams, max_output: int | None = None
    ) -> Admission:
        """Take in the prompt of the next request, keeping what its beginning shares with the last sequence.

        Raises `CapacityError` for a prompt over the context, `OptionError` for an empty one, for an id
        outside the public domain or for `max_output` below 1.
        """
        self._check_tokens(prompt)
        if not prompt:
            raise OptionError("the prompt is empty; at least one token is needed")
        if max_output is not None and max_output < 1:
            raise OptionError(f"the output limit must be at least 1 token, not {max_output}")
        if len(prompt) > self.plan.max_context:
            raise CapacityError(
                f"the prompt has {len(prompt)} tokens but the context holds {self.plan.max_context}; "
                f"shorten it or raise --max-context"
            )
        reused = reusable_tokens(self._ledger[: self._frontier], prompt, recurrent=self._recurrent)
        if reused == 0:
            self.reset()
        self._ledger, self._frontier, self._produced = list(prompt), reused, ()
        self._prompt_tokens = len(prompt)
        self._sampling = sampling
        if penalized(sampling):
            self._executor.clear_counts()
        limit, by_context = output_limit(
            max_output, max_context=self.plan.max_context, prompt_tokens=len(prompt)
        )
        return Admission(len(prompt), reused, limit, by_context)

    def prefill(self) -> Prefilled:
        """Feed the next chunk of the prompt; after the last one, draw the first output token."""
        if self._produced or len(self._ledger) != self._prompt_tokens:
            raise ValueError("the prompt has been fed already")
        self._feed(self.plan.prefill_chunk, Draw(self._sampling, self._prompt_tokens, Purpose.PREFILL))
        return Prefilled(self._frontier, self._prompt_tokens, self._produced)

    def decode(self) -> Decoded:
        """Feed the committed tokens that wait (one, or more after `force`) and draw the next.

        Raises `CapacityError` if the context has no room for them.
        """
        if self._produced or self._frontier >= len(self._ledger):
            raise ValueError("decode needs a committed token that has not been fed")
        if len(self._ledger) > self.plan.max_context:
            raise CapacityError(f"the context of {self.plan.max_context} tokens is full; raise --max-context")
        draw = Draw(self._sampling, len(self._ledger) - 1, Purpose.DECODE)
        while not self._produced:
            self._feed(self.plan.prefill_chunk, draw)
        return Decoded(self._produced)

    def commit(self, accepted: int) -> None:
        """Take the first `accepted` provisional tokens into the sequence and drop the others."""
        if not 0 <= accepted <= len(self._produced):
            raise ValueError(f"{accepted} of {len(self._produced)} provisional tokens can't be committed")
        tokens, self._produced = self._produced[:accepted], ()
        self._append(tokens)

    def force(self, tokens: Sequence[int]) -> None:
        """Commit tokens that were not drawn (they count as output); the next `decode` feeds them."""
        if self._produced:
            raise ValueError("provisional tokens must be committed or dropped before others are forced")
        self._check_tokens(tokens)
        self._append(tuple(tokens))

    def score(self, tokens: Sequence[int]) -> np.ndarray:
        """FP32 log p(tokens[i] | tokens before) for i = 1 … n-1, from an empty state; `[n - 1]`.

        Replaces the current sequence. Raises `CapacityError` for more tokens than the context holds and
        `OptionError` for fewer than two or an id outside the public domain.
        """
        self._check_tokens(tokens)
        if len(tokens) < 2:
            raise OptionError(f"scoring needs at least 2 tokens, not {len(tokens)}")
        if len(tokens) > self.plan.max_context:
            raise CapacityError(
                f"{len(tokens)} tokens can't be scored in a context of {self.plan.max_context}; "
                f"raise --max-context"
            )
        self.reset()
        self._ledger = list(tokens)
        pieces = []
        for begin in range(0, len(tokens), self.plan.prefill_chunk):
            ingress = self._ingress(self.plan.prefill_chunk, None)
            targets = tokens[begin + 1 : begin + 1 + len(ingress.tokens)]
            pieces.append(self._executor.score(ingress, targets, _SCORE_TILE))
            self._advance(ingress)
        self.reset()
        return np.concatenate(pieces)

    def _feed(self, limit: int, draw: Draw) -> None:
        """Feed up to `limit` waiting tokens; draw only if none is left waiting."""
        ingress = self._ingress(limit, draw)
        egress = self._executor.run(ingress)
        self._advance(ingress)
        self._produced = egress.tokens

    def _ingress(self, limit: int, draw: Draw | None) -> Ingress:
        end = min(self._frontier + limit, len(self._ledger))
        return Ingress(
            tokens=tuple(self._ledger[self._frontier : end]),
            frontier=self._frontier,
            source_slot=self._slot,
            target_slot=1 - self._slot,
            draw=draw if end == len(self._ledger) else None,
        )

    def _advance(self, ingress: Ingress) -> None:
        if ingress.tokens:
            self._frontier, self._slot = ingress.frontier + len(ingress.tokens), ingress.target_slot

    def _append(self, tokens: tuple[int, ...]) -> None:
        self._ledger += tokens
        if penalized(self._sampling):
            self._executor.count(tokens)

    def _check_tokens(self, tokens: Sequence[int]) -> None:
        for index, token in enumerate(tokens):
            if not 0 <= token < self._public_tokens:
                raise OptionError(f"token id {token} at position {index} is not below {self._public_tokens}")
