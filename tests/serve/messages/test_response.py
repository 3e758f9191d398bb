"""Answer events as Messages events."""

import json

import orjson
import pytest
from anthropic.types import Message, RawMessageStreamEvent
from pydantic import TypeAdapter

from ninfer.events import FinishReason
from ninfer.serve.calls import (
    Begun,
    CallArguments,
    CallBegan,
    CallEnded,
    Finished,
    Progress,
    Text,
    Timings,
    Usage,
)
from ninfer.serve.messages.response import MessageEvents, whole_message
from ninfer.serve.sealing import sealed
from tests.serve.fakes import statistics

EVENTS = TypeAdapter(RawMessageStreamEvent)


def finished(reason=FinishReason.STOP_TOKEN, *, stop=None, calls=0):
    usage = Usage(100, 60, 20, 7)
    return Finished(reason, usage, Timings(100, 60, 20, 0.1, 0.2), statistics(), stop, calls)


def stream(*events, **options):
    message = MessageEvents("label", prompt_tokens=100, **options)
    made = [item for event in events for item in message.of(event)]
    for item in made:
        checked = EVENTS.validate_python(item, strict=True)
        assert checked.type == item["type"]
    whole = whole_message(made)
    if made[-1]["type"] == "message_stop":
        Message.model_validate(whole, strict=True)
    return made, whole


def kinds(events):
    return [
        event["type"].removeprefix("content_block_") + (f" {event['index']}" if "index" in event else "")
        for event in events
    ]


def test_the_whole_sequence():
    made, whole = stream(
        Begun(100, 60),
        Progress(100, 60, 100, 0.1),
        Text("reasoning", "Hm"),
        Text("reasoning", "m."),
        Text("content", "Look"),
        Text("content", "ing."),
        CallBegan(0, "Bash"),
        CallArguments(0, '{"command": "l'),
        CallArguments(0, 's"}'),
        CallEnded(0, "Bash", '{"command": "ls"}'),
        CallBegan(1, "Now"),
        CallEnded(1, "Now", "{}"),
        finished(calls=2),
    )
    assert kinds(made) == [
        "message_start",
        "start 0",
        "delta 0",
        "delta 0",
        "delta 0",
        "stop 0",
        "start 1",
        "delta 1",
        "delta 1",
        "stop 1",
        "start 2",
        "delta 2",
        "delta 2",
        "stop 2",
        "start 3",
        "delta 3",
        "stop 3",
        "message_delta",
        "message_stop",
    ]
    start = made[0]["message"]
    assert start["content"] == []
    assert start["stop_reason"] is None
    assert start["model"] == "label"
    assert start["usage"]["input_tokens"] == 40
    assert start["usage"]["cache_read_input_tokens"] == 60
    assert start["usage"]["output_tokens"] == 0
    assert made[1]["content_block"] == {"type": "thinking", "thinking": "", "signature": ""}
    assert made[4]["delta"] == {"type": "signature_delta", "signature": start["id"]}
    pieces = [
        event["delta"]["partial_json"] for event in made if event.get("index") == 2 and "delta" in event
    ]
    assert pieces == ['{"command": "l', 's"}']
    assert made[-2]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    assert made[-2]["usage"]["output_tokens_details"] == {"thinking_tokens": 7}

    first, second = (block["id"] for block in whole["content"][2:])
    assert first.startswith("toolu_")
    assert len(first) == 22
    assert first != second
    assert whole["id"].startswith("msg_")
    assert len(whole["id"]) == 20
    assert whole["content"] == [
        {"type": "thinking", "thinking": "Hmm.", "signature": whole["id"]},
        {"type": "text", "text": "Looking."},
        {"type": "tool_use", "id": first, "name": "Bash", "input": {"command": "ls"}},
        {"type": "tool_use", "id": second, "name": "Now", "input": {}},
    ]
    assert whole["usage"] == {
        "input_tokens": 40,
        "cache_creation_input_tokens": None,
        "cache_read_input_tokens": 60,
        "cache_creation": None,
        "output_tokens": 20,
        "output_tokens_details": {"thinking_tokens": 7},
        "server_tool_use": {"web_search_requests": 0, "web_fetch_requests": 0},
        "service_tier": None,
        "inference_geo": None,
    }


def test_text_behind_a_call_is_a_block_of_its_own():
    made, whole = stream(
        Begun(1, 0),
        Text("content", "a"),
        CallBegan(0, "f"),
        CallEnded(0, "f", "{}"),
        Text("content", "b"),
        finished(calls=1),
    )
    assert [block["type"] for block in whole["content"]] == ["text", "tool_use", "text"]
    assert kinds(made)[-3:] == ["stop 2", "message_delta", "message_stop"]


def test_omitted_thinking_is_in_the_signature():
    now = [0.0]
    message = MessageEvents("m", prompt_tokens=1, omit_thinking=True, clock=lambda: now[0])
    made = [*message.of(Begun(1, 0))]
    for seconds in range(0, 100, 10):
        now[0] = float(seconds)
        made += message.of(Text("reasoning", f"{seconds} "))
    made += message.of(Text("content", "done"))
    made += message.of(finished())
    thinking = [
        event["delta"]["thinking"] for event in made if event.get("delta", {}).get("type") == "thinking_delta"
    ]
    # Clients that would give up a silent stream see that it lives, and nothing of the thinking.
    assert thinking == ["", "", ""]
    block = whole_message(made)["content"][0]
    assert block == {"type": "thinking", "thinking": "", "signature": sealed("0 10 20 30 40 50 60 70 80 90 ")}


def test_a_call_that_takes_long_shows_that_it_goes_on():
    call = (CallBegan(0, "f"), CallArguments(0, ""), CallArguments(0, ""), CallEnded(0, "f", "{}"))
    made, whole = stream(Begun(1, 0), *call, finished(calls=1))
    pieces = [event["delta"]["partial_json"] for event in made if event["type"] == "content_block_delta"]
    assert pieces == ["", "", "{}"]
    assert whole["content"][0]["input"] == {}


def test_an_empty_answer():
    made, whole = stream(Begun(5, 0), Text("content", ""), finished())
    assert kinds(made) == ["message_start", "message_delta", "message_stop"]
    assert whole["content"] == []
    assert whole["stop_reason"] == "end_turn"


@pytest.mark.parametrize(
    ("reason", "stop", "calls", "said", "sequence"),
    [
        (FinishReason.STOP_TOKEN, None, 0, "end_turn", None),
        (FinishReason.STOP_TOKEN, None, 1, "tool_use", None),
        (FinishReason.OUTPUT_LIMIT, None, 0, "max_tokens", None),
        (FinishReason.OUTPUT_LIMIT, None, 1, "tool_use", None),
        (FinishReason.CONTEXT_CAPACITY, None, 0, "model_context_window_exceeded", None),
        (FinishReason.STOP_STRING, "END", 0, "stop_sequence", "END"),
        (FinishReason.STOP_STRING, "END", 1, "tool_use", None),
    ],
)
def test_stop_reasons(reason, stop, calls, said, sequence):
    begun = [CallBegan(0, "f"), CallEnded(0, "f", "{}")] if calls else []
    _, whole = stream(Begun(1, 0), *begun, Text("content", "x"), finished(reason, stop=stop, calls=calls))
    assert (whole["stop_reason"], whole["stop_sequence"]) == (said, sequence)


def test_a_call_that_the_limit_cut_is_not_to_be_executed():
    made, whole = stream(
        Begun(1, 0),
        CallBegan(0, "f"),
        CallEnded(0, "f", "{}"),
        CallBegan(1, "Write"),
        CallArguments(1, '{"path": "a'),
        CallArguments(1, '"}', cut=True),
        CallEnded(1, "Write", '{"path": "a"}', cut=True),
        finished(FinishReason.OUTPUT_LIMIT, calls=2),
    )
    assert whole["stop_reason"] == "max_tokens"
    assert whole["content"][1]["input"] == {}
    assert kinds(made)[-3:] == ["stop 1", "message_delta", "message_stop"]


@pytest.mark.parametrize("value", ["123456789012345678901234567890", "[" * 300 + "]" * 300])
def test_an_input_that_the_writer_refuses_is_as_the_model_wrote_it(value):
    arguments = f'{{"n":{value}}}'
    call = (CallBegan(0, "f"), CallArguments(0, arguments), CallEnded(0, "f", arguments))
    message = MessageEvents("m", prompt_tokens=1)
    whole = whole_message([item for event in (*call, finished(calls=1)) for item in message.of(event)])
    assert f'"input":{arguments}'.encode() in orjson.dumps(whole)


def test_the_start_without_a_beginning_counts_the_prompt():
    message = MessageEvents("m", prompt_tokens=123, omit_thinking=False)
    (start,) = message.start()
    assert start["message"]["usage"]["input_tokens"] == 123
    assert list(message.start()) == []


def test_signatures_are_plain_base64():
    assert sealed("ÿ?>") == "ninfer-reasoning.v1:w78/Pg=="
    assert json.dumps(sealed("x" * 1000)).isascii()
