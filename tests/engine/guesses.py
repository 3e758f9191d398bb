"""Draft sources for the toy: they know its answers and how far to tell the truth."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tests.runtime.toy import PUBLIC, expected_token


def _always(tokens: int) -> int:
    return 1 << 30


def never(tokens: int) -> int:
    return 0


def sometimes(tokens: int) -> int:
    """0 to 4 true tokens, depending on the length of the sequence."""
    return tokens * 7 % 5


@dataclass
class Guesses:
    """Proposes `truths(len(tokens))` right tokens and then wrong ones, at most `most` in all."""

    recurrent: bool = True
    truths: Callable[[int], int] = _always
    most: Callable[[int], int] = _always

    def propose(self, tokens: Sequence[int], limit: int) -> Sequence[int]:
        ledger = list(tokens)
        for index in range(min(limit, self.most(len(tokens)))):
            wrong = index >= self.truths(len(tokens))
            ledger.append((expected_token(ledger, self.recurrent) + wrong) % PUBLIC)
        return ledger[len(tokens) :]
