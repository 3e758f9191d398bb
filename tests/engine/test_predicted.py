"""Drafts by the model's own predictor: the output is that of plain decoding, and the predictor, which guesses
right only if it was given every token and hidden state, is never wrong."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from ninfer.engine import Core, Marks, Policy
from ninfer.events import FinishReason
from ninfer.ops import SamplingParams
from tests.engine.harness import Constrained, Session, drain, request, settle, stop_and_resume
from tests.engine.oracle import greedy_answer
from tests.runtime.toy import PUBLIC, ToyModel, ToyPredictor, expected_answer

Build = Callable[..., Core]
PROMPT = [(5 * i + 1) % 97 for i in range(300)]
RECURRENT = pytest.mark.parametrize("recurrent", [True, False])


def model(recurrent: bool = True, lies: Callable[[int], bool] = lambda count: False) -> ToyModel:
    return ToyModel(recurrent, predictor=ToyPredictor(recurrent, lies))


def all_stood(core: Core) -> bool:
    counters = core.statistics()
    return counters.drafted_tokens == counters.accepted_tokens > 0


@RECURRENT
@pytest.mark.parametrize("width", [2, 3, 6])
def test_every_draft_stands(build: Build, recurrent: bool, width: int) -> None:
    """Over chunk borders, page borders and to the end of the context, alone and beside others."""
    core = build(
        model=model(recurrent), width=width, concurrency=3, context=256, policy=Policy(turn_anchors=0)
    )
    prompts = [PROMPT[:1], PROMPT[2:42], PROMPT[3:130], PROMPT[4:68], PROMPT[5:204]]
    handles = [core.submit(request(prompt, 66), Session()) for prompt in prompts]
    for handle, prompt in zip(handles, prompts, strict=True):
        count = min(66, 256 - len(prompt) + 1)
        ids, statistics, _ = drain(handle)
        assert ids == expected_answer(prompt, count, recurrent)
        speculation = statistics.speculation
        assert (
            speculation.drafted
            == speculation.accepted
            == count - 1 - speculation.rounds - speculation.fallback_steps
        )
        assert speculation.fallback_steps <= 1
        assert sum(speculation.histogram()) == speculation.rounds
    settle(core)
    assert all_stood(core)


@RECURRENT
def test_wrong_drafts_never_show(build: Build, recurrent: bool) -> None:
    core = build(model=model(recurrent, lambda count: count * 7 % 5 < 2), width=5, concurrency=4, context=256)
    sampled = SamplingParams(temperature=1.3, seed=9)
    penalized = SamplingParams(temperature=0.0, presence_penalty=3.0, frequency_penalty=1.1)
    asked = [(PROMPT[:64], None), (PROMPT[:30], penalized), (PROMPT[1:99], None), (PROMPT[:50], sampled)]
    handles = [
        core.submit(request(p, 50) if s is None else request(p, 50, sampling=s), Session()) for p, s in asked
    ]
    plain = build(recurrent=recurrent, context=256)
    drafted_each = []
    for handle, (prompt, sampling) in zip(handles, asked, strict=True):
        alone = request(prompt, 50) if sampling is None else request(prompt, 50, sampling=sampling)
        ids, statistics, _ = drain(handle)
        drafted_each.append(statistics.speculation.drafted)
        assert ids == drain(plain.submit(alone, Session()))[0]
    counters = core.statistics()
    assert 0 < counters.accepted_tokens < counters.drafted_tokens
    assert all(drafted > 0 for drafted in drafted_each)
    settle(core)


@RECURRENT
@pytest.mark.parametrize("length", range(1, 9))
def test_a_stop_leaves_a_frontier_to_resume_from(build: Build, recurrent: bool, length: int) -> None:
    for tokens in (60, 121):
        core = build(model=model(recurrent), width=4, context=256)
        prompt = PROMPT[:tokens]
        said, statistics = stop_and_resume(core, prompt, length, recurrent)
        if len(said) > 1:
            assert statistics.reused_tokens == len(prompt) + len(said) - 1
        assert statistics.speculation.drafted == statistics.speculation.accepted > 0


@pytest.mark.parametrize("length", range(2, 11))
def test_only_drafts_that_are_output_count(build: Build, length: int) -> None:
    """The predictor is always right, so all of a round stands; what is behind a stop doesn't count."""
    core = build(model=model(), width=4)
    answer = expected_answer(PROMPT[:60], length)
    stop = answer[-1]
    length = answer.index(stop) + 1
    ids, statistics, _ = drain(core.submit(request(PROMPT[:60], 30), Session(stop=stop)))
    assert ids == answer[:length]
    full, last = divmod(length - 2, 4)  # behind the first token: rounds of four, and one to the stop
    speculation, accepted = statistics.speculation, [3] * full + [min(last + 1, 3)]
    assert list(speculation.lengths) == accepted
    assert (speculation.accepted, speculation.drafted) == (sum(accepted), 3 * len(accepted))
    assert speculation.per_position == [sum(count > i for count in accepted) for i in range(3)]
    assert speculation.histogram() == [accepted.count(i) for i in range(4)]
    assert core.statistics().accepted_tokens == sum(accepted)
    settle(core)


@pytest.mark.parametrize("frontier", [1, 63, 64, 65, 127, 128])
def test_reused_prefixes_carry_what_the_predictor_needs(build: Build, frontier: int) -> None:
    """Others go on from the same snapshot with another token, which the pair at the border depends on."""
    core = build(model=model(), width=4, context=320, concurrency=2, snapshots=6)
    stem = PROMPT[:frontier]
    marks = Marks(preamble=frontier)
    for tail in ([50, 3], [51, 3, 9], [52], [50, 3]):
        prompt = [*stem, *tail]
        ids, statistics, _ = drain(core.submit(request(prompt, 30, marks=marks), Session()))
        assert ids == expected_answer(prompt, 30)
        assert statistics.speculation.drafted == statistics.speculation.accepted > 0
        settle(core)
    assert core.statistics().reused_tokens >= 3 * frontier


@pytest.mark.parametrize("budget", range(1, 9))
def test_thinking_budgets_end_exactly_and_drafts_go_on_after_the_closer(build: Build, budget: int) -> None:
    core = build(model=model(), width=5, concurrency=2)
    handles = [
        core.submit(request(PROMPT[:n], 30, thinking_budget=budget), Session(budget=budget))
        for n in (60, 250)
    ]
    for handle, n in zip(handles, (60, 250), strict=True):
        ids, _, _ = drain(handle)
        assert ids == greedy_answer(PROMPT[:n], 30, think=budget, closer=(7, 8))
    settle(core)
    assert all_stood(core)


def test_masks_hold(build: Build) -> None:
    def even(ledger: object) -> set[int]:
        return set(range(0, PUBLIC, 2))

    core, plain = build(model=model(), width=4), build()
    for prompt in (PROMPT[:40], PROMPT[:100]):
        answers = [
            drain(one.submit(request(prompt, 30), Constrained(prompt, even)))[0] for one in (core, plain)
        ]
        assert answers[0] == answers[1]
        assert all(token % 2 == 0 for token in answers[0])
    assert core.statistics().drafted_tokens > 0
    settle(core)


@pytest.mark.parametrize("context", range(130, 140))
def test_the_end_of_the_context_is_exact(build: Build, context: int) -> None:
    core = build(model=model(), width=6, context=context)
    ids, statistics, _ = drain(core.submit(request(PROMPT[:120], None), Session()))
    assert ids == expected_answer(PROMPT[:120], context - 120 + 1)
    assert statistics.finish_reason is FinishReason.CONTEXT_CAPACITY
    settle(core)
