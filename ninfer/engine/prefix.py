"""The prefix cache: KV pages and recurrent states that later prompts can begin with.

A radix tree of 64-token blocks, each with its page, plus sparse snapshots of the recurrent state at exact
frontiers. Identity is exact equality of all tokens from the beginning; nobody owns an entry, and whoever
sends the same tokens gets them. This is bookkeeping only: numbers of pages and slots, no tensors.

Why a promised page can always be had: a node that no lane uses has no used node below it. Lanes lock whole
paths, and while a lane still writes, it inserts only beneath nodes whose pages it has locked itself. So the
cached pages, taken from the leaves up, can all be freed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING

from ninfer.engine.blocks import BLOCK, Node, continues, cut, pack
from ninfer.engine.eviction import Shelf
from ninfer.engine.snapshots import Kind, Snapshot, choose_victim, replaces, supersede

if TYPE_CHECKING:
    from ninfer.runtime.pages import PagePool
    from ninfer.runtime.slots import SlotPool

__all__ = ["Kind", "Match", "Node", "PrefixCache", "Snapshot"]


@dataclass(frozen=True, eq=False)
class Match:
    """A beginning of a prompt that is in the cache. Valid until the cache or a pool next changes."""

    frontier: int
    """Tokens that need no computation: 0 < frontier <= len(tokens) - 1."""
    nodes: tuple[Node, ...]
    """Full blocks; the lane uses their pages as they are."""
    tail: Node | None
    """Whose page has the tokens after them in its first columns, 64 at most; None if there are none."""
    snapshot: Snapshot | None
    """Recurrent models: the state at the frontier."""


class PrefixCache:
    """Owns the tree, its references to pages, and the slots of its snapshots.

    `recurrent`: a model with a recurrent state resumes only where a snapshot is (there are at most
    `snapshots`); any other model resumes after any token. `ahead`: so many tokens behind a block its page
    depends on, too (1 with a predictor); who goes on with others copies the page.
    """

    def __init__(
        self, pages: PagePool, slots: SlotPool, *, recurrent: bool, snapshots: int, ahead: int = 0
    ) -> None:
        self._ahead = ahead
        self._pages = pages
        self._slots = slots
        self._recurrent = recurrent
        self._capacity = snapshots
        self._root = Node(None, b"", -1, ahead=ahead)
        self._shelf = Shelf(pages, recurrent=recurrent)
        self._snapshots: dict[int, Snapshot] = {}
        """By slot."""
        self._blocks = 0
        self._lineages = count(1)
        self._clock = count()
        self._floor = 0
        self.evicted_blocks = 0
        """Blocks dropped because a lane needed their page."""
        self.evicted_snapshots = 0
        """Snapshots dropped because their slot or page was needed."""
        self.captured = 0
        """Snapshots taken."""
        self.refused = 0
        """Snapshots that weren't taken: all slots were in use."""
        pages.reclaim = self._reclaim
        pages.released = self._shelf.touch

    @property
    def blocks(self) -> int:
        """Blocks in the tree, partial ones included."""
        return self._blocks

    @property
    def snapshots_in_use(self) -> int:
        """Snapshots, each with a slot of its own."""
        return len(self._snapshots)

    def new_lineage(self) -> int:
        """A number for a conversation that begins."""
        return next(self._lineages)

    def now(self) -> int:
        """The time, in events of the cache."""
        return next(self._clock)

    # Lookup.

    def matches(self, tokens: Sequence[int]) -> list[Match]:
        """The places at which a request with this prompt can resume, deepest first."""
        last = max(0, len(tokens) - 1)
        known = pack(tokens[: last + self._ahead])
        packed = cut(known, 0, last)
        path: list[Node] = []
        found: list[Match] = []
        node = self._root
        while True:
            begin = BLOCK * len(path)
            if self._recurrent:
                found += (
                    Match(leaf.end, tuple(path), leaf, leaf.snapshot)
                    for leaf in node.leaves.values()
                    if continues(packed, begin, leaf.key)
                )
            child = node.child(cut(known, begin, begin + BLOCK + self._ahead))
            if child is None or child.partial:
                break
            node = child
            path.append(node)
            if node.snapshot is not None:
                found.append(Match(node.end, tuple(path), None, node.snapshot))
        if not self._recurrent:
            tail, length = node.closest(cut(packed, begin, begin + BLOCK))
            if path:
                found.append(Match(begin, tuple(path), None, None))
            if tail is not None:
                found.append(Match(begin + length, tuple(path), tail, None))
        return sorted(found, key=lambda match: match.frontier, reverse=True)

    def cost(self, match: Match) -> int:
        """Available pages that `lock(match)` takes: those that no lane uses yet."""
        return sum(self._pages.users(node.page) == 0 for node in _used(match))

    def lock(self, match: Match) -> None:
        """A lane resumes here: its pages and its snapshot stay. Needs `cost(match)` available pages."""
        nodes, snapshot = _used(match), match.snapshot
        if not all(node.attached for node in nodes) or (snapshot and snapshot.node.snapshot is not snapshot):
            raise ValueError("the match is outdated; the cache has changed since")
        if self.cost(match) > self._pages.available:
            raise ValueError(
                f"{self.cost(match)} pages can't be locked, {self._pages.available} are available"
            )
        for node in nodes:
            self._pages.lock(node.page)
        if snapshot is not None:
            snapshot.pins += 1
            self._want(snapshot)
            if snapshot.kind is Kind.PREAMBLE:
                snapshot.lineage = self.new_lineage()

    def unlock_tail(self, match: Match) -> None:
        """The lane has copied the tail and advanced to a slot of its own: both may go.

        The pages of the full blocks are now the lane's like any other; it unlocks them itself.
        """
        if match.snapshot is not None:
            if match.snapshot.pins == 0:
                raise ValueError("the snapshot of the match isn't pinned")
            match.snapshot.pins -= 1
        if match.tail is not None:
            self._pages.unlock(match.tail.page)

    def release(self, match: Match) -> None:
        """Undo `lock`: the request didn't begin."""
        self.unlock_tail(match)
        if match.snapshot is not None:
            match.snapshot.hits -= 1
        for node in reversed(match.nodes):
            self._pages.unlock(node.page)

    # Learning.

    def publish(
        self,
        tokens: Sequence[int],
        pages: list[int],
        frontier: int,
        *,
        slot: int | None,
        kind: Kind,
        lineage: int,
        active: bool,
        since: int | None = None,
    ) -> bool:
        """Take in the first `frontier` tokens, and the state in `slot`. True if the slot is the cache's now.

        pages[b] has the KV of tokens 64b … 64b+63 as far as they are committed; the caller still has them
        locked. active: the lane goes on using them (it may write only columns past the frontier). Where the
        cache has a full block in another page, the lane then changes over to that page, in `pages`, and gives
        its own up: so no block in use stands beneath an unused one, and nothing is kept twice.
        `since`: when the request began (`now`); a snapshot that was wanted later is given up last.
        An active lane reads the slot that it gave away once more, in its next unit: the snapshot is pinned
        until it calls `unpin(slot)`.
        """
        packed = pack(tokens[:frontier])
        full = max(frontier - self._ahead, 0) // BLOCK
        node = self._root
        for block in range(full):
            key = cut(packed, BLOCK * block, BLOCK * (block + 1) + self._ahead)
            child = node.child(key)
            if child is None:
                child = self._insert(node, key, pages[block])
            elif active and child.page != pages[block]:
                self._pages.unlock(pages[block])
                self._pages.lock(child.page)
                pages[block] = child.page
            elif self._pages.users(child.page) == 0:
                self._shelf.touch(child.page)
            node = child
        tail = cut(packed, BLOCK * full, frontier)
        if not self._recurrent:
            if tail and not node.covered(tail):
                self._insert(node, tail, pages[full])
            return False
        if slot is None or frontier == 0:
            return False
        place = node.child(tail) if tail else node
        if place is not None and place.snapshot is not None:
            self._refresh(place.snapshot, kind, lineage)
            return False
        if not self._make_room(kind, lineage, since):
            self.refused += 1
            return False
        if place is None:
            place = self._insert(node, tail, pages[full])
        self._attach(place, slot, kind, lineage).pins = int(active)
        self.captured += 1
        return True

    def unpin(self, slot: int) -> None:
        """The active lane that gave this slot away has advanced to another one, or ends."""
        snapshot = self._snapshots.get(slot)
        if snapshot is None or snapshot.pins == 0:
            raise ValueError(f"slot {slot} has no pinned snapshot")
        snapshot.pins -= 1

    def clear(self) -> None:
        """Forget all that no lane uses."""
        for snapshot in list(self._snapshots.values()):
            if snapshot.pins == 0:
                self._forget(snapshot)
        while nodes := self._shelf.next():
            for node in nodes:
                self._remove(node)

    def check(self) -> None:
        """Raise AssertionError if the books don't balance or an unused block has a used one below."""
        nodes = list(self._root.descendants())
        assert len(nodes) == self._blocks
        for node in nodes:
            assert node.attached
            assert node.parent is not None
            assert node.parent.child(node.key) is node
            assert node.sorted == sorted([*node.children, *node.leaves])
            assert not (node.partial and not node.childless)
            assert 0 < len(node.key) <= node.full
            assert node.partial or len(node.tokens) == BLOCK
            if self._pages.users(node.page):
                assert node.parent is self._root or self._pages.users(node.parent.page), "used below unused"
            if self._recurrent:
                assert not node.partial or node.snapshot is not None, "a partial block without its state"
            else:
                assert node.snapshot is None
                assert node.parent.redundant(node.key) is None, "a block repeats the beginning of another"
        assert sum(node.snapshot is not None for node in nodes) == len(self._snapshots) <= self._capacity
        for slot, snapshot in self._snapshots.items():
            assert snapshot.slot == slot
            assert snapshot.node.attached
            assert snapshot.node.snapshot is snapshot
            assert snapshot.frontier == snapshot.node.end
            assert self._slots.taken(snapshot.slot)
            assert not snapshot.pins or self._pages.users(snapshot.node.page)
        self._shelf.check()

    def _attach(self, node: Node, slot: int, kind: Kind, lineage: int) -> Snapshot:
        snapshot = Snapshot(node.end, slot, kind, node, lineage, floor=self._floor, used=next(self._clock))
        if kind is Kind.PREAMBLE:
            # Many conversations resume from it, so it belongs to none; each of them gets its own number.
            snapshot.lineage = self.new_lineage()
        node.snapshot = snapshot
        snapshot.revalue()
        self._snapshots[slot] = snapshot
        self._shelf.offer(node.page)
        self._supersede(snapshot, kind)
        return snapshot

    def _refresh(self, snapshot: Snapshot, kind: Kind, lineage: int) -> None:
        """Another lane has come to the same state: it is wanted as if that lane had resumed from it."""
        snapshot.kind = min(kind, snapshot.kind, key=lambda kind: kind.rank)
        snapshot.lineage = self.new_lineage() if snapshot.kind is Kind.PREAMBLE else lineage
        self._want(snapshot)
        self._shelf.touch(snapshot.node.page)
        self._supersede(snapshot, kind)

    def _want(self, snapshot: Snapshot) -> None:
        snapshot.hits += 1
        snapshot.superseded = False
        snapshot.floor, snapshot.used = self._floor, next(self._clock)
        snapshot.revalue()

    def _supersede(self, newest: Snapshot, kind: Kind) -> None:
        for old in supersede(self._snapshots.values(), newest, kind):
            self._shelf.offer(old.node.page)

    def _make_room(self, kind: Kind, lineage: int, since: int | None) -> bool:
        """See to it that one more snapshot is allowed; False if all are pinned, or none is ever allowed."""
        if len(self._snapshots) < self._capacity:
            return True
        victim = choose_victim(self._snapshots.values(), kind, lineage, since)
        if victim is None:
            return False
        if not (victim.superseded or replaces(kind, lineage, victim)):
            # Not the victim's: one that goes though others are worth less must not make newcomers dear.
            self._floor = max(self._floor, min(s.value for s in self._snapshots.values() if s.pins == 0))
        self._forget(victim)
        self.evicted_snapshots += 1
        return True

    def _reclaim(self) -> bool:
        """Free one cached page, with all that it holds."""
        nodes = self._shelf.next()
        for node in nodes:
            self.evicted_snapshots += node.snapshot is not None
            self.evicted_blocks += 1
            if node.snapshot is not None:
                self._forget(node.snapshot)
            if node.attached:
                self._remove(node)
        return bool(nodes)

    def _forget(self, snapshot: Snapshot) -> None:
        """Drop a snapshot; a partial block has no use without it."""
        node = snapshot.node
        node.snapshot = None
        del self._snapshots[snapshot.slot]
        self._slots.give(snapshot.slot)
        if node.partial:
            self._remove(node)
        else:
            self._shelf.offer(node.page)

    def _insert(self, parent: Node, key: bytes, page: int) -> Node:
        if not self._recurrent and (repeated := parent.redundant(key)) is not None:
            # Lanes that use its page as a tail keep the page, not the node.
            self._remove(repeated)
        node = parent.add(key, page)
        self._shelf.add(node)
        self._blocks += 1
        return node

    def _remove(self, node: Node) -> None:
        node.detach()
        self._shelf.remove(node)
        self._blocks -= 1
        parent = node.parent
        if parent is not None and parent is not self._root and parent.childless:
            self._shelf.offer(parent.page)


def _used(match: Match) -> tuple[Node, ...]:
    """The nodes whose pages a lane locks."""
    return match.nodes if match.tail is None else (*match.nodes, match.tail)
