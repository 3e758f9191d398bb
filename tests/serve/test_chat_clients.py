"""Recorded requests of released clients get a valid answer of Chat Completions."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest

from ninfer.serve.app import create_app
from ninfer.serve.chat.request import read_request
from tests.serve.fakes import FakeLink, call_text, calls, events_of, make_server, nano_frontend, says

CLIENTS = Path(__file__).parents[1] / "data" / "clients"
PATH = "/v1/chat/completions"
MODEL = "stub-model"


def recorded() -> Iterator[Any]:
    for file in sorted(CLIENTS.glob("*.jsonl")):
        for number, line in enumerate(file.read_bytes().splitlines(), 1):
            request = orjson.loads(line)
            if request["path"].endswith("/chat/completions"):
                yield pytest.param(request, id=f"{file.stem}-{number}-{request['case']}")


REQUESTS = list(recorded())


def has_image(body: Any) -> bool:
    contents = [m["content"] for m in body["messages"] if isinstance(m["content"], list)]
    return any(part["type"] == "image_url" for content in contents for part in content)


def test_there_are_requests_of_three_clients() -> None:
    names = {request.id.split("-")[0] for request in REQUESTS if request.id}
    assert names >= {"openai", "opencode", "aider"}
    assert len(REQUESTS) > 15


@pytest.mark.anyio
@pytest.mark.parametrize("request_", REQUESTS)
async def test_a_recorded_request_is_answered(request_: Any) -> None:
    body, sent = request_["body"], dict(request_["headers"])
    link = FakeLink(says("done."), max_context=100_000)
    app = create_app(make_server(link, model_id=MODEL))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as http:
        sent.pop("accept-encoding", None)
        answer = await http.post(PATH, json=body, headers=sent)
    if has_image(body):
        assert answer.status_code == 400
        assert answer.json()["error"]["code"] == "vision_disabled"
        return
    assert answer.status_code == 200, answer.text
    if not body.get("stream"):
        (choice,) = answer.json()["choices"]
        assert choice["message"]["content"] == "done."
        return
    found = [data for _, data in events_of(answer.content)]
    assert found[-1] == "[DONE]"
    with_usage = (body.get("stream_options") or {}).get("include_usage")
    finish = found[-3 if with_usage else -2]["choices"][0]
    assert finish["finish_reason"] == "stop"
    assert bool(found[-2].get("usage")) == bool(with_usage)


@pytest.mark.anyio
async def test_a_turn_of_opencode_grows_at_its_end_only() -> None:
    """What it sends back of an answer renders to the tokens that the next prompt can reuse."""
    turns = [r.values[0]["body"] for r in REQUESTS if r.id and "opencode" in r.id and "-bash" in r.id][1:]
    link = FakeLink(says(calls(call_text("bash", command="ls -a"))), max_context=100_000)
    server = make_server(link, model_id=MODEL)
    for body in turns:
        answer = await server.service.prepare(read_request(body, MODEL).generation)
        answer.close()
    first, second = (list(job.prompt.tokens) for job in link.jobs)
    shared = next(i for i, pair in enumerate(zip(first, second, strict=False)) if pair[0] != pair[1])
    opener = link.jobs[0].prompt.opener
    assert opener is not None
    assert shared >= opener
    assert nano_frontend().decode(second[opener:]).count("bash") == 1
