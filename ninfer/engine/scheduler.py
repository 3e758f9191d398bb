"""What runs next and who may go first: decisions over small facts, without tensors or locks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum, auto


class Choice(Enum):
    """The unit of work of an iteration."""

    CONTROL = auto()
    PREFILL = auto()
    DECODE = auto()
    WAIT = auto()


def choose(*, control: bool, prefill: bool, decode: bool, decoded_last: bool) -> Choice:
    """Prefill chunks and decode rounds alternate when there are both; forced spans go first."""
    if control:
        return Choice.CONTROL
    if prefill:
        return Choice.DECODE if decode and not decoded_last else Choice.PREFILL
    return Choice.DECODE if decode else Choice.WAIT


def may_admit(*, waiting: bool, changed: bool, prefill: bool, decode: bool, decoded_last: bool) -> bool:
    """Is it worth and allowed to look at the queue? `changed`: something has happened since it was in vain.
    One request prefills at a time, and a decode round goes between two admissions."""
    return waiting and changed and not prefill and (not decode or decoded_last)


@dataclass
class Protection:
    """Keeps later requests from starving a blocked one that stands first.

    Opened for the first request (`head`) with the requests active at that moment, the donors. A later one may
    go first (a borrower) only on the proof that the head can start once all donors are gone, with every
    borrower still keeping all that it was promised. `borrowers` maps ids to their promised pages.
    """

    head: int
    donors: frozenset[int]
    borrowers: dict[int, int] = field(default_factory=dict)

    @classmethod
    def renewed(cls, old: Protection | None, head: int, active: Iterable[int]) -> Protection:
        """The old one while it is about the same head, else a new one."""
        return old if old is not None and old.head == head else cls(head, frozenset(active))

    def allows(
        self, pages: int, *, head_pages: int, capacity: int, lanes: int, active: Mapping[int, int]
    ) -> bool:
        """May a request that is promised `pages` go before the head, which needs `head_pages` of `capacity`?

        `active` maps the ids of active requests to their promised pages.
        """
        if not self.donors & active.keys() or active.keys() - self.donors - self.borrowers.keys():
            return False
        borrowed = [count for id_, count in self.borrowers.items() if id_ in active]
        return sum(borrowed) + pages + head_pages <= capacity and len(borrowed) + 2 <= lanes

    def lend(self, id_: int, pages: int) -> None:
        """A request has gone first."""
        self.borrowers[id_] = pages
