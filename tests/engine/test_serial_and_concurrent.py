"""The same seeded requests give the same ids alone and in company, whenever they arrive."""

import random
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import pytest

from ninfer.engine import Marks, Policy
from ninfer.ops import SamplingParams
from tests.models.conftest import one_thread  # noqa: F401
from tests.models.loaded import GEOMETRIES, loaded

from .harness import GREEDY, drain
from .real import Desk, Reply, differences

MODELS = pytest.mark.parametrize("name", GEOMETRIES)
LENGTHS = (1, 17, 63, 64, 65, 129, 200, 300)
PREAMBLE = 90
NO_MARKS = Marks()


@dataclass(frozen=True)
class Ask:
    prompt: tuple[int, ...]
    count: int
    sampling: SamplingParams
    marks: Marks = NO_MARKS


def sampling(index: int) -> SamplingParams:
    """Greedy, sampled, and with penalties that change the answer."""
    kinds = (
        GREEDY,
        SamplingParams(0.8, seed=index),
        SamplingParams(0.0, presence_penalty=0.7, frequency_penalty=0.4),
        SamplingParams(1.1, top_k=8, top_p=0.9, frequency_penalty=0.6, seed=1 << 63 | index),
    )
    return kinds[index % len(kinds)]


def mixed(seed: int) -> list[Ask]:
    """Two requests of every length, in no order."""
    rng = random.Random(seed)
    lengths = rng.sample(LENGTHS * 2, 2 * len(LENGTHS))
    return [
        Ask(tuple(rng.randrange(190) for _ in range(length)), rng.randint(1, 30), sampling(index))
        for index, length in enumerate(lengths)
    ]


def related(seed: int) -> list[Ask]:
    """Conversations with one preamble, some asked twice, some with another last message.

    Marks cut their prefills, so what is computed after the place where a request resumes is cut the same way
    in a cold run.
    """
    rng = random.Random(seed)

    def some(count: int) -> tuple[int, ...]:
        return tuple(rng.randrange(190) for _ in range(count))

    preamble, asks = some(PREAMBLE), []
    for conversation in range(4):
        history = preamble + some(rng.randint(1, 150))
        for version in range(2):
            prompt = history + some(rng.randint(5, 90))
            opener = len(prompt)
            prompt += (7, 8, 9)
            marks = Marks((0, PREAMBLE, len(history)), PREAMBLE, opener)
            ask = Ask(prompt, rng.randint(1, 24), sampling(conversation + version), marks)
            asks += [ask] * (1 + (conversation + version) % 2)
    rng.shuffle(asks)
    return asks


def serial(name: str, asks: list[Ask], **options) -> list[Reply]:
    """One after the other, in one engine."""
    with Desk(loaded(name), **options) as desk:
        return [desk.ask(a.prompt, a.count, marks=a.marks, sampling=a.sampling) for a in asks]


def concurrent(name: str, asks: list[Ask], rows: int, seed: int, **options) -> tuple[list[list[int]], int]:
    """Ids by request, and tokens reused; each request comes from a thread of its own after a while."""
    rng = random.Random(seed)
    delays = [rng.uniform(0, 0.03) for _ in asks]  # more than can be answered meanwhile
    with (
        Desk(loaded(name), concurrency=rows, capacity=rows * 512, **options) as desk,
        ThreadPoolExecutor(len(asks)) as threads,
    ):

        def one(ask: Ask, delay: float) -> list[int]:
            time.sleep(delay)
            return drain(desk.submit(ask.prompt, ask.count, marks=ask.marks, sampling=ask.sampling))[0]

        ids = list(threads.map(one, asks, delays))
        statistics = desk.core.statistics()
        assert statistics.row_rounds <= rows * statistics.rounds
        if rows > 1:
            assert statistics.row_rounds > statistics.rounds, "no round had company"
        return ids, statistics.reused_tokens


@MODELS
def test_without_reuse(name: str) -> None:
    asks = mixed(1)
    options = {"context": 512, "policy": Policy(max_pending=32, reuse=False)}
    alone = [reply.ids for reply in serial(name, asks, **options)]
    assert any(len(ids) == ask.count for ids, ask in zip(alone, asks, strict=True))
    assert len({tuple(ids) for ids in alone}) > len(asks) // 2
    for rows in (1, 2, 4, 8):
        ids, reused = concurrent(name, asks, rows, seed=rows, **options)
        assert ids == alone, rows
        assert reused == 0


def test_with_reuse_and_equal_partitions() -> None:
    """Cold, serial with a cache and concurrent with a cache: only where a request resumes differs."""
    asks = related(2)
    options = {"context": 512, "policy": Policy(max_pending=32), "snapshots": 12}
    cold = [serial("qwen3.5", [ask], **options)[0] for ask in asks]
    assert all(reply.reused == 0 for reply in cold)
    alone = serial("qwen3.5", asks, **options)
    assert sum(reply.reused >= PREAMBLE for reply in alone) == len(asks) - 1
    assert all(r.computed == len(a.prompt) - r.reused for r, a in zip(alone, asks, strict=True))
    expected = [reply.ids for reply in cold]
    assert [reply.ids for reply in alone] == expected
    for rows in (1, 2, 4, 8):
        ids, reused = concurrent("qwen3.5", asks, rows, seed=rows, **options)
        assert ids == expected, rows
        assert reused > PREAMBLE


@MODELS
def test_with_reuse_and_other_partitions(name: str, record_property) -> None:
    """Where a cached and a cold prefill are cut differently, answers part at near-ties only."""
    model, rng = loaded(name), random.Random(3)
    options = {"context": 1024, "policy": Policy(max_pending=32), "snapshots": 8}
    compared = parted = reused = 0
    with Desk(model, concurrency=4, capacity=4096, **options) as desk:
        histories = [[rng.randrange(190) for _ in range(rng.randint(20, 200))] for _ in range(6)]
        for _ in range(4):
            handles = [desk.submit(history, rng.randint(2, 20)) for history in histories]
            for history, handle in zip(histories, handles, strict=True):
                ids, statistics, _ = drain(handle)
                cold = serial(name, [Ask(tuple(history), len(ids), GREEDY)], **options)[0].ids
                parted += differences(model, history, ids, cold)
                compared += 1
                reused += statistics.reused_tokens
                history += ids + [rng.randrange(190) for _ in range(rng.randint(1, 40))]
    record_property("answers compared", compared)
    record_property("answers that part at a near-tie", parted)
    print(f"{name}: {parted} of {compared} answers part at a near-tie")
    assert reused > 1000
