"""The teacher-forced gate: 64 tokens of two drafted answers, each against a prefill of all that stands before
it."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import pytest

from ninfer.api import Engine, EngineOptions, GenerationOptions, Output, Statistics, TokenLogprob

from .asking import GREEDY, NANO, held_out

PROBES = [("story", 0), ("kv512", 0)]
"""A short prompt, and one over more than two chunks."""
OUTPUTS, DRAFTS = 32, 3
SAMPLED = {
    "temperature": 0.7, "top_k": 20, "top_p": 0.8, "presence_penalty": 0.5, "frequency_penalty": 0.3,
    "seed": 20260826,
}  # fmt: skip


def load(**changes: object) -> Engine:
    chosen = {"max_context": 4096, "prefill_chunk": 256, "kv_dtype": "int8", "threads": 1, **changes}
    return Engine.load(NANO, EngineOptions(**chosen))  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def drafting() -> Iterator[Engine]:
    with load(spec="mtp", draft_tokens=DRAFTS, max_concurrency=2) as engine:
        yield engine


@pytest.fixture(scope="module")
def plain() -> Iterator[Engine]:
    with load() as engine:
        yield engine


def prompt(engine: Engine, probe: tuple[str, int]) -> list[int]:
    task = held_out(*probe)
    return list(engine.frontend.render(task.messages, thinking=False).tokens)


def options(**changes: object) -> GenerationOptions:
    chosen = {"max_new": OUTPUTS, "ignore_model_stops": True, "raw": True, "prefix_reuse": False, **GREEDY}
    return GenerationOptions(**{**chosen, **changes})  # type: ignore[arg-type]


def answer(engine: Engine, ids: list[int], **changes: object) -> Statistics:
    *_, done = engine.generate(ids, options(**changes))
    return done.statistics  # type: ignore[union-attr]


def counters(statistics: Statistics) -> tuple[object, ...]:
    s = statistics.speculation
    return statistics.token_ids, s.rounds, s.drafted, s.accepted, s.fallback_steps, s.per_position, s.lengths


def scores(engine: Engine, ids: list[int]) -> TokenLogprob:
    """The likeliest tokens after these."""
    events = engine.generate(ids, options(max_new=1, logprobs=20))
    [found] = [one for event in events if isinstance(event, Output) for one in event.logprobs]
    return found


@pytest.mark.parametrize("probe", PROBES, ids=lambda probe: probe[0])
def test_the_gate(drafting: Engine, plain: Engine, probe: tuple[str, int]) -> None:
    ids = prompt(plain, probe)
    greedy = answer(drafting, ids)
    assert greedy.accepted_tokens > 0
    answer(drafting, ids, **SAMPLED)
    assert counters(answer(drafting, ids)) == counters(greedy)
    wrong = []
    for index, token in enumerate(greedy.token_ids):
        fed = [*ids, *greedy.token_ids[:index]]
        found = scores(plain, fed)
        if index in (0, 15, 31):
            assert scores(drafting, fed) == found
        best, own = found.top[0][1], dict(found.top).get(token, -1e9)
        if found.top[0][0] != token:
            wrong.append((index, best - own))
            assert best - own <= 0.5
    assert len(wrong) <= 1, wrong


def test_eager_rounds_give_the_same(drafting: Engine) -> None:
    with load(spec="mtp", draft_tokens=DRAFTS, cuda_graph=False) as eager:
        for probe in PROBES:
            ids = prompt(eager, probe)
            for changes in ({}, SAMPLED):
                seen = [counters(answer(engine, ids, **changes)) for engine in (drafting, eager)]
                assert seen[0] == seen[1]


def test_two_at_a_time_give_the_same(drafting: Engine) -> None:
    ids = [prompt(drafting, probe) for probe in PROBES]
    ask = partial(answer, drafting)
    for changes in ({}, SAMPLED):
        wanted = counters(ask(ids[0])), counters(ask(ids[1], **changes))
        running = [drafting.generate(ids[0], options()), drafting.generate(ids[1], options(**changes))]
        seen = []
        for generation in running:
            *_, done = generation
            seen.append(counters(done.statistics))  # type: ignore[union-attr]
        assert tuple(seen) == wanted
