"""Which state slots are free: bookkeeping of slot numbers, no memory."""

from __future__ import annotations


class SlotPool:
    """Slot numbers 0 … capacity-1; each is free or has exactly one owner, a lane or a snapshot."""

    def __init__(self, capacity: int) -> None:
        if capacity < 0:
            raise ValueError(f"a pool can't have {capacity} slots")
        self.capacity = capacity
        self._free = list(range(capacity - 1, -1, -1))
        self._taken = [False] * capacity

    @property
    def free(self) -> int:
        """Slots without an owner."""
        return len(self._free)

    def take(self) -> int:
        """A slot for the caller."""
        if not self._free:
            raise ValueError(f"all {self.capacity} state slots are taken")
        slot = self._free.pop()
        self._taken[slot] = True
        return slot

    def give(self, slot: int) -> None:
        """The caller gives its slot back."""
        if not 0 <= slot < self.capacity or not self._taken[slot]:
            raise ValueError(f"slot {slot} isn't taken")
        self._taken[slot] = False
        self._free.append(slot)

    def taken(self, slot: int) -> bool:
        """Whether the slot has an owner."""
        return self._taken[slot]

    def check(self) -> None:
        """Raise AssertionError if the books don't balance."""
        assert len(set(self._free)) == len(self._free), "a slot is free twice"
        assert not any(self._taken[slot] for slot in self._free), "a slot is free and taken"
        assert len(self._free) + sum(self._taken) == self.capacity, "a slot is lost"
