"""The public engine on a tiny model: order of use, threads, and what is refused."""

import gc
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import ninfer
from ninfer import Done, Engine, EngineOptions, FinishReason, GenerationOptions, Output, Started
from ninfer.api import Event
from ninfer.errors import CapacityError, EngineError, OptionError

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


def test_cancelled_before_it_began(engine: Engine):
    generation = engine.chat(HELLO)
    generation.cancel()
    started, done = list(generation)
    assert isinstance(started, Started)
    assert isinstance(done, Done)
    assert done.statistics.finish_reason is FinishReason.CANCELLED
    assert done.statistics.token_ids == ()


def test_another_answer_ends_the_one_under_way(engine: Engine):
    first = iter(engine.chat(HELLO, GenerationOptions(max_new=100)))
    next(first)
    next(first)
    unstarted = engine.chat(HELLO)
    assert len(ids(answer(engine))) == 4
    with pytest.raises(EngineError, match="ended early: another one was begun"):
        next(first)
    assert isinstance(next(iter(unstarted)), Started)


def test_a_consumer_that_fails_or_leaves_costs_nothing(engine: Engine):
    expected = ids(answer(engine, max_new=12))
    for stop_after in range(5):
        for number, _ in enumerate(engine.chat(HELLO, GenerationOptions(max_new=12))):
            if number == stop_after:
                break
        assert ids(answer(engine, max_new=12)) == expected


def test_threads_take_turns(engine: Engine):
    """Whoever began last finishes; the others are told. None gets tokens that are not its own."""
    expected = {seed: ids(answer(engine, max_new=30, seed=seed)) for seed in range(4)}
    finished: dict[int, tuple[int, ...]] = {}
    refused: list[int] = []

    def work(seed: int) -> None:
        try:
            finished[seed] = ids(answer(engine, max_new=30, seed=seed))
        except EngineError:
            refused.append(seed)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert finished
    assert len(finished) + len(refused) == 4
    assert finished == {seed: expected[seed] for seed in finished}


def test_errors_come_from_chat_or_the_first_event(engine: Engine):
    long = [{"role": "user", "content": "word " * 600}]
    generation = engine.chat(long)
    with pytest.raises(CapacityError, match="context holds 512"):
        next(iter(generation))
    with pytest.raises(ninfer.NInferError, match="no messages"):
        engine.chat([])


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
    engine.close()
    engine.close()
    with pytest.raises(EngineError, match="the engine closed"):
        next(events)
    with pytest.raises(EngineError, match="the engine is closed"):
        next(iter(later))
    with pytest.raises(EngineError, match="the engine is closed"):
        engine.chat(HELLO).text()


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
