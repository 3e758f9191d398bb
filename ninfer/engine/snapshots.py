"""Recurrent states kept for later requests, and which of them is given up when slots are short."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ninfer.engine.blocks import Node


class Kind(StrEnum):
    """Why a snapshot was taken; the more valuable kind first."""

    PREAMBLE = "preamble"
    """End of the leading system and tools block: shared by conversations."""
    ANCHOR = "anchor"
    """Start of one of the last messages: an edited message branches here."""
    OPENER = "opener"
    """Start of the generation prompt: a repeated or rewritten answer branches here."""
    ENDPOINT = "endpoint"
    """End of a request: the next turn continues here."""
    TAP = "tap"
    """Anywhere else."""

    @property
    def rank(self) -> int:
        """0 for the most valuable kind."""
        return list(Kind).index(self)


@dataclass(eq=False)
class Snapshot:
    """The recurrent state after exactly `frontier` tokens: those on the path to `node`, which ends there."""

    frontier: int
    slot: int
    kind: Kind
    node: Node
    lineage: int
    """The conversation it belongs to: its number goes to those that resume from here."""
    hits: int = 0
    superseded: bool = False
    """The same conversation has a newer one of this kind."""
    pins: int = 0
    """Lanes whose first unit of work has yet to read the slot."""
    value: int = 0
    """GreedyDual value: `floor` + (1 + hits) · tokens since the nearest snapshot before it."""
    floor: int = 0
    """The cache's floor when this snapshot was last wanted."""
    used: int = 0
    """Time of the last want, in events of the cache."""

    def revalue(self) -> None:
        """Bring `value` up to date with the snapshots that are there now."""
        before = self.node.snapshot_before()
        self.value = self.floor + (1 + self.hits) * (self.frontier - (before.frontier if before else 0))


def replaces(kind: Kind, lineage: int, old: Snapshot) -> bool:
    """Does a snapshot that is published as `kind` supersede an old one?

    What several continuations resumed from is a branching point: it stays. So do preambles, since each has a
    lineage of its own.
    """
    same = old.kind is kind is not Kind.PREAMBLE and old.lineage == lineage
    return same and old.hits <= 1


def choose_victim(
    snapshots: Iterable[Snapshot], kind: Kind, lineage: int, since: int | None = None
) -> Snapshot | None:
    """Whose slot a newcomer gets: the longest unused superseded one, else the one of least value.

    Those wanted or taken from the time `since` on, when the newcomer's request began, go after all others:
    beside old snapshots that have often saved much, a request's own are worth little each, and would drive
    out one another, so that nothing of a new conversation stayed.

    What the newcomer itself replaces counts as superseded: otherwise a part of its conversation that seems
    worth little beside the old snapshot would go first, and the old one, which alone saved much, after it.
    Never a pinned one; None if all are pinned.
    """
    loose = [snapshot for snapshot in snapshots if snapshot.pins == 0]
    superseded = [snapshot for snapshot in loose if snapshot.superseded or replaces(kind, lineage, snapshot)]
    if superseded:
        return min(superseded, key=lambda snapshot: snapshot.used)
    for snapshot in loose:
        snapshot.revalue()
    older = [snapshot for snapshot in loose if since is not None and snapshot.used < since]
    return min(older or loose, key=lambda snapshot: (snapshot.value, snapshot.used), default=None)


def supersede(snapshots: Iterable[Snapshot], newest: Snapshot, kind: Kind) -> list[Snapshot]:
    """Mark what `newest`, published as `kind`, replaces in its conversation; returns those newly marked."""
    marked = [
        other
        for other in snapshots
        if other is not newest and replaces(kind, newest.lineage, other) and not other.superseded
    ]
    for other in marked:
        other.superseded = True
    return marked
