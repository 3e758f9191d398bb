"""Who uses which KV page, and what is promised: bookkeeping of page numbers, no memory."""

from __future__ import annotations

from collections.abc import Callable


class PagePool:
    """Page numbers 0 … capacity-1. Lanes *lock* pages, the prefix cache *holds* them; both are counted.

    A page is free (nobody has it), locked (at least one lane uses it, whether held or not) or cached (only
    held). `reserved` pages are promised to lanes but not yet chosen. A promise can always be kept: free and
    cached pages together are never fewer than `reserved`, and `reclaim` turns cached ones into free ones.

    The owner of the cache sets `reclaim` (free at least one cached page; False if it can't) and `released`
    (told when a held page has lost its last lane).
    """

    def __init__(self, capacity: int) -> None:
        if capacity < 0:
            raise ValueError(f"a pool can't have {capacity} pages")
        self.capacity = capacity
        self.locked = 0
        """Pages used by at least one lane."""
        self.reserved = 0
        self.reclaim: Callable[[], bool] | None = None
        self.released: Callable[[int], None] | None = None
        self._users = [0] * capacity
        self._held = [0] * capacity
        self._free = list(range(capacity - 1, -1, -1))

    @property
    def available(self) -> int:
        """Pages that can still be reserved or newly locked."""
        return self.capacity - self.locked - self.reserved

    @property
    def free(self) -> int:
        """Pages that neither a lane nor the cache has."""
        return len(self._free)

    def users(self, page: int) -> int:
        """Lanes that use the page."""
        return self._users[page]

    def held(self, page: int) -> int:
        """References of the cache to the page."""
        return self._held[page]

    def reserve(self, count: int) -> None:
        """Promise `count` pages."""
        if not 0 <= count <= self.available:
            raise ValueError(f"{count} pages can't be reserved, {self.available} are available")
        self.reserved += count

    def unreserve(self, count: int) -> None:
        """Give up a promise."""
        if not 0 <= count <= self.reserved:
            raise ValueError(f"{count} pages can't be unreserved, {self.reserved} are reserved")
        self.reserved -= count

    def take(self) -> int:
        """A page for one lane, out of the reserved ones."""
        if self.reserved == 0:
            raise ValueError("a page must be reserved before it is taken")
        while not self._free:
            if self.reclaim is None or not self.reclaim():
                raise ValueError(f"no page of {self.capacity} can be freed, {self.reserved} are promised")
        page = self._free.pop()
        self.reserved -= 1
        self.locked += 1
        self._users[page] = 1
        return page

    def give_back(self, page: int) -> None:
        """Truncation: a lane gives up a page that it alone uses and may take another one for it later."""
        if self._users[page] != 1:
            raise ValueError(f"page {page} has {self._users[page]} users; only a sole user can give it back")
        self.unlock(page)
        self.reserved += 1

    def lock(self, page: int) -> None:
        """One more lane uses a page that is locked or cached."""
        if self._users[page] == 0:
            if self._held[page] == 0:
                raise ValueError(f"page {page} is free and can't be locked")
            if self.available < 1:
                raise ValueError(f"page {page} can't be locked, every page is locked or promised")
            self.locked += 1
        self._users[page] += 1

    def unlock(self, page: int) -> None:
        """One lane less uses the page."""
        if self._users[page] == 0:
            raise ValueError(f"page {page} isn't locked")
        self._users[page] -= 1
        if self._users[page]:
            return
        self.locked -= 1
        if self._held[page] == 0:
            self._free.append(page)
        elif self.released is not None:
            self.released(page)

    def hold(self, page: int) -> None:
        """The cache refers to a page that isn't free."""
        if self._users[page] == 0 and self._held[page] == 0:
            raise ValueError(f"page {page} is free and can't be held")
        self._held[page] += 1

    def drop(self, page: int) -> None:
        """The cache gives up one reference."""
        if self._held[page] == 0:
            raise ValueError(f"page {page} isn't held")
        self._held[page] -= 1
        if self._held[page] == 0 and self._users[page] == 0:
            self._free.append(page)

    def check(self) -> None:
        """Raise AssertionError if the books don't balance."""
        free = set(self._free)
        assert len(free) == len(self._free), "a page is free twice"
        assert all(count >= 0 for count in (*self._users, *self._held))
        unused = {page for page in range(self.capacity) if not self._users[page] and not self._held[page]}
        assert free == unused, f"lost or used free pages: {free ^ unused}"
        assert self.locked == sum(1 for count in self._users if count)
        assert 0 <= self.reserved <= self.capacity - self.locked, "more is promised than there is"
