"""The link to the engine process: jobs and their events, and every way in which a process may end."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest

from ninfer.api.options import EngineOptions, GenerationOptions
from ninfer.engine import Done, Event, Output, PromptProgress, Started
from ninfer.errors import ContextLengthError, EngineError, ModelError, OptionError, UnavailableError
from ninfer.events import FinishReason
from ninfer.frontend import Prompt
from ninfer.serve import link as link_module
from ninfer.serve import process as process_module
from ninfer.serve.jobs import Job, LinkState
from ninfer.serve.link import EngineLink

pytestmark = pytest.mark.anyio
WORKER = Path(__file__).with_name("link_worker.py")
ROOT = WORKER.parents[2]
SOON = 0.25
"""Seconds in which the end of the process must be known."""
ENDLESS, FAILS, BREAKS, DIES, SILENT = 0, 7, 8, 9, 10


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(autouse=True)
def package_on_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """For the scripted worker, which is run as a file."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))


@pytest.fixture(autouse=True)
def own_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Temporary files apart from those of other servers on this machine; sockets need a short path.

    (`tmp_path` comes first, so that pytest makes its own folder elsewhere.)"""
    with tempfile.TemporaryDirectory(prefix="nt-") as folder:
        monkeypatch.setattr(tempfile, "tempdir", folder)
        yield


@pytest.fixture(autouse=True)
def nothing_left(own_folder: None) -> Iterator[None]:
    """After each test: no thread, no descriptor, no child and no file of ours."""
    gc.collect()
    before, children = descriptors(), offspring()
    yield
    gc.collect()
    assert [t.name for t in threading.enumerate() if t.name.startswith("ninfer-engine")] == []
    assert descriptors() <= before
    assert os.listdir(tempfile.gettempdir()) == []
    assert offspring() <= children  # servers of other tests may go on


def offspring() -> set[str]:
    """The ids of our child processes, those that have ended and wait to be looked at included."""
    found: set[str] = set()
    for file in Path("/proc/self/task").glob("*/children"):
        with suppress(OSError):  # a thread that has ended meanwhile
            found.update(file.read_text().split())
    return found


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def command(script: str) -> tuple[str, ...]:
    return (sys.executable, str(WORKER), script)


@asynccontextmanager
async def linked(
    script: str = "echo", model: Path = Path("model"), **options: float
) -> AsyncIterator[EngineLink]:
    link = EngineLink(model, EngineOptions(), worker=command(script), **options)  # type: ignore[arg-type]
    await link.start()
    try:
        yield link
    finally:
        await link.stop()
    tasks = asyncio.all_tasks() - {asyncio.current_task()}  # type: ignore[arg-type]
    assert not [task for task in tasks if "ninfer" in repr(task.get_coro())]


def job(what: int = 1, words: int = 1, **more: object) -> Job:
    return Job(Prompt([1, 2, 3], "abc", False), GenerationOptions(max_new=what, seed=words, **more))  # type: ignore[arg-type]


async def events(stream: object, limit: float = 5) -> list[Event]:
    async with asyncio.timeout(limit):
        return [event async for event in stream]  # type: ignore[attr-defined]


def words(of: list[Event]) -> list[str]:
    return [event.text for event in of if isinstance(event, Output)]


async def until(condition: Callable[[], bool], limit: float = 5) -> None:
    async with asyncio.timeout(limit):
        while not condition():
            await asyncio.sleep(0.005)


async def test_a_job_gets_its_events_in_order_and_once():
    async with linked() as link:
        told: list[tuple[str, int, int]] = []
        assert await link.opened(lambda *facts: told.append(facts)) == Path("model")
        info = await link.wait_ready()
        assert (link.state, link.info, info.name) == (LinkState.READY, info, "scripted")
        assert told == [("converting", 1, 2)]
        stream = await link.submit(job(words=500))
        got = await events(stream)
        assert got[0] == Started(3, 0)
        assert words(got) == [f"{n} " for n in range(500)]
        assert isinstance(got[-1], Done)
        assert await events(stream) == []
        statistics = await link.statistics()
        assert statistics is not None
        assert statistics.rounds == 1


async def test_an_unread_job_holds_up_nobody_and_loses_nothing_but_old_progress():
    async with linked() as link:
        await link.wait_ready()
        slow = await link.submit(job(words=3000))
        for _ in range(5):
            assert len(words(await events(await link.submit(job(words=3))))) == 3
        await until(lambda: not link.jobs)
        got = await events(slow)
        assert words(got) == [f"{n} " for n in range(3000)]
        late = await link.submit(job(words=0))
        await until(lambda: not link.jobs)
        assert not any(isinstance(event, PromptProgress) for event in await events(late))


async def test_two_readers_at_a_time_are_refused():
    async with linked() as link:
        await link.wait_ready()
        stream = await link.submit(job(ENDLESS))
        assert isinstance(await anext(aiter(stream)), Started)
        first = asyncio.create_task(events(stream))
        await asyncio.sleep(0.01)
        with pytest.raises(EngineError, match="read elsewhere"):
            await events(stream)
        stream.cancel()
        assert len(await first) == 1


async def test_cancelling_brings_done_and_closing_brings_nothing():
    async with linked() as link:
        await link.wait_ready()
        cancelled, closed = await link.submit(job(ENDLESS)), await link.submit(job(ENDLESS))
        cancelled.cancel()
        cancelled.cancel()
        last = (await events(cancelled))[-1]
        assert isinstance(last, Done)
        assert last.statistics.finish_reason is FinishReason.CANCELLED
        cancelled.cancel()
        cancelled.close()
        closed.close()
        assert await events(closed) == []
        await until(lambda: not link.jobs)


async def test_closing_ends_a_reader_that_waits():
    async with linked() as link:
        await link.wait_ready()
        stream = await link.submit(job(ENDLESS))
        reader = asyncio.create_task(events(stream))
        await asyncio.sleep(0.05)
        stream.close()
        assert len(await reader) == 1


async def test_a_dropped_stream_is_cancelled_from_any_thread():
    async with linked() as link:
        await link.wait_ready()
        held = [await link.submit(job(ENDLESS)), await link.submit(job(ENDLESS))]
        assert link.jobs == 2
        del held[0]
        thread = threading.Thread(target=held.clear)
        thread.start()
        thread.join()
        await until(lambda: not link.jobs)


async def test_errors_of_a_job_keep_their_class():
    async with linked() as link:
        await link.wait_ready()
        stream = await link.submit(job(FAILS))
        assert isinstance(await anext(stream), Started)
        with pytest.raises(ContextLengthError, match=r"^too long$"):
            await anext(stream)
        assert await events(stream) == []
        for bad in (Job(Prompt([-1], "", False), GenerationOptions()), job(stop=("\ud800",))):
            with pytest.raises(OptionError, match="can't be passed on"):
                await events(await link.submit(bad))
        assert link.jobs == 0


@pytest.mark.parametrize("how", ["killed", "failed", "babbling"])
async def test_everybody_is_told_when_the_engine_is_gone(how: str):
    async with linked("babble" if how == "babbling" else "echo") as link:
        states: list[LinkState] = []
        link.watch(states.append)
        pid = (await link.wait_ready()).process
        if how == "babbling":
            await until(lambda: link.state is LinkState.FAILED)
        else:
            waiting = [asyncio.create_task(events(await link.submit(job(ENDLESS)))) for _ in range(3)]
            asking = asyncio.create_task(link.statistics())
            await asyncio.sleep(0.05)
            begin = time.perf_counter()
            if how == "killed":
                os.kill(pid, signal.SIGKILL)
            else:
                waiting.append(asyncio.create_task(events(await link.submit(job(BREAKS)))))
            for task in waiting:
                with pytest.raises(UnavailableError, match="start the server again"):
                    await task
            assert time.perf_counter() - begin < SOON
            assert (await asking) is None or asking.done()
        assert states[-1] is link.state is LinkState.FAILED
        said = {"killed": "SIGKILL", "failed": "it was told to", "babbling": "SIGKILL"}[how]
        assert said in link.failure
        with pytest.raises(UnavailableError, match=said):
            await link.submit(job())
        assert await link.statistics() is None
        assert not link.jobs


async def test_an_engine_that_dies_in_a_job_fails_it():
    async with linked() as link:
        await link.wait_ready()
        with pytest.raises(UnavailableError, match="ended unexpectedly"):
            await events(await link.submit(job(DIES)))


async def test_silence_is_a_failure(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(link_module, "_LOOK", 0.05)
    async with linked() as link:
        await link.wait_ready()
        await asyncio.sleep(0.05 * (link_module._SILENT_LOOKS + 3))
        assert link.state is LinkState.READY
        with pytest.raises(UnavailableError, match="has said nothing for"):
            await events(await link.submit(job(SILENT)))


async def test_signals_to_everybody_are_not_for_the_engine():
    async with linked() as link:
        info = await link.wait_ready()
        assert os.getpgid(info.process) != os.getpgid(0)
        for number in (signal.SIGINT, signal.SIGTERM):
            os.kill(info.process, number)
        assert len(words(await events(await link.submit(job(words=2))))) == 2


async def test_the_key_is_no_part_of_the_engines_environment(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("NINFER_API_KEY", "secret")
    async with linked() as link:
        assert (await link.wait_ready()).extra["key"] == ""


# Loading


async def test_a_failed_load_says_why_in_its_own_class():
    async with linked("refuse", Path("/some/model")) as link:
        for wait in (link.wait_ready(), link.opened()):
            with pytest.raises(ModelError, match=r"^/some/model is no model$"):
                await wait
        assert link.state is LinkState.FAILED
        with pytest.raises(UnavailableError, match="is no model"):
            await link.submit(job())
        with pytest.raises(UnavailableError, match="not been loaded"):
            _ = link.info


async def test_a_process_that_ends_while_it_loads():
    async with linked("vanish") as link:
        with pytest.raises(UnavailableError, match=r"while it loaded the model \(exit code 3\)"):
            await link.wait_ready()


async def test_a_command_that_does_not_exist():
    link = EngineLink(Path("model"), EngineOptions(), worker=("/no/such/program",))
    await link.start()
    with pytest.raises(EngineError, match="No such file"):
        await link.wait_ready()
    await link.stop()


async def test_stopping_while_it_loads_is_quick_and_told():
    async with linked("hang") as link:
        waiting = asyncio.create_task(link.wait_ready())
        job_waiting = asyncio.create_task(link.submit(job()))
        await link.opened()
        begin = time.perf_counter()
        await link.stop(drain_timeout=60)
        assert time.perf_counter() - begin < 1
        for task in (waiting, job_waiting):
            with pytest.raises(UnavailableError, match="stopping"):
                await task
        assert link.state is LinkState.STOPPED


# The end


async def test_draining_lets_jobs_end_and_takes_no_more():
    async with linked() as link:
        await link.wait_ready()
        stream = await link.submit(job(ENDLESS))
        stopping = asyncio.create_task(link.stop(drain_timeout=60))
        await asyncio.sleep(0.05)
        with pytest.raises(UnavailableError, match="takes no more requests"):
            await link.submit(job())
        stream.cancel()
        assert isinstance((await events(stream))[-1], Done)
        await asyncio.wait_for(stopping, 5)
        assert link.state is LinkState.STOPPED


async def test_a_second_stop_does_not_wait_for_the_first():
    async with linked() as link:
        await link.wait_ready()
        stream = await link.submit(job(ENDLESS))
        stopping = asyncio.create_task(link.stop(drain_timeout=60))
        await asyncio.sleep(0.05)
        await link.stop()
        await asyncio.wait_for(stopping, 5)
        with pytest.raises(UnavailableError, match="stopping"):
            await events(stream)


async def test_what_does_not_end_is_killed(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(link_module, "_GRACE", 0.2)
    async with linked() as link:
        await link.wait_ready()
        await anext(await link.submit(job(SILENT)))
        begin = time.perf_counter()
        await link.stop()
        assert 0.2 < time.perf_counter() - begin < 1.5


async def test_the_engine_ends_with_a_server_that_is_killed():
    folder = Path(tempfile.gettempdir())
    code = f"""
import asyncio, sys
from pathlib import Path
from ninfer.api.options import EngineOptions
from ninfer.serve.link import EngineLink
async def main():
    link = EngineLink(Path("model"), EngineOptions(), worker={command("echo")!r})
    await link.start()
    print((await link.wait_ready()).process, flush=True)
    await asyncio.sleep(600)
asyncio.run(main())
"""
    environment = {**os.environ, "TMPDIR": str(folder)}
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, cwd=ROOT, env=environment, text=True
    ) as server:
        assert server.stdout is not None
        pid = int(await asyncio.to_thread(server.stdout.readline))
        assert list(folder.glob("ninfer-*/engine"))
        server.kill()
        await asyncio.to_thread(server.wait)
        await until(lambda: not Path(f"/proc/{pid}").exists() or "Z" in state_of(pid), 2)
        assert not list(folder.iterdir())


def state_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "Z"


# Idle


async def test_an_idle_engine_is_unloaded_and_comes_back_once_for_all():
    async with linked(idle_unload=0.15) as link:
        states: list[LinkState] = []
        link.watch(states.append)
        first = (await link.wait_ready()).process
        stream = await link.submit(job(ENDLESS))
        await asyncio.sleep(0.3)
        assert link.state is LinkState.READY, "a job is under way"
        stream.cancel()
        await events(stream)
        await until(lambda: link.state is LinkState.UNLOADED)
        assert link.info.process == first
        assert await link.statistics() is None
        # Asked while the old one still ends.
        streams = await asyncio.gather(*(link.submit(job(words=n)) for n in range(1, 5)))
        assert [len(words(await events(one))) for one in streams] == [1, 2, 3, 4]
        assert link.info.process != first
        assert not Path(f"/proc/{first}").exists()
        await until(lambda: link.state is LinkState.UNLOADED)
        ready = [LinkState.STARTING, LinkState.READY, LinkState.UNLOADED]
        assert states == [*ready[1:], *ready]
    assert link.state is LinkState.STOPPED


async def test_an_engine_that_does_not_come_back_is_a_failure(tmp_path: Path):
    async with linked("once", tmp_path / "model", idle_unload=0.05) as link:
        await until(lambda: link.state is LinkState.UNLOADED)
        asked = await asyncio.gather(link.submit(job()), link.submit(job()), return_exceptions=True)
        assert [type(error) for error in asked] == [UnavailableError] * 2
        assert all("is no model" in str(error) for error in asked)
        assert link.state is LinkState.FAILED


async def test_another_model_in_the_same_place_is_refused():
    async with linked("changing", idle_unload=0.05) as link:
        await until(lambda: link.state is LinkState.UNLOADED)
        with pytest.raises(UnavailableError, match="another model than before"):
            await link.submit(job())


async def test_who_leaves_while_the_engine_comes_back_takes_nobody_along():
    async with linked(idle_unload=0.05) as link:
        await until(lambda: link.state is LinkState.UNLOADED)
        leaving, staying = (asyncio.create_task(link.submit(job(words=2))) for _ in range(2))
        await asyncio.sleep(0.01)
        leaving.cancel()
        assert len(words(await events(await staying))) == 2


# Between processes


async def test_nobody_else_is_listened_to(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(process_module, "_SOCKET_PATH", 0)  # as on Windows: TCP, where anybody may connect
    async with linked("twice") as link:
        await link.wait_ready()
        assert len(words(await events(await link.submit(job(words=3))))) == 3
        assert link.state is LinkState.READY


def test_the_folder_of_modules_is_the_servers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [place for place in sys.path if place not in ("", str(tmp_path))])
    assert "-P" in process_module.worker_command()
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    assert "-P" not in process_module.worker_command()
