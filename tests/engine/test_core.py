"""One request from submission to its end: events, limits, stops, forced spans, penalties, refusals."""

from collections.abc import Callable, Sequence
from math import nan

import pytest
import torch

from ninfer.engine import Core, Done, Output, Policy, PromptProgress, Request, Started
from ninfer.errors import (
    ContextLengthError,
    ModelError,
    OptionError,
    ThinkingBudgetError,
)
from ninfer.events import FinishReason
from ninfer.models import Batch, Cache, Records
from ninfer.ops import SamplingParams
from tests.engine.harness import Gate, Session, drain, request, settle, text
from tests.engine.oracle import greedy_answer
from tests.runtime.toy import ToyModel, expected_answer

Build = Callable[..., Core]
PROMPT = [(7 * i + 3) % 97 for i in range(300)]


@pytest.mark.parametrize("recurrent", [True, False])
def test_events_come_in_order_and_add_up(build: Build, recurrent: bool) -> None:
    gate = Gate()
    core = build(recurrent=recurrent, gate=gate)
    handle = core.submit(request(PROMPT, 5), Session())
    seen = []
    events = iter(handle)
    seen.append(next(events))
    assert seen == [Started(300, 0)], "it has its memory before anything is computed"
    for _ in range(3):  # chunks of 128, 128 and 44
        gate.arrive()
        gate.step()
        seen.append(next(events))
    gate.open()
    seen += events
    progress = [event for event in seen if isinstance(event, PromptProgress)]
    # Recurrent: the last chunk end before the last token is a tap, which costs no further chunk.
    assert [(p.prompt_tokens, p.processed_tokens) for p in progress] == [(300, 128), (300, 256), (300, 300)]
    assert 0 < progress[0].seconds < progress[1].seconds < progress[2].seconds
    assert [type(event) for event in seen] == [Started, *[PromptProgress] * 3, *[Output] * 5, Done]
    expected = expected_answer(PROMPT, 5, recurrent)
    assert text(seen) == "".join(f"{token} " for token in expected)
    assert isinstance(seen[-1], Done)
    statistics = seen[-1].statistics
    assert statistics.token_ids == tuple(expected)
    assert statistics.finish_reason is FinishReason.OUTPUT_LIMIT
    assert (statistics.prompt_tokens, statistics.reused_tokens, statistics.generated_tokens) == (300, 0, 5)
    assert statistics.rounds == 4
    assert statistics.first_token_seconds is not None
    assert 0 <= statistics.queue_seconds < statistics.first_token_seconds < statistics.total_seconds
    assert 0 < statistics.prefill_seconds + statistics.decode_seconds <= statistics.total_seconds
    assert list(handle) == [], "events come once"
    settle(core)


def test_progress_that_nobody_reads_is_replaced(build: Build) -> None:
    core = build()
    handle = core.submit(request(PROMPT, 2), Session())
    while not core.statistics().finished:
        pass
    assert [type(event) for event in handle] == [Started, PromptProgress, Output, Output, Done]


@pytest.mark.parametrize("tokens", [1, 63, 64, 65, 127, 128, 129, 255, 256])
@pytest.mark.parametrize("recurrent", [True, False])
def test_prompts_around_the_page_and_the_chunk(build: Build, tokens: int, recurrent: bool) -> None:
    core = build(recurrent=recurrent)
    ids, _, _ = drain(core.submit(request(PROMPT[:tokens], 70), Session()))
    assert ids == expected_answer(PROMPT[:tokens], 70, recurrent)
    settle(core)


def test_output_ends_at_the_limit_or_with_the_context(build: Build) -> None:
    core = build(context=128)
    prompt = PROMPT[:100]
    for count, reason in [
        (1, FinishReason.OUTPUT_LIMIT),
        (28, FinishReason.OUTPUT_LIMIT),
        (29, FinishReason.OUTPUT_LIMIT),  # exactly what the context holds: the last token needs no place
        (30, FinishReason.CONTEXT_CAPACITY),
        (None, FinishReason.CONTEXT_CAPACITY),
    ]:
        ids, statistics, _ = drain(core.submit(request(prompt, count), Session()))
        assert statistics.finish_reason is reason
        assert ids == expected_answer(prompt, min(count or 29, 29))
        settle(core)


@pytest.mark.parametrize("recurrent", [True, False])
def test_a_prompt_as_long_as_the_context_yields_one_token(build: Build, recurrent: bool) -> None:
    core = build(context=256, recurrent=recurrent)
    for _ in range(2):
        ids, statistics, _ = drain(core.submit(request(PROMPT[:256], None), Session()))
        assert ids == expected_answer(PROMPT[:256], 1, recurrent)
        assert statistics.finish_reason is FinishReason.CONTEXT_CAPACITY
        assert statistics.rounds == 0
        settle(core)
    with pytest.raises(ContextLengthError, match=r"257 tokens.*256.*--max-context"):
        core.submit(request(PROMPT[:257], 1), Session())


def test_a_stop_token_ends_the_output(build: Build) -> None:
    core = build()
    answer = expected_answer(PROMPT, 12)
    for index in (0, 1, 7, 11):
        stop = answer[index]
        ids, statistics, _ = drain(core.submit(request(PROMPT, 12), Session(stop=stop)))
        assert ids == answer[: answer.index(stop) + 1]
        assert statistics.finish_reason is FinishReason.STOP_TOKEN
        settle(core)


def test_no_output_is_resolved_at_once(build: Build) -> None:
    gate = Gate()
    core = build(gate=gate, policy=Policy(max_pending=0))
    running = core.submit(request(PROMPT, 2), Session())
    gate.arrive()
    [event] = core.submit(request(PROMPT, 0), Session())  # neither a lane nor a place in the full queue
    assert isinstance(event, Done)
    assert event.statistics.finish_reason is FinishReason.OUTPUT_LIMIT
    assert event.statistics.token_ids == ()
    gate.open()
    drain(running)
    settle(core)


@pytest.mark.parametrize(
    ("prompt", "count", "error", "message"),
    [
        ([], 1, OptionError, "prompt is empty"),
        ([1, 97], 1, OptionError, "token id 97 at position 1 is not below 97"),
        ([-1], 1, OptionError, "token id -1 at position 0"),
        ([1], -1, OptionError, "output limit must not be negative, not -1"),
        ([1] * 513, 1, ContextLengthError, "513 tokens but the context holds 512"),
    ],
)
def test_bad_requests_are_refused_before_they_take_anything(
    build: Build, prompt: list[int], count: int, error: type[Exception], message: str
) -> None:
    core = build(policy=Policy(max_pending=0))
    with pytest.raises(error, match=message):
        core.submit(request(prompt, count), Session())
    assert drain(core.submit(request([1], 1), Session()))[0] == expected_answer([1], 1)
    settle(core)


# Thinking budgets


@pytest.mark.parametrize("recurrent", [True, False])
@pytest.mark.parametrize("budget", [1, 2, 10])
def test_a_forced_closer_leaves_what_generating_it_would_have(
    build: Build, recurrent: bool, budget: int
) -> None:
    core = build(recurrent=recurrent)
    for tokens in {50, 64 - budget, 63, 126}:  # spans across a page boundary and up to it
        prompt = PROMPT[:tokens]
        session = Session(budget=budget)
        ids, statistics, events = drain(
            core.submit(request(prompt, budget + 12, thinking_budget=budget), session)
        )
        assert ids == greedy_answer(prompt, budget + 12, recurrent=recurrent, think=budget, closer=(7, 8))
        assert "closed" in text(events)
        report = statistics.thinking
        assert report is not None
        assert (report.budget, report.model_tokens, report.control_tokens) == (budget, budget, 2)
        assert report.applied
        # What was committed unsampled is as reusable as the rest.
        again = [*prompt, *ids, 5]
        follow, statistics, _ = drain(core.submit(request(again, 6), Session()))
        assert statistics.reused_tokens == len(again) - 2
        assert follow == expected_answer(again, 6, recurrent)
        settle(core)


def test_the_closer_may_end_the_output(build: Build) -> None:
    core = build()
    ids, statistics, _ = drain(core.submit(request(PROMPT, 6, thinking_budget=4), Session(budget=6)))
    assert ids == expected_answer(PROMPT, 6), "the limit came first"
    assert statistics.finish_reason is FinishReason.OUTPUT_LIMIT
    ids, statistics, _ = drain(core.submit(request(PROMPT, 7, thinking_budget=4), Session(budget=4)))
    assert ids == greedy_answer(PROMPT, 7, think=4, closer=(7, 8))
    settle(core)


@pytest.mark.parametrize(
    ("budget", "output", "allowed"),
    [(5, 8, True), (5, 7, False), (5, 6, False), (5, 5, True), (9, 5, True)],
)
def test_a_thinking_budget_needs_room_for_the_closer_and_an_answer(
    build: Build, budget: int, output: int, allowed: bool
) -> None:
    core = build()
    asked = request(PROMPT, output, thinking_budget=budget)
    if allowed:
        drain(core.submit(asked, Session(budget=budget)))
    else:
        with pytest.raises(ThinkingBudgetError, match=f"{budget} tokens needs room for 8"):
            core.submit(asked, Session(budget=budget))
    # Without an open thinking block the budget says nothing.
    _, statistics, _ = drain(core.submit(asked, Session()))
    assert statistics.thinking is not None
    assert not statistics.thinking.applied
    settle(core)


def test_a_thinking_budget_must_be_positive(build: Build) -> None:
    with pytest.raises(OptionError, match="thinking budget must be at least 1"):
        build().submit(request(PROMPT, 20, thinking_budget=0), Session(budget=0))


def test_closers_of_several_requests_go_together_or_apart(build: Build) -> None:
    gate = Gate(shut=False)
    core = build(concurrency=4, gate=gate, context=256)
    asked = [
        (PROMPT[:20], 6, (7, 8)),
        (PROMPT[20:50], 6, (9, 1)),
        (PROMPT[:70], 6, (1, 2, 3)),
        ([4], 3, (5, 6)),
    ]
    handles = [
        core.submit(request(prompt, 20, thinking_budget=budget), Session(budget=budget, closer=closer))
        for prompt, budget, closer in asked
    ]
    for handle, (prompt, budget, closer) in zip(handles, asked, strict=True):
        ids, _, _ = drain(handle)
        assert ids == greedy_answer(prompt, 20, think=budget, closer=closer)
    assert core.statistics().control_tokens == 2 + 2 + 3 + 2
    settle(core)


def test_a_closer_too_long_for_the_records_is_refused(build: Build) -> None:
    with pytest.raises(OptionError, match=r"closing text has 65 tokens.*64"):
        build().submit(request(PROMPT, 200, thinking_budget=3), Session(budget=3, closer=(1,) * 65))


# Sampling


@pytest.mark.parametrize(("presence", "frequency"), [(6.0, 0.0), (0.0, 6.0), (1.0, 3.0)])
def test_penalties_count_the_request_s_own_output(build: Build, presence: float, frequency: float) -> None:
    core = build(concurrency=3, context=256)
    sampling = SamplingParams(temperature=0.0, presence_penalty=presence, frequency_penalty=frequency)
    prompts = [PROMPT[:10], PROMPT[10:60], PROMPT[:10], PROMPT[3:90], [1], [2]]
    handles = [core.submit(request(p, 60, sampling=sampling), Session()) for p in prompts]
    plain = core.submit(request(PROMPT[:10], 60), Session())
    answers = [drain(handle)[0] for handle in handles]
    assert answers == [greedy_answer(p, 60, sampling=sampling) for p in prompts]
    assert drain(plain)[0] == expected_answer(PROMPT[:10], 60)
    assert answers[0] != drain(core.submit(request(PROMPT[:10], 60), Session()))[0], "penalties must show"
    settle(core)


def test_penalties_count_forced_tokens(build: Build) -> None:
    sampling = SamplingParams(temperature=0.0, presence_penalty=6.0)
    core = build()
    # A closer of the tokens that would win next, so that counting them changes the answer.
    closer = tuple(range(12))
    ids, _, _ = drain(
        core.submit(
            request(PROMPT, 60, sampling=sampling, thinking_budget=5), Session(budget=5, closer=closer)
        )
    )
    assert ids == greedy_answer(PROMPT, 60, sampling=sampling, think=5, closer=closer)
    settle(core)


@pytest.mark.parametrize("recurrent", [True, False])
def test_seeded_draws_do_not_depend_on_company(build: Build, recurrent: bool) -> None:
    def ask(index: int) -> Request:
        sampling = SamplingParams(temperature=1.5, seed=(1 << 63) + index, presence_penalty=index % 2 * 1.0)
        return request(PROMPT[index : 30 + 11 * index], 5 + 4 * index, sampling=sampling)

    asked = [ask(index) for index in range(8)]
    answers = []
    for concurrency in (1, 2, 4, 8):
        core = build(recurrent=recurrent, concurrency=concurrency, context=256, capacity=2048)
        handles = [core.submit(one, Session()) for one in asked]
        answers.append([drain(handle)[0] for handle in handles])
        settle(core)
    assert answers[0] == answers[1] == answers[2] == answers[3]
    greedy = [expected_answer(PROMPT[i : 30 + 11 * i], 5 + 4 * i, recurrent) for i in range(8)]
    assert all(answer != other for answer, other in zip(answers[0], greedy, strict=True))


# Faults of one request


class Poisoned(ToyModel):
    """Its scores aren't finite after position `poison`."""

    poison = 0

    def forward(self, batch: Batch, cache: Cache, records: Records | None = None) -> torch.Tensor:
        hidden = super().forward(batch, cache, records)
        hidden[batch.positions == self.poison] = nan
        return hidden


@pytest.mark.parametrize("at", ["prefill", "decode"])
@pytest.mark.parametrize("width", [1, 3])
def test_scores_that_are_not_finite_fail_their_request_alone(build: Build, at: str, width: int) -> None:
    class Echo:
        def propose(self, tokens: Sequence[int], limit: int) -> Sequence[int]:
            return expected_answer(tokens, limit)

    model = Poisoned()
    model.poison = 99 if at == "prefill" else 104
    core = build(model=model, concurrency=3, context=256, width=width, drafts=Echo())
    others = [core.submit(request(PROMPT[:n], 30), Session()) for n in (20, 40)]
    victim = core.submit(request(PROMPT[:100], 30), Session())
    events = []
    with pytest.raises(ModelError, match="aren't finite"):
        events += [event for event in victim]  # noqa: C416
    for handle, n in zip(others, (20, 40), strict=True):
        assert drain(handle)[0] == expected_answer(PROMPT[:n], 30)
    assert core.health().available
    assert core.statistics().failed == 1
    settle(core)


def broken(name: str) -> Session:
    class Broken(Session):
        def close(self):
            if name == "close":
                raise ValueError("this session breaks here")
            return super().close()

        def commit_closer(self):
            if name == "closer":
                raise ValueError("this session breaks here")
            return super().commit_closer()

    numbers = {"first": 1, "second": 2, "fifth": 5}
    return Broken(budget=6, fail_at=numbers.get(name))


@pytest.mark.parametrize("where", ["first", "second", "fifth", "closer", "close"])
@pytest.mark.parametrize("width", [1, 3])
def test_a_session_that_raises_ends_its_request_alone(build: Build, where: str, width: int) -> None:
    class Echo:
        def propose(self, tokens: Sequence[int], limit: int) -> Sequence[int]:
            return expected_answer(tokens, limit)

    core = build(concurrency=3, context=256, width=width, drafts=Echo())
    other = core.submit(request(PROMPT[:20], 30), Session())
    victim = core.submit(request(PROMPT[:100], 30, thinking_budget=6), broken(where))
    closing = core.submit(request(PROMPT[:30], 30, thinking_budget=6), Session(budget=6))
    with pytest.raises(ValueError, match="breaks here"):
        list(victim)
    assert drain(other)[0] == expected_answer(PROMPT[:20], 30)
    assert drain(closing)[0] == greedy_answer(PROMPT[:30], 30, think=6, closer=(7, 8))
    assert core.health().available
    assert core.statistics().failed == 1
    settle(core)


def test_statistics_count_what_was_done(build: Build) -> None:
    core = build(concurrency=2, context=256)
    handles = [core.submit(request(PROMPT[:n], n), Session()) for n in (10, 20, 30)]
    stopped = core.submit(request(PROMPT[:50], 20), Session(stop=expected_answer(PROMPT[:50], 20)[3]))
    done = [drain(handle)[1] for handle in handles]
    drain(stopped)
    statistics = core.statistics()
    assert (statistics.admitted, statistics.failed) == (4, 0)
    assert statistics.finished == {FinishReason.OUTPUT_LIMIT: 3, FinishReason.STOP_TOKEN: 1}
    assert statistics.prefill_tokens + statistics.reused_tokens == 10 + 20 + 30 + 50
    assert statistics.row_rounds == sum(one.rounds for one in done) + 3
    assert statistics.decode_tokens == 9 + 19 + 29 + 3
    assert statistics.rounds < statistics.row_rounds
    assert statistics.running == statistics.waiting == statistics.prefilling == 0
    assert statistics.decode_host_share is not None
    assert 0 < statistics.decode_host_share < 1
    assert statistics.free_pages + statistics.cached_blocks >= core.plan.pages
    assert statistics.evicted_blocks == statistics.evicted_snapshots == 0
    settle(core)


def test_what_the_cache_gives_up_is_counted(build: Build) -> None:
    core = build(context=256, snapshots=1)
    for start in range(3):
        drain(core.submit(request(PROMPT[start : start + 200], 3), Session()))
    statistics = core.statistics()
    assert statistics.evicted_snapshots == 3 * 2 - 1  # each leaves a tap and an endpoint
    assert statistics.evicted_blocks > 0
