"""Every recorded request of a released client, sent as it was, gets a valid answer of its API.

One of each kind is read to its end; of the others, the events until the prompt is computed, whereupon the
client leaves.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic.types
import httpx
import openai.types
import pytest
from anthropic.types import MessageTokensCount, RawMessageStreamEvent
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from pydantic import TypeAdapter

from tests.serve.e2e.process import ServerProcess
from tests.serve.responses.support import check_event, check_events, check_response

CLIENTS = Path(__file__).parents[2] / "data" / "clients"
MESSAGE_EVENT: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)
BEFORE_PREFILL = {"/v1/messages": 1, "/v1/responses": 2, "/v1/chat/completions": 1}
"""How many events come before the prompt is computed."""
STOP_REASONS = ("end_turn", "tool_use", "max_tokens", "model_context_window_exceeded")
READ_TO_THE_END = {
    "aider": "aider 1, aider 2, aider 3",
    "anthropic-python": "sdk 1, sdk 2, sdk 3, sdk 4, sdk 5, sdk 9, sdk 12, sdk 13, sdk 14, sdk 15, f-429 1",
    "claude-code": "thinking 2, sonnet 2, opus48 1, nothink 1, jsonschema 1, m-nosse 1",
    "codex": "normal 1, normal 2, gpt55 2, codemode 1, oss-lmstudio 2, schema 1, compact 1",
    "openai-python": "sdk 3, sdk 4, sdk 5, sdk 8, sdk 10, sdk 11, sdk 12, sdk 15, f-429 1",
    "opencode": "bash 1, bash 2, responses 2, anthropic 1, anthropic 2",
}
REFUSED = {
    ("anthropic-python", "sdk 10"): (400, "thread_unsupported_request"),
    ("anthropic-python", "sdk 11"): (400, "thread_unsupported_request"),
    ("anthropic-python", "thread-unsupported 1"): (400, "thread_unsupported_request"),
    ("anthropic-python", "thread-not-found 1"): (400, "thread_unsupported_request"),
    ("anthropic-python", "thread-not-found 2"): (400, "thread_unsupported_request"),
    ("anthropic-python", "thread-not-found 3"): (400, "thread_unsupported_request"),
    ("claude-code", "discovery 1"): (404, None),
    ("codex", "builtin 1"): (426, "websocket_not_supported"),
    ("codex", "oss-ollama 2"): (404, None),
    ("codex", "oss-ollama 3"): (404, None),
    ("codex", "oss-ollama 4"): (404, None),
    ("openai-python", "sdk 7"): (400, "vision_disabled"),
    ("opencode", "image 1"): (400, "vision_disabled"),
    ("openai-python", "sdk 14"): (404, "response_not_found"),
}
"""Answers that end a request, as the notes on the clients want them."""


def recorded() -> Iterator[Any]:
    for file in sorted(CLIENTS.glob("*.jsonl")):
        client = file.stem.rpartition("-")[0]
        for line in file.read_text("utf-8").splitlines():
            request = json.loads(line)
            name = f"{request['case']} {request['step']}"
            yield pytest.param(client, name, request, id=f"{client} {name}")


REQUESTS = list(recorded())


@pytest.fixture(scope="module")
def http(nano: ServerProcess) -> Iterator[httpx.Client]:
    with nano.http() as client:
        yield client


def test_the_lists_name_requests() -> None:
    known = {(request.values[0], request.values[1]) for request in REQUESTS}
    assert len(known) == len(REQUESTS) > 100
    whole = {(client, name) for client, names in READ_TO_THE_END.items() for name in names.split(", ")}
    assert whole | REFUSED.keys() <= known
    assert {client for client, _ in whole} == {client for client, _ in known}


@pytest.mark.parametrize(("client", "name", "request_"), REQUESTS)
def test_a_recorded_request(http: httpx.Client, client: str, name: str, request_: dict[str, Any]) -> None:
    body = request_["body"]
    path = request_["path"].partition("?")[0]
    headers = dict(request_["headers"])
    if client == "codex" and request_["method"] == "GET" and path == "/v1/responses":
        headers |= {"connection": "Upgrade"}  # left out of the records
    content = None if body is None else json.dumps(body, ensure_ascii=False).encode()
    whole = name in READ_TO_THE_END[client].split(", ")
    limit = None if whole else BEFORE_PREFILL.get(path)
    with http.stream(request_["method"], request_["path"], headers=headers, content=content) as answer:
        expected, code = REFUSED.get((client, name), (200, None))
        if answer.status_code != 200:
            answer.read()
        assert answer.status_code == expected, answer.text
        if expected != 200:
            check_error(answer, path, code)
        elif isinstance(body, dict) and body.get("stream"):
            assert answer.headers["content-type"].startswith("text/event-stream")
            check_stream(path, body, list(events(answer, limit)), whole)
        else:
            answer.read()
            check_whole(path, "anthropic-version" in headers, body, answer.json())


def events(answer: httpx.Response, limit: int | None) -> Iterator[tuple[str | None, Any]]:
    """(name, data) of the first `limit` events; the stream has nothing else but comments."""
    name, data, count = None, None, 0
    for line in answer.iter_lines():
        kind, _, value = line.partition(": ")
        if kind == "event":
            name = value
        elif kind == "data":
            data = value
        elif line:
            assert line.startswith(":")
        elif data is not None:
            yield name, json.loads(data) if data != "[DONE]" else data
            name, data, count = None, None, count + 1
            if count == limit:
                return


def check_error(answer: httpx.Response, path: str, code: str | None) -> None:
    if answer.request.method == "HEAD":
        return
    error = answer.json()["error"]
    assert error["message"].endswith(".")
    if path.startswith("/v1/messages"):
        assert answer.json()["type"] == "error"
        assert error["details"]["error_code"] == code
    else:
        assert error["code"] == code


def check_whole(path: str, versioned: bool, body: Any, answer: Any) -> None:
    match path:
        case "/v1/messages":
            message = anthropic.types.Message.model_validate(answer)
            assert message.stop_reason in STOP_REASONS
            assert message.model == body["model"]
        case "/v1/messages/count_tokens":
            assert MessageTokensCount.model_validate(answer).input_tokens > 5
        case "/v1/responses":
            assert check_response(answer)["status"] in ("completed", "incomplete")
        case "/v1/chat/completions":
            ChatCompletion.model_validate(answer)
            assert {choice["finish_reason"] for choice in answer["choices"]} <= {
                "stop",
                "length",
                "tool_calls",
            }
        case "/v1/models":
            kind: Any = anthropic.types.ModelInfo if versioned else openai.types.Model
            assert "stub-model" in [kind.model_validate(model).id for model in answer["data"]]
        case "/v1/models/stub-model":
            kind = anthropic.types.ModelInfo if versioned else openai.types.Model
            assert kind.model_validate(answer).id == "stub-model"
        case _:
            pytest.fail(f"an answer of {path}")


def check_stream(path: str, body: Any, found: list[tuple[str | None, Any]], ended: bool) -> None:
    assert found
    if path == "/v1/messages":
        for name, event in found:
            assert MESSAGE_EVENT.validate_python(event).type == name
        check_messages([event for _, event in found], ended)
    elif path == "/v1/responses":
        assert all(name == event["type"] for name, event in found)
        if ended:
            check_events([event for _, event in found])
            assert found[-1][0] in ("response.completed", "response.incomplete")
            return
        for number, (_, event) in enumerate(found):
            check_event(event)
            assert event["sequence_number"] == number
    else:
        usage = bool((body.get("stream_options") or {}).get("include_usage"))
        check_chat([event for _, event in found], body.get("n") or 1, usage, ended)


def check_messages(found: list[dict[str, Any]], ended: bool) -> None:
    """Blocks come one after the other, in order, between the message's start and its end."""
    assert found[0]["type"] == "message_start"
    assert found[0]["message"]["usage"]["output_tokens"] == 0
    index, begun = -1, False
    for event in found[1 : -2 if ended else None]:
        match event["type"]:
            case "content_block_start":
                assert not begun
                index, begun = index + 1, True
            case "content_block_delta":
                assert begun
            case "content_block_stop":
                assert begun
                begun = False
            case kind:
                assert kind == "ping"
                continue
        assert event["index"] == index
    if ended:
        assert not begun
        delta, stop = found[-2:]
        assert (delta["type"], stop["type"]) == ("message_delta", "message_stop")
        assert delta["delta"]["stop_reason"] in STOP_REASONS
        assert delta["usage"]["output_tokens"] > 0


def check_chat(found: list[Any], n: int, usage: bool, ended: bool) -> None:
    """A role first, a reason last, for each choice; then usage if asked for, and the end."""
    chunks = found[: -1 if ended else None]
    for chunk in chunks:
        ChatCompletionChunk.model_validate(chunk)
        assert chunk["id"] == chunks[0]["id"]
    assert chunks[0]["choices"][0]["delta"]["role"] == "assistant"
    if not ended:
        return
    assert found[-1] == "[DONE]"
    if usage:
        last = chunks.pop()
        assert last["choices"] == []
        assert last["usage"]["completion_tokens"] > 0
    for index in range(n):
        of_choice = [c["choices"][0] for c in chunks if c["choices"][0]["index"] == index]
        reasons = [choice["finish_reason"] for choice in of_choice]
        assert reasons[-1] in ("stop", "length", "tool_calls")
        assert set(reasons[:-1]) <= {None}
