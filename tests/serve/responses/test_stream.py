"""Events of answers to events of the API."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ninfer.events import FinishReason
from ninfer.serve.calls import (
    Alternative,
    AnswerEvent,
    CallArguments,
    CallBegan,
    CallEnded,
    Finished,
    Text,
    TokenLogprob,
)
from ninfer.serve.custom import InputText
from ninfer.serve.errors import ApiError
from ninfer.serve.responses.request import read_create
from ninfer.serve.responses.response import begun
from ninfer.serve.responses.store import Store
from ninfer.serve.responses.stream import ResponseStream
from ninfer.serve.sealing import opened
from tests.serve.responses.support import PATCH, SEARCH, WEATHER, call, check_events, done, text, user

NAMESPACE = {"type": "namespace", "name": "crm", "description": "Customers.", "tools": [WEATHER]}


def stream(**body: Any) -> ResponseStream:
    tools = [WEATHER, PATCH, SEARCH, NAMESPACE]
    asked = read_create({"model": "m", "input": [user()], "tools": tools, **body}, Store(1, 1000))
    logprobs = asked.generation.logprobs is not None
    return ResponseStream(begun(asked, 0.7, 0.9), asked.toolbox, encrypted=asked.encrypted, logprobs=logprobs)


def play(events: list[AnswerEvent], **body: Any) -> list[dict[str, Any]]:
    """All events of a response, checked against the SDK's types and each other."""
    made = stream(**body)
    out = list(made.begin())
    for event in events:
        out += made.finish(event) if isinstance(event, Finished) else made.feed(event)
    out.append(made.terminal())
    out = json.loads(json.dumps(out))
    check_events(out)
    return out


def kinds(events: list[dict[str, Any]]) -> list[str]:
    return [event["type"].removeprefix("response.") for event in events]


def test_reasoning_and_a_message() -> None:
    events = play([text("Hm", "reasoning"), text(".", "reasoning"), text("Hello"), text("!"), done()])
    assert kinds(events) == [
        "created", "in_progress",
        "output_item.added", "content_part.added", "reasoning_text.delta", "reasoning_text.delta",
        "reasoning_text.done", "content_part.done", "output_item.done",
        "output_item.added", "content_part.added", "output_text.delta", "output_text.delta",
        "output_text.done", "content_part.done", "output_item.done",
        "completed",
    ]  # fmt: skip
    response = events[-1]["response"]
    reasoning, message = response["output"]
    assert reasoning["id"].startswith("rs_")
    assert message["id"].startswith("msg_")
    assert reasoning == {
        "id": reasoning["id"], "type": "reasoning", "status": "completed", "summary": [],
        "content": [{"type": "reasoning_text", "text": "Hm."}],
    }  # fmt: skip
    assert message == {
        "id": message["id"], "type": "message", "status": "completed", "role": "assistant",
        "content": [{"type": "output_text", "annotations": [], "text": "Hello!"}],
    }  # fmt: skip
    assert response["status"] == "completed"
    assert response["completed_at"] >= response["created_at"]
    assert response["usage"] == {
        "input_tokens": 20, "input_tokens_details": {"cached_tokens": 8, "cache_write_tokens": 0},
        "output_tokens": 6, "output_tokens_details": {"reasoning_tokens": 2}, "total_tokens": 26,
    }  # fmt: skip
    assert (response["temperature"], response["top_p"]) == (0.7, 0.9)
    deltas = [event for event in events if event["type"] == "response.output_text.delta"]
    assert [(d["delta"], d["content_index"], d["output_index"], d["logprobs"]) for d in deltas] == [
        ("Hello", 0, 1, []), ("!", 0, 1, []),
    ]  # fmt: skip


def test_function_calls_come_piece_by_piece() -> None:
    events = play(
        [text("Look:"), *call(0, "weather", '{"city":', ' "Oslo"}'), *call(1, "crm__weather", "{}"), done()]
    )
    assert kinds(events)[8:] == [
        "output_item.added", "function_call_arguments.delta", "function_call_arguments.delta",
        "function_call_arguments.done", "output_item.done",
        "output_item.added", "function_call_arguments.delta", "function_call_arguments.done",
        "output_item.done", "completed",
    ]  # fmt: skip
    _, first, second = events[-1]["response"]["output"]
    assert first == {
        "id": first["id"], "type": "function_call", "status": "completed", "call_id": first["call_id"],
        "name": "weather", "arguments": '{"city": "Oslo"}',
    }  # fmt: skip
    assert first["id"].startswith("fc_")
    assert first["call_id"].startswith("call_")
    assert first["call_id"] != second["call_id"]
    assert (second["name"], second["namespace"]) == ("weather", "crm")
    finals = [event for event in events if event["type"].endswith("arguments.done")]
    assert [(f["name"], f.get("namespace")) for f in finals] == [("weather", None), ("weather", "crm")]


def test_a_call_that_takes_long_shows_that_it_goes_on() -> None:
    events = play([CallBegan(0, "weather"), CallArguments(0, ""), CallEnded(0, "weather", "{}"), done()])
    assert [event["delta"] for event in events if event["type"].endswith("arguments.delta")] == ["", "{}"]


def test_a_custom_tool_gets_its_input_as_text() -> None:
    patch = '*** Begin\n"quoted" \\ tab\t é \U0001f600'
    encoded = json.dumps({"input": patch})
    events = play([*call(0, "apply_patch", *encoded), done()])
    assert "custom_tool_call_input.delta" in kinds(events)
    (item,) = events[-1]["response"]["output"]
    assert item == {
        "id": item["id"], "type": "custom_tool_call", "status": "completed", "call_id": item["call_id"],
        "name": "apply_patch", "input": patch,
    }  # fmt: skip
    assert item["id"].startswith("ctc_")


def test_a_tool_search_of_the_client_is_an_item_of_its_own() -> None:
    events = play([*call(0, "tool_search", '{"query":', '"mail"}'), done()])
    assert kinds(events)[2:-1] == ["output_item.added", "output_item.done"]
    (item,) = events[-1]["response"]["output"]
    assert item == {
        "id": item["id"], "type": "tool_search_call", "status": "completed", "call_id": item["call_id"],
        "execution": "client", "arguments": {"query": "mail"},
    }  # fmt: skip


def test_content_after_a_broken_call_is_a_message_of_its_own() -> None:
    events = play([text("a"), *call(0, "weather", "{}"), text("b"), done()])
    output = events[-1]["response"]["output"]
    assert [item["type"] for item in output] == ["message", "function_call", "message"]


def test_an_empty_answer_is_an_empty_message_and_a_cut_one_is_nothing() -> None:
    (message,) = play([done()])[-1]["response"]["output"]
    assert message["content"] == [{"type": "output_text", "annotations": [], "text": ""}]
    events = play([done(FinishReason.OUTPUT_LIMIT)], max_output_tokens=0)
    assert events[-1]["response"]["output"] == []
    reasoning = play([text("Hm", "reasoning"), done()])[-1]["response"]["output"]
    assert [item["type"] for item in reasoning] == ["reasoning"]


@pytest.mark.parametrize("reason", [FinishReason.OUTPUT_LIMIT, FinishReason.CONTEXT_CAPACITY])
def test_a_limit_makes_the_response_and_what_is_open_incomplete(reason: FinishReason) -> None:
    cut: list[AnswerEvent] = [CallBegan(0, "weather"), CallArguments(0, '{"ci')]
    events = play([text("a"), *cut, done(reason)])
    response = events[-1]["response"]
    assert events[-1]["type"] == "response.incomplete"
    assert (response["status"], response["completed_at"]) == ("incomplete", None)
    assert response["incomplete_details"] == {"reason": "max_output_tokens"}
    assert [item["status"] for item in response["output"]] == ["completed", "incomplete"]
    assert response["output"][1]["arguments"] == '{"ci'
    search: list[AnswerEvent] = [CallBegan(0, "tool_search"), CallArguments(0, '{"q')]
    (item,) = play([*search, done(reason)])[-1]["response"]["output"]
    assert (item["status"], item["arguments"]) == ("incomplete", {})


@pytest.mark.parametrize(
    ("name", "member", "pieces", "left"),
    [
        ("weather", "arguments", ['{"city":"Os'], '{"city":"Os'),
        ("weather", "arguments", [], ""),
        ("apply_patch", "input", ['{"input":"*** Beg'], "*** Beg"),
        ("apply_patch", "input", ['{"input":"'], ""),
        ("tool_search", "arguments", ['{"query":"ma'], {}),
    ],
)
def test_a_call_that_the_limit_cut_is_not_to_be_executed(
    name: str, member: str, pieces: list[str], left: object
) -> None:
    cut: list[AnswerEvent] = [
        CallBegan(0, name),
        *(CallArguments(0, piece) for piece in pieces),
        CallArguments(0, '"}', cut=True),
        CallEnded(0, name, "".join(pieces) + '"}', cut=True),
    ]
    events = play([*cut, done(FinishReason.OUTPUT_LIMIT)])
    (item,) = events[-1]["response"]["output"]
    assert (item["status"], item[member]) == ("incomplete", left)


def test_a_cancelled_answer_says_so() -> None:
    response = play([text("a"), done(FinishReason.CANCELLED)])[-1]["response"]
    assert response["status"] == "cancelled"
    assert response["output"][0]["status"] == "incomplete"


def test_a_failure_ends_the_stream_with_what_was_complete() -> None:
    made = stream()
    out = [*made.begin(), *made.feed(text("Hm", "reasoning")), *made.feed(text("Hel"))]
    made.fail(ApiError(503, "Too late.", type="server_error", code="request_queue_timeout"))
    out.append(made.terminal())
    check_events(json.loads(json.dumps(out)))
    response = out[-1]["response"]
    assert out[-1]["type"] == "response.failed"
    assert response["error"] == {"code": "request_queue_timeout", "message": "Too late."}
    assert [item["type"] for item in response["output"]] == ["reasoning"]
    made.fail(ApiError(500, "Oh.", code="internal_error"))
    assert made.response["error"] == {"code": "server_error", "message": "Oh."}


def test_reasoning_is_sealed_when_asked_for() -> None:
    events = play([text("Grüß", "reasoning"), text("a"), done()], include=["reasoning.encrypted_content"])
    sealed = events[-1]["response"]["output"][0]["encrypted_content"]
    assert sealed.startswith("ninfer-reasoning.v1:")
    assert opened(sealed) == "Grüß"
    assert opened("gAAAA-of-another-server") == ""


def test_log_probabilities_stand_with_their_text() -> None:
    tokens = (
        TokenLogprob("é".encode(), -0.25, (Alternative(b"\xc3", -1.5),)),
        TokenLogprob(b"!", -0.5),
    )
    answer = [Text("content", "é!", tokens), Text("content", "", tokens[1:]), done()]
    events = play(answer, include=["message.output_text.logprobs"])
    first = {
        "token": "é", "bytes": [195, 169], "logprob": -0.25,
        "top_logprobs": [{"token": "\ufffd", "bytes": [195], "logprob": -1.5}],
    }  # fmt: skip
    second = {"token": "!", "bytes": [33], "logprob": -0.5, "top_logprobs": []}
    part = events[-1]["response"]["output"][0]["content"][0]
    assert part["logprobs"] == [first, second, second]
    delta = next(event for event in events if event["type"] == "response.output_text.delta")
    assert delta["logprobs"] == [first, second]
    # Tokens without text open no item.
    output = play([*call(0, "weather", "{}"), Text("content", "", tokens), done()], top_logprobs=2)
    assert [item["type"] for item in output[-1]["response"]["output"]] == ["function_call"]


VALUES = st.text(max_size=40)


@given(VALUES, st.booleans(), st.lists(st.integers(0, 80), max_size=6))
def test_input_text_is_the_same_however_its_json_is_cut(value: str, ascii: bool, cuts: list[int]) -> None:
    encoded = json.dumps({"input": value}, ensure_ascii=ascii)
    reader = InputText()
    places = [0, *sorted(cut for cut in cuts if cut < len(encoded)), len(encoded)]
    got = "".join(reader.feed(encoded[a:b]) for a, b in pairwise(places))
    assert value.startswith(got)
    assert got + reader.end(encoded) == value == reader.text
    got.encode()  # whole characters only


def test_input_text_of_other_arguments_is_them_as_they_are() -> None:
    for arguments, expected in (
        ('{"patch": "x"}', '{"patch": "x"}'),
        ('{"patch": "x", "input": "y"}', "y"),
        ('{"input": 3}', '{"input": 3}'),
        ('{"input": "cut', "cut"),
        ('{"input": "\\ud83dx"}', "\ufffd\ufffd\ufffdx"),
        ("", ""),
        ("[1]", "[1]"),
    ):
        reader = InputText()
        got = reader.feed(arguments) + reader.end(arguments)
        assert got == expected == reader.text


def test_input_text_is_linear() -> None:
    reader = InputText()
    reader.feed('{"input": "')
    for _ in range(20_000):
        reader.feed("\\n\\ud83d")
        reader.feed("\\ude00x")
    reader.feed('"}')
    assert len(reader.text) == 20_000 * 3
