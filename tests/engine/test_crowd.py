"""The engine with its worker and many consumers at once, who read, leave half-way, cancel and come back."""

import random
import threading
from collections.abc import Callable
from time import monotonic, sleep

import pytest

from ninfer.engine import Core, Done, Policy
from ninfer.errors import OverloadedError
from ninfer.events import FinishReason
from tests.engine.guesses import Guesses, sometimes
from tests.engine.harness import Session, request, settle
from tests.runtime.toy import ToyModel, ToyPredictor, expected_answer


def visit(core: Core, recurrent: bool, seed: int, rounds: int, faults: list[BaseException]) -> None:
    """One consumer: conversations that grow, are edited, left and taken up again."""
    chance = random.Random(seed)
    talk = [seed % 3, *(7 * i % 97 for i in range(chance.randrange(1, 120)))]
    try:
        served = 0
        while served < rounds:
            talk = talk[: chance.randrange(1, 230)]
            count = chance.randrange(1, 25)
            try:
                handle = core.submit(request(talk, count), Session())
            except OverloadedError:
                sleep(0.001)
                continue
            served += 1
            leaves = chance.random() < 0.3
            patience = chance.randrange(1, 12)
            for number, event in enumerate(handle):
                if leaves and number == patience:
                    if chance.random() < 0.5:
                        break
                    handle.cancel()
                if isinstance(event, Done):
                    ids = list(event.statistics.token_ids)
                    whole = event.statistics.finish_reason is not FinishReason.CANCELLED
                    assert whole or leaves
                    assert ids == expected_answer(talk, count if whole else len(ids), recurrent)
                    talk = [*talk, *ids, chance.randrange(97)]
    except BaseException as error:
        faults.append(error)


def crowd(core: Core, recurrent: bool, seed: int, rounds: int) -> None:
    faults: list[BaseException] = []
    threads = [
        threading.Thread(target=visit, args=(core, recurrent, 10 * seed + index, rounds, faults))
        for index in range(6)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(300)
    assert not faults, faults
    limit = monotonic() + 20
    while core._outstanding:
        assert monotonic() < limit, "a place was not given back"
        sleep(0.001)
    settle(core)
    assert core.health().available
    assert core.statistics().admitted > rounds


@pytest.mark.parametrize("recurrent", [True, False])
@pytest.mark.parametrize("width", [1, 3])
def test_a_crowd_is_served(build: Callable[..., Core], recurrent: bool, width: int) -> None:
    core = build(
        recurrent=recurrent,
        width=width,
        concurrency=3,
        context=256,
        snapshots=3,
        drafts=Guesses(recurrent, sometimes),
        policy=Policy(max_pending=2),
    )
    crowd(core, recurrent, seed=width, rounds=40)


@pytest.mark.parametrize("recurrent", [True, False])
def test_a_crowd_is_served_with_a_predictor(build: Callable[..., Core], recurrent: bool) -> None:
    predictor = ToyPredictor(recurrent, lambda count: sometimes(count) == 0)
    core = build(
        model=ToyModel(recurrent, predictor=predictor),
        width=5,
        concurrency=3,
        context=256,
        snapshots=3,
        policy=Policy(max_pending=2),
    )
    crowd(core, recurrent, seed=7, rounds=40)
    counters = core.statistics()
    assert 0 < counters.accepted_tokens < counters.drafted_tokens


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(8))
def test_a_crowd_is_served_for_long(build: Callable[..., Core], seed: int) -> None:
    recurrent = seed % 2 == 0
    core = build(
        recurrent=recurrent,
        width=1 + seed // 2 % 2 * 2,
        concurrency=1 + seed // 2,
        context=256,
        snapshots=seed % 4,
        drafts=Guesses(recurrent, sometimes),
        policy=Policy(max_pending=2),
    )
    crowd(core, recurrent, seed, rounds=300)
