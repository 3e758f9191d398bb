"""Which cached page is freed next."""

from __future__ import annotations

import heapq
from itertools import count
from typing import TYPE_CHECKING

from ninfer.engine.blocks import Node

if TYPE_CHECKING:
    from ninfer.runtime.pages import PagePool


class Shelf:
    """The pages that the prefix cache holds, each with its nodes, in the order in which they may go.

    A partial block and the full one that grew out of it share a page: it goes with all its nodes or not at
    all. A page may go if no lane uses it and nothing is below its nodes, hence deep blocks before those
    above them. Pages without a snapshot go first if `recurrent` (their KV leads to no state), then those
    whose snapshots are superseded, then the others; among equals the longest unused.

    The queue is a heap with outdated entries: one counts only if it agrees with its page's present key.
    """

    def __init__(self, pages: PagePool, *, recurrent: bool) -> None:
        self._pages = pages
        self._recurrent = recurrent
        self._nodes: dict[int, list[Node]] = {}
        self._used: dict[int, int] = {}
        self._clock = count()
        self._queue: list[tuple[int, int, int]] = []

    def __len__(self) -> int:
        return len(self._nodes)

    def add(self, node: Node) -> None:
        """Hold the page of a new node."""
        self._pages.hold(node.page)
        self._nodes.setdefault(node.page, []).append(node)
        self.touch(node.page)

    def remove(self, node: Node) -> None:
        """Drop the page of a node that has left the tree."""
        nodes = self._nodes[node.page]
        nodes.remove(node)
        if not nodes:
            del self._nodes[node.page], self._used[node.page]
        self._pages.drop(node.page)
        self.offer(node.page)

    def touch(self, page: int) -> None:
        """The page was used just now, or its last lane has left it."""
        self._used[page] = next(self._clock)
        self.offer(page)

    def offer(self, page: int) -> None:
        """Something has changed that decides whether or when the page may go."""
        key = self._key(page)
        if key is None:
            return
        heapq.heappush(self._queue, key)
        if len(self._queue) > 64 + 2 * len(self._nodes):
            self._queue = [key for page in self._nodes if (key := self._key(page)) is not None]
            heapq.heapify(self._queue)

    def next(self) -> list[Node]:
        """The nodes of the page that goes first; none if every page is used. The caller removes them."""
        while self._queue:
            key = heapq.heappop(self._queue)
            if key == self._key(key[2]):
                return list(self._nodes[key[2]])
        return []

    def check(self) -> None:
        """Raise AssertionError if the pool or the queue disagree with what is on the shelf."""
        queue = set(self._queue)
        for page, nodes in self._nodes.items():
            assert self._pages.held(page) == len(nodes) > 0
            key = self._key(page)
            assert key is None or key in queue, f"page {page} may go but isn't queued"
        held = sum(self._pages.held(page) > 0 for page in range(self._pages.capacity))
        assert held == len(self._nodes) == len(self._used)

    def _key(self, page: int) -> tuple[int, int, int] | None:
        """Place in the queue: rank, last use, page; None if the page may not go."""
        nodes = self._nodes.get(page)
        if nodes is None or self._pages.users(page) or not all(node.childless for node in nodes):
            return None
        rank = max(_rank(node) for node in nodes) if self._recurrent else 0
        return rank, self._used[page], page


def _rank(node: Node) -> int:
    if node.snapshot is None:
        return 0
    return 1 if node.snapshot.superseded else 2
