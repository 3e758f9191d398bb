"""The engine under random use, one iteration of its worker at a time: nothing lost, every answer right."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from hypothesis.stateful import run_state_machine_as_test as run_machine

from ninfer.engine import Core, Done, Event, Handle, Marks, Policy, PromptProgress, Request, Started
from ninfer.engine.mailbox import Mailbox
from ninfer.engine.sequence import pages_for
from ninfer.events import FinishReason
from ninfer.ops import SamplingParams
from ninfer.runtime import Limits, Program, plan_model
from tests.engine.guesses import Guesses, sometimes
from tests.engine.harness import GREEDY, Constrained, Session, settle, text
from tests.engine.oracle import greedy_answer
from tests.runtime.toy import PUBLIC, ToyModel, ToyPredictor

CONTEXT = 256
CLOSER = (7, 8)


class Stepped(Core):
    """A core without a worker: the test is the worker, so that every run can be repeated."""

    def _work(self) -> None:
        pass

    @property
    def idle(self) -> bool:
        return not (self._inbox or self._queue.waiting or any(self._lanes))

    def step(self) -> None:
        if not self.idle:
            self._wait()
            self._iterate()


@dataclass(eq=False)
class Case:
    """A request, what it must answer, and what it has said so far."""

    request: Request
    expected: list[int]
    mailbox: Mailbox
    handle: Handle | None
    may_be_cut: bool = False
    events: list[Event] = field(default_factory=list)

    def read(self) -> None:
        while (event := self.mailbox.take(wait=False)) is not None:
            self.events.append(event)

    @property
    def computed(self) -> int:
        """Prompt tokens computed for it, as far as it was told."""
        reused = sum(event.reused_tokens for event in self.events if isinstance(event, Started))
        done = [event.processed_tokens for event in self.events if isinstance(event, PromptProgress)]
        return done[-1] - reused if done else 0

    def check_end(self) -> list[int]:
        """Everything that holds of a request that has ended; its output."""
        done = self.events[-1]
        assert isinstance(done, Done)
        assert sum(isinstance(event, Done) for event in self.events) == 1
        statistics, prompt = done.statistics, self.request.prompt
        ids = list(statistics.token_ids)
        started = [index for index, event in enumerate(self.events) if isinstance(event, Started)]
        if statistics.finish_reason is FinishReason.CANCELLED:
            assert self.may_be_cut
            assert ids == self.expected[: len(ids)]
            assert started in ([], [0])
        else:
            assert ids == self.expected
            assert started == [0]
            assert self.computed == len(prompt) - statistics.reused_tokens
        assert 0 <= statistics.reused_tokens < len(prompt)
        assert not statistics.reused_tokens or self.request.reuse
        said = text(self.events)
        assert said.replace("closed ", "".join(f"{token} " for token in CLOSER)) == "".join(
            f"{token} " for token in ids
        )
        return ids


LENGTHS = st.one_of(
    st.sampled_from([1, 2, 62, 63, 64, 65, 66, 126, 127, 128, 129, 130, 191, 192, 193, 255, 256]),
    st.integers(1, 200),
)
COUNTS = st.one_of(st.none(), st.integers(1, 12), st.integers(50, 80))
SAMPLINGS = st.sampled_from(
    [GREEDY, GREEDY, SamplingParams(temperature=0.0, presence_penalty=3.0, frequency_penalty=1.1)]
)


def few(ledger: Sequence[int]) -> set[int] | None:
    """A rule for masks: at every third place anything, else less than half of the tokens."""
    if len(ledger) % 3 == 0:
        return None
    return {token for token in range(PUBLIC) if (token + len(ledger)) % 5 < 2}


RULES = st.sampled_from([None, None, few])
TAILS = st.lists(st.integers(0, PUBLIC - 1), min_size=1, max_size=6)


class Machine(RuleBasedStateMachine):
    """Random requests over tiny pools."""

    @initialize(
        recurrent=st.booleans(),
        concurrency=st.integers(1, 4),
        width=st.integers(1, 6),
        predicts=st.booleans(),
        snapshots=st.integers(0, 4),
        spare=st.sampled_from([0, 0, 64, 192, 512]),
        anchors=st.integers(0, 2),
    )
    def begin(
        self,
        recurrent: bool,
        concurrency: int,
        width: int,
        predicts: bool,
        snapshots: int,
        spare: int,
        anchors: int,
    ) -> None:
        self.recurrent, self.snapshots = recurrent, snapshots
        predicts &= width > 1
        self.stateful = recurrent or predicts
        predictor = ToyPredictor(recurrent, lambda count: sometimes(count) == 0) if predicts else None
        model = ToyModel(recurrent, predictor=predictor)
        limits = Limits(
            max_context=CONTEXT,
            prefill_chunk=128,
            max_concurrency=concurrency,
            kv_capacity=CONTEXT + spare,
            state_slots=snapshots,
            width=width,
        )
        plan = plan_model(model, limits)
        self.core = Stepped(
            Program(model, plan).run,
            plan,
            public_tokens=PUBLIC,
            policy=Policy(max_pending=4, pending_timeout=None, turn_anchors=anchors),
            drafts=None if predicts else Guesses(recurrent, sometimes),
        )
        self.cases: list[Case] = []
        self.ledgers: list[list[int]] = []
        self.computed = 0

    def teardown(self) -> None:
        if hasattr(self, "core"):
            self.rest()

    # Requests

    def submit(
        self,
        data: st.DataObject,
        prompt: Sequence[int],
        count: int | None = None,
        *,
        plain: bool = False,
    ) -> Case | None:
        """Ask for an answer to the prompt, or nothing if the queue is full. plain: nothing out of the way."""
        if len(self.core._outstanding) >= self.core.plan.concurrency + self.core.policy.max_pending:
            return None
        prompt = list(prompt)[:CONTEXT]
        room = CONTEXT - len(prompt) + 1
        count = count if plain else data.draw(COUNTS, "count")
        limit = room if count is None else min(count, room)
        stop = budget = rule = None
        reuse, sampling = True, GREEDY
        if not plain:
            reuse = data.draw(st.integers(0, 7), "reuse") > 0
            sampling = data.draw(SAMPLINGS, "sampling")
            rule = data.draw(RULES, "rule")
            if data.draw(st.integers(0, 3), "ends early") == 0:
                index = data.draw(st.integers(0, limit - 1), "stop at")
                stop = greedy_answer(
                    prompt, index + 1, recurrent=self.recurrent, sampling=sampling, rule=rule
                )[index]
            elif data.draw(st.integers(0, 3), "thinks") == 0:
                budget = data.draw(st.integers(1, 5), "budget")
                budget = budget if budget + len(CLOSER) + 1 <= limit else None
        points = st.integers(0, len(prompt))
        marks = Marks(
            tuple(sorted(set(data.draw(st.lists(points, max_size=4), "boundaries")))),
            data.draw(st.one_of(st.none(), points), "preamble"),
            data.draw(st.one_of(st.none(), points), "opener"),
        )
        asked = Request(tuple(prompt), sampling, count, budget, marks, reuse)
        expected = greedy_answer(
            prompt,
            limit,
            recurrent=self.recurrent,
            sampling=sampling,
            stop=stop,
            think=budget,
            closer=CLOSER,
            rule=rule,
        )
        chosen = {"stop": stop, "budget": budget, "closer": CLOSER}
        session = Session(**chosen) if rule is None else Constrained(prompt, rule, **chosen)
        handle = self.core.submit(asked, session)
        case = Case(asked, expected, handle._mailbox, handle)
        self.cases.append(case)
        return case

    def known(self, data: st.DataObject) -> list[int]:
        return self.ledgers[data.draw(st.integers(0, len(self.ledgers) - 1), "which")]

    @rule(data=st.data(), seed=st.integers(0, 4), tokens=LENGTHS)
    def fresh(self, data: st.DataObject, seed: int, tokens: int) -> None:
        self.submit(data, [(seed + 1) * i % PUBLIC for i in range(1, tokens + 1)])

    @precondition(lambda self: self.ledgers)
    @rule(data=st.data(), tail=TAILS)
    def extend(self, data: st.DataObject, tail: list[int]) -> None:
        self.submit(data, [*self.known(data), *tail])

    @precondition(lambda self: self.ledgers)
    @rule(data=st.data())
    def shorten(self, data: st.DataObject) -> None:
        ledger = self.known(data)
        self.submit(data, ledger[: data.draw(st.integers(1, len(ledger)), "tokens")])

    @precondition(lambda self: self.ledgers)
    @rule(data=st.data(), tail=TAILS, more=LENGTHS)
    def edit(self, data: st.DataObject, tail: list[int], more: int) -> None:
        ledger = self.known(data)
        cut = data.draw(st.integers(0, len(ledger)), "cut")
        self.submit(data, [*ledger[:cut], *tail, *ledger[cut + len(tail) : cut + more]])

    @rule(data=st.data(), talk=st.integers(0, 20), tokens=st.sampled_from([64, 100, 130]))
    def same_preamble(self, data: st.DataObject, talk: int, tokens: int) -> None:
        self.submit(data, [*(3 * i % PUBLIC for i in range(tokens)), talk, 5, talk])

    @rule(data=st.data(), seed=st.integers(0, 4), stem=LENGTHS, tails=st.lists(TAILS, min_size=2, max_size=5))
    def together(self, data: st.DataObject, seed: int, stem: int, tails: list[list[int]]) -> None:
        """Several prompts that begin alike, at the same time."""
        for tail in tails:
            self.submit(data, [*((seed + 7) * i % PUBLIC for i in range(stem)), *tail])

    # What consumers do

    @precondition(lambda self: self.cases)
    @rule(data=st.data(), gone=st.booleans())
    def leave(self, data: st.DataObject, gone: bool) -> None:
        """Cancel a request, or drop its handle."""
        case = self.cases[data.draw(st.integers(0, len(self.cases) - 1), "whose")]
        case.may_be_cut = True
        if case.handle is not None and not gone:
            case.handle.cancel()
        case.handle = None if gone else case.handle

    @precondition(lambda self: self.cases)
    @rule(data=st.data())
    def read(self, data: st.DataObject) -> None:
        self.cases[data.draw(st.integers(0, len(self.cases) - 1), "whose")].read()

    # What the worker does

    @rule(iterations=st.integers(1, 4))
    def step(self, iterations: int) -> None:
        for _ in range(iterations):
            self.core.step()
            self.books()

    @rule()
    def rest(self) -> None:
        """Run until there is nothing to do; then nothing may be taken or owed, and every answer be right."""
        for _ in range(5000):
            if self.core.idle:
                break
            self.core.step()
            self.books()
        assert self.core.idle
        settle(self.core)
        for case in self.cases:
            case.read()
            self.computed += case.computed
            self.ledgers.append([*case.request.prompt, *case.check_end()][:CONTEXT])
            case.handle = None
        self.cases.clear()
        del self.ledgers[:-8]
        assert not self.core._outstanding
        assert self.core.statistics().prefill_tokens == self.computed
        assert self.core.statistics().failed == 0

    @rule()
    def clear(self) -> None:
        """The cache is emptied, except for what lanes use."""
        self.core._pools.cache.clear()

    @rule(data=st.data(), seed=st.integers(0, 4), tokens=LENGTHS, count=st.integers(1, 70), tail=TAILS)
    def converse(self, data: st.DataObject, seed: int, tokens: int, count: int, tail: list[int]) -> None:
        """With nobody else about, the next turn resumes where the last one ended."""
        self.rest()
        turn = self.submit(data, [(seed + 1) * i % PUBLIC for i in range(1, tokens + 1)], count, plain=True)
        self.rest()
        assert turn is not None
        prompt = [*turn.request.prompt, *turn.expected, *tail]
        if len(prompt) > CONTEXT:
            return
        follow = self.submit(data, prompt, 3, plain=True)
        self.rest()
        assert follow is not None
        done = follow.events[-1]
        assert isinstance(done, Done)
        if self.snapshots or not self.stateful:
            assert done.statistics.reused_tokens >= len(turn.request.prompt) + len(turn.expected) - 1
        else:
            assert done.statistics.reused_tokens == 0

    @rule(data=st.data(), seed=st.integers(0, 4), tokens=LENGTHS, iterations=st.integers(1, 12), tail=TAILS)
    def interrupt(
        self, data: st.DataObject, seed: int, tokens: int, iterations: int, tail: list[int]
    ) -> None:
        """With nobody else about, what was cancelled is resumed where it stood."""
        self.rest()
        cut = self.submit(data, [(seed + 1) * i % PUBLIC for i in range(2, tokens + 2)], 40, plain=True)
        assert cut is not None
        for _ in range(iterations):
            self.core.step()
            self.books()
        assert cut.handle is not None
        cut.handle.cancel()
        cut.may_be_cut = True
        self.rest()
        done, progress = cut.events[-1], [e for e in cut.events if isinstance(e, PromptProgress)]
        assert isinstance(done, Done)
        ids = list(done.statistics.token_ids)
        prompt = [*cut.request.prompt, *ids, *tail]
        if not progress or len(prompt) > CONTEXT:
            return
        frontier = progress[-1].processed_tokens + max(len(ids) - 1, 0)
        follow = self.submit(data, prompt, 3, plain=True)
        self.rest()
        assert follow is not None
        done = follow.events[-1]
        assert isinstance(done, Done)
        if self.snapshots or not self.stateful:
            assert done.statistics.reused_tokens >= frontier

    @invariant()
    def books(self) -> None:
        """Every page and slot is accounted for between any two units."""
        if not hasattr(self, "core"):
            return
        core, pools = self.core, self.core._pools
        pools.pages.check()
        pools.slots.check()
        pools.cache.check()
        lanes = [ticket for ticket in core._lanes if ticket is not None]
        slots = [slot for ticket in lanes if ticket.sequence is not None for slot in ticket.sequence._own]
        assert len(slots) == 2 * len(lanes) * self.stateful
        assert len(set(slots) | set(pools.cache._snapshots)) == len(slots) + len(pools.cache._snapshots)
        assert pools.slots.capacity - pools.slots.free == len(slots) + len(pools.cache._snapshots)
        # A page is locked as well until it has been copied, which a control unit may precede.
        copied = [t.sequence.copy[0] for t in lanes if t.sequence is not None and t.sequence.copy]
        used, promised = set(copied), 0
        for ticket in lanes:
            sequence = ticket.sequence
            assert sequence is not None
            assert len(sequence.pages) + sequence._promised == pages_for(ticket.budget.context)
            assert len(sequence.pages) == pages_for(sequence.frontier)
            promised += sequence._promised
            if self.stateful:
                # A unit reads a state that nobody may overwrite and doesn't write where it reads.
                assert sequence.target in sequence._own
                assert sequence.target != sequence.source
                snapshot = pools.cache._snapshots.get(sequence.source)
                assert sequence.source in (-1, *sequence._own) or (snapshot is not None and snapshot.pins)
            used |= set(sequence.pages)
            # A page that a lane will write is nobody else's.
            if sequence.frontier % 64:
                page = sequence.pages[-1]
                assert pools.pages.users(page) - copied.count(page) == 1
        assert (pools.pages.locked, pools.pages.reserved) == (len(used), promised)
        assert sum(snapshot.pins for snapshot in pools.cache._snapshots.values()) <= len(lanes)
        assert core.statistics().running == len(lanes)


OPTIONS = settings(
    deadline=None,
    report_multiple_bugs=False,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
)


def test_random_use() -> None:
    run_machine(Machine, settings=settings(OPTIONS, max_examples=30, stateful_step_count=25))


@pytest.mark.soak
def test_random_use_for_long() -> None:
    run_machine(Machine, settings=settings(OPTIONS, max_examples=1500, stateful_step_count=60))
