"""Rounds of several columns: whatever is guessed, the output is that of plain decoding."""

from collections.abc import Callable

import pytest

from ninfer.engine import Core
from ninfer.ops import SamplingParams
from ninfer.runtime.records import Unit
from tests.engine.guesses import Guesses, never, sometimes
from tests.engine.harness import GREEDY, Gate, Session, drain, request, settle, stop_and_resume
from tests.engine.oracle import greedy_answer
from tests.runtime.toy import expected_answer

Build = Callable[..., Core]
PROMPT = [(5 * i + 1) % 97 for i in range(300)]


@pytest.mark.parametrize("recurrent", [True, False])
@pytest.mark.parametrize("width", [2, 3, 5, 16])
@pytest.mark.parametrize("truths", [None, never, sometimes])
def test_ids_are_those_of_plain_decoding(
    build: Build, recurrent: bool, width: int, truths: Callable[[int], int] | None
) -> None:
    source = Guesses(recurrent) if truths is None else Guesses(recurrent, truths, most=lambda n: n % 17)
    core = build(recurrent=recurrent, width=width, drafts=source, concurrency=3, context=256)
    # The output crosses page boundaries; the last one ends with the context.
    prompts = [PROMPT[:40], PROMPT[3:130], PROMPT[:64], PROMPT[:200]]
    handles = [core.submit(request(prompt, 66), Session()) for prompt in prompts]
    for handle, prompt in zip(handles, prompts, strict=True):
        count = min(66, 256 - len(prompt) + 1)
        assert drain(handle)[0] == expected_answer(prompt, count, recurrent)
    settle(core)


def test_true_and_false_guesses_are_counted(build: Build) -> None:
    core = build(width=4, drafts=Guesses())
    _, statistics, _ = drain(core.submit(request(PROMPT, 14), Session()))
    counters = core.statistics()
    # One token from the prefill, then 4 + 4 + 4 + 1: no guess beyond what may still be said.
    assert (counters.rounds, counters.drafted_tokens, counters.accepted_tokens) == (4, 9, 9)
    assert statistics.rounds == 4
    assert counters.decode_tokens == 13

    core = build(width=4, drafts=Guesses(truths=never))
    drain(core.submit(request(PROMPT, 6), Session()))
    counters = core.statistics()
    assert (counters.rounds, counters.drafted_tokens, counters.accepted_tokens) == (5, 3 + 3 + 2 + 1, 0)

    core = build(width=4, drafts=Guesses(truths=lambda tokens: 1))
    drain(core.submit(request(PROMPT, 8), Session()))
    counters = core.statistics()
    # Two tokens a round: 1 + 2 + 2 + 2 + 1, with 3, 3, 2 and 0 guesses.
    assert (counters.rounds, counters.drafted_tokens, counters.accepted_tokens) == (4, 8, 3)


@pytest.mark.parametrize("recurrent", [True, False])
@pytest.mark.parametrize("length", range(1, 11))
def test_a_stop_inside_a_round_cuts_it_and_leaves_a_frontier_to_resume_from(
    build: Build, recurrent: bool, length: int
) -> None:
    # Prompts that put the round before, on and behind a page boundary.
    for tokens in (60, 121):
        core = build(recurrent=recurrent, width=5, drafts=Guesses(recurrent), context=256)
        prompt = PROMPT[:tokens]
        said, statistics = stop_and_resume(core, prompt, length, recurrent)
        if len(said) > 1 or not recurrent:
            assert statistics.reused_tokens == len(prompt) + len(said) - 1


def test_a_stop_in_one_row_does_not_touch_the_others(build: Build) -> None:
    core = build(width=4, drafts=Guesses(), concurrency=3, context=256)
    prompts = [PROMPT[:30], PROMPT[:77], PROMPT[5:40]]
    answers = [expected_answer(prompt, 40) for prompt in prompts]
    sessions = [Session(), Session(stop=answers[1][9]), Session(stop=answers[2][18])]
    handles = [core.submit(request(p, 40), s) for p, s in zip(prompts, sessions, strict=True)]
    for handle, session, prompt in zip(handles, sessions, prompts, strict=True):
        assert drain(handle)[0] == greedy_answer(prompt, 40, stop=session.stop)
    settle(core)


@pytest.mark.parametrize("budget", range(1, 9))
def test_guesses_keep_to_the_thinking_budget(build: Build, budget: int) -> None:
    core = build(width=5, drafts=Guesses(), concurrency=2)
    handles = [
        core.submit(request(PROMPT[:n], 30, thinking_budget=budget), Session(budget=budget))
        for n in (60, 250)
    ]
    for handle, n in zip(handles, (60, 250), strict=True):
        ids, _, _ = drain(handle)
        assert ids == greedy_answer(PROMPT[:n], 30, think=budget, closer=(7, 8))
    settle(core)


def test_a_row_with_penalties_or_without_guesses_goes_along(build: Build) -> None:
    penalties = SamplingParams(temperature=0.0, presence_penalty=6.0)
    core = build(width=4, drafts=Guesses(most=lambda tokens: tokens % 3), concurrency=3, context=256)
    asked = [(PROMPT[:30], penalties), (PROMPT[:77], GREEDY), (PROMPT[5:40], penalties)]
    handles = [core.submit(request(p, 40, sampling=s), Session()) for p, s in asked]
    for handle, (prompt, sampling) in zip(handles, asked, strict=True):
        assert drain(handle)[0] == greedy_answer(prompt, 40, sampling=sampling)
    settle(core)


def test_seeded_draws_are_those_of_plain_decoding(build: Build) -> None:
    asked = [
        request(PROMPT[i : 50 + 9 * i], 40, sampling=SamplingParams(temperature=2.0, seed=i))
        for i in range(4)
    ]
    answers = []
    for width in (1, 4):
        core = build(width=width, drafts=Guesses(), concurrency=4, context=256)
        handles = [core.submit(one, Session()) for one in asked]
        answers.append([drain(handle)[0] for handle in handles])
        settle(core)
    assert core.statistics().accepted_tokens > 0
    assert answers[0] == answers[1]


def test_tokens_that_do_not_exist_are_not_fed(build: Build) -> None:
    class Nonsense:
        def propose(self, tokens: list[int], limit: int) -> list[int]:
            return [-1, 97, 10**9, *range(limit + 5)]

    gate = Gate(shut=False)
    core = build(width=4, drafts=Nonsense(), gate=gate)
    assert drain(core.submit(request(PROMPT, 30), Session()))[0] == expected_answer(PROMPT, 30)
    assert all(
        len(note.tokens) <= 4 and max(note.tokens) < 97 for note in gate.notes if note.unit == Unit.ROUND
    )
    settle(core)
