"""Perplexity in fixed windows: which tokens each window scores, and how scores add up.

Every token of a stream after the first is scored exactly once; every window starts from nothing, so a token
sees at least `context - stride` tokens before it once the stream is that long.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING

from ninfer.errors import ModelError, OptionError

if TYPE_CHECKING:
    from ninfer.api.scorer import Scorer


@dataclass(frozen=True)
class Window:
    """Tokens [begin, end) are fed and those from `begin + first_target` on are scored."""

    begin: int
    end: int
    first_target: int


@dataclass(frozen=True)
class Score:
    """A number of scored tokens and the sum of their -log p (natural logarithm)."""

    scored_tokens: int
    total_nll: float

    @property
    def mean_nll(self) -> float:
        return self.total_nll / self.scored_tokens

    @property
    def perplexity(self) -> float:
        try:
            return math.exp(self.mean_nll)
        except OverflowError:
            raise ModelError(
                f"a mean -log p of {self.mean_nll:.1f} has no finite perplexity; the weights are damaged"
            ) from None


@dataclass(frozen=True)
class WindowScore:
    window: Window
    score: Score
    seconds: float


@dataclass(frozen=True)
class StreamScore:
    """The windows of one stream of `tokens` tokens, in order."""

    tokens: int
    windows: tuple[WindowScore, ...]

    @property
    def score(self) -> Score:
        return total(item.score for item in self.windows)

    @property
    def seconds(self) -> float:
        return math.fsum(item.seconds for item in self.windows)


def window_plan(tokens: int, context: int, stride: int) -> list[Window]:
    """The windows of a stream of `tokens` tokens (2 or more).

    The first scores all that it holds; each next one scores up to `stride` further tokens, fed after as much
    of what precedes them as the context holds.
    """
    if context < 2:
        raise OptionError(f"--context must be at least 2 tokens, not {context}")
    if not 1 <= stride < context:
        raise OptionError(f"--stride must be between 1 and {context - 1} (below --context), not {stride}")
    end = min(tokens, context)
    windows = [Window(0, end, 1)]
    while end < tokens:
        new = min(tokens, end + stride)
        begin = max(0, new - context)
        windows.append(Window(begin, new, end - begin))
        end = new
    return windows


def score_stream(
    scorer: Scorer, tokens: Sequence[int], windows: Iterable[Window], progress: Callable[[int], None]
) -> StreamScore:
    """Score a stream; `progress` gets the number of tokens fed by each chunk of a window."""
    done = []
    for window in windows:
        begin, fed = perf_counter(), 0

        def chunk(now: int) -> None:
            nonlocal fed
            progress(now - fed)
            fed = now

        scores = scorer.score(tokens[window.begin : window.end], window.first_target, progress=chunk)
        score = Score(len(scores), -math.fsum(scores.tolist()))
        done.append(WindowScore(window, score, perf_counter() - begin))
    return StreamScore(len(tokens), tuple(done))


def total(scores: Iterable[Score]) -> Score:
    """The sum of scores, each a part of the whole."""
    parts = list(scores)
    return Score(sum(part.scored_tokens for part in parts), math.fsum(part.total_nll for part in parts))
