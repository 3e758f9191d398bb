"""Texts that share a run of characters with others, found by hashes of windows."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

WINDOW = 50  # bytes of UTF-8, white space collapsed
_BASE = np.uint64(0x9E3779B97F4A7C15)

Hashes = npt.NDArray[np.uint64]


def window_hashes(text: str) -> Hashes:
    """One 64-bit hash per window, in order; none for a text shorter than a window."""
    data = np.frombuffer(" ".join(text.split()).encode(), dtype=np.uint8).astype(np.uint64)
    count = max(len(data) - WINDOW + 1, 0)
    hashes = np.zeros(count, dtype=np.uint64)
    for offset in range(WINDOW if count else 0):  # a polynomial modulo 2^64, by Horner's rule
        hashes *= _BASE
        hashes += data[offset : offset + count]
    return hashes


class Windows:
    """The windows of some texts, to look others up in."""

    def __init__(self, texts: Iterable[str]) -> None:
        every = [window_hashes(text) for text in texts]
        self._sorted = np.unique(np.concatenate(every)) if every else np.zeros(0, dtype=np.uint64)

    def shared(self, text: str) -> Hashes:
        """The hashes of the text's windows that occur in the texts, in order, with repeats."""
        hashes = window_hashes(text)
        if not len(self._sorted) or not len(hashes):
            return hashes[:0]
        at = np.searchsorted(self._sorted, hashes)
        at[at == len(self._sorted)] = 0
        return hashes[self._sorted[at] == hashes]
