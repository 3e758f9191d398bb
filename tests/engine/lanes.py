"""A world for the prefix cache: lanes that really write tokens to pages and states to slots.

A column of a page, and a slot, hold a number that stands for the whole sequence of tokens up to there. So a
match is right exactly if every column of its pages and its slot hold the numbers of the prompt's prefixes.
With a predictor (`ahead`) a column also holds the number of the sequence that is one token longer, and who
resumes writes that of the column before once more.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field

from ninfer.engine.prefix import Kind, Match, Node, PrefixCache, Snapshot
from ninfer.runtime.pages import PagePool
from ninfer.runtime.slots import SlotPool


@dataclass(eq=False)
class Lane:
    tokens: list[int]
    """The prompt, and what was generated."""
    limit: int
    """Tokens for which pages were promised."""
    lineage: int
    match: Match | None
    frontier: int = 0
    pages: list[int] = field(default_factory=list)
    slot: int | None = None
    """Slot with the state at the frontier; None for the zero state."""
    borrowed: bool = False
    """The slot belongs to a snapshot."""
    begun: bool = False


class World:
    def __init__(self, *, pages: int, lanes: int, snapshots: int, recurrent: bool, ahead: int = 0) -> None:
        self.pages = PagePool(pages)
        self.slots = SlotPool(2 * lanes + snapshots if recurrent else 0)
        self.cache = PrefixCache(
            self.pages, self.slots, recurrent=recurrent, snapshots=snapshots, ahead=ahead
        )
        self.recurrent, self.ahead = recurrent, ahead
        self.snapshots = snapshots
        self.max_lanes = lanes
        self.lanes: list[Lane] = []
        self.memory: list[list[int]] = [[-1] * 64 for _ in range(pages)]
        self.following: list[list[int]] = [[-1] * 64 for _ in range(pages)]
        self.states: dict[int, int] = {}
        self.published: set[int] = set()
        """Numbers of prefixes at which a request can resume as long as nothing was evicted."""
        self.forgot = False
        """Something was evicted or cleared, or a lane was refused."""
        self._numbers: dict[tuple[int, int], int] = {}
        self._reclaim = self.pages.reclaim
        self.pages.reclaim = self._checked_reclaim

    def numbers(self, tokens: Sequence[int]) -> list[int]:
        """The number of every prefix, the empty one included."""
        result = [0]
        for token in tokens:
            result.append(self._numbers.setdefault((result[-1], token), len(self._numbers) + 1))
        return result

    def verify(self, tokens: Sequence[int]) -> list[Match]:
        """The matches of a prompt, each compared with what is in memory."""
        numbers = self.numbers(tokens)
        matches = self.cache.matches(tokens)
        frontiers = [match.frontier for match in matches]
        assert frontiers == sorted(set(frontiers), reverse=True)
        for match in matches:
            frontier = match.frontier
            assert 0 < frontier <= len(tokens) - 1
            rest = frontier - 64 * len(match.nodes)
            assert 0 <= rest < 64 + self.ahead
            assert (match.tail is None) == (rest == 0)
            used = [*match.nodes, *((match.tail,) if match.tail else ())]
            columns = [column for node in used for column in self.memory[node.page]]
            assert columns[:frontier] == numbers[1 : frontier + 1]
            if self.ahead:
                columns = [column for node in used for column in self.following[node.page]]
                assert columns[: frontier - 1] == numbers[2 : frontier + 1]
            assert (match.snapshot is not None) == self.recurrent
            if match.snapshot is not None:
                assert match.snapshot.frontier == frontier
                assert self.states[match.snapshot.slot] == numbers[frontier]
        if not self.forgot:
            known = [end for end in range(1, len(tokens)) if numbers[end] in self.published]
            if self.recurrent:
                assert frontiers == known[::-1]
            else:
                assert max(frontiers, default=0) == max(known, default=0)
        return matches

    def admit(self, prompt: list[int], extra: int, choice: int) -> Lane | None:
        """A lane for a prompt that may grow by `extra` tokens; resumes at the first match from `choice` on
        that fits, None if even a cold start doesn't."""
        limit = len(prompt) + extra
        candidates: list[Match | None] = [*self.verify(prompt)[choice:], None]
        for match in candidates:
            own = -(-limit // 64) - (len(match.nodes) if match else 0)
            if own + (self.cache.cost(match) if match else 0) > self.pages.available:
                continue
            lineage = self.cache.new_lineage()
            if match is not None:
                before = self.pages.available
                cost = self.cache.cost(match)
                self.cache.lock(match)
                assert before - self.pages.available == cost
                lineage = match.snapshot.lineage if match.snapshot else lineage
            self.pages.reserve(own)
            lane = Lane(prompt, limit, lineage, match)
            if match is not None:
                lane.frontier = match.frontier
                lane.pages = [node.page for node in match.nodes]
            self.lanes.append(lane)
            return lane
        return None

    def unit(self, lane: Lane, count: int, generate: int) -> None:
        """Feed up to `count` tokens; when the prompt is in, one `generate`d token at a time."""
        if lane.frontier == len(lane.tokens):
            if len(lane.tokens) == lane.limit:
                return
            lane.tokens.append(generate)
        end = min(lane.frontier + count, len(lane.tokens))
        numbers = self.numbers(lane.tokens[:end])
        self._map(lane, end)
        source = lane.slot
        if not lane.begun and lane.match is not None:
            if lane.match.tail is not None:
                page, tail = lane.pages[len(lane.match.nodes)], lane.match.tail.page
                rest = lane.frontier - 64 * len(lane.match.nodes)
                for memory in (self.memory, self.following):
                    memory[page][:rest] = memory[tail][:rest]
            source = lane.match.snapshot.slot if lane.match.snapshot else None
        for position in range(lane.frontier, end):
            self._write(lane.pages[position // 64], position % 64, numbers[position + 1])
        if self.ahead:
            for position in range(max(lane.frontier - 1, 0), end - 1):
                self.following[lane.pages[position // 64]][position % 64] = numbers[position + 2]
            seen = [column for page in lane.pages for column in self.following[page]]
            assert seen[: end - 1] == numbers[2 : end + 1]
        if self.recurrent:
            assert (self.states[source] if source is not None else 0) == numbers[lane.frontier]
            target = self.slots.take()
            self.states[target] = numbers[end]
            self._leave_slot(lane)
            lane.slot = target
        if not lane.begun and lane.match is not None:
            self.cache.unlock_tail(lane.match)
        lane.begun = True
        lane.frontier = end

    def publish(self, lane: Lane, kind: Kind, *, active: bool, with_slot: bool = True) -> None:
        slot = lane.slot if with_slot and not lane.borrowed else None
        evicted, used = self.cache.evicted_snapshots, self.cache.snapshots_in_use
        victim = expected_victim(self.cache, kind, lane.lineage) if used == self.snapshots else None
        blocks = self.cache.blocks
        taken = self.cache.publish(
            lane.tokens, lane.pages, lane.frontier, slot=slot, kind=kind, lineage=lane.lineage, active=active
        )
        assert self.pages.reserved + self.pages.locked <= self.pages.capacity
        evictions = self.cache.evicted_snapshots - evicted
        assert evictions == (taken and used == self.snapshots)
        if evictions:
            assert victim is not None
            assert victim.node.snapshot is not victim
            self.forgot = True
        numbers = self.numbers(lane.tokens[: lane.frontier])
        if self.recurrent:
            assert not taken or slot is not None
            if taken:
                lane.borrowed = True
                if not active:
                    lane.slot, lane.borrowed = None, False
                self.published.add(numbers[lane.frontier])
                assert self._deepest(lane.tokens[: lane.frontier]) == lane.frontier
            elif slot is not None and not active and lane.frontier:
                refused = used == self.snapshots and victim is None
                assert refused or self._deepest(lane.tokens[: lane.frontier]) == lane.frontier
        else:
            assert not taken
            reachable = self._deepest(lane.tokens[: lane.frontier])
            self.published.update(numbers[1 : reachable + 1])
            assert active or reachable == lane.frontier
        assert self.cache.blocks <= blocks + lane.frontier // 64 + 1

    def finish(self, lane: Lane, kind: Kind, *, publish: bool) -> None:
        self.lanes.remove(lane)
        if not lane.begun:
            if lane.match is not None:
                self.cache.release(lane.match)
            own = -(-lane.limit // 64) - len(lane.pages)
        else:
            if lane.borrowed:
                assert lane.slot is not None
                self.cache.unpin(lane.slot)
                lane.slot, lane.borrowed = None, False
            if publish:
                self.publish(lane, kind, active=False)
            self._leave_slot(lane)
            for page in lane.pages:
                self.pages.unlock(page)
            own = -(-lane.limit // 64) - len(lane.pages)
        self.pages.unreserve(own)

    def speculate(self, lane: Lane) -> None:
        """Map pages past the frontier, scribble on them, and give them back."""
        if not lane.begun:
            return
        self._map(lane, lane.limit)
        for position in range(lane.frontier, lane.limit):
            self._write(lane.pages[position // 64], position % 64, -2)
        while len(lane.pages) > -(-lane.frontier // 64):
            self.pages.give_back(lane.pages.pop())

    def clear(self) -> None:
        self.forgot = True
        self.cache.clear()
        assert all(snapshot.pins for snapshot in snapshots_of(self.cache))
        assert self.pages.free == self.pages.capacity - self.pages.locked

    def check(self) -> None:
        self.pages.check()
        self.slots.check()
        self.cache.check()
        owned = [lane.slot for lane in self.lanes if lane.slot is not None and not lane.borrowed]
        owned += [snapshot.slot for snapshot in snapshots_of(self.cache)]
        assert len(set(owned)) == len(owned) == self.slots.capacity - self.slots.free
        uses = [0] * self.pages.capacity
        for lane in self.lanes:
            for page in lane.pages:
                uses[page] += 1
            if not lane.begun and lane.match is not None and lane.match.tail is not None:
                uses[lane.match.tail.page] += 1
        assert uses == [self.pages.users(page) for page in range(self.pages.capacity)]
        promised = sum(-(-lane.limit // 64) - len(lane.pages) for lane in self.lanes)
        assert promised == self.pages.reserved
        for snapshot in snapshots_of(self.cache):
            path = path_tokens(snapshot.node)
            assert self.states[snapshot.slot] == self.numbers(path)[-1]
            assert snapshot.frontier in [match.frontier for match in self.cache.matches([*path, 0])]

    def prove_promises(self) -> None:
        """In a copy of the world, take every page that is promised or available; lanes keep theirs."""
        pages, cache = copy.deepcopy((self.pages, self.cache))
        pages.reclaim = cache._reclaim
        pinned = [snapshot.frontier for snapshot in snapshots_of(cache) if snapshot.pins]
        pages.reserve(pages.available)
        for _ in range(pages.reserved):
            assert self.pages.users(pages.take()) == 0
        assert pages.locked == pages.capacity
        pages.check()
        cache.check()
        assert [snapshot.frontier for snapshot in snapshots_of(cache) if snapshot.pins] == pinned
        assert all(self.pages.users(node.page) for node in cache._root.descendants())

    def _deepest(self, tokens: Sequence[int]) -> int:
        return max((match.frontier for match in self.cache.matches([*tokens, 0])), default=0)

    def _map(self, lane: Lane, end: int) -> None:
        while len(lane.pages) < -(-end // 64):
            lane.pages.append(self.pages.take())
            self.memory[lane.pages[-1]] = [-1] * 64

    def _write(self, page: int, column: int, number: int) -> None:
        for node in self.cache._shelf._nodes.get(page, []):
            assert column >= len(node.tokens), "a column that the cache relies on is overwritten"
        self.memory[page][column] = number

    def _leave_slot(self, lane: Lane) -> None:
        if lane.slot is None:
            return
        if lane.borrowed:
            self.cache.unpin(lane.slot)
        else:
            del self.states[lane.slot]
            self.slots.give(lane.slot)
        lane.slot, lane.borrowed = None, False

    def _checked_reclaim(self) -> bool:
        """The cache's reclaim, compared with a search of all pages."""
        assert self.pages.free == 0, "evicted without need"
        self.forgot = True
        order = expected_order(self.cache, self.recurrent)
        assert self._reclaim is not None
        done = self._reclaim()
        assert done == bool(order)
        if order:
            assert self.pages.free == 1
            assert not self.pages.held(order[0])
        return done


def snapshots_of(cache: PrefixCache) -> list[Snapshot]:
    return [node.snapshot for node in cache._root.descendants() if node.snapshot is not None]


def path_tokens(node: Node) -> list[int]:
    tokens: list[int] = []
    current: Node | None = node
    while current is not None:
        tokens[:0] = current.tokens
        current = current.parent
    return tokens


def expected_victim(cache: PrefixCache, kind: Kind, lineage: int) -> Snapshot | None:
    """Who must go for a newcomer, from the definition: paths are compared token by token."""
    everyone = snapshots_of(cache)
    loose = [snapshot for snapshot in everyone if not snapshot.pins]

    def superseded_now(old: Snapshot) -> bool:
        own = kind is not Kind.PREAMBLE and (old.kind, old.lineage) == (kind, lineage)
        return old.superseded or (own and old.hits <= 1)

    if superseded := [snapshot for snapshot in loose if superseded_now(snapshot)]:
        return min(superseded, key=lambda snapshot: snapshot.used)
    paths = {id(snapshot): path_tokens(snapshot.node) for snapshot in everyone}

    def value(snapshot: Snapshot) -> tuple[int, int]:
        path = paths[id(snapshot)]
        before = [other.frontier for other in everyone if path[: other.frontier] == paths[id(other)]]
        saved = snapshot.frontier - max([end for end in before if end < snapshot.frontier], default=0)
        return snapshot.floor + (1 + snapshot.hits) * saved, snapshot.used

    return min(loose, key=value, default=None)


def expected_order(cache: PrefixCache, recurrent: bool) -> list[int]:
    """Pages that may go now, the first one first."""
    by_page: dict[int, list[Node]] = {}
    for node in cache._root.descendants():
        by_page.setdefault(node.page, []).append(node)

    def rank(node: Node) -> int:
        if node.snapshot is None or not recurrent:
            return 0
        return 1 if node.snapshot.superseded else 2

    loose = [
        page
        for page, nodes in by_page.items()
        if not cache._pages.users(page) and not any(node.children or node.leaves for node in nodes)
    ]
    return sorted(loose, key=lambda page: (max(map(rank, by_page[page])), cache._shelf._used[page]))
