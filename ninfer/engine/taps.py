"""Where a prefill leaves snapshots: positions of a prompt at which a later one may branch off."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from ninfer.engine.snapshots import Kind

_NEAR = 64
"""A tap of free choice this close behind another one saves nothing worth a slot."""


@dataclass(frozen=True)
class Tap:
    """A chunk of the prefill ends after `position` tokens, and the state there becomes a snapshot."""

    position: int
    kind: Kind


def plan_taps(
    *,
    prompt_tokens: int,
    base: int,
    boundaries: Sequence[int],
    preamble: int | None,
    opener: int | None,
    turn_anchors: int,
    chunk: int,
    limit: int,
) -> tuple[Tap, ...]:
    """At most `limit` taps at ascending positions p, base < p <= prompt_tokens - 1.

    base: tokens that need no computation. boundaries: ascending offsets where messages begin (the opener may
    be the last). preamble: end of the leading system and tools block. opener: start of the generation prompt.
    chunk: tokens of a prefill chunk; chunks are counted from the base and anew from every tap.

    Exact: the preamble, the starts of the last `turn_anchors` messages, the opener. Free: a ladder of
    doubling distances from the end, on message starts or else on chunk ends (which cost no extra chunk), and
    without an opener the last chunk end. Over `limit`, the ladder goes first (its far end before its near
    one), then the earliest anchors, then the preamble.
    """
    exact = _exact(boundaries, preamble, opener, turn_anchors)
    exact = {position: kind for position, kind in exact.items() if base < position < prompt_tokens}
    while len(exact) > limit:
        del exact[_least(exact)]
    rungs = _rungs(prompt_tokens, base, chunk)
    for count in range(len(rungs), -1, -1):
        taps = dict(exact)
        # Ascending: where chunks end depends on the taps before.
        for goal in reversed(rungs[:count]):
            position = _snap(goal, base, boundaries, chunk, taps)
            if _gap(position, base, taps) >= max(1024, chunk):
                taps[position] = Kind.TAP
        if opener is None:
            start = max(taps, default=base)
            position = start + (prompt_tokens - 1 - start) // chunk * chunk
            if position - start > _NEAR:
                taps[position] = Kind.TAP
        if len(taps) <= limit:
            return tuple(Tap(position, taps[position]) for position in sorted(taps))
    return tuple(Tap(position, exact[position]) for position in sorted(exact))


def next_cut(frontier: int, prompt_tokens: int, chunk: int, taps: Sequence[Tap]) -> int:
    """End of the prefill chunk that begins after `frontier` tokens."""
    ahead = (tap.position for tap in taps if tap.position > frontier)
    return min(frontier + chunk, prompt_tokens, next(ahead, prompt_tokens))


def _exact(
    boundaries: Sequence[int], preamble: int | None, opener: int | None, turn_anchors: int
) -> dict[int, Kind]:
    starts = [start for start in boundaries if opener is None or start < opener]
    exact = dict.fromkeys(starts[max(0, len(starts) - turn_anchors) :], Kind.ANCHOR)
    if opener is not None:
        exact[opener] = Kind.OPENER
    if preamble is not None:
        exact[preamble] = Kind.PREAMBLE
    return exact


def _least(exact: dict[int, Kind]) -> int:
    """The exact tap that is given up first."""
    order = (Kind.ANCHOR, Kind.PREAMBLE, Kind.OPENER)
    return min(exact, key=lambda position: (order.index(exact[position]), position))


def _rungs(prompt_tokens: int, base: int, chunk: int) -> list[int]:
    """Positions of the ladder before snapping, the one nearest to the end first."""
    rungs, distance = [], max(4096, 2 * chunk)
    while prompt_tokens - 1 - distance > base:
        rungs.append(prompt_tokens - 1 - distance)
        distance *= 2
    return rungs


def _snap(goal: int, base: int, boundaries: Sequence[int], chunk: int, taps: dict[int, Kind]) -> int:
    """The message start at most a chunk before `goal`, else the chunk end before it."""
    index = bisect_right(boundaries, goal) - 1
    if index >= 0 and goal - boundaries[index] <= chunk:
        return boundaries[index]
    start = max((position for position in taps if position <= goal), default=base)
    return start + (goal - start) // chunk * chunk


def _gap(position: int, base: int, taps: dict[int, Kind]) -> int:
    """Distance to the nearest tap or the base; negative before the base."""
    return min([position - base, *(abs(position - other) for other in taps)])
