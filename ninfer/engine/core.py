"""The engine: a queue of requests and one worker that owns every change of their state.

Other threads only submit, cancel and read events. An iteration of the worker ends requests, admits one, runs
one unit of work, commits it and publishes what came of it.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from threading import Condition, Thread, current_thread
from time import monotonic, perf_counter

import numpy as np

from ninfer.engine.admission import Admission, Policy
from ninfer.engine.drafts import DraftSource, propose
from ninfer.engine.events import Done, PromptProgress, Speculation, Started
from ninfer.engine.handle import Handle
from ninfer.engine.output import OutputSession
from ninfer.engine.prefix import PrefixCache
from ninfer.engine.request import Request, State, Ticket, budget
from ninfer.engine.results import Results, preview, publish
from ninfer.engine.scheduler import Choice, choose, may_admit
from ninfer.engine.sequence import Pools, Sequence
from ninfer.engine.stats import Health, RuntimeStatistics
from ninfer.engine.taps import next_cut
from ninfer.engine.units import UnitWriter
from ninfer.errors import OverloadedError, QueueTimeoutError, UnavailableError
from ninfer.events import FinishReason, Step
from ninfer.runtime.pages import PagePool
from ninfer.runtime.plan import Plan
from ninfer.runtime.slots import SlotPool

_NONE: list[int] = []
"""The drafts of those that have none; never changed."""
_FORKED = "the engine works in the process that this one was forked from"


class Core:
    """Serves requests on a Program, reached through `run`: an ingress record in, an egress record out."""

    def __init__(
        self,
        run: Callable[[np.ndarray], np.ndarray],
        plan: Plan,
        *,
        public_tokens: int,
        policy: Policy | None = None,
        drafts: DraftSource | None = None,
        record: np.ndarray | None = None,
    ) -> None:
        """`record`: the Program's own ingress record, if it can be written directly."""
        self.plan = plan
        self.policy = policy or Policy()
        self._run, self._public_tokens, self._drafts = run, public_tokens, drafts
        self._speculates = drafts is not None or plan.shape.drafts > 0
        pages, slots = PagePool(plan.pages + plan.copies), SlotPool(plan.slots)
        recurrent = plan.slots > 0
        ahead = int(plan.shape.drafts > 0)
        cache = PrefixCache(pages, slots, recurrent=recurrent, snapshots=plan.snapshots, ahead=ahead)
        self._pools = Pools(pages, slots, cache, plan.copies, recurrent)
        self._writer = UnitWriter(plan.shape, record)
        self._lanes: list[Ticket | None] = [None] * plan.concurrency
        self._queue = Admission(self._pools, plan, self.policy)
        self._decoded_last = False
        self._stats = RuntimeStatistics()
        self._results = Results()
        self._condition = Condition()
        self._inbox: list[Ticket] = []
        self._outstanding: set[Ticket] = set()
        self._orders = 0
        self._stopping = False
        self._error: BaseException | None = None
        self._process = os.getpid()
        self._thread = Thread(target=self._work, name="ninfer-engine", daemon=True)
        self._thread.start()

    # What other threads may call

    def submit(self, request: Request, session: OutputSession, *, timeout: float | None = None) -> Handle:
        """Put a request in the queue; `timeout` seconds replace the policy's for this one.

        Raises `OverloadedError`, `UnavailableError`, and what `request.budget` raises.
        """
        sized = budget(
            request,
            session,
            max_context=self.plan.max_context,
            public_tokens=self._public_tokens,
            span=self.plan.shape.span,
        )
        wait = self.policy.pending_timeout if timeout is None else timeout
        if wait is not None and wait <= 0:
            raise QueueTimeoutError("the request's time was over before it could be queued")
        with self._condition:
            self._require_available()
            limit = self.plan.concurrency + self.policy.max_pending
            if sized.output and len(self._outstanding) >= limit:
                raise OverloadedError(
                    f"the queue is full: {limit} requests are running or waiting; try again later or raise "
                    f"the queue's limit"
                )
            self._orders += 1
            now = perf_counter()
            deadline = None if wait is None else monotonic() + wait
            ticket = Ticket(self._orders, request, session, sized, now, deadline)
            if self._speculates:
                ticket.speculation = Speculation(self.plan.shape.width - 1)
            if sized.output:
                self._outstanding.add(ticket)
                self._inbox.append(ticket)
                self._condition.notify()
        if not sized.output:
            ticket.state = State.FINISHED
            ticket.mailbox.put(Done(ticket.statistics(FinishReason.OUTPUT_LIMIT, now)))
        return Handle(
            ticket.mailbox, lambda: self._cancel(ticket, gone=False), lambda: self._cancel(ticket, gone=True)
        )

    def statistics(self) -> RuntimeStatistics:
        """A copy of the counters, with the present state of the queue and the cache."""
        waiting = len(self._queue.waiting) + len(self._inbox)
        return self._stats.as_of_now(self._pools, self._states(), waiting)

    def health(self) -> Health:
        """Can requests be served, and if not, why?"""
        with self._condition:
            if self._error is not None:
                return Health(False, f"the engine has failed: {_name(self._error)}")
            if self._stopping:
                return Health(False, "the engine is closed")
            forked = os.getpid() != self._process
            return Health(not forked, _FORKED if forked else None)

    def stop(self) -> None:
        """End every request with an error and wait for the unit under way. May be called more than once."""
        with self._condition:
            self._stopping = True
            self._condition.notify()
        # The collector may drop an engine, and so stop it, in any thread.
        if self._thread is not current_thread():
            self._thread.join()
        self._run = _gone

    def _cancel(self, ticket: Ticket, *, gone: bool) -> None:
        """`gone`: the consumer won't read any more, so the request's place is free once it has ended."""
        with self._condition:
            ticket.cancelled = True
            if gone:
                ticket.gone = True
                if ticket.mailbox.ended:
                    self._outstanding.discard(ticket)
            self._condition.notify()

    def _require_available(self) -> None:
        if self._error is not None:
            raise UnavailableError(f"the engine has failed ({_name(self._error)}); load the model again")
        if self._stopping:
            raise UnavailableError("the engine is closed; load the model again")
        if os.getpid() != self._process:
            raise UnavailableError(f"{_FORKED}; load the model in this one")

    # The worker

    def _work(self) -> None:
        try:
            while self._wait():
                self._iterate()
        except BaseException as error:
            with self._condition:
                self._error = error
        self._end_all()

    def _wait(self) -> bool:
        """Take in what was submitted, waiting while there is nothing to do; False to stop."""
        if not self._inbox and not self._stopping and any(self._lanes):
            return True
        with self._condition:
            while not self._stopping and not (self._inbox or self._queue.waiting or any(self._lanes)):
                self._condition.wait()
            if self._inbox:
                self._queue.add(self._inbox)
                self._inbox.clear()
            return not self._stopping

    def _iterate(self) -> None:
        begin, maintained = perf_counter(), self._stats.engine_maintenance
        self._end_cancelled()
        states = self._states()
        if self._queue.waiting:
            self._end_waiting()
            if may_admit(
                waiting=bool(self._queue.waiting),
                changed=self._queue.changed,
                prefill=State.PREFILL in states,
                decode=State.DECODE_READY in states,
                decoded_last=self._decoded_last,
            ):
                self._admit()
                states = self._states()
        choice = choose(
            control=State.CONTROL_READY in states,
            prefill=State.PREFILL in states,
            decode=State.DECODE_READY in states,
            decoded_last=self._decoded_last,
        )
        if choice is not Choice.DECODE:
            self._deliver()
        now = perf_counter()
        self._stats.engine_boundary += now - begin - (self._stats.engine_maintenance - maintained)
        if choice is Choice.CONTROL:
            self._control(now)
        elif choice is Choice.PREFILL:
            self._prefill(now)
        elif choice is Choice.DECODE:
            self._decode(now)
        else:
            self._idle()
        self._decoded_last = choice in (Choice.CONTROL, Choice.DECODE)

    def _deliver(self) -> None:
        """What comes next may take long: nobody's text waits for it."""
        for ticket in self._lanes:
            if ticket is not None:
                ticket.mailbox.deliver()

    def _states(self) -> list[State]:
        return [ticket.state for ticket in self._lanes if ticket is not None]

    def _idle(self) -> None:
        """Only blocked requests: something will be cancelled, submitted or time out."""
        with self._condition:
            if not self._inbox and not self._stopping:
                self._condition.wait(0.001)

    def _end_waiting(self) -> None:
        """Drop waiting requests that were cancelled or have waited too long."""
        for ticket, error in self._queue.leaving():
            if error is None:
                self._finish(ticket, FinishReason.CANCELLED)
            else:
                self._fail(ticket, error)

    def _end_cancelled(self) -> None:
        for ticket in self._lanes:
            if ticket is not None and ticket.cancelled:
                self._finish(ticket, FinishReason.CANCELLED)

    def _admit(self) -> None:
        """Give a waiting request a lane, if one may and can start."""
        ticket = self._queue.next(self._lanes)
        if ticket is None:
            return
        self._lanes[self._lanes.index(None)] = ticket
        ticket.state, ticket.admitted = State.PREFILL, perf_counter()
        ticket.work_before = self._stats.host
        self._stats.select(ticket)
        ticket.mailbox.put(Started(len(ticket.request.prompt), ticket.reused))

    # Units of work. Each takes over from the boundary at `begin`; the host's time in it is that of writing
    # the record, of what follows the Program until it is known what was drawn, and of committing and
    # publishing.

    def _do(self, record: np.ndarray) -> float:
        """Have the Program do a unit; what it yields stands in `_results`. Device seconds."""
        return self._results.take(self._run(record))

    def _prefill(self, begin: float) -> None:
        [lane] = [i for i, t in enumerate(self._lanes) if t is not None and t.state is State.PREFILL]
        ticket, sequence = self._ticket(lane)
        stats, prompt_tokens = self._stats, len(ticket.request.prompt)
        end = next_cut(sequence.frontier, prompt_tokens, self.plan.prefill_chunk, ticket.taps)
        count, masked = end - sequence.frontier, 0
        if end == prompt_tokens and ticket.constrained:
            masked = self._mask(ticket, 0, [])
            if masked is None:
                return
        sequence.map_to(self._writer.limit(ticket, end) if end == prompt_tokens else end)
        record = self._writer.prefill(lane, ticket, end, masked=masked > 0)
        written = perf_counter()
        device = self._do(record)
        sequence.advance(count)
        if self.plan.shape.drafts:
            sequence.trim()
        known = perf_counter()
        if self._queue.reuses(ticket):
            kinds = [tap.kind for tap in ticket.taps if tap.position == end]
            if kinds:
                sequence.capture(kinds[0])
            elif end == prompt_tokens:
                sequence.share()
        now = perf_counter()
        ticket.prefill_seconds += now - begin
        stats.prefill_tokens += count
        stats.prefill_units += 1
        stats.prefill_device_seconds += device
        stats.ran(begin, written, known, device)
        stats.engine_maintenance += now - known
        stats.prefill_seconds += now - begin
        maintained = stats.engine_maintenance
        ticket.mailbox.put(PromptProgress(prompt_tokens, end, now - ticket.admitted))
        if end == prompt_tokens:
            self._queue.changed = True
            ticket.state = State.DECODE_READY
            ticket.first_token = now
            [ticket.drafts] = self._results.drafts(1)
            [first] = self._results.offers(1, 1)
            step = preview(ticket, first)
            self._results.collect(ticket, step, 0)
            self._settle(ticket, first, step, now)
        stats.prefill_seconds += stats.settled(now, maintained)

    def _decode(self, begin: float) -> None:
        """One round of all requests that are ready for it."""
        lanes, tickets, sequences = [], [], []
        drafts: list[list[int]] = []
        masked: list[tuple[int, int]] = []
        told: list[int] = []
        for lane, ticket in enumerate(self._lanes):
            if ticket is not None and ticket.state is State.DECODE_READY:
                assert ticket.sequence is not None
                draft = _NONE
                if self._speculates:
                    draft = propose(self._drafts, ticket, self.plan, self._public_tokens)
                if not ticket.plain:
                    if ticket.constrained:
                        columns = self._mask(ticket, len(lanes), draft)
                        if columns is None:
                            continue
                        masked.append((len(lanes), columns))
                    if ticket.request.logprobs is not None:
                        told.append(len(lanes))
                lanes.append(lane)
                tickets.append(ticket)
                sequences.append(ticket.sequence)
                drafts.append(draft)
        if not lanes:
            return
        for sequence, draft in zip(sequences, drafts, strict=True):
            sequence.map_to(sequence.frontier + 1 + len(draft))
        width = self._writer.width(drafts)
        if self.plan.shape.drafts:
            for ticket, sequence, draft in zip(tickets, sequences, drafts, strict=True):
                sequence.map_to(self._writer.limit(ticket, sequence.frontier + 1 + len(draft)))
        record = self._writer.round(lanes, tickets, drafts, masked)
        written = perf_counter()
        device, folded = self._do(record), 0.0
        offers = self._results.offers(len(lanes), width)
        known = perf_counter()
        steps = [preview(ticket, offer) for ticket, offer in zip(tickets, offers, strict=True)]
        counts = [0 if isinstance(step, Exception) else step.committed for step in steps]
        for row in told:
            self._results.collect(tickets[row], steps[row], row * width)
        if width == 1:
            for sequence in sequences:
                sequence.advance(1)
        else:
            proposed = self._results.drafts(len(lanes))
            fewer = [count < len(offer) for count, offer in zip(counts, offers, strict=True)]
            if any(fewer):
                # A round advances states by all that stands; where less is committed they start over.
                again = [count if less else 0 for count, less in zip(counts, fewer, strict=True)]
                if any(again):
                    folded = self._do(self._writer.fold(again))
            for row, (sequence, count) in enumerate(zip(sequences, counts, strict=True)):
                tickets[row].drafts = [] if fewer[row] else proposed[row]
                if count:
                    sequence.advance(count)
                    sequence.trim()
        now = perf_counter()
        stats = self._stats
        stats.rounds += 1
        stats.row_rounds += len(lanes)
        stats.decode_tokens += sum(counts)
        stats.decode_device_seconds += device + folded
        stats.ran(begin, written, known, device)
        stats.engine_commit_output += now - known - folded
        stats.decode_seconds += now - begin
        maintained = stats.engine_maintenance
        if self._speculates:
            for ticket, draft, offer, count in zip(tickets, drafts, offers, counts, strict=True):
                accepted = min(len(offer) - 1, count)  # behind a stop nothing is output
                stats.drafted_tokens += len(draft)
                stats.accepted_tokens += accepted
                ticket.speculation.count(len(draft), accepted)
        for ticket, offer, step in zip(tickets, offers, steps, strict=True):
            ticket.decode_seconds += now - begin
            ticket.rounds += 1
            self._settle(ticket, offer, step, now)
        stats.decode_seconds += stats.settled(now, maintained)

    def _control(self, begin: float) -> None:
        """Feed the texts that close thinking blocks; they were committed without being drawn."""
        due = [i for i, t in enumerate(self._lanes) if t is not None and t.state is State.CONTROL_READY]
        span = len(self._ticket(due[0])[0].session.closer)
        # Rows of a unit are equally long; a closer of another length has its turn in the next iteration.
        lanes = [lane for lane in due if len(self._ticket(lane)[0].session.closer) == span]
        tickets = [self._ticket(lane)[0] for lane in lanes]
        for ticket, sequence in zip(tickets, (self._ticket(lane)[1] for lane in lanes), strict=True):
            sequence.ledger += ticket.session.closer
            sequence.map_to(self._writer.limit(ticket, sequence.frontier + span))
        record = self._writer.control(lanes, tickets, span)
        written = perf_counter()
        device = self._do(record)
        drafts = self._results.drafts(len(tickets))
        now = perf_counter()
        stats = self._stats
        stats.control_units += 1
        stats.control_tokens += span * len(tickets)
        stats.control_device_seconds += device
        stats.ran(begin, written, now, device)
        stats.control_seconds += now - begin
        maintained = stats.engine_maintenance
        for ticket, ticket.drafts in zip(tickets, drafts, strict=True):
            assert ticket.sequence is not None
            ticket.sequence.advance(span)
            ticket.sequence.trim()
            ticket.state = State.DECODE_READY
            ticket.decode_seconds += now - begin
            try:
                step = ticket.session.commit_closer()
            except Exception as error:
                self._fail(ticket, error)
                continue
            ticket.output += ticket.session.closer
            publish(ticket, step, now)
            if reason := step.finish or ticket.budget.finish(len(ticket.output)):
                self._finish(ticket, reason)
        stats.control_seconds += stats.settled(now, maintained)

    def _mask(self, ticket: Ticket, row: int, drafts: list[int]) -> int | None:
        """Have the masks of a constrained request's columns written, and drop drafts that they forbid; how
        many there are (0: nothing is forbidden). None if that fails, and the request with it."""
        try:
            columns = ticket.session.fill_masks(drafts, self._writer.masks(row, len(drafts)))
        except Exception as error:
            self._fail(ticket, error)
            return None
        if columns and drafts:
            del drafts[columns - 1 :]
        return columns

    def _settle(self, ticket: Ticket, tokens: list[int], step: Step | Exception, now: float) -> None:
        """Take committed tokens into the ledger, publish them, and end the request if it is at its end."""
        if isinstance(step, Exception):
            self._fail(ticket, step)
            return
        assert ticket.sequence is not None
        committed = tokens[: step.committed]
        ticket.sequence.ledger += committed
        ticket.output += committed
        publish(ticket, step, now)
        reason = step.finish or ticket.budget.finish(len(ticket.output))
        if reason is not None:
            self._finish(ticket, reason)
        elif ticket.session.closer_due:
            ticket.state = State.CONTROL_READY

    # The end of a request

    def _finish(self, ticket: Ticket, reason: FinishReason) -> None:
        """Give everything back, leaving the state at the frontier to the cache, and tell the consumer."""
        self._leave(ticket, keep=self._queue.reuses(ticket))
        now = perf_counter()
        try:
            publish(ticket, ticket.session.close(), now, last=True)
        except Exception as error:
            self._stats.failed += 1
            self._end(ticket, error)
            return
        self._stats.finished[reason] = self._stats.finished.get(reason, 0) + 1
        self._end(ticket, Done(ticket.statistics(reason, now, self._stats.host)))

    def _fail(self, ticket: Ticket, error: Exception) -> None:
        """End a request by its own fault; the others don't notice."""
        self._leave(ticket, keep=False)
        self._stats.failed += 1
        self._end(ticket, error)

    def _leave(self, ticket: Ticket, *, keep: bool) -> None:
        if ticket.sequence is not None:
            begin = perf_counter()
            ticket.sequence.close(keep=keep)
            ticket.sequence = None
            self._stats.engine_maintenance += perf_counter() - begin
        if ticket in self._lanes:
            # Last, so that whoever sees no request running sees its pages given back.
            self._lanes[self._lanes.index(ticket)] = None
            self._queue.changed = True

    def _end(self, ticket: Ticket, last: Done | BaseException) -> None:
        ticket.state = State.FINISHED
        # Not while holding our lock: a handle may be collected, and so ask for the lock, in a thread that is
        # just then inside some mailbox.
        if isinstance(last, Done):
            ticket.mailbox.put(last)
        else:
            ticket.mailbox.fail(last)
        with self._condition:
            if ticket.gone:
                self._outstanding.discard(ticket)

    def _end_all(self) -> None:
        """The worker is leaving: nobody may wait for it any longer."""
        with self._condition:
            self._stopping = True
            tickets, self._inbox = list(self._outstanding), []
        for ticket in tickets:
            error = UnavailableError("the engine was closed before the answer was complete")
            if self._error is not None:
                error = UnavailableError(
                    f"the engine failed before the answer was complete ({_name(self._error)}); "
                    f"load the model again"
                )
                error.__cause__ = self._error
            ticket.sequence = None
            self._end(ticket, error)
        self._lanes = [None] * len(self._lanes)
        self._queue.waiting.clear()

    def _ticket(self, lane: int) -> tuple[Ticket, Sequence]:
        ticket = self._lanes[lane]
        assert ticket is not None
        assert ticket.sequence is not None
        return ticket, ticket.sequence


def _gone(record: np.ndarray) -> np.ndarray:
    """In place of the Program once it is given up, so that its memory isn't kept."""
    raise UnavailableError("the engine is closed; load the model again")


def _name(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
