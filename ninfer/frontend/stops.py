"""Finding strings in a text that arrives in pieces, in time linear in the text."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Match:
    """`[begin, end)` of pattern number `pattern`, in characters from the start of the window."""

    begin: int
    end: int
    pattern: int


class Scanner:
    """Searches one stream for the first of several patterns.

    The *window* is what could not be ruled out before (`pending` characters) followed by the new piece.
    Among the patterns that complete within one piece the earliest begin wins, then the declaration order.
    After a match the scanner is spent until `restart`. State: per pattern the length of its longest prefix
    that ends the stream (Knuth, Morris, Pratt).
    """

    def __init__(self, patterns: Sequence[str]) -> None:
        """`patterns` are non-empty."""
        self._patterns = [(pattern, _borders(pattern)) for pattern in patterns]
        self._states = [0] * len(patterns)
        self.pending = 0

    def restart(self) -> None:
        """Begin a new stream: nothing that came before counts."""
        self._states = [0] * len(self._patterns)
        self.pending = 0

    def feed(self, piece: str) -> Match | None:
        """Take in `piece`. Without a match, `pending` characters at the window's end must be held back."""
        best: Match | None = None
        longest = 0
        for number, (pattern, borders) in enumerate(self._patterns):
            state, end = _advance(pattern, borders, self._states[number], piece)
            self._states[number] = state
            longest = max(longest, state)
            if state == len(pattern):
                stop = self.pending + end
                if best is None or stop - state < best.begin:
                    best = Match(stop - state, stop, number)
        if best is None:
            self.pending = longest
        return best


def _advance(pattern: str, borders: list[int], state: int, piece: str) -> tuple[int, int]:
    """The state after `piece`, or `len(pattern)` and the end of the first occurrence within `piece`."""
    index, size = 0, len(piece)
    while index < size:
        if state == 0:
            index = piece.find(pattern[0], index)
            if index < 0:
                return 0, size
        character = piece[index]
        while state and pattern[state] != character:
            state = borders[state - 1]
        if pattern[state] == character:
            state += 1
        index += 1
        if state == len(pattern):
            break
    return state, index


def _borders(pattern: str) -> list[int]:
    """For each prefix the length of its longest proper prefix that is also its suffix."""
    borders = [0] * len(pattern)
    length = 0
    for index in range(1, len(pattern)):
        while length and pattern[length] != pattern[index]:
            length = borders[length - 1]
        if pattern[length] == pattern[index]:
            length += 1
        borders[index] = length
    return borders
