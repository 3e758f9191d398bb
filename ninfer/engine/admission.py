"""Who is given a lane next: the queue, its limits, and what keeps its head from being starved."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence as Items
from dataclasses import dataclass
from time import monotonic, perf_counter
from typing import TYPE_CHECKING

from ninfer.engine.reuse import reuse_path
from ninfer.engine.scheduler import Protection
from ninfer.engine.sequence import Pools, Sequence, fits, pages_for
from ninfer.engine.taps import plan_taps
from ninfer.errors import EngineError, QueueTimeoutError

if TYPE_CHECKING:
    from ninfer.engine.prefix import Match
    from ninfer.engine.request import Ticket
    from ninfer.runtime.plan import Plan


@dataclass(frozen=True)
class Policy:
    """How requests are queued and what the prefix cache keeps.

    `max_pending` requests may wait beside those that run, each for `pending_timeout` seconds at most (None:
    for ever). `turn_anchors` message boundaries before the last message are kept exactly.
    """

    max_pending: int = 16
    pending_timeout: float | None = 30.0
    reuse: bool = True
    turn_anchors: int = 1
    taps: int = 4


class Admission:
    """Owns the waiting requests, in their order; belongs to the worker.

    `changed`: has something happened since the queue was last looked at in vain? The worker says so when a
    lane or the prefill becomes free.
    """

    def __init__(self, pools: Pools, plan: Plan, policy: Policy) -> None:
        self._pools, self._plan, self._policy = pools, plan, policy
        self._protection: Protection | None = None
        self.waiting: deque[Ticket] = deque()
        self.changed = False

    def add(self, tickets: Items[Ticket]) -> None:
        """Queue further requests."""
        self.waiting += tickets
        self.changed = True

    def reuses(self, ticket: Ticket) -> bool:
        """May the prefix cache serve this request and learn from it?"""
        return ticket.request.reuse and self._policy.reuse

    def leaving(self) -> list[tuple[Ticket, QueueTimeoutError | None]]:
        """Take out the requests that were cancelled (None) or have waited too long."""
        if not self.waiting:
            return []
        now, gone = monotonic(), []
        for ticket in self.waiting:
            if ticket.cancelled:
                gone.append((ticket, None))
            elif ticket.deadline is not None and now >= ticket.deadline:
                waited = perf_counter() - ticket.submitted
                error = QueueTimeoutError(
                    f"the request waited {waited:.1f} s for its turn, longer than it may; try again later or "
                    f"raise the queue's timeout"
                )
                gone.append((ticket, error))
        for ticket, _ in gone:
            self.waiting.remove(ticket)
            self.changed = True
        return gone

    def next(self, lanes: Items[Ticket | None]) -> Ticket | None:
        """Take out the first request, or a later one that doesn't delay it, if there is a free lane and all
        that the request may ever need can be promised; it then has its sequence and its taps."""
        self.changed = False
        if None not in lanes:
            return None
        active = [ticket for ticket in lanes if ticket is not None]
        lent = sum(ticket.sequence.lends for ticket in active if ticket.sequence is not None)
        head = self.waiting[0]
        if self._start(head, lent):
            self.waiting.popleft()
            self._protection = None
            return head
        if not active:
            raise EngineError("a request was blocked although nothing runs")
        promised = {ticket.order: pages_for(ticket.budget.context) for ticket in active}
        protection = self._protection = Protection.renewed(self._protection, head.order, promised)
        for ticket in list(self.waiting)[1:]:
            pages = pages_for(ticket.budget.context)
            allowed = protection.allows(
                pages,
                head_pages=pages_for(head.budget.context),
                capacity=self._plan.pages,
                lanes=len(lanes),
                active=promised,
            )
            if allowed and self._start(ticket, lent):
                self.waiting.remove(ticket)
                protection.lend(ticket.order, pages)
                return ticket
        return None

    def _start(self, ticket: Ticket, lent: int) -> bool:
        request, entitlement = ticket.request, pages_for(ticket.budget.context)
        reuse = self.reuses(ticket)
        candidates: list[Match | None] = [*self._pools.cache.matches(request.prompt)] if reuse else []
        for match in (*candidates, None):
            if fits(self._pools, match, entitlement, lent):
                break
        else:
            return False
        ticket.reuse_path = reuse_path(match, request.marks)
        ticket.sequence = sequence = Sequence(self._pools, request.prompt, entitlement, match)
        ticket.reused = sequence.frontier
        if reuse and self._plan.snapshots:  # a cut costs a pass and is for nothing without them
            marks = request.marks
            ticket.taps = plan_taps(
                prompt_tokens=len(request.prompt),
                base=sequence.frontier,
                boundaries=marks.boundaries,
                preamble=marks.preamble,
                opener=marks.opener,
                turn_anchors=self._policy.turn_anchors,
                chunk=self._plan.prefill_chunk,
                limit=self._policy.taps,
            )
        self.changed = True
        return True
