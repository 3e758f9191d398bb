"""Log-probabilities, grammars and time limits through the public interface, with ninfer-nano."""

import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from ninfer.api import (
    Channel,
    Done,
    Engine,
    EngineOptions,
    Event,
    GenerationOptions,
    Output,
    Scorer,
    ScorerOptions,
    Statistics,
)
from ninfer.errors import QueueTimeoutError
from ninfer.events import TokenLogprob
from ninfer.runtime import Program

NANO = Path(__file__).resolve().parents[2] / "models" / "ninfer-nano.ninfer"
PLAIN: dict[str, Any] = {"temperature": 0.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
ASKED = [{"role": "user", "content": "What is the capital of France? Answer in a few words."}]


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    threads = torch.get_num_threads()
    with Engine.load(NANO, EngineOptions(threads=1, max_concurrency=4, kv_capacity=4096)) as engine:
        yield engine
    torch.set_num_threads(threads)


def ended(events: list[Event]) -> Statistics:
    assert isinstance(events[-1], Done)
    return events[-1].statistics


def told(events: list[Event]) -> list[TokenLogprob]:
    return [item for event in events if isinstance(event, Output) for item in event.logprobs]


def content(events: list[Event]) -> str:
    return "".join(e.text for e in events if isinstance(e, Output) and e.channel is Channel.CONTENT)


def test_log_probabilities_are_those_of_the_scorer(engine: Engine) -> None:
    options = GenerationOptions(max_new=24, thinking=False, logprobs=5, temperature=0.9, seed=3)
    generation = engine.chat(ASKED, options)
    events = list(generation)
    ids, reports = ended(events).token_ids, told(events)
    assert [item.token_id for item in reports] == list(ids[: len(reports)])
    assert len(ids) - len(reports) <= 1  # the stop token
    assert engine.frontend.decode([item.token_id for item in reports]) == content(events) != ""
    with Scorer.load(NANO, ScorerOptions(context=512, kv_dtype="bf16", threads=1)) as scorer:
        tokens = [*generation.prompt.tokens, *ids]
        scores = scorer.score(tokens, len(generation.prompt.tokens))
    # One pass over everything adds BF16 numbers up in another order than rounds do; a neighbour's value would
    # be off by several.
    gaps = [abs(item.logprob - score) for item, score in zip(reports, scores, strict=False)]
    assert max(gaps) < 0.3
    assert sum(gaps) / len(gaps) < 0.05
    for item in reports:
        assert len(item.top) == 5
        assert dict(item.top).get(item.token_id, item.logprob) == item.logprob
        assert item.top[0][1] >= item.logprob


def test_thoughts_have_none_and_asking_changes_nothing(engine: Engine) -> None:
    options = {"max_new": 200, "thinking": True, "seed": 5, "prefix_reuse": False}
    silent = list(engine.chat(ASKED, GenerationOptions(**options)))
    events = list(engine.chat(ASKED, GenerationOptions(**options, logprobs=0)))
    assert ended(events).token_ids == ended(silent).token_ids
    assert not told(silent)
    assert ended(events).reasoning_tokens > 0
    assert all(not e.logprobs for e in events if isinstance(e, Output) and e.channel is not Channel.CONTENT)
    assert engine.frontend.decode([item.token_id for item in told(events)]).strip() == content(events).strip()
    assert all(item.top == () for item in told(events))


def test_answers_follow_a_grammar_beside_free_ones(engine: Engine) -> None:
    grammar = r"start: /[a-f]{3,9}/ | /[0-9]{4}-[0-9]{2}/"
    options = [
        GenerationOptions(
            max_new=20, thinking=False, seed=seed, prefix_reuse=False, grammar=grammar if seed % 2 else None
        )
        for seed in range(8)
    ]
    alone = [list(engine.chat(ASKED, one)) for one in options]
    generations = [engine.chat(ASKED, one) for one in options]
    together = [list(generation) for generation in generations]
    for one, first, second in zip(options, alone, together, strict=True):
        assert ended(first).token_ids == ended(second).token_ids
        matches = re.fullmatch("[a-f]{3,9}|[0-9]{4}-[0-9]{2}", content(first)) is not None
        assert matches == (one.grammar is not None)


def test_a_request_may_wait_for_as_long_as_it_says(engine: Engine) -> None:
    busy = [engine.chat(ASKED, GenerationOptions(max_new=2000, stop_token_ids=())) for _ in range(4)]
    begin = time.perf_counter()
    waiting = engine.chat(ASKED, GenerationOptions(timeout=0.05))
    with pytest.raises(QueueTimeoutError, match="the request waited 0"):
        list(waiting)
    assert time.perf_counter() - begin < 5
    for generation in busy:
        generation.close()


def test_warming_up_changes_no_answer(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    real = Program.warm_up
    monkeypatch.setattr(Program, "warm_up", lambda program: (calls.append(1), real(program)))
    answers = []
    for warm_up in (False, True):
        with Engine.load(tiny, EngineOptions(threads=1, max_concurrency=2, warm_up=warm_up)) as engine:
            answers.append(ended(list(engine.chat(ASKED, GenerationOptions(max_new=8)))).token_ids)
        assert len(calls) == warm_up
    assert answers[0] == answers[1]
