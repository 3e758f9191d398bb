from __future__ import annotations

import asyncio
from typing import Any

import pytest

from ninfer.serve.calls import Begun, Finished, GenerationRequest, Progress, Protocol, Text
from tests.serve.fakes import MODEL, FakeLink, Recorder, make_server, says, thinks

pytestmark = pytest.mark.anyio


def ask(**changes: Any) -> GenerationRequest:
    messages = changes.pop("messages", [{"role": "user", "content": "hi"}])
    return GenerationRequest(Protocol.CHAT, MODEL, messages, **changes)


async def test_an_answer_is_begun_text_and_finished() -> None:
    seen = Recorder()
    link = FakeLink(says(thinks("Hm."), "Hello", " there."))
    server = make_server(link, seen)
    answer = await server.service.prepare(ask())
    got = [event async for _, event in answer.events()]
    assert [type(e) for e in got] == [Begun, Progress, Text, Text, Text, Finished]
    assert [(e.channel, e.text) for e in got if isinstance(e, Text)] == [
        ("reasoning", "Hm."), ("content", "Hello"), ("content", " there."),
    ]  # fmt: skip
    assert seen.told == [("started", 1), ("done", 1)]
    assert server.service.active == 1
    answer.close()
    await asyncio.wait_for(server.service.idle(), 1)
    assert server.service.active == 0
