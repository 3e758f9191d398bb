"""What a request that resumes resumes from, in the words of the request log."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING

from ninfer.engine.snapshots import Kind

if TYPE_CHECKING:
    from ninfer.engine.prefix import Match
    from ninfer.engine.request import Marks


class ReusePath(StrEnum):
    """Where a request found its beginning. The cache belongs to all, so `private` says what the place was
    kept for, not who may use it."""

    ROOT = "root"
    """Nowhere: all of the prompt is computed."""
    ENDPOINT = "private_endpoint"
    """The end of an earlier request."""
    TURN_CLOSURE = "private_turn_closure"
    """The beginning of an earlier answer, of which this prompt has another rendering."""
    RESPONSE_REPLAY = "private_response_replay"
    """The beginning of the answer that is asked for again."""
    LONG_ANCHOR = "private_long_anchor"
    """Another place inside an earlier prompt."""
    STABLE_PREFIX = "shared_stable_prefix"
    """The leading system and tools block."""


_PATHS = {
    Kind.PREAMBLE: ReusePath.STABLE_PREFIX,
    Kind.ANCHOR: ReusePath.LONG_ANCHOR,
    Kind.OPENER: ReusePath.TURN_CLOSURE,
    Kind.ENDPOINT: ReusePath.ENDPOINT,
    Kind.TAP: ReusePath.LONG_ANCHOR,
}


def reuse_path(match: Match | None, marks: Marks) -> ReusePath:
    """By the kind of the snapshot. Models without a recurrent state resume after any token and have no kinds:
    for them up to the prompt's preamble it is the stable prefix, behind it an endpoint. What reaches the
    opener of this very prompt is the replay of a response."""
    if match is None:
        return ReusePath.ROOT
    if match.snapshot is None:
        if marks.opener is not None and match.frontier >= marks.opener:
            return ReusePath.RESPONSE_REPLAY
        stable = marks.preamble is not None and match.frontier <= marks.preamble
        return ReusePath.STABLE_PREFIX if stable else ReusePath.ENDPOINT
    if match.snapshot.kind is Kind.OPENER and match.frontier == marks.opener:
        return ReusePath.RESPONSE_REPLAY
    return _PATHS[match.snapshot.kind]
