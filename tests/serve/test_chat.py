"""Answers of Chat Completions, whole and streamed."""

from __future__ import annotations

from typing import Any

import httpx
import orjson
import pytest

from ninfer.engine import Output
from ninfer.events import Channel, FinishReason
from ninfer.serve.app import create_app
from tests.serve.fakes import (
    MODEL,
    FakeLink,
    call_text,
    calls,
    events_of,
    logprob,
    make_server,
    nano_frontend,
    says,
    thinks,
)

pytestmark = pytest.mark.anyio
PATH = "/v1/chat/completions"


def function(name: str, **properties: Any) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


READ = function("read", path={"type": "string"})


async def post(script: Any, **fields: Any) -> httpx.Response:
    app = create_app(make_server(script if isinstance(script, FakeLink) else FakeLink(script)))
    body = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], **fields}
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as http:
        return await http.post(PATH, json=body)


async def whole(script: Any, **fields: Any) -> dict[str, Any]:
    answer = await post(script, **fields)
    assert answer.status_code == 200, answer.text
    return answer.json()


async def chunks(script: Any, **fields: Any) -> list[Any]:
    answer = await post(script, stream=True, **fields)
    assert answer.status_code == 200, answer.text
    found = events_of(answer.content)
    assert all(name is None for name, _ in found)
    return [data for _, data in found]


def deltas(found: list[Any]) -> list[dict[str, Any]]:
    return [chunk["choices"][0]["delta"] for chunk in found if chunk != "[DONE]" and chunk["choices"]]


async def test_a_whole_answer() -> None:
    body = await whole(says(thinks("Hm."), "Hello", " there.", reused=4, prompt=12))
    assert list(body) == ["id", "object", "created", "model", "choices", "usage", "timings"]
    assert body["id"].startswith("chatcmpl-")
    assert len(body["id"]) == len("chatcmpl-") + 16
    assert (body["object"], body["model"]) == ("chat.completion", MODEL)
    assert body["choices"] == [
        {
            "index": 0,
            "message": {
                "role": "assistant", "content": "Hello there.", "refusal": None, "reasoning_content": "Hm.",
            },
            "logprobs": None,
            "finish_reason": "stop",
        }
    ]  # fmt: skip
    assert body["usage"] == {
        "prompt_tokens": 12,
        "prompt_tokens_details": {"cached_tokens": 4},
        "completion_tokens": 4,
        "completion_tokens_details": {"reasoning_tokens": 1},
        "total_tokens": 16,
    }
    timings = body["timings"]
    assert (timings["cache_n"], timings["prompt_n"], timings["predicted_n"]) == (4, 8, 4)
    assert (timings["prompt_ms"], timings["predicted_ms"]) == (20.0, 40.0)
    assert timings["prompt_per_token_ms"] == pytest.approx(2.5)
    assert timings["predicted_per_second"] == pytest.approx(75.0)  # three tokens after the first
    assert "draft_n" not in timings


async def test_an_empty_answer_has_empty_content_and_numbers() -> None:
    body = await whole(says(reason=FinishReason.OUTPUT_LIMIT), max_tokens=0)
    assert body["choices"][0]["message"]["content"] == ""
    assert body["choices"][0]["finish_reason"] == "length"
    assert body["timings"]["predicted_per_second"] == 0.0
    assert body["usage"]["completion_tokens"] == 0


@pytest.mark.parametrize(
    ("reason", "word"),
    [
        (FinishReason.STOP_TOKEN, "stop"), (FinishReason.STOP_STRING, "stop"),
        (FinishReason.OUTPUT_LIMIT, "length"), (FinishReason.CONTEXT_CAPACITY, "length"),
        (FinishReason.CANCELLED, "stop"),
    ],
)  # fmt: skip
async def test_finish_reasons(reason: FinishReason, word: str) -> None:
    assert (await whole(says("a", reason=reason)))["choices"][0]["finish_reason"] == word
    found = await chunks(says("a", reason=reason))
    assert found[-2]["choices"][0]["finish_reason"] == word


async def test_calls_of_a_whole_answer() -> None:
    body = await whole(says(calls(call_text("read", path="a"))), tools=[READ])
    (choice,) = body["choices"]
    assert choice["message"]["content"] is None
    (call,) = choice["message"]["tool_calls"]
    assert call["id"].startswith("call_")
    assert call == {
        "id": call["id"], "type": "function", "function": {"name": "read", "arguments": '{"path":"a"}'},
    }  # fmt: skip
    assert choice["finish_reason"] == "tool_calls"
    cut = await whole(
        says("I", calls(call_text("read", path="a")), reason=FinishReason.OUTPUT_LIMIT), tools=[READ]
    )
    assert cut["choices"][0]["finish_reason"] == "length"  # wins over calls
    assert cut["choices"][0]["message"]["content"] == "I"


async def test_a_stream() -> None:
    found = await chunks(says(thinks("Hm."), "Hello", " there."))
    assert found[-1] == "[DONE]"
    assert deltas(found) == [
        {"role": "assistant", "content": ""},
        {"reasoning_content": "Hm."},
        {"content": "Hello"},
        {"content": " there."},
        {},
    ]
    heads = [(c["id"], c["object"], c["created"], c["model"]) for c in found[:-1]]
    assert set(heads) == {(heads[0][0], "chat.completion.chunk", heads[0][2], MODEL)}
    assert all(list(c["choices"][0]) == ["index", "delta", "logprobs", "finish_reason"] for c in found[:-1])
    assert [c["choices"][0]["finish_reason"] for c in found[:-1]] == [None] * 4 + ["stop"]
    assert all("usage" not in c for c in found[:-1])
    assert [("timings" in c) for c in found[:-1]] == [False] * 4 + [True]


async def test_a_stream_with_usage() -> None:
    found = await chunks(says("Hello"), stream_options={"include_usage": True})
    assert [c["usage"] for c in found[:-2]] == [None] * (len(found) - 2)
    last = found[-2]
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 2
    assert last["timings"]["predicted_n"] == 2
    assert "timings" not in found[-3]


async def test_calls_are_streamed_as_they_are_written() -> None:
    first, second = call_text("read", path="one two"), call_text("read", path="3")
    pieces = [calls((first + "\n" + second)[i : i + 5]) for i in range(0, len(first + second) + 1, 5)]
    found = deltas(await chunks(says("I read. ", *pieces), tools=[READ]))
    got = [d["tool_calls"][0] for d in found if "tool_calls" in d]
    begun = [c for c in got if "id" in c]
    assert [(c["index"], c["type"], c["function"]) for c in begun] == [
        (0, "function", {"name": "read", "arguments": ""}),
        (1, "function", {"name": "read", "arguments": ""}),
    ]
    assert begun[0]["id"] != begun[1]["id"]
    for index, text in enumerate(("one two", "3")):
        parts = [c["function"]["arguments"] for c in got if c["index"] == index]
        assert len(parts) > 2
        assert orjson.loads("".join(parts)) == {"path": text}
    assert got.index(begun[1]) > len(got) // 3  # the first was sent before the second was known
    assert [d["content"] for d in found if d.get("content")] == ["I read."]


async def test_a_call_that_the_output_limit_cuts_stays_cut() -> None:
    text = call_text("read", path="one two three")
    script = says(calls(text[: text.index(" three")]), reason=FinishReason.OUTPUT_LIMIT)
    body = await whole(script, tools=[READ])
    (call,) = body["choices"][0]["message"]["tool_calls"]
    found = deltas(await chunks(script, tools=[READ]))
    streamed = "".join(d["tool_calls"][0]["function"]["arguments"] for d in found if "tool_calls" in d)
    for arguments in (call["function"]["arguments"], streamed):
        assert arguments.startswith('{"path":"one')
        with pytest.raises(orjson.JSONDecodeError):
            orjson.loads(arguments)
    assert body["choices"][0]["finish_reason"] == "length"


async def test_a_malformed_call_is_content() -> None:
    text = "<tool_call>\n<function=unknown>\n</function>\n</tool_call>"
    found = await chunks(says("See: ", calls(text)), tools=[READ])
    assert "".join(d.get("content", "") for d in deltas(found)) == "See: " + text
    assert found[-2]["choices"][0]["finish_reason"] == "stop"


async def test_custom_tools_are_called_with_their_input() -> None:
    tool = {
        "type": "custom",
        "custom": {
            "name": "patch",
            "description": "Edits.",
            "format": {"type": "grammar", "grammar": {"syntax": "lark", "definition": 'start: "x"'}},
        },
    }
    link = FakeLink(says(calls(call_text("patch", input='a "b"\nc'))))
    body = await whole(link, tools=[tool, READ])
    (call,) = body["choices"][0]["message"]["tool_calls"]
    assert call["type"] == "custom"
    assert call["custom"] == {"name": "patch", "input": 'a "b"\nc'}
    assert body["choices"][0]["finish_reason"] == "tool_calls"
    assert 'start: \\"x\\"' in link.jobs[0].prompt.text
    found = deltas(await chunks(link, tools=[tool]))
    begun, ended = (d["tool_calls"][0] for d in found if "tool_calls" in d)
    assert (begun["type"], begun["custom"]) == ("custom", {"name": "patch", "input": ""})
    assert ended == {"index": 0, "custom": {"input": 'a "b"\nc'}}


async def test_a_custom_tools_input_beside_what_no_encoder_takes() -> None:
    tool = {"type": "custom", "custom": {"name": "patch"}}
    link = FakeLink(says(calls(call_text("patch", input="a", other='"\\ud800"'))))
    (call,) = (await whole(link, tools=[tool]))["choices"][0]["message"]["tool_calls"]
    assert call["custom"]["input"] == "a"
    found = deltas(await chunks(link, tools=[tool]))
    assert [d["tool_calls"][0]["custom"] for d in found if "tool_calls" in d][-1] == {"input": "a"}


async def test_functions_of_before_tools() -> None:
    functions = [READ["function"]]
    script = says(calls(call_text("read", path="a")))
    link = FakeLink(script)
    body = await whole(link, functions=functions, function_call="auto")
    assert body["choices"][0]["message"]["function_call"] == {"name": "read", "arguments": '{"path":"a"}'}
    assert "tool_calls" not in body["choices"][0]["message"]
    assert body["choices"][0]["finish_reason"] == "function_call"
    assert link.jobs[0].options.single_call
    found = await chunks(script, functions=functions)
    got = [d["function_call"] for d in deltas(found) if "function_call" in d]
    assert got[0] == {"name": "read", "arguments": ""}
    assert "".join(d["arguments"] for d in got) == '{"path":"a"}'
    assert found[-2]["choices"][0]["finish_reason"] == "function_call"


async def test_several_answers() -> None:
    link = FakeLink(says(thinks("1"), "one"), says("two"), says("three", reason=FinishReason.OUTPUT_LIMIT))
    body = await whole(link, n=3)
    assert [c["index"] for c in body["choices"]] == [0, 1, 2]
    assert [c["message"]["content"] for c in body["choices"]] == ["one", "two", "three"]
    assert [c["finish_reason"] for c in body["choices"]] == ["stop", "stop", "length"]
    assert body["usage"]["completion_tokens"] == 3 + 2 + 1
    assert body["usage"]["total_tokens"] == body["usage"]["prompt_tokens"] + 6
    link = FakeLink(says("one"), says("two"))
    found = await chunks(link, n=2, stream_options={"include_usage": True})
    for index, text in enumerate(("one", "two")):
        mine = [c["choices"][0] for c in found[:-2] if c["choices"][0]["index"] == index]
        assert [c["delta"] for c in mine] == [{"role": "assistant", "content": ""}, {"content": text}, {}]
        assert mine[-1]["finish_reason"] == "stop"
    assert found[-2]["usage"]["completion_tokens"] == 4


async def test_log_probabilities() -> None:
    frontend = nano_frontend()
    ids = [frontend.encode(text)[0] for text in ("hi", " there")]
    half = next(i for i in range(300) if frontend.token_bytes(i) == b"\xc3")
    script = says(
        Output(Channel.CONTENT, "hi", (logprob(ids[0], -0.25, (ids[0], -0.25), (half, -3.0)),)),
        Output(Channel.CONTENT, " there", (logprob(ids[1], -1.0),)),
    )
    link = FakeLink(script)
    body = await whole(link, logprobs=True, top_logprobs=2)
    assert link.jobs[0].options.logprobs == 2
    found = body["choices"][0]["logprobs"]
    assert found["refusal"] is None
    hi = {"token": "hi", "logprob": -0.25, "bytes": [104, 105]}
    assert found["content"][0] == {
        **hi,
        "top_logprobs": [hi, {"token": "\ufffd", "logprob": -3.0, "bytes": [0xC3]}],
    }
    assert found["content"][1]["top_logprobs"] == []
    streamed = await chunks(script, logprobs=True)
    got = [c["choices"][0]["logprobs"] for c in streamed[:-1]]
    assert got[0] is None
    assert [len(g["content"]) for g in got[1:3]] == [1, 1]
    assert (await whole(says("a")))["choices"][0]["logprobs"] is None


async def test_timings_with_each_text() -> None:
    found = await chunks(says(thinks("a"), "b", reused=3), timings_per_token=True)
    timings = [c["timings"] for c in found[1:3]]
    assert [t["predicted_n"] for t in timings] == [1, 2]
    assert all(t["cache_n"] == 3 and t["prompt_ms"] == 20.0 for t in timings)
    assert "timings" not in found[0]


async def test_progress_of_the_prompt() -> None:
    found = await chunks(says("b", reused=3, prompt=12), return_progress=True)
    progress = [c["prompt_progress"] for c in found[:-1] if "prompt_progress" in c]
    assert progress == [
        {"total": 12, "cache": 3, "processed": 3, "time_ms": 0.0},
        {"total": 12, "cache": 3, "processed": 12, "time_ms": 20.0},
    ]
    order = ["progress" if "prompt_progress" in c else "other" for c in found]
    assert order == ["other", "progress", "progress", "other", "other", "other"]
    assert not any("prompt_progress" in c for c in (await chunks(says("b")))[:-1])


async def test_a_prompt_that_is_too_long() -> None:
    answer = await post(FakeLink(max_context=5), stream=True)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert (error["code"], error["param"], error["max_context"]) == ("context_length_exceeded", "messages", 5)
    assert error["prompt_tokens"] > 5
    assert "maximum context length is 5 tokens" in error["message"]
