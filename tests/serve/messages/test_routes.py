"""The two routes on a fake engine: bodies, event streams, errors, cancelling."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import anthropic
import httpx
import httpx2
import pytest
from anthropic.types import Message

from ninfer.engine import Output
from ninfer.errors import UnavailableError
from ninfer.events import Channel, FinishReason
from ninfer.serve.app import create_app
from ninfer.serve.calls import JsonFormat
from tests.serve.fakes import (
    Call,
    FakeLink,
    Recorder,
    call_text,
    calls,
    events_of,
    make_server,
    nano_frontend,
    says,
    thinks,
)
from tests.serve.messages.conftest import RECORDED, assistant, body, recording, result, text, tool, use, user
from tests.serve.messages.test_response import EVENTS, kinds

pytestmark = pytest.mark.anyio
LOOKS = {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]}
TOOLS = [tool("Bash", input_schema=LOOKS)]


def client(link: FakeLink | None = None, *observers, **options) -> httpx.AsyncClient:
    app = create_app(make_server(link, *observers, **options))
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test")


def sdk_on(link: FakeLink) -> anthropic.AsyncAnthropic:
    transport: Any = httpx2.ASGITransport(create_app(make_server(link)))
    http = httpx2.AsyncClient(transport=transport, base_url="http://test")
    return anthropic.AsyncAnthropic(base_url="http://test", api_key="k", http_client=http)


async def ask(
    link: FakeLink | None, sent: Any, path: str = "/v1/messages?beta=true", **options
) -> httpx.Response:
    async with client(link, **options) as http:
        return await http.post(path, json=sent)


async def streamed(link: FakeLink, sent: dict[str, Any], **options) -> list[dict[str, Any]]:
    answer = await ask(link, {**sent, "stream": True}, **options)
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert answer.headers["cache-control"] == "no-cache"
    events = events_of(answer.content)
    for name, data in events:
        assert name == data["type"]
        if name != "error":
            EVENTS.validate_python(data, strict=True)
    return [data for _, data in events]


def error_of(answer: httpx.Response) -> dict[str, Any]:
    said = answer.json()
    assert set(said) == {"type", "error", "request_id"}
    assert said["type"] == "error"
    assert said["request_id"] == answer.headers["request-id"]
    return said["error"]


async def test_a_whole_answer():
    link = FakeLink(says(thinks("Hm."), "Hello", " there.", prompt=100, reused=60))
    answer = await ask(link, body("hi", model="any-label"))
    assert answer.status_code == 200
    assert answer.headers["request-id"].startswith("req_")
    message = Message.model_validate(answer.json(), strict=True)
    assert message.model == "any-label"
    assert [block.type for block in message.content] == ["thinking", "text"]
    assert (message.usage.input_tokens, message.usage.cache_read_input_tokens) == (40, 60)
    assert message.stop_reason == "end_turn"


async def test_a_stream():
    link = FakeLink(says(thinks("Hm."), "Hello", " there.", prompt=100, reused=60))
    events = await streamed(link, body("hi"))
    assert kinds(events) == [
        *("message_start", "start 0", "delta 0", "delta 0", "stop 0"),
        *("start 1", "delta 1", "delta 1", "stop 1", "message_delta", "message_stop"),
    ]
    assert events[0]["message"]["usage"]["cache_read_input_tokens"] == 60
    assert events[-2]["usage"]["output_tokens"] == 4


async def test_omitted_thinking_comes_back():
    link = FakeLink(says(thinks("Se"), thinks("cret."), "Hi."))
    thinking = {"type": "adaptive", "display": "omitted"}
    sent = body("hi", thinking=thinking, preserve_thinking=True, max_tokens=500)
    async with client(link) as http:
        first = (await http.post("/v1/messages", json=sent)).json()
        assert first["content"][0]["thinking"] == ""
        again = {**sent, "messages": [*sent["messages"], assistant(*first["content"]), user(text("and?"))]}
        assert (await http.post("/v1/messages", json=again)).status_code == 200
    assert "<think>\nSecret.\n</think>\n\nHi." in link.jobs[1].prompt.text


@pytest.mark.parametrize("line", RECORDED)
async def test_recorded_requests_get_valid_answers(line):
    link = FakeLink(says(thinks("Hm."), "done."), max_context=32768)
    answer = await ask(link, line["body"], line["path"])
    if line["body"].get("thread"):
        assert answer.status_code == 400
        assert error_of(answer)["details"]["error_code"] == "thread_unsupported_request"
        return
    assert answer.status_code == 200, answer.text
    if "count_tokens" in line["path"]:
        assert set(answer.json()) == {"input_tokens"}
        assert answer.json()["input_tokens"] > 0
    elif line["body"].get("stream"):
        events = events_of(answer.content)
        assert [EVENTS.validate_python(data, strict=True).type for _, data in events][-1] == "message_stop"
    else:
        assert Message.model_validate(answer.json(), strict=True).stop_reason == "end_turn"


async def test_a_tool_call_streams_its_input():
    written = call_text("Bash", command="ls -a /tmp")
    pieces = [calls(written[at : at + 7]) for at in range(0, len(written), 7)]
    events = await streamed(FakeLink(says(thinks("Hm."), "Look.", *pieces)), body("list", tools=TOOLS))
    start = next(event for event in events if event.get("content_block", {}).get("type") == "tool_use")
    assert start["content_block"]["name"] == "Bash"
    assert start["content_block"]["input"] == {}
    assert start["content_block"]["id"].startswith("toolu_")
    parts = [
        event["delta"]["partial_json"]
        for event in events
        if event.get("index") == start["index"] and "delta" in event
    ]
    assert len(parts) > 2
    assert json.loads("".join(parts)) == {"command": "ls -a /tmp"}
    assert events[-2]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}


@pytest.mark.parametrize(
    "value",
    ["1" * 40, "1e999", "[" * 300 + "]" * 300],
    ids=["long", "large", "deep"],
)
async def test_input_that_no_encoder_takes_is_sent_as_it_was_written(value: str):
    tools = [tool("Any", input_schema={"type": "object", "properties": {"x": {}}})]
    answer = await ask(FakeLink(says(calls(call_text("Any", x=value)))), body("go", tools=tools))
    assert answer.status_code == 200
    assert f'"input":{{"x":{value}}}' in answer.text


async def test_a_call_that_the_limit_cuts_stays_broken():
    """A client must not execute half a call."""
    written = call_text("Bash", command="rm -r /tmp/a/b").partition("/b")[0]
    link = FakeLink(says(calls(written), reason=FinishReason.OUTPUT_LIMIT))
    events = await streamed(link, body("list", tools=TOOLS, thinking={"type": "disabled"}))
    parts = [
        event["delta"].get("partial_json", "") for event in events if event["type"] == "content_block_delta"
    ]
    with pytest.raises(ValueError):
        json.loads("".join(parts))
    assert events[-2]["delta"]["stop_reason"] == "max_tokens"
    assert (await ask(link, body("list", tools=TOOLS))).json()["stop_reason"] == "max_tokens"


async def test_stop_sequences():
    link = FakeLink(says("a", reason=FinishReason.STOP_STRING, stop_string="END"))
    answer = (await ask(link, body("hi", stop_sequences=["END"]))).json()
    assert (answer["stop_reason"], answer["stop_sequence"]) == ("stop_sequence", "END")
    options = link.jobs[0].options
    assert (options.stop, options.reasoning_stop) == (("END",), ())


async def test_counting():
    link = FakeLink(says("x"))
    sent = recording("claude-code", "context", 3)
    async with client(link) as http:
        counts = await asyncio.gather(
            *(http.post("/v1/messages/count_tokens?beta=true", json=sent) for _ in range(24))
        )
        assert {count.status_code for count in counts} == {200}
        counted = counts[0].json()["input_tokens"]
        assert (await http.post("/v1/messages", json={**sent, "max_tokens": 9})).status_code == 200
    assert len(link.jobs) == 1
    assert len(link.jobs[0].prompt.tokens) == counted


async def test_billing_lines_are_not_counted():
    billed = body("hi", system=[text("x-anthropic-billing-header: cc_version=1;"), text("Be kind.")])
    path = "/v1/messages/count_tokens"
    assert (await ask(None, billed, path)).json() == (
        await ask(None, body("hi", system="Be kind."), path)
    ).json()


async def test_a_prompt_that_is_too_long_is_said_in_the_words_that_clients_know():
    answer = await ask(FakeLink(max_context=64), body("word " * 100))
    assert answer.status_code == 400
    error = error_of(answer)
    assert error["type"] == "invalid_request_error"
    count = (await ask(None, body("word " * 100), "/v1/messages/count_tokens")).json()["input_tokens"]
    assert error["message"] == f"prompt is too long: {count} tokens > 64 maximum"


async def test_errors_before_the_answer():
    bad = await ask(None, body("hi", max_tokens=-1))
    assert bad.status_code == 400
    assert "max_tokens" in error_of(bad)["message"]
    async with client() as http:
        broken = await http.post("/v1/messages", content=b'{"model": ')
        assert broken.status_code == 400
        assert error_of(broken)["type"] == "invalid_request_error"
        missing = await http.get("/v1/messages/msg_1")
        assert missing.status_code == 404
        assert error_of(missing)["type"] == "not_found_error"


async def test_a_busy_server_says_so():
    gate = asyncio.Event()
    link = FakeLink(says(gate, "x"))
    async with client(link, max_concurrency=1, max_pending=1) as http:
        running = [asyncio.create_task(http.post("/v1/messages", json=body("hi"))) for _ in range(2)]
        while len(link.jobs) < 2:
            await asyncio.sleep(0.01)
        refused = await http.post("/v1/messages", json=body("hi"))
        assert refused.status_code == 529
        assert error_of(refused)["type"] == "overloaded_error"
        assert "retry-after" in refused.headers
        gate.set()
        assert {answer.status_code for answer in await asyncio.gather(*running)} == {200}


@pytest.mark.parametrize("at", [0, 1])
async def test_an_error_in_the_stream_ends_it(at):
    failure = UnavailableError("The engine has failed.")
    link = FakeLink([failure] if at == 0 else says("Hel", failure))
    events = await streamed(link, body("hi"))
    assert events[0]["type"] == "message_start"
    assert events[-1]["type"] == "error"
    assert events[-1]["error"] == {"type": "api_error", "message": "The engine has failed."}
    assert events[-1]["request_id"].startswith("req_")
    assert len(events) == (2 if at == 0 else 4)


async def test_a_broken_renderer_still_ends_the_stream(monkeypatch):
    def fail(*_):
        raise KeyError("x")

    monkeypatch.setattr("ninfer.serve.messages.response.MessageEvents.of", fail)
    seen = Recorder()
    async with client(FakeLink(says("Hello")), seen) as http:
        answer = await http.post("/v1/messages", json=body("hi", stream=True))
    *_, (name, last) = events_of(answer.content)
    assert (name, last["error"]) == ("error", {"type": "api_error", "message": "Internal error."})
    assert "response_failed" in [name for name, _ in seen.told]


async def test_an_error_of_a_whole_answer_is_a_status():
    answer = await ask(FakeLink(says("Hel", UnavailableError("The engine has failed."))), body("hi"))
    assert answer.status_code == 503
    assert error_of(answer)["type"] == "api_error"


async def test_comments_keep_a_quiet_stream_alive():
    link = FakeLink(says(0.25, "x"))
    answer = await ask(link, body("hi", stream=True), keep_alive=0.05)
    assert answer.text.count(": keep-alive\n\n") >= 2
    assert "ping" not in answer.text


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_leaves_cancels_the_job(stream):
    gate = asyncio.Event()
    link, seen = FakeLink(says("Hel", gate, "lo")), Recorder()
    server = make_server(link, seen)
    call = Call(create_app(server), "POST", "/v1/messages", body("hi", stream=stream))
    while not link.streams:
        await asyncio.sleep(0.01)
    if stream:
        await call.start()
        await call.read()
    call.leave()
    await asyncio.wait_for(server.service.idle(), 5)
    await call.task
    assert link.streams[0].cancelled
    assert server.service.active == 0


async def test_the_label_of_a_client_is_checked():
    seen = Recorder()
    async with client(None, seen) as http:
        path, sent = "/v1/messages", body("hi")
        assert (await http.post(path, json=sent, headers={"X-Ninfer-Client": "a b"})).status_code == 400
        assert (await http.post(path, json=sent, headers={"X-Ninfer-Client": "gate/x"})).status_code == 200
    assert [record.request.client for record in seen.records][-1] == "gate/x"


async def test_the_official_sdk():
    written = call_text("Bash", command="ls")
    link = FakeLink(says(thinks("Hm."), "Look.", calls(written)), says("done."))
    async with sdk_on(link) as sdk:
        talk: list[Any] = [{"role": "user", "content": "list"}]
        tools: list[Any] = TOOLS
        async with sdk.messages.stream(model="m", max_tokens=500, messages=talk, tools=tools) as stream:
            seen = [event.type async for event in stream]
            message = await stream.get_final_message()
        assert "input_json" in seen
        assert "thinking" in seen
        assert message.stop_reason == "tool_use"
        call = message.content[-1]
        assert call.type == "tool_use"
        assert call.input == {"command": "ls"}
        talk += [
            {"role": "assistant", "content": message.content},
            user(result(call.id, "a.txt")),
        ]
        final = await sdk.messages.create(model="m", max_tokens=500, messages=talk, tools=tools)
        assert final.content[0].type == "text"
        assert final.stop_reason == "end_turn"
        counted = await sdk.messages.count_tokens(model="m", messages=talk, tools=tools)
        assert counted.input_tokens == final.usage.input_tokens
        with pytest.raises(anthropic.BadRequestError, match="max_tokens"):
            await sdk.messages.create(model="m", max_tokens=0, messages=talk)
    assert link.jobs[1].prompt.text.startswith(link.jobs[0].prompt.text.rpartition("<think>")[0])


async def test_the_sdks_tool_runner_falls_back_to_whole_histories():
    link = FakeLink(says(calls(call_text("list_dir", path="/"))), says("done."))

    @anthropic.beta_async_tool
    async def list_dir(path: str) -> str:
        """Lists a directory."""
        return f"a.txt in {path}"

    async with sdk_on(link) as sdk:
        runner = sdk.beta.messages.tool_runner(
            model="m", max_tokens=300, tools=[list_dir], messages=[{"role": "user", "content": "list"}]
        )
        final = await runner.until_done()
    assert final.content[-1].type == "text"
    assert "a.txt in /" in link.jobs[-1].prompt.text
    assert "list<|im_end|>" in link.jobs[-1].prompt.text


async def test_structured_output_and_strict_tools_reach_the_service():
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    link, seen = FakeLink(says('{"a": 1}')), Recorder()
    wanted = {"format": {"type": "json_schema", "schema": schema}}
    sent = body("hi", output_config=wanted, tools=[tool(strict=True)], tool_choice={"type": "any"})
    async with client(link, seen) as http:
        assert (await http.post("/v1/messages", json=sent)).status_code == 200
    asked = seen.records[0].request
    assert asked.response_format == JsonFormat(schema)
    assert asked.tools[0].strict
    assert asked.tool_choice.mode == "required"


async def test_a_tool_that_a_result_refers_to_can_be_called():
    fetch = tool("Fetch", defer_loading=True, input_schema=LOOKS)
    found = result("t1", [{"type": "tool_reference", "tool_name": "Fetch"}])
    talk = body("find", assistant(use("t1", "Search")), user(found), tools=[tool("Search"), fetch])
    link = FakeLink(says(Output(Channel.TOOL, call_text("Fetch", command="x"))))
    answer = (await ask(link, talk)).json()
    assert answer["content"][0]["name"] == "Fetch"
    alone = {**talk, "tools": [fetch]}
    assert (await ask(link, alone)).json()["content"][0]["name"] == "Fetch"


@pytest.mark.parametrize("room", [1, 20, 60, 99, 1000, 1024, 1030, 1060, 2000])
async def test_a_budget_gives_way_to_what_is_left_of_the_context(room):
    """Else a long conversation would once meet a length at which its request is refused."""
    sent = body("hi", thinking={"type": "enabled", "budget_tokens": 1024}, max_tokens=32000)
    count = (await ask(None, sent, "/v1/messages/count_tokens")).json()["input_tokens"]
    link = FakeLink(max_context=count + room - 1)
    assert (await ask(link, sent)).status_code == 200
    budget = link.jobs[0].options.thinking_budget
    closer = len(nano_frontend().thinking_closer)
    assert budget is None or budget >= room or budget + closer + 1 <= room
