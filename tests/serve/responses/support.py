"""What the tests of the Responses API share: bodies, an app around the router, and the SDK's own types."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import httpx
from fastapi import FastAPI
from openai.types.responses import Response as SdkResponse
from openai.types.responses import ResponseItem, ResponseStreamEvent
from pydantic import TypeAdapter

from ninfer.events import FinishReason
from ninfer.serve.app import create_app
from ninfer.serve.calls import (
    AnswerEvent,
    CallArguments,
    CallBegan,
    CallEnded,
    Finished,
    Text,
    Timings,
    Usage,
)
from ninfer.serve.server import Server
from tests.serve.fakes import events_of, statistics

CLIENTS = Path(__file__).parents[2] / "data" / "clients"
EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
RESPONSE: TypeAdapter[Any] = TypeAdapter(SdkResponse)
ITEM: TypeAdapter[Any] = TypeAdapter(ResponseItem)

WEATHER = {
    "type": "function",
    "name": "weather",
    "description": "Tells the weather.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
PATCH = {
    "type": "custom",
    "name": "apply_patch",
    "format": {"type": "grammar", "syntax": "lark", "definition": "start: /(.|\\n)+/"},
}
SEARCH = {"type": "tool_search", "execution": "client", "description": "Finds tools."}


def recorded(*clients: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """(name, recorded request) of each POST to the Responses API."""
    for client in clients:
        (path,) = CLIENTS.glob(f"{client}-*.jsonl")
        for line in path.read_text("utf-8").splitlines():
            request = json.loads(line)
            if request["method"] == "POST" and request["path"] == "/v1/responses":
                yield f"{client} {request['case']} {request['step']}", request


def user(text: str = "hi") -> dict[str, Any]:
    return {"role": "user", "content": text}


def text(words: str, channel: Any = "content") -> Text:
    return Text(channel, words)


def call(index: int, name: str, *pieces: str) -> list[AnswerEvent]:
    return [
        CallBegan(index, name),
        *(CallArguments(index, piece) for piece in pieces),
        CallEnded(index, name, "".join(pieces)),
    ]


def done(reason: FinishReason = FinishReason.STOP_TOKEN) -> Finished:
    return Finished(reason, Usage(20, 8, 6, 2), Timings(20, 8, 6, 0.1, 0.2), statistics(), None, 0)


def app(server: Server) -> FastAPI:
    return create_app(server)


def client(server: Server) -> httpx.AsyncClient:
    """Talks to the whole application."""
    transport = httpx.ASGITransport(app=app(server))
    return httpx.AsyncClient(transport=transport, base_url="http://test/v1")


def checked_events(body: bytes) -> list[dict[str, Any]]:
    """The events of a stream, each as the SDK's types want it, their numbers contiguous, names equal."""
    events = []
    for name, event in events_of(body):
        assert name == event["type"]
        events.append(event)
    check_events(events)
    return events


def check_events(events: Iterable[dict[str, Any]]) -> None:
    """Each as the SDK's types want it; what they say together is what the last one says."""
    events = list(events)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    for event in events:
        check_event(event)
    assert [event["type"] for event in events[:2]] == ["response.created", "response.in_progress"]
    assert events[0]["response"]["status"] == "in_progress"
    final = events[-1]["response"]
    assert events[-1]["type"] in ("response.completed", "response.incomplete", "response.failed")
    assert final["output"] == assembled(events)


def check_event(event: dict[str, Any]) -> None:
    if event["type"] == "response.failed":  # codes of our own are beyond the SDK's list
        event = json.loads(json.dumps(event))
        event["response"]["error"]["code"] = "server_error"
    assert EVENT.validate_python(event).type == event["type"]


def check_response(response: dict[str, Any]) -> dict[str, Any]:
    RESPONSE.validate_python(response)
    return response


def assembled(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The output that a client puts together from deltas, in which each step must fit the one before."""
    items: dict[int, dict[str, Any]] = {}
    deltas: dict[int, str] = {}
    closed: set[int] = set()
    for event in events:
        index, kind = event.get("output_index"), event["type"]
        if index is None:
            continue
        assert index not in closed
        if kind == "response.output_item.added":
            assert index == len(items)
            items[index], deltas[index] = event["item"], ""
            assert event["item"].get("status") == "in_progress"
            continue
        if kind == "response.output_item.done":
            assert event["item"]["id"] == items[index]["id"]
            assert _text_of(event["item"]) in (deltas[index], None)
            items[index] = event["item"]
            closed.add(index)
            continue
        assert event["item_id"] == items[index]["id"]
        if kind.endswith(".delta"):
            deltas[index] += event["delta"]
        elif kind.endswith(("text.done", "arguments.done", "input.done")):
            whole = event.get("text", event.get("arguments", event.get("input")))
            assert whole == deltas[index]
    return [items[index] for index in sorted(closed)]


def _text_of(item: dict[str, Any]) -> str | None:
    match item["type"]:
        case "message" | "reasoning":
            return "".join(part["text"] for part in item["content"])
        case "function_call":
            return item["arguments"]
        case "custom_tool_call":
            return item["input"]
    return None
