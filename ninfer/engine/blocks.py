"""The radix tree of the prefix cache: 64-token blocks by their exact tokens."""

from __future__ import annotations

from array import array
from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ninfer.engine.snapshots import Snapshot

BLOCK = 64
"""Tokens of a KV page, and of a full block."""

_WIDTH = array("I").itemsize


class Node:
    """A block of the tokens after its parent's, and the page that has their KV in its first columns.

    Full blocks have 64 tokens, and in their keys `ahead` of the tokens that follow; partial ones have fewer
    than that, no more than 64 of them the block's own, and nothing below them. `key` is the tokens as packed
    unsigned integers: compared as exactly as a tuple of numbers, at a tenth of the memory.
    """

    __slots__ = (
        "attached", "children", "depth", "full", "key", "leaves", "page", "parent", "snapshot", "sorted",
    )  # fmt: skip

    def __init__(self, parent: Node | None, key: bytes, page: int, *, ahead: int = 0) -> None:
        """`ahead` is the root's, and counts for all below."""
        self.parent = parent
        self.key = key
        self.full: int = (BLOCK + ahead) * _WIDTH if parent is None else parent.full
        """Bytes of a full block's key."""
        self.page = page
        self.depth: int = 0 if parent is None else parent.depth + 1
        """Blocks on the path, this one included; 0 for the root."""
        self.children: dict[bytes, Node] = {}
        """Full blocks."""
        self.leaves: dict[bytes, Node] = {}
        """Partial blocks."""
        self.sorted: list[bytes] = []
        """All keys of both, so that the longest common prefix is found next to where a key would stand."""
        self.snapshot: Snapshot | None = None
        self.attached = True
        """Whether the node is (still) in the tree."""

    @property
    def partial(self) -> bool:
        """Whether the block, or what follows it in a full one's key, is incomplete."""
        return len(self.key) < self.full

    @property
    def childless(self) -> bool:
        """Whether nothing is below."""
        return not self.sorted

    @property
    def end(self) -> int:
        """Tokens on the path, this block's included."""
        return BLOCK * (self.depth - 1) + min(len(self.key) // _WIDTH, BLOCK)

    @property
    def tokens(self) -> tuple[int, ...]:
        """The tokens of this block, without those ahead."""
        return tuple(array("I", self.key))[:BLOCK]

    def add(self, key: bytes, page: int) -> Node:
        """Insert a block below."""
        node = Node(self, key, page)
        (self.leaves if node.partial else self.children)[key] = node
        insort(self.sorted, key)
        return node

    def detach(self) -> None:
        """Leave the tree; nothing may be below."""
        parent = self.parent
        if parent is None or not self.childless or not self.attached:
            raise ValueError("only a childless block of the tree can leave it")
        del (parent.leaves if self.partial else parent.children)[self.key]
        del parent.sorted[bisect_left(parent.sorted, self.key)]
        self.attached = False

    def child(self, key: bytes) -> Node | None:
        """The block below with exactly this key."""
        return (self.children if len(key) == self.full else self.leaves).get(key)

    def closest(self, key: bytes) -> tuple[Node | None, int]:
        """The block below that shares the longest prefix with `key`, and that length in tokens (0: None)."""
        index = bisect_left(self.sorted, key)
        best, length = None, 0
        for other in self.sorted[max(0, index - 1) : index + 1]:
            shared = _common(key, other)
            if shared > length:
                best, length = other, shared
        return (None if best is None else self.child(best)), length

    def covered(self, key: bytes) -> bool:
        """Whether a block below begins with `key`."""
        index = bisect_left(self.sorted, key)
        return index < len(self.sorted) and self.sorted[index].startswith(key)

    def redundant(self, key: bytes) -> Node | None:
        """The partial block below that `key` makes superfluous: its tokens and more.

        Where no block below begins with another (`covered` ones aren't added), it stands just before `key`.
        """
        index = bisect_left(self.sorted, key) - 1
        if index < 0 or not key.startswith(self.sorted[index]):
            return None
        return self.leaves[self.sorted[index]]

    def snapshot_before(self) -> Snapshot | None:
        """The deepest snapshot whose tokens this path begins with, its own aside."""
        node, parent = self, self.parent
        while parent is not None:
            if parent.leaves:
                shorter = [
                    leaf
                    for leaf in parent.leaves.values()
                    if leaf is not node and leaf.snapshot is not None and node.key.startswith(leaf.key)
                ]
                if shorter:
                    return max(shorter, key=lambda leaf: leaf.end).snapshot
            if parent.snapshot is not None:
                return parent.snapshot
            node, parent = parent, parent.parent
        return None

    def descendants(self) -> Iterator[Node]:
        """All nodes below, parents first."""
        waiting = [self]
        while waiting:
            node = waiting.pop()
            below = [*node.children.values(), *node.leaves.values()]
            yield from below
            waiting += below


def pack(tokens: Sequence[int]) -> bytes:
    """Tokens as the packed integers of which keys are cut."""
    return array("I", tokens).tobytes()


def cut(packed: bytes, begin: int, end: int) -> bytes:
    """The key of tokens begin … end-1."""
    return packed[begin * _WIDTH : end * _WIDTH]


def continues(packed: bytes, begin: int, key: bytes) -> bool:
    """Whether the tokens from `begin` on begin with `key`."""
    return packed.startswith(key, begin * _WIDTH)


def _common(first: bytes, second: bytes) -> int:
    """Length of the common prefix of two keys, in tokens."""
    length = min(len(first), len(second)) // _WIDTH
    if first[: length * _WIDTH] == second[: length * _WIDTH]:
        return length
    return next(
        index
        for index in range(length)
        if first[index * _WIDTH : (index + 1) * _WIDTH] != second[index * _WIDTH : (index + 1) * _WIDTH]
    )
