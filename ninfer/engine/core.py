"""The engine: a queue of requests and one worker that owns every change of their state.

Other threads only submit, cancel and read events. An iteration of the worker ends requests, admits one, runs
one unit of work, commits it and publishes what came of it.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from threading import Condition, Thread, current_thread
from time import monotonic, perf_counter

import numpy as np

from ninfer.engine.admission import Admission, Policy
from ninfer.engine.drafts import DraftSource, propose
from ninfer.engine.events import Done, Output, PromptProgress, Started
from ninfer.engine.handle import Handle
from ninfer.engine.output import OutputSession
from ninfer.engine.prefix import PrefixCache
from ninfer.engine.request import Request, State, Ticket, budget
from ninfer.engine.scheduler import Choice, choose, may_admit
from ninfer.engine.sequence import Pools, Sequence
from ninfer.engine.stats import Health, RuntimeStatistics
from ninfer.engine.taps import next_cut
from ninfer.engine.units import UnitWriter
from ninfer.errors import (
    ModelError,
    OverloadedError,
    QueueTimeoutError,
    UnavailableError,
)
from ninfer.events import FinishReason, Step
from ninfer.runtime.pages import PagePool
from ninfer.runtime.plan import Plan
from ninfer.runtime.slots import SlotPool

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
        pages, slots = PagePool(plan.pages + plan.copies), SlotPool(plan.slots)
        recurrent = plan.slots > 0
        cache = PrefixCache(pages, slots, recurrent=recurrent, snapshots=plan.snapshots)
        self._pools = Pools(pages, slots, cache, plan.copies, recurrent)
        self._writer = UnitWriter(plan.shape, record)
        self._lanes: list[Ticket | None] = [None] * plan.concurrency
        self._queue = Admission(self._pools, plan, self.policy)
        self._decoded_last = False
        self._stats = RuntimeStatistics()
        self._egress: np.ndarray | None = None
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
        states = self._states()
        pages, cache = self._pools.pages, self._pools.cache
        return replace(
            self._stats,
            finished=dict(self._stats.finished),
            evicted_blocks=cache.evicted_blocks,
            evicted_snapshots=cache.evicted_snapshots,
            waiting=len(self._queue.waiting) + len(self._inbox),
            running=len(states),
            prefilling=states.count(State.PREFILL),
            free_pages=pages.free,
            active_pages=pages.locked,
            reserved_pages=pages.reserved,
            cached_blocks=cache.blocks,
            snapshots=cache.snapshots_in_use,
        )

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
        begin = perf_counter()
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
        self._stats.boundary_seconds += perf_counter() - begin
        if choice is Choice.CONTROL:
            self._control()
        elif choice is Choice.PREFILL:
            self._prefill()
        elif choice is Choice.DECODE:
            self._decode()
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
        self._stats.admitted += 1
        self._stats.reused_tokens += ticket.reused
        ticket.mailbox.put(Started(len(ticket.request.prompt), ticket.reused))

    # Units of work

    def _do(self, record: np.ndarray) -> float:
        """Have the Program do a unit; its results stand in `_tokens` and `_produced`. Device seconds."""
        egress = self._run(record)
        if egress is not self._egress:
            self._egress, self._seconds = egress, egress["seconds"].data
            self._tokens, self._produced = egress["tokens"][0].data, egress["produced"][0].data
        return self._seconds[0]

    def _prefill(self) -> None:
        [lane] = [i for i, t in enumerate(self._lanes) if t is not None and t.state is State.PREFILL]
        ticket, sequence = self._ticket(lane)
        begin = perf_counter()
        prompt_tokens = len(ticket.request.prompt)
        end = next_cut(sequence.frontier, prompt_tokens, self.plan.prefill_chunk, ticket.taps)
        count = end - sequence.frontier
        sequence.map_to(end)
        device = self._do(self._writer.prefill(lane, ticket, end))
        sequence.advance(count)
        if self._queue.reuses(ticket):
            kinds = [tap.kind for tap in ticket.taps if tap.position == end]
            if kinds:
                sequence.capture(kinds[0])
            elif end == prompt_tokens:
                sequence.share()
        now = perf_counter()
        ticket.prefill_seconds += now - begin
        self._stats.prefill_tokens += count
        self._stats.prefill_seconds += now - begin
        self._stats.prefill_device_seconds += device
        ticket.mailbox.put(PromptProgress(prompt_tokens, end, now - ticket.admitted))
        if end == prompt_tokens:
            self._queue.changed = True
            ticket.state = State.DECODE_READY
            ticket.first_token = now
            first = [self._tokens[0]]
            self._settle(ticket, first, self._preview(ticket, first))

    def _decode(self) -> None:
        """One round of all requests that are ready for it."""
        lanes, tickets, sequences = [], [], []
        for lane, ticket in enumerate(self._lanes):
            if ticket is not None and ticket.state is State.DECODE_READY:
                assert ticket.sequence is not None
                lanes.append(lane)
                tickets.append(ticket)
                sequences.append(ticket.sequence)
        begin = perf_counter()
        drafts: list[list[int]] = [[]] * len(lanes)
        if self._drafts is not None:
            drafts = [propose(self._drafts, t, self.plan, self._public_tokens) for t in tickets]
        for sequence, draft in zip(sequences, drafts, strict=True):
            sequence.map_to(sequence.frontier + 1 + len(draft))
        device = self._do(self._writer.round(lanes, tickets, drafts))
        width = self.plan.shape.width if self._drafts is not None and any(drafts) else 1
        tokens = self._tokens[: len(lanes) * width].tolist()
        if width == 1:
            offers = [[token] for token in tokens]
        else:
            produced = self._produced[: len(lanes)].tolist()
            offers = [tokens[row * width : row * width + count] for row, count in enumerate(produced)]
        steps = [self._preview(ticket, offer) for ticket, offer in zip(tickets, offers, strict=True)]
        counts = [0 if isinstance(step, Exception) else step.committed for step in steps]
        if width == 1:
            for sequence in sequences:
                sequence.advance(1)
        else:
            device += self._do(self._writer.fold(counts))
            for sequence, count in zip(sequences, counts, strict=True):
                if count:
                    sequence.advance(count)
                    sequence.trim()
        now = perf_counter()
        stats = self._stats
        stats.rounds += 1
        stats.row_rounds += len(lanes)
        stats.decode_tokens += sum(counts)
        if width > 1:
            stats.drafted_tokens += sum(map(len, drafts))
            stats.accepted_tokens += sum(map(len, offers)) - len(offers)
        for ticket, offer, step in zip(tickets, offers, steps, strict=True):
            ticket.decode_seconds += now - begin
            ticket.rounds += 1
            self._settle(ticket, offer, step)
        stats.decode_seconds += perf_counter() - begin
        stats.decode_device_seconds += device

    def _control(self) -> None:
        """Feed the texts that close thinking blocks; they were committed without being drawn."""
        due = [i for i, t in enumerate(self._lanes) if t is not None and t.state is State.CONTROL_READY]
        span = len(self._ticket(due[0])[0].session.closer)
        # Rows of a unit are equally long; a closer of another length has its turn in the next iteration.
        lanes = [lane for lane in due if len(self._ticket(lane)[0].session.closer) == span]
        tickets = [self._ticket(lane)[0] for lane in lanes]
        begin = perf_counter()
        for ticket, sequence in zip(tickets, (self._ticket(lane)[1] for lane in lanes), strict=True):
            sequence.ledger += ticket.session.closer
            sequence.map_to(sequence.frontier + span)
        device = self._do(self._writer.control(lanes, tickets, span))
        self._stats.control_tokens += span * len(tickets)
        self._stats.control_device_seconds += device
        for ticket in tickets:
            assert ticket.sequence is not None
            ticket.sequence.advance(span)
            ticket.state = State.DECODE_READY
            ticket.decode_seconds += perf_counter() - begin
            try:
                step = ticket.session.commit_closer()
            except Exception as error:
                self._fail(ticket, error)
                continue
            ticket.output += ticket.session.closer
            self._publish(ticket, step)
            if reason := step.finish or ticket.budget.finish(len(ticket.output)):
                self._finish(ticket, reason)
        self._stats.control_seconds += perf_counter() - begin

    # Output

    def _preview(self, ticket: Ticket, tokens: list[int]) -> Step | Exception:
        """How many of the tokens belong to the output, and what they mean; an error is the request's own."""
        if min(tokens) < 0:
            return ModelError("the model's scores aren't finite; the weights are damaged")
        try:
            return ticket.session.accept(tokens)
        except Exception as error:
            return error

    def _settle(self, ticket: Ticket, tokens: list[int], step: Step | Exception) -> None:
        """Take committed tokens into the ledger, publish them, and end the request if it is at its end."""
        if isinstance(step, Exception):
            self._fail(ticket, step)
            return
        assert ticket.sequence is not None
        committed = tokens[: step.committed]
        ticket.sequence.ledger += committed
        ticket.output += committed
        self._publish(ticket, step)
        reason = step.finish or ticket.budget.finish(len(ticket.output))
        if reason is not None:
            self._finish(ticket, reason)
        elif ticket.session.closer_due:
            ticket.state = State.CONTROL_READY

    @staticmethod
    def _publish(ticket: Ticket, step: Step) -> None:
        for delta in step.deltas:
            ticket.mailbox.put_text(Output(delta.channel, delta.text))

    # The end of a request

    def _finish(self, ticket: Ticket, reason: FinishReason) -> None:
        """Give everything back, leaving the state at the frontier to the cache, and tell the consumer."""
        self._leave(ticket, keep=self._queue.reuses(ticket))
        try:
            self._publish(ticket, ticket.session.close())
        except Exception as error:
            self._stats.failed += 1
            self._end(ticket, error)
            return
        self._stats.finished[reason] = self._stats.finished.get(reason, 0) + 1
        self._end(ticket, Done(ticket.statistics(reason, perf_counter())))

    def _fail(self, ticket: Ticket, error: Exception) -> None:
        """End a request by its own fault; the others don't notice."""
        self._leave(ticket, keep=False)
        self._stats.failed += 1
        self._end(ticket, error)

    def _leave(self, ticket: Ticket, *, keep: bool) -> None:
        if ticket.sequence is not None:
            ticket.sequence.close(keep=keep)
            ticket.sequence = None
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
