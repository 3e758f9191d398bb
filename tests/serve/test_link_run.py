"""A server's life around a scripted engine and a small application: start, signals, drain, exit codes."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from ninfer.api.options import EngineOptions, GenerationOptions
from ninfer.engine import Output
from ninfer.errors import ModelError, NInferError, OptionError
from ninfer.frontend import Frontend, Prompt
from ninfer.serve import run as run_module
from ninfer.serve.address import announcement, bind, url
from ninfer.serve.jobs import Job, LinkState
from ninfer.serve.options import ServeOptions

from .test_link import DIES, ENDLESS, ROOT, command, nothing_left, own_folder, package_on_path, until

__all__ = ["nothing_left", "own_folder", "package_on_path"]
pytestmark = pytest.mark.anyio
NANO = ROOT / "models" / "ninfer-nano.ninfer"


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@dataclass
class Standin:
    """A `run.Life` whose application runs one job a request, `/MAX_NEW`, and writes what becomes of it."""

    told: list[str] = field(default_factory=list)
    port: int = 0
    link: Any = None
    streams: list[Any] = field(default_factory=list)

    def __call__(self, options: ServeOptions, frontend: Frontend, name: str, link: Any) -> Standin:
        assert frontend.architecture == "Qwen3_5ForCausalLM"
        self.link = link
        self.told.append(f"assembled {name}")
        return self

    def loaded(self, link: object, info: object) -> None:
        self.told.append("loaded")

    def listening(self, host: str, port: int) -> None:
        self.port = port
        self.told.append("listening")

    def changed(self, link: Any) -> None:
        self.told.append(f"changed {link.state}")

    def stopping(self) -> None:
        self.told.append("stopping")

    async def stopped(self) -> None:
        self.told.append("stopped")

    async def app(self, scope: Any, receive: Callable, send: Callable) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})

        async def write(text: str, more: bool) -> None:
            await send({"type": "http.response.body", "body": text.encode(), "more_body": more})

        await write("begun ", True)
        options = GenerationOptions(max_new=int(scope["path"][1:]), seed=2)
        try:
            stream = await self.link.submit(Job(Prompt([1], "", False), options))
            self.streams.append(stream)
            async for event in stream:
                if isinstance(event, Output):
                    await write(event.text, True)
            await write("end", False)
        except NInferError as error:
            await write(f"error: {error}", False)


@asynccontextmanager
async def serving(
    standin: Standin, script: str = "echo", **options: Any
) -> AsyncIterator[tuple[asyncio.Task[int], list[str]]]:
    """A running server; its task and what it announced. Waits until it listens."""
    said: list[str] = []
    chosen = ServeOptions(NANO, EngineOptions(), port=0, **options)
    task = asyncio.create_task(
        run_module.serve(chosen, assemble=standin, worker=command(script), announce=said.append)
    )
    try:
        await until(lambda: bool(said) or task.done())
        yield task, said
    finally:
        task.cancel()
        await asyncio.wait({task})


async def ask(standin: Standin, what: int) -> str:
    async with httpx.AsyncClient() as client:
        return (await client.get(f"http://127.0.0.1:{standin.port}/{what}", timeout=20)).text


async def under_way(standin: Standin, count: int = 1) -> None:
    await until(lambda: len(standin.streams) >= count)


def signalled(number: signal.Signals = signal.SIGTERM) -> None:
    os.kill(os.getpid(), number)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_a_signal_lets_answers_end(number: signal.Signals):
    standin, before = Standin(), signal.getsignal(number)
    async with serving(standin) as (server, said):
        assert await ask(standin, 1) == "begun 0 1 end"
        assert f"http://127.0.0.1:{standin.port}/v1 " in said[0]
        long = asyncio.create_task(ask(standin, ENDLESS))
        await under_way(standin, 2)
        signalled(number)
        await asyncio.sleep(0.3)
        with pytest.raises(httpx.ConnectError):
            await ask(standin, 1)
        assert not server.done()
        standin.streams[1].cancel()
        assert await long == "begun end"
        assert await asyncio.wait_for(server, 5) == 0
    assert standin.told[:3] == ["assembled ninfer-nano", "loaded", "listening"]
    assert standin.told[3:] == ["stopping", "stopped", "changed stopped"]
    assert signal.getsignal(number) == before


async def test_answers_that_take_too_long_are_broken_off_with_a_word():
    standin = Standin()
    async with serving(standin, drain_timeout=0.3) as (server, _):
        long = asyncio.create_task(ask(standin, ENDLESS))
        await under_way(standin)
        begin = time.perf_counter()
        signalled()
        assert "error: the server is stopping" in await long
        assert await asyncio.wait_for(server, 5) == 0
        assert 0.3 < time.perf_counter() - begin < 2


async def test_a_second_signal_does_not_wait():
    standin = Standin()
    async with serving(standin, drain_timeout=60) as (server, _):
        long = asyncio.create_task(ask(standin, ENDLESS))
        await under_way(standin)
        signalled()
        await asyncio.sleep(0.2)
        begin = time.perf_counter()
        signalled(signal.SIGINT)
        assert "error: the server is stopping" in await long
        assert await asyncio.wait_for(server, 5) == 0
        assert time.perf_counter() - begin < 2


async def test_a_failed_engine_ends_the_server_with_2():
    standin = Standin()
    async with serving(standin, drain_timeout=60) as (server, _):
        long = asyncio.create_task(ask(standin, ENDLESS))
        await under_way(standin)
        assert "error: the engine process ended unexpectedly" in await ask(standin, DIES)
        assert "error: the engine process ended unexpectedly" in await long
        assert await asyncio.wait_for(server, 5) == 2
    assert standin.told[-3:] == ["changed failed", "stopping", "stopped"]


async def test_an_engine_that_was_idle_comes_back():
    standin = Standin()
    async with serving(standin, idle_unload=0.2) as (server, _):
        await until(lambda: standin.link.state is LinkState.UNLOADED)
        assert await ask(standin, 1) == "begun 0 1 end"
        signalled()
        assert await asyncio.wait_for(server, 5) == 0
    # On a busy machine it may be idle before all has begun.
    begin = standin.told.index("changed unloaded")
    assert standin.told[begin : begin + 3] == ["changed unloaded", "changed starting", "changed ready"]


async def test_what_cannot_be_loaded_is_the_servers_error():
    standin = Standin()
    with pytest.raises(ModelError, match="is no model"):
        async with serving(standin, "refuse") as (server, _):
            await server
    assert standin.told == []


async def test_a_signal_while_it_loads_ends_it():
    standin = Standin()
    task = asyncio.create_task(
        run_module.serve(
            ServeOptions(NANO, EngineOptions(), port=0), assemble=standin, worker=command("hang")
        )
    )
    await until(lambda: bool(standin.told))
    signalled()
    assert await asyncio.wait_for(task, 2) == 0
    assert standin.told == ["assembled ninfer-nano", "stopped"]


async def test_while_it_loads_it_asks_to_come_again():
    with bind("127.0.0.1", 0) as free:
        port = free.getsockname()[1]
    standin = Standin()
    options = ServeOptions(NANO, EngineOptions(), port=port, api_key="k")
    task = asyncio.create_task(run_module.serve(options, assemble=standin, worker=command("hang")))
    await until(lambda: bool(standin.told))
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as client:
        health = await client.get("/health")
        assert (health.status_code, health.json()) == (503, {"status": "unavailable"})
        assert (await client.post("/v1/chat/completions")).status_code == 401
        client.headers["x-api-key"] = "k"
        asked = await client.post("/v1/chat/completions", content=bytes(1 << 20))
        assert (asked.status_code, asked.headers["retry-after"]) == (503, "2")
        assert asked.json()["error"]["code"] == "service_unavailable"
        asked = await client.post("/v1/messages", json={})
        assert (asked.status_code, asked.json()["error"]["type"]) == (503, "api_error")
        signalled()
        assert await asyncio.wait_for(task, 2) == 0


# Addresses


def test_a_port_that_is_taken_is_refused_at_once():
    with bind("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(OptionError, match=rf"port {port}: Address already in use; choose another --port"):
            bind("127.0.0.1", port)
        # Who connects now waits for an answer; nobody is refused while a model is loaded.
        with socket.create_connection(("127.0.0.1", port), timeout=1):
            pass


@pytest.mark.parametrize("host", ["no.such.host.invalid", "192.0.2.1", "a" * 70, "a..b"])
def test_a_host_that_is_not_ours_is_refused(host: str):
    with pytest.raises(OptionError, match=f"{host}"):
        bind(host, 0)


def test_hosts():
    assert url("0.0.0.0", 80) == url("127.0.0.1", 80) == "http://127.0.0.1:80"
    assert url("::", 80) == url("::1", 80) == "http://[::1]:80"
    for host, family in (("localhost", socket.AF_INET), ("0.0.0.0", socket.AF_INET)):
        with bind(host, 0) as listener:
            assert listener.family == family
    if Path("/proc/net/if_inet6").exists():
        with bind("::", 0) as listener:  # of both families
            port = listener.getsockname()[1]
            socket.create_connection(("127.0.0.1", port), timeout=1).close()


def test_an_announcement_never_shows_the_key():
    base = "http://127.0.0.1:80"
    open_to_all, guarded = (announcement(base, "m", key=key) for key in (False, True))
    assert "asks for none" in open_to_all
    assert "Authorization" not in open_to_all
    assert "Authorization: Bearer $NINFER_API_KEY" in guarded
    for text in (open_to_all, guarded):
        assert '"model": "m"' in text
        assert f"base URL {base}/v1 " in text
