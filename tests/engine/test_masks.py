"""Constrained requests: what is forbidden is never drawn, and nobody else notices."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import pytest

from ninfer.engine import Core, Policy
from ninfer.errors import GrammarError
from ninfer.events import FinishReason
from ninfer.ops import SamplingParams
from ninfer.runtime.records import Unit
from tests.engine.guesses import Guesses, never, sometimes
from tests.engine.harness import GREEDY, Constrained, Gate, Rule, Session, drain, request, settle
from tests.engine.oracle import greedy_answer
from tests.engine.real import Desk
from tests.engine.test_serial_and_concurrent import sampling
from tests.models.conftest import one_thread  # noqa: F401
from tests.models.loaded import GEOMETRIES, loaded
from tests.runtime.toy import PUBLIC, expected_answer

Build = Callable[..., Core]
PROMPT = [(5 * i + 1) % 97 for i in range(300)]


def changing(tokens: Sequence[int]) -> set[int]:
    """A third of the tokens, another third each time."""
    return {token for token in range(PUBLIC) if (token + sum(tokens)) % 3 == 0}


def now_and_then(tokens: Sequence[int]) -> set[int] | None:
    """Free for five tokens, then bound for seven, and so on."""
    return changing(tokens) if len(tokens) % 12 >= 5 else None


def dead_end_at(length: int, stop: int | None = None) -> Rule:
    """After `length` tokens nothing is allowed."""
    return lambda tokens: None if len(tokens) < length else set()


@dataclass
class RuledGuesses(Guesses):
    """True guesses keep to the rule; false ones may be allowed or not."""

    rule: Rule = changing

    def propose(self, tokens: Sequence[int], limit: int) -> Sequence[int]:
        guesses: list[int] = []
        for index in range(min(limit, self.most(len(tokens)))):
            ledger = [*tokens, *guesses]
            [token] = greedy_answer(ledger, 1, recurrent=self.recurrent, rule=self.rule)
            guesses.append((token + (index >= self.truths(len(tokens)))) % PUBLIC)
        return guesses


@pytest.mark.parametrize("recurrent", [True, False])
@pytest.mark.parametrize("rule", [changing, now_and_then])
@pytest.mark.parametrize("width", [1, 2, 5])
@pytest.mark.parametrize("truths", [None, never, sometimes])
def test_answers_are_the_best_that_is_allowed(
    build: Build, recurrent: bool, rule: Rule, width: int, truths: Callable[[int], int] | None
) -> None:
    source = RuledGuesses(recurrent, rule=rule)
    if truths is not None:
        source = RuledGuesses(recurrent, truths, most=lambda n: n % 7, rule=rule)
    core = build(recurrent=recurrent, width=width, drafts=source, concurrency=3, context=256)
    prompts = [PROMPT[:40], PROMPT[3:130], PROMPT[:64], PROMPT[:200]]
    sessions = [Constrained(prompt, rule) if i % 2 == 0 else Session() for i, prompt in enumerate(prompts)]
    handles = [core.submit(request(p, 50), s) for p, s in zip(prompts, sessions, strict=True)]
    for handle, prompt, session in zip(handles, prompts, sessions, strict=True):
        own = rule if isinstance(session, Constrained) else None
        assert drain(handle)[0] == greedy_answer(prompt, 50, recurrent=recurrent, rule=own)
    if width > 1 and truths is None:
        assert core.statistics().accepted_tokens > 0
    settle(core)


def test_rounds_of_one_column_where_drafts_are_possible(build: Build) -> None:
    """A row's masks stand where its drafts' would be too, however wide the round is."""
    core = build(width=5, drafts=Guesses(most=lambda tokens: 2 * (tokens % 11 == 0)), concurrency=3)
    prompts = [PROMPT[: 40 + 30 * i] for i in range(3)]
    handles = [core.submit(request(prompt, 50), Constrained(prompt, now_and_then)) for prompt in prompts]
    for handle, prompt in zip(handles, prompts, strict=True):
        assert drain(handle)[0] == greedy_answer(prompt, 50, rule=now_and_then)
    settle(core)


def test_drafts_are_fed_as_far_as_they_are_allowed(build: Build) -> None:
    """Plain guesses, of which two thirds are forbidden."""
    gate, session = Gate(shut=False), Constrained(PROMPT, changing)
    core = build(width=5, drafts=Guesses(), gate=gate)
    ids, statistics, _ = drain(core.submit(request(PROMPT, 60), session))
    assert ids == greedy_answer(PROMPT, 60, rule=changing)
    fed = [note.tokens for note in gate.notes if note.unit is Unit.ROUND]
    # The first mask is the prefill's; every round has one more than drafts.
    assert [len(tokens) for tokens in fed] == session.asked[1:]
    assert {1, 2} <= {len(tokens) for tokens in fed}
    ledger, at = [*PROMPT, *ids], len(PROMPT)
    for tokens in fed:
        at = next(i for i in range(at, len(ledger)) if ledger[i] == tokens[0])
        for i, draft in enumerate(tokens[1:], 1):
            assert draft in changing([*ledger[: at + 1], *tokens[1:i]])
        at += 1
    assert statistics.drafted_tokens == core.statistics().drafted_tokens == sum(len(t) - 1 for t in fed)
    settle(core)


def test_penalties_choose_among_what_is_allowed(build: Build) -> None:
    penalties = SamplingParams(temperature=0.0, presence_penalty=6.0, frequency_penalty=0.5)
    few: Rule = lambda tokens: {3, 4, 90}  # noqa: E731
    core = build()
    ids = drain(core.submit(request(PROMPT, 30, sampling=penalties), Constrained(PROMPT, few)))[0]
    assert ids == greedy_answer(PROMPT, 30, sampling=penalties, rule=few)
    assert set(ids) == {3, 4, 90}


@pytest.mark.parametrize("width", [1, 4])
@pytest.mark.parametrize("length", range(7))
def test_a_dead_end_fails_the_request_only(build: Build, width: int, length: int) -> None:
    core = build(width=width, drafts=Guesses(), concurrency=2)
    session = Constrained(PROMPT[:50], dead_end_at(50 + length))
    failing = core.submit(request(PROMPT[:50], 20), session)
    other = core.submit(request(PROMPT[:60], 20), Session())
    events = iter(failing)
    with pytest.raises(GrammarError, match="the grammar allows no token here"):
        for _ in events:
            pass
    assert session.ledger[50:] == expected_answer(PROMPT[:50], length)
    assert drain(other)[0] == expected_answer(PROMPT[:60], 20)
    assert core.statistics().failed == 1
    settle(core)


def test_a_stop_before_a_dead_end_is_a_stop(build: Build) -> None:
    """Both in one round: the guesses go up to the stop, and behind it nothing is allowed."""
    prompt = PROMPT[:50]
    answer = expected_answer(prompt, 20)
    length = next(i for i in range(3, 20) if answer[i] not in answer[:i]) + 1
    core = build(width=8, drafts=Guesses(most=lambda tokens: 50 + length - tokens))
    session = Constrained(prompt, dead_end_at(50 + length), stop=answer[length - 1])
    ids, statistics, _ = drain(core.submit(request(prompt, 20), session))
    assert ids == answer[:length]
    assert statistics.finish_reason is FinishReason.STOP_TOKEN
    settle(core)


@pytest.mark.parametrize("at", [1, 2, 4])
def test_a_session_that_can_fill_no_mask_fails_alone(build: Build, at: int) -> None:
    class Broken(Constrained):
        def fill_masks(self, drafts: Sequence[int], masks: np.ndarray) -> int:
            if len(self.asked) + 1 == at:
                raise GrammarError("the grammar is too complex")
            return super().fill_masks(drafts, masks)

    core = build(concurrency=2)
    failing = core.submit(request(PROMPT[:50], 20), Broken(PROMPT[:50], changing))
    other = core.submit(request(PROMPT[:60], 20), Session())
    with pytest.raises(GrammarError, match="too complex"):
        list(failing)
    assert drain(other)[0] == expected_answer(PROMPT[:60], 20)
    settle(core)


def by_length(tokens: Sequence[int]) -> set[int] | None:
    """For the models of 190 tokens: free at times, else a fifth of them, another one each time."""
    step = len(tokens) % 9
    return None if step == 3 else {token for token in range(190) if (7 * token + step) % 5 == 0}


@dataclass
class Repeated:
    """Guesses that the tokens a while ago come again: sometimes right where few are allowed."""

    def propose(self, tokens: Sequence[int], limit: int) -> Sequence[int]:
        return list(tokens[-9 : -9 + limit]) if len(tokens) > 9 else []


@pytest.mark.parametrize("name", GEOMETRIES)
@pytest.mark.parametrize("width", [1, 3])
def test_serial_and_concurrent_with_free_neighbours(name: str, width: int) -> None:
    """Rounds are recorded and replayed with other masks each time."""
    rng = random.Random(width)
    asks = [
        (tuple(rng.randrange(190) for _ in range(rng.choice((1, 17, 64, 129)))), rng.randint(12, 30), i)
        for i in range(14)
    ]
    options = {"context": 256, "policy": Policy(max_pending=32, reuse=False)}
    drafts = Repeated() if width > 1 else None

    def answers(rows: int, *, bound: bool) -> list[list[int] | None]:
        with Desk(
            loaded(name), concurrency=rows, capacity=rows * 256, width=width, drafts=drafts, **options
        ) as desk:
            handles = [
                desk.submit(prompt, count, sampling=sampling(i), rule=by_length if i % 2 else None)
                for prompt, count, i in asks
                if bound or i % 2 == 0
            ]
            return [drain(handle)[0] for handle in handles]

    alone = answers(1, bound=True)
    assert answers(4, bound=True) == answers(8, bound=True) == alone
    assert answers(4, bound=False) == alone[::2]


def test_frequencies_are_those_of_what_is_allowed() -> None:
    """Sampled draws of a constrained request: the toy's scores, renormalized over three tokens."""
    from tests.engine.harness import make_core

    core = make_core(concurrency=8, context=256)
    prompt = PROMPT[:30]
    [best] = expected_answer(prompt, 1)
    allowed = {best, (best + 1) % PUBLIC, (best + 50) % PUBLIC}
    counts = dict.fromkeys(allowed, 0)
    draws = 600
    for first in range(0, draws, 8):
        handles = [
            core.submit(
                request(prompt, 1, sampling=SamplingParams(temperature=2.5, seed=first + i)),
                Constrained(prompt, lambda tokens: allowed),
            )
            for i in range(8)
        ]
        for handle in handles:
            counts[drain(handle)[0][0]] += 1
    core.stop()
    weights = np.array([np.exp(5 / 2.5) if token == best else 1.0 for token in counts])
    shares = weights / weights.sum()
    deviation = np.array(list(counts.values())) / draws - shares
    assert (np.abs(deviation) < 4 * np.sqrt(shares * (1 - shares) / draws)).all()


def test_greedy_is_unchanged_by_a_mask_that_allows_everything(build: Build) -> None:
    everything: Rule = lambda tokens: set(range(PUBLIC))  # noqa: E731
    core = build(width=4, drafts=Guesses())
    ids = drain(core.submit(request(PROMPT, 30, sampling=GREEDY), Constrained(PROMPT, everything)))[0]
    assert ids == expected_answer(PROMPT, 30)
    assert core.statistics().accepted_tokens > 15
