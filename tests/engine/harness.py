"""An engine over the model without weights, and sessions that publish every token as its number."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ninfer.engine import Core, Done, Event, Handle, Marks, Output, Policy, Request, Started, Statistics
from ninfer.engine.drafts import DraftSource
from ninfer.events import Channel, Delta, FinishReason, Step
from ninfer.ops import SamplingParams
from ninfer.runtime import Limits, Program, plan_model
from tests.runtime.toy import PUBLIC, ToyModel

GREEDY = SamplingParams(temperature=0.0)


class Session:
    """Publishes each token as its number; stops after `stop` (a token); thinks for `budget` tokens."""

    def __init__(
        self,
        stop: int | None = None,
        budget: int | None = None,
        fail_at: int | None = None,
        closer: tuple[int, ...] = (7, 8),
    ) -> None:
        self.stop, self.budget, self.fail_at, self.closer = stop, budget, fail_at, closer
        self.finish: FinishReason | None = None
        self.reasoning_tokens = self.thinking_model_tokens = self.control_tokens = 0
        self._seen = 0

    @property
    def thinking_remaining(self) -> int | None:
        if self.budget is None or self.control_tokens:
            return None
        return self.budget - self.thinking_model_tokens

    @property
    def closer_due(self) -> bool:
        return self.finish is None and self.thinking_remaining == 0

    def accept(self, token_ids: Sequence[int]) -> Step:
        deltas = []
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
        return Step(tuple(deltas), self.finish, len(deltas))

    def commit_closer(self) -> Step:
        self.control_tokens = len(self.closer)
        return Step((Delta(Channel.CONTENT, "closed "),), None, len(self.closer))

    def close(self) -> Step:
        return Step()


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
    return Core(Program(model, plan).run, plan, public_tokens=PUBLIC, policy=policy, drafts=drafts)


def request(
    prompt: Iterable[int],
    count: int | None = 8,
    *,
    sampling: SamplingParams = GREEDY,
    marks: Marks | None = None,
    reuse: bool = True,
    thinking_budget: int | None = None,
) -> Request:
    return Request(tuple(prompt), sampling, count, thinking_budget, marks or Marks(), reuse)


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
