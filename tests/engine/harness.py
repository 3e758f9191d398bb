"""An engine over the model without weights, and sessions that publish every token as its number."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from threading import Semaphore

import numpy as np

from ninfer.engine import Core, Done, Event, Handle, Marks, Output, Policy, Request, Started, Statistics
from ninfer.engine.drafts import DraftSource
from ninfer.events import Channel, Delta, FinishReason, Step
from ninfer.ops import SamplingParams
from ninfer.runtime import Limits, Program, plan_model
from ninfer.runtime.records import Unit
from tests.runtime.toy import PUBLIC, ToyModel, expected_answer

GREEDY = SamplingParams(temperature=0.0)


class Session:
    """Publishes each token as its number; stops after `stop` (a token); thinks for `budget` tokens. Every
    token but the stop is content."""

    def __init__(
        self,
        stop: int | None = None,
        budget: int | None = None,
        fail_at: int | None = None,
        closer: tuple[int, ...] = (7, 8),
    ) -> None:
        self.stop, self.budget, self.fail_at, self.closer = stop, budget, fail_at, closer
        self.finish: FinishReason | None = None
        self.stop_string: str | None = None
        self.reasoning_tokens = self.thinking_model_tokens = self.control_tokens = 0
        self._seen = 0

    @property
    def constrained(self) -> bool:
        return False

    def fill_masks(self, drafts: Sequence[int], masks: np.ndarray) -> int:
        raise AssertionError("this session has no masks")

    @property
    def thinking_remaining(self) -> int | None:
        if self.budget is None or self.control_tokens:
            return None
        return self.budget - self.thinking_model_tokens

    @property
    def closer_due(self) -> bool:
        return self.finish is None and self.thinking_remaining == 0

    def accept(self, token_ids: Sequence[int]) -> Step:
        deltas: list[Delta] = []
        content: list[int] = []
        for token in token_ids:
            self._seen += 1
            if self._seen == self.fail_at:
                raise ValueError("this session breaks here")
            if self.thinking_remaining is not None:
                self.thinking_model_tokens += 1
                self.reasoning_tokens += 1
            deltas.append(Delta(Channel.CONTENT, f"{token} "))
            if token == self.stop:
                self.finish = FinishReason.STOP_TOKEN
                break
            content.append(len(deltas) - 1)
        return Step(tuple(deltas), self.finish, len(deltas), tuple(content))

    def commit_closer(self) -> Step:
        self.control_tokens = len(self.closer)
        return Step((Delta(Channel.CONTENT, "closed "),), None, len(self.closer))

    def close(self) -> Step:
        return Step()


Rule = Callable[[Sequence[int]], set[int] | None]
"""Which tokens may follow a sequence (the prompt and the output so far); None: any."""


class Constrained(Session):
    """Asks for masks by a rule, and breaks if it gets a token that the rule forbids."""

    def __init__(self, prompt: Sequence[int], rule: Rule, **options) -> None:
        super().__init__(**options)
        self.ledger, self.rule = list(prompt), rule
        self.asked: list[int] = []
        """How many masks there were each time."""

    @property
    def constrained(self) -> bool:
        return True

    def fill_masks(self, drafts: Sequence[int], masks: np.ndarray) -> int:
        assert masks.dtype == np.int32
        assert masks.shape[0] == 1 + len(drafts)
        masks[:] = 0x55555555  # what a forgotten row would say
        filled, restricted = 0, False
        for row in range(1 + len(drafts)):
            allowed = self.rule([*self.ledger, *drafts[:row]])
            restricted |= allowed is not None
            _fill(masks[row], allowed)
            filled += 1
            if row < len(drafts) and allowed is not None and drafts[row] not in allowed:
                break
        self.asked.append(filled if restricted else 0)
        return self.asked[-1]

    def accept(self, token_ids: Sequence[int]) -> Step:
        step = super().accept(token_ids)
        for token in token_ids[: step.committed]:
            allowed = self.rule(self.ledger)
            assert allowed is None or token in allowed, f"{token} is forbidden"
            self.ledger.append(token)
        return step

    def commit_closer(self) -> Step:
        self.ledger += self.closer
        return super().commit_closer()


def _fill(mask: np.ndarray, allowed: set[int] | None) -> None:
    words = mask.view(np.uint32)
    words[:] = 0xFFFFFFFF if allowed is None else 0
    for token in allowed or ():
        words[token // 32] |= np.uint32(1 << token % 32)


@dataclass(frozen=True)
class Note:
    """A unit of work as the Program got it; `tokens` and `positions` are those of the live columns."""

    unit: Unit
    rows: int
    tokens: tuple[int, ...]
    positions: tuple[int, ...]


class Gate:
    """Stands before the Program: notes every unit and, while shut, lets units through one by one."""

    def __init__(self, *, shut: bool = True) -> None:
        self.notes: list[Note] = []
        self._shut = shut
        self._arrived, self._permits = Semaphore(0), Semaphore(0)

    def through(self, run: Callable[[np.ndarray], np.ndarray]) -> Callable[[np.ndarray], np.ndarray]:
        def guarded(record: np.ndarray) -> np.ndarray:
            fields = record[0]
            unit, count = Unit(fields["unit"]), int(fields["rows"]) * int(fields["columns"])
            live = [i for i in range(count) if fields["positions"][i] >= 0]
            tokens, positions = ([int(fields[name][i]) for i in live] for name in ("tokens", "positions"))
            self.notes.append(Note(unit, int(fields["rows"]), tuple(tokens), tuple(positions)))
            self._arrived.release()
            if self._shut:
                self._permits.acquire()
            return run(record)

        return guarded

    def arrive(self) -> Note:
        """Wait until the worker stands before one more unit than the last time."""
        assert self._arrived.acquire(timeout=20), "no unit came"
        return self.notes[-1]

    def step(self) -> None:
        """Let one unit through."""
        self._permits.release()

    def open(self) -> None:
        """Let everything through from now on."""
        self._shut = False
        self._permits.release()


def make_core(
    *,
    recurrent: bool = True,
    concurrency: int = 1,
    context: int = 512,
    capacity: int | None = None,
    snapshots: int | None = None,
    chunk: int = 128,
    width: int = 1,
    policy: Policy | None = None,
    drafts: DraftSource | None = None,
    model: ToyModel | None = None,
    gate: Gate | None = None,
) -> Core:
    model = model or ToyModel(recurrent)
    limits = Limits(
        max_context=context,
        prefill_chunk=chunk,
        max_concurrency=concurrency,
        kv_capacity=capacity,
        state_slots=snapshots,
        width=width,
    )
    plan = plan_model(model, limits)
    run = Program(model, plan).run
    if gate is not None:
        run = gate.through(run)
    return Core(run, plan, public_tokens=PUBLIC, policy=policy, drafts=drafts)


def request(
    prompt: Iterable[int],
    count: int | None = 8,
    *,
    sampling: SamplingParams = GREEDY,
    marks: Marks | None = None,
    reuse: bool = True,
    thinking_budget: int | None = None,
    logprobs: int | None = None,
) -> Request:
    return Request(tuple(prompt), sampling, count, thinking_budget, marks or Marks(), reuse, logprobs)


def drain(handle: Handle) -> tuple[list[int], Statistics, list[Event]]:
    """(ids, statistics, all events) of a request that ends well."""
    events = list(handle)
    assert isinstance(events[0], Started), events
    assert isinstance(events[-1], Done)
    assert sum(isinstance(e, Done) for e in events) == sum(isinstance(e, Started) for e in events) == 1
    statistics = events[-1].statistics
    assert events[0].reused_tokens == statistics.reused_tokens
    return list(statistics.token_ids), statistics, events


def text(events: Iterable[Event]) -> str:
    return "".join(event.text for event in events if isinstance(event, Output))


def settle(core: Core) -> None:
    """Wait until nothing runs or waits, then check that nothing was lost."""
    import time

    for _ in range(5000):
        statistics = core.statistics()
        if not statistics.running and not statistics.waiting:
            break
        time.sleep(0.001)
    pools = core._pools
    pools.pages.check()
    pools.slots.check()
    pools.cache.check()
    assert pools.pages.locked == pools.pages.reserved == 0
    taken = pools.slots.capacity - pools.slots.free
    assert taken == pools.cache.snapshots_in_use


def stop_and_resume(
    core: Core, prompt: Sequence[int], length: int, recurrent: bool
) -> tuple[list[int], Statistics]:
    """Answer until the token at which the answer is to end comes up, then go on behind all that was said:
    what was said, and the second request's statistics."""
    answer = expected_answer(prompt, 10, recurrent)
    stop = answer[length - 1]
    said = answer[: answer.index(stop) + 1]
    ids, statistics, _ = drain(core.submit(request(prompt, 20), Session(stop=stop)))
    assert ids == said
    assert statistics.finish_reason is FinishReason.STOP_TOKEN
    settle(core)
    follow = [*prompt, *ids, 11, 12]
    ids, statistics, _ = drain(core.submit(request(follow, 20), Session()))
    assert ids == expected_answer(follow, 20, recurrent)
    settle(core)
    return said, statistics
