"""The request loop on a scripted program and a scripted output session."""

import time
from collections.abc import Sequence
from typing import cast

import pytest

from ninfer.engine import Done, Event, Output, PromptProgress, Request, Started, run
from ninfer.errors import CapacityError
from ninfer.events import Channel, Delta, FinishReason, Step
from ninfer.runtime import Admission, Decoded, Prefilled, Program, SamplingParams


class ScriptedProgram:
    """Yields 100, 101, ...; prefills in chunks of 4; logs every mutation."""

    def __init__(self, context: int = 64, reused: int = 0) -> None:
        self.context, self.reused = context, reused
        self.ledger: list[int] = []
        self.log: list[tuple[str, int]] = []
        self._next = 100
        self._pending: tuple[int, ...] = ()

    def start(self, prompt: Sequence[int], sampling: SamplingParams, max_output: int | None) -> Admission:
        self.ledger = list(prompt)
        self._fed = self.reused
        capacity = self.context - len(prompt) + 1
        limit = capacity if max_output is None else min(max_output, capacity)
        return Admission(len(prompt), self.reused, limit, max_output is None or max_output > capacity)

    def prefill(self) -> Prefilled:
        self._fed = min(self._fed + 4, len(self.ledger))
        self.log.append(("prefill", self._fed))
        self._pending = self._draw() if self._fed == len(self.ledger) else ()
        return Prefilled(self._fed, len(self.ledger), self._pending)

    def decode(self) -> Decoded:
        assert not self._pending, "decode before commit"
        assert len(self.ledger) <= self.context, "fed past the context"
        self.log.append(("decode", len(self.ledger)))
        self._pending = self._draw()
        return Decoded(self._pending)

    def commit(self, accepted: int) -> None:
        self.ledger += self._pending[:accepted]
        self._pending = ()

    def force(self, tokens: Sequence[int]) -> None:
        self.log.append(("force", len(tokens)))
        self.ledger += tokens

    def _draw(self) -> tuple[int, ...]:
        self._next += 1
        return (self._next - 1,)


class ScriptedSession:
    """Publishes each token as its number; stops at `stop_at`; thinks for `budget` tokens."""

    closer: tuple[int, ...] = (7, 8)

    def __init__(self, stop_at: int | None = None, budget: int | None = None) -> None:
        self.stop_at, self.budget = stop_at, budget
        self.finish: FinishReason | None = None
        self.reasoning_tokens = self.thinking_model_tokens = self.control_tokens = 0
        self.held = "held"

    @property
    def thinking_remaining(self) -> int | None:
        return (
            None if self.budget is None or self.control_tokens else self.budget - self.thinking_model_tokens
        )

    @property
    def closer_due(self) -> bool:
        return self.thinking_remaining == 0

    def accept(self, token_ids: Sequence[int]) -> Step:
        [token] = token_ids
        self.thinking_model_tokens += self.thinking_remaining is not None
        self.finish = FinishReason.STOP_TOKEN if token == self.stop_at else None
        deltas = () if self.finish else (Delta(Channel.CONTENT, f"{token} "),)
        return Step(deltas, self.finish, 1)

    def commit_closer(self) -> Step:
        self.control_tokens = len(self.closer)
        return Step((Delta(Channel.REASONING, "closed"),), None, len(self.closer))

    def close(self) -> Step:
        return Step((Delta(Channel.CONTENT, self.held),) if self.finish is None else ())


def collect(program: ScriptedProgram, request: Request, session: ScriptedSession, **kwargs) -> list[Event]:
    cancelled = kwargs.get("cancelled", lambda: False)
    return list(run(cast(Program, program), request, session, cancelled))


def request(prompt: int = 10, **kwargs) -> Request:
    return Request(tuple(range(prompt)), SamplingParams(temperature=0), **kwargs)


def done(events: list[Event]) -> Done:
    assert isinstance(events[-1], Done)
    assert sum(isinstance(event, Done) for event in events) == 1
    return events[-1]


def test_events_come_in_order_and_the_stop_token_is_committed_but_not_shown():
    program = ScriptedProgram(reused=3)
    events = collect(program, request(), ScriptedSession(stop_at=103))
    assert events[0] == Started(10, 3)
    progress = [event for event in events if isinstance(event, PromptProgress)]
    assert [event.processed_tokens for event in progress] == [7, 10]
    assert [event.text for event in events if isinstance(event, Output)] == ["100 ", "101 ", "102 "]
    statistics = done(events).statistics
    assert statistics.finish_reason is FinishReason.STOP_TOKEN
    assert statistics.token_ids == (100, 101, 102, 103)
    assert statistics.generated_tokens == 4
    assert program.ledger[10:] == [100, 101, 102, 103]


@pytest.mark.parametrize(
    ("max_output", "context", "generated", "reason"),
    [
        (1, 64, 1, FinishReason.OUTPUT_LIMIT),
        (5, 64, 5, FinishReason.OUTPUT_LIMIT),
        (None, 12, 3, FinishReason.CONTEXT_CAPACITY),
        (3, 12, 3, FinishReason.OUTPUT_LIMIT),
        (4, 12, 3, FinishReason.CONTEXT_CAPACITY),
        (None, 10, 1, FinishReason.CONTEXT_CAPACITY),
    ],
)
def test_budgets_end_exactly_and_held_text_is_published(max_output, context, generated, reason):
    events = collect(ScriptedProgram(context), request(max_output=max_output), ScriptedSession())
    statistics = done(events).statistics
    assert (statistics.generated_tokens, statistics.finish_reason) == (generated, reason)
    assert [event.text for event in events if isinstance(event, Output)][-1] == "held"


def test_times_are_the_models_and_not_the_consumers():
    events = []
    for event in run(
        cast(Program, ScriptedProgram()), request(max_output=4), ScriptedSession(), lambda: False
    ):
        time.sleep(0.02)
        events.append(event)
    statistics = done(events).statistics
    assert 0 < statistics.prefill_seconds < 0.02
    assert 0 < statistics.decode_seconds < 0.02


@pytest.mark.parametrize("polls", range(8))
def test_cancel_at_every_boundary_leaves_only_committed_tokens(polls: int):
    program = ScriptedProgram()
    left = iter([False] * polls)
    events = collect(program, request(), ScriptedSession(), cancelled=lambda: next(left, True))
    statistics = done(events).statistics
    assert statistics.finish_reason is FinishReason.CANCELLED
    assert len(program.log) == polls
    assert tuple(program.ledger[10:]) == statistics.token_ids


def test_a_used_up_thinking_budget_commits_the_closer_and_goes_on():
    program = ScriptedProgram()
    events = collect(program, request(max_output=8, thinking_budget=3), ScriptedSession(budget=3))
    statistics = done(events).statistics
    assert statistics.token_ids == (100, 101, 102, 7, 8, 103, 104, 105)
    assert statistics.thinking is not None
    assert (statistics.thinking.model_tokens, statistics.thinking.control_tokens) == (3, 2)
    assert statistics.thinking.applied
    assert ("force", 2) in program.log


@pytest.mark.parametrize(("max_output", "fits"), [(6, True), (5, False), (4, False), (3, True), (2, True)])
def test_a_thinking_budget_must_leave_room_for_its_closer(max_output: int, fits: bool):
    run_it = lambda: collect(  # noqa: E731
        ScriptedProgram(), request(max_output=max_output, thinking_budget=3), ScriptedSession(budget=3)
    )
    if fits:
        assert done(run_it()).statistics.generated_tokens == max_output
    else:
        with pytest.raises(CapacityError, match="thinking budget of 3"):
            run_it()
