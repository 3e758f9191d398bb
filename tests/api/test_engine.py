"""The public engine on a tiny model: order of use, threads, and what is refused."""

import asyncio
import gc
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

import ninfer
from ninfer import (
    Done,
    Engine,
    EngineOptions,
    FinishReason,
    Generation,
    GenerationOptions,
    Output,
    PromptProgress,
    Started,
)
from ninfer.api import Event
from ninfer.errors import ContextLengthError, OptionError, OverloadedError, UnavailableError

HELLO = [{"role": "user", "content": "Hello"}]


@pytest.fixture(scope="module")
def engine(tiny: Path) -> Iterator[Engine]:
    threads = torch.get_num_threads()
    with Engine.load(tiny, EngineOptions(threads=1)) as engine:
        yield engine
    torch.set_num_threads(threads)


def answer(engine: Engine, **options) -> list[Event]:
    return list(engine.chat(HELLO, GenerationOptions(**{"max_new": 4, **options})))


def ids(events: list[Event]) -> tuple[int, ...]:
    assert isinstance(events[-1], Done)
    return events[-1].statistics.token_ids


def test_public_names_are_there():
    assert all(hasattr(ninfer, name) for name in ninfer.__all__)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        ninfer.nothing  # noqa: B018


def test_threads_are_what_was_asked_for(engine: Engine):
    assert engine.description.threads == torch.get_num_threads() == 1


def test_text_is_the_content_and_events_come_once(engine: Engine):
    generation = engine.chat(HELLO, GenerationOptions(max_new=4, thinking=False))
    text = generation.text()
    assert (generation.text(), list(generation)) == ("", [])
    events = answer(engine, thinking=False)
    assert text == "".join(event.text for event in events if isinstance(event, Output)) != ""
    assert engine.chat(HELLO, GenerationOptions(max_new=4)).text() == ""  # all of it is reasoning


def test_cancelled_before_it_is_read(engine: Engine):
    generation = engine.chat(HELLO)
    generation.cancel()
    *_, done = list(generation)
    assert isinstance(done, Done)
    assert done.statistics.finish_reason is FinishReason.CANCELLED


def test_answers_queue_up_in_order(engine: Engine):
    expected = [ids(answer(engine, max_new=30, seed=seed)) for seed in range(3)]
    generations = [engine.chat(HELLO, GenerationOptions(max_new=30, seed=seed)) for seed in range(3)]
    assert [ids(list(generation)) for generation in reversed(generations)] == expected[::-1]


def test_several_answers_at_a_time(tiny: Path):
    options = EngineOptions(threads=1, max_concurrency=4, kv_capacity=2048, max_context=512)
    with Engine.load(tiny, options) as engine:
        expected = [ids(answer(engine, max_new=30, seed=seed, prefix_reuse=False)) for seed in range(8)]
        options = [GenerationOptions(max_new=30, seed=seed, prefix_reuse=False) for seed in range(8)]
        before = engine.statistics()
        generations = [engine.chat(HELLO, one) for one in options]
        assert [ids(list(generation)) for generation in generations] == expected
        after = engine.statistics()
        assert after.rounds - before.rounds < after.row_rounds - before.row_rounds

        async def collect(one: GenerationOptions) -> tuple[int, ...]:
            return ids([event async for event in engine.chat(HELLO, one)])

        async def together() -> list[tuple[int, ...]]:
            return await asyncio.gather(*map(collect, options))

        assert asyncio.run(together()) == expected


def test_a_consumer_that_fails_or_leaves_costs_nothing(engine: Engine):
    expected = ids(answer(engine, max_new=12))
    for stop_after in range(5):
        for number, _ in enumerate(engine.chat(HELLO, GenerationOptions(max_new=12))):
            if number == stop_after:
                break
        assert ids(answer(engine, max_new=12)) == expected


def test_threads_get_their_own_tokens(engine: Engine):
    expected = {seed: ids(answer(engine, max_new=30, seed=seed)) for seed in range(4)}
    finished: dict[int, tuple[int, ...]] = {}

    def work(seed: int) -> None:
        finished[seed] = ids(answer(engine, max_new=30, seed=seed))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert finished == expected


def test_a_conversation_computes_only_its_new_part(engine: Engine):
    turn = [*HELLO, {"role": "assistant", "content": "Yes?"}, {"role": "user", "content": "Tell me."}]
    first, again = (answer(engine, max_new=4, thinking=False, seed=9) for _ in range(2))
    assert isinstance(first[0], Started)
    assert isinstance(again[0], Started)
    assert 0 < again[0].reused_tokens < again[0].prompt_tokens
    assert ids(first) == ids(again)
    options = GenerationOptions(max_new=4, prefix_reuse=False)
    [started, *_] = engine.chat(turn, options)
    assert isinstance(started, Started)
    assert started.reused_tokens == 0


def test_plain_tokens_are_continued(engine: Engine):
    events = list(engine.generate([5, 6, 7], GenerationOptions(max_new=3, temperature=0)))
    assert len(ids(events)) == 3
    with pytest.raises(OptionError, match="not below"):
        engine.generate([5, 1 << 20])


@pytest.mark.parametrize("prompt", ["Hello", [1.5, 2], None, [None], 7, torch.tensor([0.5])])
def test_a_prompt_that_is_no_token_ids_is_refused_and_hurts_nobody(engine: Engine, prompt):
    with pytest.raises(OptionError, match="sequence of token ids"):
        engine.generate(prompt)
    assert ids(answer(engine))


def test_token_ids_of_any_integer_kind_are_one_prompt(engine: Engine):
    options = GenerationOptions(max_new=3, temperature=0)
    kinds = [5, 6, 7], np.array([5, 6, 7]), torch.tensor([5, 6, 7]), (5, 6, 7)
    events = [list(engine.generate(kind, options)) for kind in kinds]  # type: ignore[arg-type]
    assert len({ids(one) for one in events}) == 1


def test_events_keep_their_engine_alive(tiny: Path):
    """Also where nothing but the loop over its events holds an answer, and so its engine."""

    def chat() -> Generation:
        return Engine.load(tiny, EngineOptions(threads=1)).chat(HELLO, GenerationOptions(max_new=6))

    async def collect() -> list[Event]:
        return [event async for event in chat()]

    before = threading.active_count()
    assert len(ids(list(chat()))) == len(ids(asyncio.run(collect()))) == 6
    gc.collect()
    assert threading.active_count() == before


def test_without_reuse_no_states_are_kept_and_no_chunk_is_cut_for_them(tiny: Path):
    turns = [*HELLO, {"role": "assistant", "content": "Yes?"}, {"role": "user", "content": "Tell me."}]

    def load(**options) -> tuple[str, int]:
        with Engine.load(tiny, EngineOptions(threads=1, **options)) as engine:
            list(engine.chat(turns, GenerationOptions(max_new=1)))
            steps = [
                e for e in engine.chat(turns, GenerationOptions(max_new=1)) if isinstance(e, PromptProgress)
            ]
            return engine.description.memory, steps[0].processed_tokens - steps[0].prompt_tokens

    assert "2 + 0 of" in load(prefix_reuse=False)[0]
    assert "2 + 5 of" in load()[0]
    assert load(state_slots=0)[1] == 0


def test_errors_come_at_once(engine: Engine):
    with pytest.raises(ContextLengthError, match="context holds 512"):
        engine.chat([{"role": "user", "content": "word " * 600}])
    with pytest.raises(ninfer.NInferError, match="no messages"):
        engine.chat([])


def test_a_full_queue_is_an_error_of_its_own(tiny: Path):
    with Engine.load(tiny, EngineOptions(threads=1, max_pending=1)) as engine:
        busy = [engine.chat(HELLO, GenerationOptions(max_new=400)) for _ in range(2)]
        with pytest.raises(OverloadedError, match="the queue is full: 2 requests"):
            engine.chat(HELLO)
        for generation in busy:
            generation.close()


def test_an_empty_template_is_refused(tiny: Path):
    with (
        Engine.load(tiny, EngineOptions(chat_template="", threads=1)) as engine,
        pytest.raises(OptionError, match="rendered prompt is empty"),
    ):
        engine.chat(HELLO)


def test_a_closed_engine_says_so(tiny: Path):
    engine = Engine.load(tiny, EngineOptions(threads=1))
    events = iter(engine.chat(HELLO))
    later = engine.chat(HELLO)
    next(events)
    assert engine.health().available
    engine.close()
    engine.close()
    with pytest.raises(UnavailableError, match="the engine was closed"):
        list(events)
    with pytest.raises(UnavailableError, match="the engine was closed"):
        list(later)
    with pytest.raises(UnavailableError, match="the engine is closed"):
        engine.chat(HELLO)
    assert not engine.health().available


def test_closing_frees_the_weights(tiny: Path):
    """Nothing of the file stays mapped."""
    maps = Path("/proc/self/maps")
    if not maps.exists():
        pytest.skip("needs /proc")
    copy = tiny.with_name("copy.ninfer")
    copy.write_bytes(tiny.read_bytes())
    with Engine.load(copy, EngineOptions(threads=1)) as engine:
        answer(engine)
        assert str(copy) in maps.read_text()
    gc.collect()
    assert str(copy) not in maps.read_text()
