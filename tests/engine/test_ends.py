"""How requests end before their time: cancellation at every state, consumers that leave, faults, shutdown."""

import asyncio
import gc
import os
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from time import monotonic, sleep

import pytest

from ninfer.engine import Core, Done, Event, Handle, Output, Policy, Started
from ninfer.errors import EngineError, OverloadedError, QueueTimeoutError, UnavailableError
from ninfer.events import FinishReason, Step
from ninfer.runtime.records import Unit
from tests.engine.guesses import Guesses
from tests.engine.harness import Gate, Session, drain, request, settle
from tests.engine.oracle import greedy_answer
from tests.runtime.toy import ToyModel, expected_answer

Build = Callable[..., Core]
PROMPT = [(11 * i + 2) % 97 for i in range(400)]


def ended(handle: Handle) -> Done:
    """The end of a request, which may be short of a start."""
    events = list(handle)
    assert [event for event in events if isinstance(event, Done)] == events[-1:]
    assert all(isinstance(event, Started) == (index == 0) for index, event in enumerate(events[:-1]))
    assert isinstance(events[-1], Done)
    return events[-1]


def until(condition: Callable[[], bool]) -> None:
    limit = monotonic() + 20
    while not condition():
        assert monotonic() < limit
        sleep(0.0005)


# Cancellation


def test_a_waiting_request_ends_at_once_and_takes_nothing(build: Build) -> None:
    gate = Gate()
    core = build(gate=gate)
    running = core.submit(request(PROMPT, 3), Session())
    gate.arrive()
    waiting = [core.submit(request(PROMPT[i:], 3), Session()) for i in range(1, 4)]
    waiting[1].cancel()
    gate.step()
    gate.arrive()
    [event] = list(waiting[1])
    assert isinstance(event, Done)
    assert event.statistics.finish_reason is FinishReason.CANCELLED
    assert event.statistics.token_ids == ()
    gate.open()
    assert drain(running)[0] == expected_answer(PROMPT, 3)
    for index in (0, 2):
        assert drain(waiting[index])[0] == expected_answer(PROMPT[index + 1 :], 3)
    settle(core)


def test_a_request_cancelled_before_the_worker_has_seen_it(build: Build) -> None:
    gate = Gate()
    core = build(gate=gate, concurrency=2)
    running = core.submit(request(PROMPT, 3), Session())
    gate.arrive()
    other = core.submit(request(PROMPT, 3), Session())
    other.cancel()
    gate.open()
    assert ended(other).statistics.finish_reason is FinishReason.CANCELLED
    drain(running)
    assert core.statistics().admitted == 1
    settle(core)


@pytest.mark.parametrize("recurrent", [True, False])
@pytest.mark.parametrize("chunk", range(4))
def test_a_prefill_is_left_at_the_end_of_its_chunk_and_taken_up_there(
    build: Build, recurrent: bool, chunk: int
) -> None:
    gate = Gate()
    core = build(recurrent=recurrent, gate=gate)
    handle = core.submit(request(PROMPT, 5), Session())
    for _ in range(chunk):
        gate.arrive()
        gate.step()
    gate.arrive()
    handle.cancel()  # while this chunk is computed
    gate.open()
    statistics = ended(handle).statistics
    assert statistics.finish_reason is FinishReason.CANCELLED
    assert list(statistics.token_ids) == expected_answer(PROMPT, int(chunk == 3), recurrent)
    settle(core)
    frontier = min(128 * (chunk + 1), 400)
    assert core.statistics().prefill_tokens == frontier
    ids, statistics, _ = drain(core.submit(request(PROMPT, 5), Session()))
    # The whole prompt is known, but its last token has to be fed for the answer.
    last = 384 if recurrent else 399
    assert statistics.reused_tokens == (frontier if frontier < 400 else last)
    assert ids == expected_answer(PROMPT, 5, recurrent)
    assert core.statistics().prefill_tokens == frontier + 400 - statistics.reused_tokens
    settle(core)


def test_a_cancelled_prefill_makes_room_at_the_end_of_its_chunk(build: Build) -> None:
    """For a request that waits for its lane and its pages."""
    gate = Gate()
    core = build(gate=gate, context=448, snapshots=0)
    first = core.submit(request(PROMPT, 5), Session())
    gate.arrive()
    second = core.submit(request(PROMPT[200:], 5), Session())
    gate.step()
    gate.arrive()
    first.cancel()
    gate.step()
    assert gate.arrive().tokens == tuple(PROMPT[200:328])
    assert ended(first).statistics.finish_reason is FinishReason.CANCELLED
    statistics = core.statistics()
    assert (statistics.running, statistics.active_pages) == (1, 2)
    gate.open()
    assert drain(second)[0] == expected_answer(PROMPT[200:], 5)
    settle(core)


@pytest.mark.parametrize("recurrent", [True, False])
@pytest.mark.parametrize("width", [1, 3])
@pytest.mark.parametrize("rounds", [1, 2, 30, 70])
def test_a_decode_is_left_at_its_frontier(build: Build, recurrent: bool, width: int, rounds: int) -> None:
    gate = Gate()
    core = build(recurrent=recurrent, gate=gate, width=width, drafts=Guesses(recurrent), context=1024)
    prompt = PROMPT[:100]
    handle = core.submit(request(prompt, None), Session())
    while sum(note.unit is Unit.ROUND for note in gate.notes) < rounds:
        gate.arrive()
        if sum(note.unit is Unit.ROUND for note in gate.notes) == rounds:
            break
        gate.step()
    handle.cancel()
    gate.open()
    statistics = ended(handle).statistics
    ids = list(statistics.token_ids)
    assert statistics.finish_reason is FinishReason.CANCELLED
    assert len(ids) == 1 + rounds * width
    assert ids == expected_answer(prompt, len(ids), recurrent)
    settle(core)
    follow = [*prompt, *ids, 1]
    ids, statistics, _ = drain(core.submit(request(follow, 5), Session()))
    assert statistics.reused_tokens == len(follow) - 2
    assert ids == expected_answer(follow, 5, recurrent)
    settle(core)


def test_cancelled_where_a_closer_is_due(build: Build) -> None:
    gate = Gate()
    core = build(gate=gate)
    handle = core.submit(request(PROMPT, 50, thinking_budget=4), Session(budget=4))
    while gate.arrive().unit is not Unit.CONTROL:
        gate.step()
    handle.cancel()
    gate.open()
    ids = list(ended(handle).statistics.token_ids)
    assert ids == greedy_answer(PROMPT, 6, think=4, closer=(7, 8))
    settle(core)
    follow = [*PROMPT, *ids, 9]
    ids, statistics, _ = drain(core.submit(request(follow, 5), Session()))
    assert (ids, statistics.reused_tokens) == (expected_answer(follow, 5), len(follow) - 2)
    settle(core)


def test_cancelling_twice_and_after_the_end_changes_nothing(build: Build) -> None:
    core = build(concurrency=2)
    handle = core.submit(request(PROMPT, None), Session())
    events = iter(handle)
    assert isinstance(next(events), Started)
    handle.cancel()
    handle.cancel()
    rest = list(events)
    assert isinstance(rest[-1], Done)
    assert rest[-1].statistics.finish_reason is FinishReason.CANCELLED
    handle.cancel()
    handle.close()
    finished = core.submit(request(PROMPT, 3), Session())
    assert drain(finished)[1].finish_reason is FinishReason.OUTPUT_LIMIT
    finished.cancel()
    finished.close()
    assert core.statistics().finished == {FinishReason.CANCELLED: 1, FinishReason.OUTPUT_LIMIT: 1}
    settle(core)


def test_cancelling_one_leaves_the_others_alone(build: Build) -> None:
    core = build(concurrency=4, width=3, drafts=Guesses(), context=512)
    handles = [core.submit(request(PROMPT[:n], 100), Session()) for n in (10, 70, 130, 200)]
    events = iter(handles[1])
    for _ in range(6):
        next(events)
    handles[1].cancel()
    for index, n in ((0, 10), (2, 130), (3, 200)):
        assert drain(handles[index])[0] == expected_answer(PROMPT[:n], 100)
    *_, done = events
    assert isinstance(done, Done)
    ids = list(done.statistics.token_ids)
    assert ids == expected_answer(PROMPT[:70], len(ids))
    settle(core)


# The queue's places


def places(core: Core) -> int:
    """How many requests the queue takes now; they are dropped again."""
    handles: list[Handle] = []
    with suppress(OverloadedError):
        while len(handles) < 100:
            handles.append(core.submit(request([1, 2, 3], 1), Session()))
    return len(handles)


def read(handle: Handle) -> None:
    list(handle)


def close_then_end(handle: Handle) -> None:
    handle.close()


def cancel_and_read(handle: Handle) -> None:
    handle.cancel()
    list(handle)


def end_then_close(handle: Handle) -> None:
    until(lambda: handle._mailbox.ended)
    handle.close()
    handle.close()


def leave_half_way(handle: Handle) -> None:
    for event in handle:
        if isinstance(event, Output):
            break


def leave_before_the_first_event(handle: Handle) -> None:
    iter(handle)


def end_then_drop(handle: Handle) -> None:
    until(lambda: handle._mailbox.ended)


def drop(handle: Handle) -> None:
    pass


def cancel_and_drop(handle: Handle) -> None:
    handle.cancel()


def drop_in_a_cycle(handle: Handle) -> None:
    cycle: list[object] = [handle]
    cycle.append(cycle)


@pytest.mark.parametrize(
    "leave",
    [
        read,
        close_then_end,
        cancel_and_read,
        end_then_close,
        leave_half_way,
        leave_before_the_first_event,
        end_then_drop,
        drop,
        cancel_and_drop,
        drop_in_a_cycle,
    ],
)
@pytest.mark.parametrize("fails", [False, True])
def test_a_place_is_given_back_exactly_once(
    build: Build, leave: Callable[[Handle], None], fails: bool
) -> None:
    core = build(policy=Policy(max_pending=2), concurrency=2)
    for _ in range(2):
        handles = [core.submit(request(PROMPT, 30), Session(fail_at=9 if fails else None)) for _ in range(4)]
        while handles:
            with suppress(ValueError):
                leave(handles.pop(0))
        if leave is drop_in_a_cycle:
            gc.collect()
        until(lambda: not core._outstanding)
        assert places(core) == 4, "neither lost nor given back twice"
        until(lambda: not core._outstanding)
    settle(core)


def test_an_unread_end_keeps_its_place(build: Build) -> None:
    core = build(policy=Policy(max_pending=0))
    handle = core.submit(request(PROMPT, 2), Session())
    until(lambda: handle._mailbox.ended)
    with pytest.raises(OverloadedError, match="the queue is full: 1 requests"):
        core.submit(request(PROMPT, 2), Session())
    list(handle)
    drain(core.submit(request(PROMPT, 2), Session()))
    settle(core)


def test_waiting_has_a_limit(build: Build) -> None:
    gate = Gate()
    core = build(gate=gate, policy=Policy(pending_timeout=0.05))
    running = core.submit(request(PROMPT, 3), Session())
    gate.arrive()
    late = core.submit(request(PROMPT, 3), Session())
    patient = core.submit(request(PROMPT, 3), Session(), timeout=100)
    sleep(0.06)
    gate.open()
    with pytest.raises(QueueTimeoutError, match=r"waited 0\.\d s for its turn"):
        list(late)
    assert drain(running)[0] == drain(patient)[0] == expected_answer(PROMPT, 3), "running has no limit"
    with pytest.raises(QueueTimeoutError, match="over before it could be queued"):
        core.submit(request(PROMPT, 3), Session(), timeout=0)
    assert core.statistics().failed == 1
    settle(core)


# Consumers


def test_threads_read_side_by_side(build: Build) -> None:
    core = build(concurrency=3, context=512, width=3, drafts=Guesses())
    answers: dict[int, list[list[int]]] = {}

    def consume(index: int) -> None:
        answers[index] = [
            drain(core.submit(request(PROMPT[index : 60 + k], 30), Session()))[0] for k in range(5)
        ]

    threads = [threading.Thread(target=consume, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    for index in range(4):
        assert answers[index] == [expected_answer(PROMPT[index : 60 + k], 30) for k in range(5)]
    settle(core)


def test_tasks_read_side_by_side(build: Build) -> None:
    core = build(concurrency=3, context=512)

    async def consume(index: int) -> list[int]:
        events: list[Event] = [event async for event in core.submit(request(PROMPT[index:90], 30), Session())]
        assert isinstance(events[0], Started)
        assert isinstance(events[-1], Done)
        return list(events[-1].statistics.token_ids)

    async def consume_all() -> list[list[int]]:
        return await asyncio.gather(*map(consume, range(6)))

    assert asyncio.run(consume_all()) == [expected_answer(PROMPT[index:90], 30) for index in range(6)]
    until(lambda: not core._outstanding)
    settle(core)


def test_a_task_gets_its_request_s_error(build: Build) -> None:
    core = build()

    async def consume() -> None:
        async for _ in core.submit(request(PROMPT, 30), Session(fail_at=5)):
            pass

    with pytest.raises(ValueError, match="breaks here"):
        asyncio.run(consume())
    until(lambda: not core._outstanding)
    settle(core)


@pytest.mark.parametrize("after", [0, 3])
def test_cancelling_a_task_cancels_its_request(build: Build, after: int) -> None:
    gate = Gate()
    core = build(gate=gate, context=4096)

    async def consume(started: asyncio.Event) -> None:
        count = 0
        async for _ in core.submit(request(PROMPT, None), Session()):
            count += 1
            if count > after:
                started.set()

    async def main() -> None:
        started = asyncio.Event()
        task = asyncio.create_task(consume(started))
        if after:
            for _ in range(12):
                gate.step()
        await started.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        gate.open()

    asyncio.run(main())
    until(lambda: not core._outstanding)
    assert core.statistics().finished == {FinishReason.CANCELLED: 1}
    assert core.statistics().decode_tokens < 20
    settle(core)


def test_leaving_an_async_loop_cancels_the_request(build: Build) -> None:
    core = build(context=4096)

    async def main() -> None:
        async for event in core.submit(request(PROMPT, None), Session()):
            if isinstance(event, Output):
                break
        await asyncio.sleep(0)

    asyncio.run(main())
    until(lambda: not core._outstanding)
    assert core.statistics().finished == {FinishReason.CANCELLED: 1}
    settle(core)


def test_an_event_loop_that_is_closed_does_not_hurt_the_worker(build: Build) -> None:
    gate = Gate()
    core = build(gate=gate, concurrency=2)
    handle = core.submit(request(PROMPT, 30), Session())
    loop = asyncio.new_event_loop()
    events = handle.__aiter__()
    assert isinstance(loop.run_until_complete(anext(events)), Started)
    loop.close()  # the generator lives on and its listener stays
    gate.open()
    assert drain(core.submit(request(PROMPT, 5), Session()))[0] == expected_answer(PROMPT, 5)
    assert core.health().available
    del events
    handle.close()
    until(lambda: not core._outstanding)
    settle(core)


def test_one_reader_at_a_time(build: Build) -> None:
    """A second one is refused, in a thread as in a task, and takes nothing from the first."""
    gate = Gate()
    core = build(gate=gate)
    handle = core.submit(request(PROMPT, 5), Session())
    first = iter(handle)
    events = [next(first)]

    async def read() -> list[Event]:
        return [event async for event in handle]

    for second in (lambda: list(handle), lambda: asyncio.run(read())):
        with pytest.raises(EngineError, match="are being read elsewhere"):
            second()
    gate.open()
    events += first
    assert [type(event) for event in events if not isinstance(event, Output)][-1] is Done
    assert len([event for event in events if isinstance(event, Output)]) == 5
    assert list(handle) == []
    gate = Gate()  # shut, so that the first task still waits when the second comes
    handle = build(gate=gate).submit(request(PROMPT, 5), Session())

    async def twice() -> tuple[list[Event], BaseException | None]:
        first, second = asyncio.create_task(read()), asyncio.create_task(read())
        await asyncio.wait({second}, timeout=20)
        gate.open()
        return await first, second.exception()

    whole, refused = asyncio.run(twice())
    assert isinstance(whole[-1], Done)
    assert isinstance(refused, EngineError)


def test_a_dropped_handle_frees_its_lane(build: Build) -> None:
    core = build(context=4096)
    handle = core.submit(request(PROMPT, None), Session())
    until(lambda: core.statistics().decode_tokens > 3)
    del handle
    gc.collect()
    assert drain(core.submit(request(PROMPT[:100], 5), Session()))[0] == expected_answer(PROMPT[:100], 5)
    assert core.statistics().finished[FinishReason.CANCELLED] == 1
    settle(core)


# The end of the engine


def failure(handle: Handle) -> str:
    """What a request is told by an engine that goes; it is told once."""
    seen: list[Event] = []
    with pytest.raises(UnavailableError) as caught:
        seen.extend(handle)
    assert not any(isinstance(event, Done) for event in seen)
    assert list(handle) == []
    return str(caught.value)


@pytest.mark.parametrize("width", [1, 3])
def test_a_broken_program_ends_every_request_once(build: Build, width: int) -> None:
    model = ToyModel()
    model.fail_at = 120
    core = build(model=model, concurrency=2, width=width, drafts=Guesses(), context=256)
    done = core.submit(request(PROMPT[:10], 3), Session())
    handles = [core.submit(request(PROMPT[:n], 100), Session()) for n in (30, 40, 50, 60)]
    told = [failure(handle) for handle in handles]
    assert len(told) == 4
    assert all("engine failed before the answer was complete (KeyboardInterrupt)" in one for one in told)
    drain(done)  # its answer was there before
    health = core.health()
    assert not health.available
    assert health.error is not None
    assert "KeyboardInterrupt" in health.error
    for _ in range(2):
        with pytest.raises(UnavailableError, match="the engine has failed"):
            core.submit(request(PROMPT[:9], 1), Session())
    core.stop()
    core.stop()
    assert not core._outstanding
    assert "KeyboardInterrupt" in (core.health().error or "")


def test_the_cause_of_a_failure_is_kept(build: Build) -> None:
    model = ToyModel()
    model.fail_at = 20
    core = build(model=model)
    with pytest.raises(UnavailableError) as caught:
        list(core.submit(request(PROMPT, 1), Session()))
    assert isinstance(caught.value.__cause__, KeyboardInterrupt)


def test_stopping_ends_what_runs_and_what_waits(build: Build) -> None:
    gate = Gate()
    core = build(gate=gate, concurrency=2)
    handles = [core.submit(request(PROMPT, 10), Session()) for _ in range(4)]
    for _ in range(6):
        gate.arrive()
        gate.step()
    gate.arrive()
    stopper = threading.Thread(target=core.stop)
    stopper.start()
    until(lambda: not core.health().available)
    with pytest.raises(UnavailableError, match="the engine is closed"):
        core.submit(request(PROMPT[:9], 1), Session())
    assert stopper.is_alive(), "the unit under way is waited for"
    units = len(gate.notes)
    gate.open()
    stopper.join(20)
    assert not stopper.is_alive()
    assert len(gate.notes) == units, "nothing was begun after it"
    assert all("closed before the answer was complete" in failure(handle) for handle in handles)
    assert core.health().error == "the engine is closed"
    core.stop()
    assert not core._outstanding


def test_an_engine_may_be_collected_in_its_worker(build: Build) -> None:
    """The collector runs where it pleases, and stops the engines that it finds."""
    core = build()

    class Collected(Session):
        def accept(self, token_ids: Sequence[int]) -> Step:
            core.stop()
            return super().accept(token_ids)

    with pytest.raises(UnavailableError, match="the engine was closed"):
        list(core.submit(request(PROMPT, 3), Collected()))
    core.stop()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork.*:DeprecationWarning")
def test_a_forked_process_has_no_engine(build: Build) -> None:
    core = build()
    child = os.fork()
    if not child:
        code = 1
        try:
            core.submit(request(PROMPT, 3), Session())
        except UnavailableError as error:
            code = 0 if "forked" in str(error) and not core.health().available else 2
        finally:
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0
    assert core.health().available
    assert drain(core.submit(request(PROMPT, 3), Session()))[0] == expected_answer(PROMPT, 3)


def test_stopping_an_idle_engine(build: Build) -> None:
    core = build()
    handle = core.submit(request(PROMPT, 3), Session())
    until(lambda: handle._mailbox.ended)
    core.stop()
    assert drain(handle)[0] == expected_answer(PROMPT, 3), "what was done is still there to read"
    handle.cancel()
    assert core.statistics().running == core.statistics().waiting == 0


def test_an_async_consumer_learns_of_the_end(build: Build) -> None:
    core = build(context=4096)

    async def consume() -> None:
        async for _ in core.submit(request(PROMPT, None), Session()):
            pass

    async def main() -> None:
        tasks = [asyncio.create_task(consume()) for _ in range(3)]
        await asyncio.sleep(0.02)
        await asyncio.to_thread(core.stop)
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert [type(result) for result in results] == [UnavailableError] * 3

    asyncio.run(main())
