"""Which tokens may come next: masks for sampling, from a grammar.

Grammars are over text, not over tokens: llguidance walks all public tokens by their bytes. Visible added
tokens (`<tool_call>`, say) are text like any other; hidden ones are never allowed but for the stop tokens,
where the grammar is satisfied. Where it leaves no choice, only the tokenizer's own spelling is allowed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from threading import Lock
from typing import Any, Protocol

import numpy as np

from ninfer.errors import GrammarError
from ninfer.frontend.schemas import first_line
from ninfer.frontend.tokenizer import Tokenizer

# Tokens that a string, or a text in which markers are looked for, mostly allows all at once: none of them has
# to be looked at then. The lengths are for strings with a limit.
_PLAIN = r'[^<"\\\x00-\x1F\x7F]'
_SLICES = [f"{_PLAIN}{{1,10}}", f"{_PLAIN}{{1,30}}", f"{_PLAIN}+", "[^<]+"]


class Constraint(Protocol):
    """What the tokens of an answer must follow, one after another; without those of a thinking block, which
    are free, and the stop token at the end. Single-threaded."""

    def fill(self, drafts: Sequence[int], masks: np.ndarray) -> int:
        """Row 0 of `masks` (int32 `[at least 1 + len(drafts), words]`, bit i of word w is token 32 w + i) is
        what may come next, row k what may come after k drafts. Returns the number of rows filled: fewer than
        all if a draft is not allowed or ends the answer. Changes nothing."""
        ...

    def accept(self, token_id: int) -> bool:
        """Take in the next token, no stop token. False if it is not allowed; then it changes nothing."""
        ...


class Script:
    """A constraint that allows only the given tokens in their order, then a stop token; for tests and tools,
    which need a certain answer from a model that wouldn't give it."""

    def __init__(self, tokens: Iterable[int], stop_token_ids: Iterable[int]) -> None:
        self._left = list(tokens)[::-1]
        self._stops = tuple(stop_token_ids)

    def fill(self, drafts: Sequence[int], masks: np.ndarray) -> int:
        for row in range(len(drafts) + 1):
            masks[row] = 0
            ended = row >= len(self._left)
            _allow(masks[row], self._stops if ended else (self._left[-1 - row],))
            if row < len(drafts) and (ended or drafts[row] != self._left[-1 - row]):
                return row + 1
        return len(drafts) + 1

    def accept(self, token_id: int) -> bool:
        allowed = bool(self._left) and self._left[-1] == token_id
        if allowed:
            self._left.pop()
        return allowed


class GrammarConstraint:
    """A grammar's constraint on one answer; made by `Grammars`."""

    def __init__(self, matcher: Any, words: int, stop_token_ids: Sequence[int], ends: frozenset[int]) -> None:
        """`matcher` is llguidance's, for masks of `words` words. It knows `ends` as the tokens that end an
        answer; `stop_token_ids` do, whether it knows them or not."""
        self._matcher = matcher
        self._words = words
        self._stops = tuple(stop_token_ids)
        self._unwanted = tuple(ends.difference(stop_token_ids))
        self._end = min(ends)
        self._ends = ends.union(stop_token_ids)

    def fill(self, drafts: Sequence[int], masks: np.ndarray) -> int:
        """See `Constraint`. Raises GrammarError if the grammar turns out to be too complex."""
        matcher, taken, rows = self._matcher, 0, 0
        try:
            for draft in (*drafts, None):
                self._fill_row(masks[rows])
                rows += 1
                if draft is None or draft in self._ends or not matcher.try_consume_tokens([draft]):
                    break
                taken += 1
        finally:
            if taken:
                matcher.rollback(taken)
        return rows

    def _fill_row(self, row: np.ndarray) -> None:
        words = self._words
        self._matcher.unsafe_compute_mask_ptr(row.ctypes.data, 4 * words)
        row[words:] = 0
        if row[self._end >> 5] >> (self._end & 31) & 1:
            if not self._matcher.is_accepting():  # the end is all that's left where nothing is allowed
                raise GrammarError(f"The answer can't go on by its grammar: {self._why()}.")
            forbid(row, self._unwanted)
            _allow(row, self._stops)

    def accept(self, token_id: int) -> bool:
        """See `Constraint`."""
        return self._matcher.try_consume_tokens([token_id]) == 1

    def _why(self) -> str:
        why = first_line(self._matcher.get_error())
        return "it allows nothing here" if why in ("", "NoExtension", "NoExtensionBias") else why


class Grammars:
    """Turns grammars into constraints over one tokenizer's tokens. Safe to use from several threads.

    The table of all tokens that llguidance needs is built once, on first use (`prepare` does it ahead).
    """

    def __init__(self, tokenizer: Tokenizer, stop_token_ids: Iterable[int]) -> None:
        self._tokenizer = tokenizer
        self._ends = tuple(stop_token_ids)
        self._words = (tokenizer.public_tokens + 31) // 32
        self._table: Any = None
        self._lock = Lock()

    def prepare(self) -> None:
        """Build the token table, if it isn't yet."""
        with self._lock:
            if self._table is None:
                import llguidance

                wrapper = llguidance.TokenizerWrapper(_Vocabulary(self._tokenizer, self._ends[0]))
                self._table = llguidance.LLTokenizer(wrapper, eos_token=list(self._ends), slices=_SLICES)

    def constraint(self, grammar: str, stop_token_ids: Iterable[int]) -> GrammarConstraint:
        """A new constraint by `grammar` (Lark, as llguidance reads it). Raises GrammarError."""
        from llguidance import LLMatcher

        if not self._ends:
            raise GrammarError("A model without stop tokens can't follow a grammar: it couldn't end.")
        self.prepare()
        matcher = LLMatcher(self._table, grammar, log_level=0)
        if matcher.is_error():
            raise GrammarError(f"The grammar can't be used: {first_line(matcher.get_error())}.")
        constraint = GrammarConstraint(matcher, self._words, sorted(stop_token_ids), frozenset(self._ends))
        constraint.fill((), np.zeros((1, self._words), np.int32))  # a grammar without any answer fails here
        return constraint


def _allow(row: np.ndarray, ids: Iterable[int]) -> None:
    bits = row.view("uint32")
    for i in ids:
        if i >> 5 < len(bits):
            bits[i >> 5] |= 1 << (i & 31)


def forbid(row: np.ndarray, ids: Iterable[int]) -> None:
    """Take tokens out of a mask row, int32 `[words]`."""
    bits = row.view("uint32")
    for i in ids:
        if i >> 5 < len(bits):
            bits[i >> 5] &= ~(1 << (i & 31)) & 0xFFFFFFFF


class _Vocabulary:
    """All tokens of a tokenizer as `llguidance.TokenizerWrapper` asks for them."""

    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, eos_token_id: int) -> None:
        self.eos_token_id = eos_token_id
        self.tokens = [tokenizer.token_bytes(i) for i in range(tokenizer.public_tokens)]
        self.special_token_ids = [i for i in range(tokenizer.public_tokens) if tokenizer.is_special(i)]
        self._tokenizer = tokenizer

    def __call__(self, data: bytes) -> list[int]:
        """The tokens that spell `data`, UTF-8."""
        return self._tokenizer.encode_exactly(data.decode("utf-8"))
