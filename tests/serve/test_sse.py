from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import orjson
import pytest
from starlette.types import Receive, Scope, Send

from ninfer.errors import UnavailableError
from ninfer.serve.app import create_app
from ninfer.serve.calls import GenerationRequest, Protocol, Text
from ninfer.serve.server import Server
from ninfer.serve.sse import KEEP_ALIVE, EventStream, sse
from tests.serve.fakes import MODEL, Call, FakeLink, Recorder, Step, events_of, make_server, says

pytestmark = pytest.mark.anyio
QUESTION = {"model": MODEL, "stream": True, "messages": [{"role": "user", "content": "hi"}]}


def ask(server: Server, body: Any = QUESTION, path: str = "/v1/chat/completions") -> Call:
    return Call(create_app(server), "POST", path, body)


async def idle(server: Server) -> None:
    await asyncio.wait_for(server.service.idle(), 2)


def test_an_event_is_one_line_of_json() -> None:
    assert sse(None, {"a": "x\ny"}) == b'data: {"a":"x\\ny"}\n\n'
    assert sse("done", {}) == b"event: done\ndata: {}\n\n"
    # Also for clients that split at every kind of line end, as Python's str does.
    text = "é\x85\u2028\u2029\x0b\x1c\r日"
    line, empty = sse(None, {"a": text}).decode().splitlines()
    assert empty == ""
    assert orjson.loads(line.removeprefix("data: ")) == {"a": text}
    assert "é" in line


async def test_what_is_known_is_written_before_the_engine_says_anything() -> None:
    server = make_server(FakeLink([asyncio.Event()]))
    call = ask(server)
    assert await call.start() == 200
    assert call.headers["content-type"] == "text/event-stream"
    assert call.headers["cache-control"] == "no-cache"
    assert call.headers["x-accel-buffering"] == "no"
    assert b'"role":"assistant"' in (await call.read() or b"")
    call.leave()
    await call.task
    await idle(server)


async def test_what_is_there_at_once_is_written_at_once() -> None:
    go = asyncio.Event()
    server = make_server(FakeLink(says("a", "b", "c", go, "d", "e")))
    call = ask(server)
    await call.start()
    writes = [await call.read() or b""]
    while b'"c"' not in writes[-1]:
        writes.append(await call.read() or b"")
    assert writes[-1].count(b"data: ") == 3  # three texts, one write
    go.set()
    rest = await call.rest()
    assert [d["choices"][0]["delta"].get("content") for _, d in events_of(rest)[:2]] == ["d", "e"]
    assert events_of(rest)[-1] == (None, "[DONE]")
    await idle(server)


async def test_silence_is_broken_by_comments_queued_or_not() -> None:
    for script in ([asyncio.Event()], says("a", asyncio.Event())):
        server = make_server(FakeLink(script), keep_alive=0.03)
        call = ask(server)
        await call.start()
        heard = [await call.read() or b"" for _ in range(4)]
        assert heard[-1] == heard[-2] == KEEP_ALIVE
        call.leave()
        await call.task
        await idle(server)


async def test_text_keeps_the_connection_alive_by_itself() -> None:
    steps: list[Step] = []
    for _ in range(10):
        steps += ["x", 0.01]  # type: ignore[list-item]
    server = make_server(FakeLink(says(*steps)), keep_alive=0.05)  # type: ignore[arg-type]
    call = ask(server)
    assert KEEP_ALIVE not in await call.rest()
    await idle(server)


async def test_a_client_that_leaves_ends_the_job_at_once() -> None:
    """Queued, in prefill, between tokens, and while it is being written to."""
    scripts: list[Any] = [
        [asyncio.Event()],
        lambda job: [*says()(job)[:2], asyncio.Event()],
        says("a", asyncio.Event()),
        says(*["a" * 100_000] * 50),
    ]
    for number, script in enumerate(scripts):
        seen = Recorder()
        server = make_server(FakeLink(script), seen)
        call = ask(server)
        if number == 3:
            call.stall()
        else:
            await call.start()
        while not server.link.streams:  # type: ignore[attr-defined]
            await asyncio.sleep(0.001)
        await asyncio.sleep(0.01)
        assert server.service.active == 1
        call.leave()
        call.resume()
        await asyncio.wait_for(call.task, 2)
        await idle(server)
        assert server.link.streams[0].closed  # type: ignore[attr-defined]
        assert seen.told == [("started", 1), ("done", 1)]


async def test_a_client_that_leaves_while_its_prompt_is_prepared() -> None:
    seen = Recorder()
    link = FakeLink()
    server = make_server(link, seen)
    for number, stream in enumerate((True, False), 1):
        slow = f"{number} gone words " * 200_000
        call = ask(server, {**QUESTION, "stream": stream, "messages": [{"role": "user", "content": slow}]})
        while not server.service.active:
            await asyncio.sleep(0.001)
        call.leave()
        await asyncio.wait_for(call.task, 2)
        await idle(server)
    assert not link.jobs
    assert seen.told == [("rejected", 1), ("rejected", 2)]
    assert {fact.code for fact in seen.facts} == {"client_disconnected"}


async def test_a_client_that_leaves_an_answer_that_is_not_streamed() -> None:
    seen = Recorder()
    link = FakeLink(says("a", asyncio.Event()))
    server = make_server(link, seen)
    call = ask(server, {**QUESTION, "stream": False})
    while not link.streams:
        await asyncio.sleep(0.001)
    call.leave()
    await asyncio.wait_for(call.task, 2)
    await idle(server)
    assert link.streams[0].cancelled
    assert seen.told == [("started", 1), ("done", 1)]


async def test_a_client_that_leaves_in_the_middle_of_its_body() -> None:
    server = make_server()
    call = Call(create_app(server), "POST", "/v1/chat/completions", pieces=[b'{"model":', b"..."])
    call._pieces.append(b"")  # the last piece never comes
    call.leave()
    await asyncio.wait_for(call.task, 2)
    assert server.service.active == 0


async def test_a_slow_reader_holds_up_nobody() -> None:
    link = FakeLink(says(*["x" * 1000] * 300), says("quick"))
    server = make_server(link)
    slow = ask(server)
    slow.stall()
    while not link.jobs:
        await asyncio.sleep(0.001)
    quick = ask(server)
    assert "quick" in (await asyncio.wait_for(quick.rest(), 2)).decode()
    assert link.streams[0].ended  # the engine has long been free
    assert server.service.active == 1
    slow.resume()
    got = events_of(await slow.rest())
    assert sum(len(d["choices"][0]["delta"].get("content", "")) for _, d in got[:-1]) == 300_000
    await idle(server)


async def test_a_failure_in_a_stream_is_its_last_event() -> None:
    seen = Recorder()
    server = make_server(FakeLink(says("a", UnavailableError("the engine has failed"))), seen)
    call = ask(server)
    assert await call.start() == 200
    got = events_of(await call.rest())
    assert got[-1][1]["error"]["code"] == "service_unavailable"
    assert seen.told == [("started", 1), ("failed", 1)]
    await idle(server)


async def _broken(answer: Any, fail: Callable[[], None]) -> AsyncIterator[bytes]:
    async for _, event in answer.events():
        if isinstance(event, Text):
            yield b"data: 1\n\n"
            fail()


async def test_a_defect_in_making_chunks_ends_the_response_and_gives_all_back() -> None:
    seen = Recorder()
    link = FakeLink(says("a", asyncio.Event()))
    server = make_server(link, seen)
    request = GenerationRequest(Protocol.CHAT, MODEL, QUESTION["messages"])  # type: ignore[arg-type]
    answer = await server.service.prepare(request)

    def fail() -> None:
        raise KeyError("secret text")

    response = EventStream(answer, _broken(answer, fail), 5.0)

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await response(scope, receive, send)

    call = Call(app, "POST", "/")
    await call.start()
    await call.task
    await idle(server)
    assert link.streams[0].cancelled
    assert ("response_failed", 1) in seen.told
    assert not any(m.get("more_body") is False for m in list(call._out._queue))  # type: ignore[attr-defined]
