"""Log-probabilities: their values, and the text that they come with."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

import pytest
import torch

from ninfer.engine import Core, Event, Output
from ninfer.errors import OptionError
from ninfer.events import Channel, Delta, FinishReason, Step, TokenLogprob
from ninfer.ops import SamplingParams
from tests.engine.guesses import Guesses
from tests.engine.harness import Constrained, Session, drain, request, settle
from tests.engine.oracle import TOP
from tests.engine.real import Desk, fresh_logits
from tests.models.conftest import one_thread  # noqa: F401
from tests.models.loaded import GEOMETRIES, loaded
from tests.runtime.toy import PUBLIC, expected_token

Build = Callable[..., Core]
PROMPT = [(5 * i + 1) % 97 for i in range(300)]
LIKELY = TOP - math.log(math.exp(TOP) + PUBLIC - 1)
UNLIKELY = -math.log(math.exp(TOP) + PUBLIC - 1)


def told(events: Iterable[Event]) -> list[TokenLogprob]:
    return [item for event in events if isinstance(event, Output) for item in event.logprobs]


@pytest.mark.parametrize("alternatives", [0, 1, 3, 20])
@pytest.mark.parametrize("width", [1, 4])
def test_values_are_those_of_the_raw_scores(build: Build, alternatives: int, width: int) -> None:
    """Whatever temperature, penalties and masks make of them."""
    odd = {token for token in range(PUBLIC) if token % 2}
    core = build(width=width, drafts=Guesses(), concurrency=3, context=256)
    penalties = SamplingParams(temperature=1.9, frequency_penalty=2.0, presence_penalty=1.0, seed=4)
    asked = [
        (PROMPT[:40], SamplingParams(temperature=0.0), Session()),
        (PROMPT[:70], penalties, Session()),
        (PROMPT[:64], SamplingParams(temperature=1.7, seed=3), Constrained(PROMPT[:64], lambda tokens: odd)),
    ]
    handles = [
        core.submit(request(prompt, 30, sampling=sampling, logprobs=alternatives), session)
        for prompt, sampling, session in asked
    ]
    missed = 0
    for handle, (prompt, _, _) in zip(handles, asked, strict=True):
        ids, _, events = drain(handle)
        reports = told(events)
        assert [item.token_id for item in reports] == ids
        for index, item in enumerate(reports):
            best = expected_token([*prompt, *ids[:index]])
            missed += item.token_id != best
            assert item.logprob == pytest.approx(LIKELY if item.token_id == best else UNLIKELY, rel=1e-6)
            order = [best, *(token for token in range(PUBLIC) if token != best)][:alternatives]
            assert [token for token, _ in item.top] == order
            assert [value for _, value in item.top] == pytest.approx(
                [LIKELY, *[UNLIKELY] * 19][:alternatives], rel=1e-6
            )
    assert missed > 10
    settle(core)


@pytest.mark.parametrize("name", GEOMETRIES)
def test_values_of_a_model_are_those_of_a_fresh_pass(name: str) -> None:
    """Prefill and recorded rounds, alone and beside requests that don't ask."""
    model, prompts = loaded(name), [[(7 * i + k) % 190 for i in range(60 + k)] for k in range(4)]
    alone = []
    with Desk(model) as desk:
        alone = [told(drain(desk.submit(prompt, 12, logprobs=20))[2]) for prompt in prompts]
    with Desk(model, concurrency=8, capacity=8 * 1024) as desk:
        silent = [desk.submit(prompt, 12) for prompt in prompts]
        handles = [desk.submit(prompt, 12, logprobs=20) for prompt in prompts]
        assert [told(drain(handle)[2]) for handle in handles] == alone
        assert not [item for handle in silent for item in told(drain(handle)[2])]
    for prompt, reports in zip(prompts, alone, strict=True):
        ledger = list(prompt)
        for item in reports:
            expected = torch.log_softmax(fresh_logits(model, ledger).double(), 0)
            # Rounds and a prefill are different orders of BF16 sums.
            assert item.logprob == pytest.approx(float(expected[item.token_id]), abs=0.05)
            for token, value in item.top:
                assert value == pytest.approx(float(expected[token]), abs=0.05)
            assert [value for _, value in item.top] == sorted((v for _, v in item.top), reverse=True)
            assert item.top[0] == (item.token_id, item.logprob)  # greedy
            ledger.append(item.token_id)
        assert [item.token_id for item in reports] == ledger[len(prompt) :]


class Scripted(Session):
    """Token number i (from 0) gets what `script[i]` says: a channel and whether its text is held back."""

    def __init__(
        self, script: Sequence[tuple[Channel, bool]], tail: tuple[Channel, ...] = (), **options
    ) -> None:
        super().__init__(**options)
        self.script, self.tail, self._held = script, tail, ""

    finish: FinishReason | None

    def accept(self, token_ids: Sequence[int]) -> Step:
        deltas: list[Delta] = []
        content: list[int] = []
        for index, token in enumerate(token_ids):
            if token == self.stop:
                self.finish = FinishReason.STOP_TOKEN
                return Step(tuple(deltas), self.finish, index + 1, tuple(content))
            channel, held = self.script[self._seen]
            self._seen += 1
            self._held += f"{token} "
            if channel is Channel.CONTENT:
                content.append(index)
            if not held:
                if deltas and deltas[-1].channel is channel:
                    self._held = deltas.pop().text + self._held
                deltas.append(Delta(channel, self._held))
                self._held = ""
        return Step(tuple(deltas), None, len(token_ids), tuple(content))

    def close(self) -> Step:
        return Step(tuple(Delta(channel, "rest") for channel in self.tail))


C, R, T = Channel.CONTENT, Channel.REASONING, Channel.TOOL
HELD, SAID = True, False


@pytest.mark.parametrize("width", [1, 4])
@pytest.mark.parametrize(
    ("script", "tail", "counts"),
    [
        ([(C, SAID)] * 4, (), [1, 1, 1, 1]),
        ([(C, HELD), (C, HELD), (C, SAID), (C, SAID)], (), [3, 1]),
        ([(R, SAID), (R, HELD), (C, SAID), (T, SAID)], (), [0, 1, 0]),
        # A tool's text in between doesn't get what belongs to the next content.
        ([(C, HELD), (T, SAID), (C, HELD), (C, SAID)], (), [0, 3]),
        # What is left goes with the last text, of whatever channel, or is dropped.
        ([(C, SAID), (C, HELD), (C, HELD), (C, HELD)], (C,), [1, 3]),
        ([(C, SAID), (C, HELD), (T, SAID), (T, HELD)], (T,), [1, 0, 1]),
        ([(C, SAID), (C, HELD), (C, HELD), (C, HELD)], (T, C), [1, 0, 3]),
        ([(C, SAID), (C, HELD), (C, HELD), (T, SAID)], (), [1, 0]),
    ],
)
def test_they_come_with_the_text(
    build: Build,
    width: int,
    script: list[tuple[Channel, bool]],
    tail: tuple[Channel, ...],
    counts: list[int],
) -> None:
    core = build(width=width, drafts=Guesses())
    ids, _, events = drain(core.submit(request(PROMPT, 4, logprobs=2), Scripted(script, tail)))
    outputs = [event for event in events if isinstance(event, Output)]
    if width == 1:
        assert [len(event.logprobs) for event in outputs] == counts
    content = [token for token, (channel, _) in zip(ids, script, strict=True) if channel is C]
    assert [item.token_id for item in told(events)] == content[: sum(counts)]
    settle(core)


def test_a_stop_token_has_none(build: Build) -> None:
    core = build()
    prompt = PROMPT[:50]
    first = [expected_token(prompt)]
    stop = expected_token([*prompt, *first])
    ids, _, events = drain(core.submit(request(prompt, 9, logprobs=0), Session(stop=stop)))
    assert ids == [*first, stop]
    assert [item.token_id for item in told(events)] == first
    assert told(events)[0].top == ()


def test_the_closer_of_a_thinking_block_has_none(build: Build) -> None:
    core = build(width=3, drafts=Guesses())
    asked = request(PROMPT, 12, thinking_budget=4, logprobs=1)
    ids, _, events = drain(core.submit(asked, Session(budget=4)))
    assert ids[4:6] == [7, 8]
    assert [item.token_id for item in told(events)] == [*ids[:4], *ids[6:]]


def test_how_many_can_be_asked_for(build: Build) -> None:
    core = build()
    for wrong in (-1, 21):
        with pytest.raises(OptionError, match=f"of 0 to 20 tokens can be told, not {wrong}"):
            core.submit(request(PROMPT, 4, logprobs=wrong), Session())
