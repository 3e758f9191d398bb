"""The link to a real engine with ninfer-nano: answers as in this process, errors in their classes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from ninfer.api import Engine, EngineOptions, GenerationOptions
from ninfer.engine import Done, Event, Output, PromptProgress, Started
from ninfer.errors import (
    ArtifactError,
    CapacityError,
    ContextLengthError,
    ConversionError,
    FrontendError,
    NInferError,
    OptionError,
    OverloadedError,
    ThinkingBudgetError,
)
from ninfer.events import FinishReason
from ninfer.frontend import Prompt
from ninfer.serve.jobs import Job, LinkState
from ninfer.serve.link import EngineLink

from .test_link import ROOT, events, until

pytestmark = pytest.mark.anyio
NANO = ROOT / "models" / "ninfer-nano.ninfer"
OPTIONS = EngineOptions(max_context=2048, max_concurrency=2, max_pending=2, kv_capacity=4096, threads=1)
GREEDY = GenerationOptions(temperature=0.0, presence_penalty=0.0, max_new=40)


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
async def link(anyio_backend: str) -> AsyncIterator[EngineLink]:
    link = EngineLink(NANO, OPTIONS)
    await link.start()
    await link.wait_ready()
    yield link
    await link.stop()


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    """The same in this process."""
    threads = torch.get_num_threads()
    with Engine.load(NANO, OPTIONS) as engine:
        yield engine
    torch.set_num_threads(threads)


def ask(engine: Engine, text: str) -> Prompt:
    return engine.frontend.render([{"role": "user", "content": text}])


def text(of: list[Event]) -> str:
    return "".join(event.text for event in of if isinstance(event, Output))


async def idle(link: EngineLink) -> None:
    """Wait until the engine has nothing to do."""
    async with asyncio.timeout(10):
        while (statistics := await link.statistics()) is None or statistics.running or statistics.waiting:
            await asyncio.sleep(0.01)


async def test_what_was_loaded(link: EngineLink, engine: Engine):
    info, description = link.info, engine.description
    assert (info.name, info.architecture, info.weight_bytes) == (
        description.name,
        description.architecture,
        description.weight_bytes,
    )
    assert (info.max_context, info.kv_tokens, info.memory) == (2048, 4096, description.memory)
    assert info.artifact_bytes == NANO.stat().st_size
    assert (info.max_concurrency, info.pages, info.slots, info.snapshots) == (2, 64, 10, 6)
    statistics = await link.statistics()
    assert statistics is not None
    assert statistics.admitted >= 1, "the warm-up"


@pytest.mark.parametrize("seed", [0, 2**64 - 1])
async def test_answers_are_those_of_this_process(link: EngineLink, engine: Engine, seed: int):
    questions = [f"What is {n} + {n * n}?" for n in range(2, 5)]
    sampled = replace(GREEDY, temperature=1.0, seed=seed)
    for options in (GREEDY, sampled, replace(GREEDY, thinking_budget=7, max_new=60)):
        wanted = [list(engine.generate(ask(engine, question), options)) for question in questions]
        streams = [await link.submit(Job(ask(engine, question), options)) for question in questions]
        for stream, expected in zip(streams, wanted, strict=True):
            got = await events(stream, 20)
            assert isinstance(got[0], Started)
            assert any(isinstance(event, PromptProgress) for event in got)
            assert text(got) == text(expected)
            last, expected_last = got[-1], expected[-1]
            assert isinstance(last, Done)
            assert isinstance(expected_last, Done)
            assert last.statistics.token_ids == expected_last.statistics.token_ids
            assert last.statistics.thinking == expected_last.statistics.thinking
            assert last.statistics.finish_reason == expected_last.statistics.finish_reason
    await idle(link)


async def test_cancelling_and_leaving_give_back_what_they_had(link: EngineLink, engine: Engine):
    long = replace(GREEDY, max_new=None, stop_token_ids=(), raw=True, temperature=1.0)
    prompt = Prompt([300, 301, 302], "", False)
    cancelled = await link.submit(Job(prompt, long))
    left = await link.submit(Job(prompt, long))
    async for event in cancelled:
        if isinstance(event, Output):
            cancelled.cancel()
        if isinstance(event, Done):
            assert event.statistics.finish_reason in (FinishReason.CANCELLED, FinishReason.STOP_TOKEN)
    await anext(left)
    begin = time.perf_counter()
    left.close()
    await idle(link)
    assert time.perf_counter() - begin < 1
    statistics = await link.statistics()
    assert statistics is not None
    assert statistics.active_pages == statistics.reserved_pages == 0


@pytest.mark.parametrize(
    ("options", "kind"),
    [
        (replace(GREEDY, stop=("",)), FrontendError),
        (replace(GREEDY, stop_token_ids=(-1,)), FrontendError),
        (replace(GREEDY, thinking_budget=30, max_new=31), ThinkingBudgetError),
    ],
)
async def test_what_is_wrong_with_a_job_is_its_own_error(
    link: EngineLink, engine: Engine, options: GenerationOptions, kind: type[NInferError]
):
    prompt = ask(engine, "Hello")
    with pytest.raises(kind) as here:
        engine.generate(prompt, options)
    with pytest.raises(kind) as there:
        await events(await link.submit(Job(prompt, options)))
    assert type(here.value) is type(there.value)
    assert str(here.value) == str(there.value)
    assert link.state is LinkState.READY


async def test_prompts_that_cannot_be(link: EngineLink):
    for prompt, kind in (
        (Prompt([1] * 2049, "", False), ContextLengthError),
        (Prompt([], "", False), OptionError),
        (Prompt([2**31], "", False), OptionError),
    ):
        with pytest.raises(kind):
            await events(await link.submit(Job(prompt, GREEDY)))
    done = await events(await link.submit(Job(Prompt([1], "", False), replace(GREEDY, max_new=0))))
    assert [type(event) for event in done] == [Done]


async def test_a_full_queue_is_said_and_passes(link: EngineLink, engine: Engine):
    jobs = [await link.submit(Job(ask(engine, "Hello"), GREEDY)) for _ in range(8)]
    outcomes = await asyncio.gather(*(events(stream, 20) for stream in jobs), return_exceptions=True)
    refused = [outcome for outcome in outcomes if isinstance(outcome, OverloadedError)]
    assert 1 <= len(refused) <= 4
    assert len(refused) + sum(isinstance(outcome, list) for outcome in outcomes) == 8
    await idle(link)


async def test_handing_over_costs_the_engine_little(link: EngineLink, engine: Engine):
    """What the worker of the engine spends on another process; measured in full by bench/http_overhead.py."""
    before = await link.statistics()
    await events(
        await link.submit(Job(ask(engine, "What is 2718 + 3141?"), replace(GREEDY, max_new=120))), 20
    )
    after = await link.statistics()
    assert before is not None
    assert after is not None
    rounds, handed = after.rounds - before.rounds, after.handovers - before.handovers
    assert 0 < handed < rounds, "texts that come quickly are handed over together"
    assert 0 < after.handover_seconds - before.handover_seconds < after.decode_seconds - before.decode_seconds


@pytest.mark.parametrize(
    ("path", "options", "kind"),
    [
        (Path("/no/such/model"), OPTIONS, ConversionError),
        (Path(__file__), OPTIONS, ArtifactError),
        (NANO, replace(OPTIONS, max_context=10**6, kv_capacity=None), CapacityError),
    ],
)
async def test_what_cannot_be_loaded(path: Path, options: EngineOptions, kind: type[NInferError]):
    link = EngineLink(path, options)
    await link.start()
    with pytest.raises(kind) as there:
        await link.wait_ready()
    with suppress(NInferError):
        await link.opened()
    await link.stop()
    with pytest.raises(kind) as here:
        Engine.load(path, options)
    assert str(here.value) == str(there.value)


async def test_memory_is_really_freed_and_the_engine_comes_back(engine: Engine):
    link = EngineLink(NANO, OPTIONS, idle_unload=0.1)
    await link.start()
    first = (await link.wait_ready()).process
    prompt = ask(engine, "What is 3 + 4?")
    wanted = text(await events(await link.submit(Job(prompt, GREEDY)), 20))
    await until(lambda: link.state is LinkState.UNLOADED)
    await until(lambda: not Path(f"/proc/{first}").exists())
    assert text(await events(await link.submit(Job(prompt, GREEDY)), 20)) == wanted
    assert link.info.process != first
    await link.stop()
