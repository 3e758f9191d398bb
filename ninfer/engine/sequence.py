"""The writable state of one active request: tokens, frontier, pages, slots."""

from __future__ import annotations

from collections.abc import Sequence as Tokens
from dataclasses import dataclass

from ninfer.engine.prefix import Kind, Match, PrefixCache
from ninfer.ops import PAGE
from ninfer.runtime.pages import PagePool
from ninfer.runtime.slots import SlotPool


@dataclass(frozen=True)
class Pools:
    """What lanes take from and give back to. `pages` holds `copies` pages more than lanes may be promised:
    a partly filled page that is being copied needs one for a moment."""

    pages: PagePool
    slots: SlotPool
    cache: PrefixCache
    copies: int
    recurrent: bool


def pages_for(tokens: int) -> int:
    return -(-tokens // PAGE)


def fits(pools: Pools, match: Match | None, entitlement: int, lent: int) -> bool:
    """Can a sequence of `entitlement` pages that begins with `match` be promised its pages?

    `lent`: pages locked at the moment only because they are about to be copied.
    """
    needed = entitlement
    if match is not None:
        needed += pools.cache.cost(match) - len(match.nodes)
        if match.tail is not None and not pools.pages.users(match.tail.page):
            needed -= 1
    return needed <= pools.pages.available - pools.copies + lent


class Sequence:
    """Owns its pages and slots until `close`; everything before `frontier` is committed.

    `ledger` holds the committed tokens; the last one waits to be fed once the prompt is in. A unit of work
    reads the state in `source` (-1: the start) and writes it to `target`.
    """

    def __init__(self, pools: Pools, prompt: Tokens[int], entitlement: int, match: Match | None) -> None:
        """`fits` must have said yes."""
        self._pools = pools
        self._match = match
        self._since = pools.cache.now()
        self.ledger = list(prompt)
        self.frontier = 0
        self.pages: list[int] = []
        self.copy: tuple[int, int] | None = None
        """A page to be copied before the first unit: (from, to)."""
        self.source, self._own = -1, []
        self.lineage = -1
        if match is not None:
            pools.cache.lock(match)
            self.frontier = match.frontier
            self.pages = [node.page for node in match.nodes]
        self._promised = entitlement - len(self.pages)
        pools.pages.reserve(self._promised)
        if match is not None and match.tail is not None:
            self.map_to(self.frontier)
            self.copy = match.tail.page, self.pages[-1]
        if pools.recurrent:
            self._own = [pools.slots.take(), pools.slots.take()]
            if match is not None and match.snapshot is not None:
                self.source, self.lineage = match.snapshot.slot, match.snapshot.lineage
        if self.lineage < 0:
            self.lineage = pools.cache.new_lineage()
        self._pinned: int | None = None

    @property
    def recurrent(self) -> bool:
        """Has it a state, and so slots?"""
        return self._pools.recurrent

    @property
    def lends(self) -> bool:
        """Is a page of the cache locked only to be copied from?"""
        return self.copy is not None

    @property
    def target(self) -> int:
        """The slot that the next unit writes."""
        if not self._own:
            return 0
        return self._own[1] if self._own[0] == self.source else self._own[0]

    def map_to(self, tokens: int) -> None:
        """Have pages for the first `tokens` positions; never takes more than was promised."""
        while len(self.pages) * PAGE < tokens:
            self.pages.append(self._pools.pages.take())
            self._promised -= 1

    def trim(self) -> None:
        """Give pages beyond the frontier back to the promise (drafts that weren't accepted)."""
        while len(self.pages) > pages_for(self.frontier):
            self._pools.pages.give_back(self.pages.pop())
            self._promised += 1

    def advance(self, count: int) -> None:
        """A unit has fed `count` more tokens of the ledger and is committed."""
        self.frontier += count
        if self._own:
            self.source = self.target
        if self._match is not None or self._pinned is not None:
            self._release_sources()

    def capture(self, kind: Kind) -> bool:
        """Leave the state at the frontier to the cache and go on from it."""
        own = self.source in self._own
        taken = self._publish(kind, self.source if own else None, active=True)
        if taken:
            self._own.remove(self.source)
            self._own.append(self._pools.slots.take())
            self._pinned = self.source
        return taken

    def share(self) -> None:
        """Let others use the blocks so far, where that needs no state."""
        if not self._pools.recurrent:
            self._publish(Kind.TAP, None, active=True)

    def close(self, *, keep: bool) -> None:
        """Return everything; if `keep`, the cache first gets the blocks and the state at the frontier."""
        pools = self._pools
        if self.copy is not None:
            # Nothing was fed: the source of the copy is still locked, the copy holds nothing.
            keep = False
        if keep and self.frontier:
            own = self.source in self._own
            if self._publish(Kind.ENDPOINT, self.source if own else None, active=False):
                self._own.remove(self.source)
        self._release_sources()
        for page in reversed(self.pages):
            pools.pages.unlock(page)
        pools.pages.unreserve(self._promised)
        for slot in self._own:
            pools.slots.give(slot)
        self.pages, self._own, self._promised = [], [], 0

    def _publish(self, kind: Kind, slot: int | None, *, active: bool) -> bool:
        return self._pools.cache.publish(
            self.ledger, self.pages, self.frontier, slot=slot, kind=kind, lineage=self.lineage,
            active=active, since=self._since,
        )  # fmt: skip

    def _release_sources(self) -> None:
        """The state read so far and the page copied from are no longer needed."""
        if self._match is not None:
            self._pools.cache.unlock_tail(self._match)
            self._match = self.copy = None
        if self._pinned is not None:
            self._pools.cache.unpin(self._pinned)
            self._pinned = None
