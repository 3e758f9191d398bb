"""The routes over HTTP, on a fake engine with the real frontend."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from openai import AsyncOpenAI

from ninfer.engine import Output
from ninfer.errors import QueueTimeoutError
from ninfer.events import Channel, FinishReason
from ninfer.serve.server import Server
from tests.serve.fakes import (
    MODEL,
    Call,
    FakeLink,
    Recorder,
    call_text,
    calls,
    logprob,
    make_server,
    says,
    thinks,
)
from tests.serve.responses.support import (
    PATCH,
    SEARCH,
    WEATHER,
    app,
    check_response,
    checked_events,
    client,
    user,
)

pytestmark = pytest.mark.anyio


def body(**members: Any) -> dict[str, Any]:
    return {"model": MODEL, "input": "hi", **members}


async def post(server: Server, path: str = "/responses", **members: Any) -> Any:
    async with client(server) as http:
        return await http.post(path, json=members)


def prompt_of(link: FakeLink, index: int = -1) -> str:
    return link.jobs[index].prompt.text


def error_of(answer: Any) -> tuple[int, Any, Any]:
    error = answer.json()["error"]
    assert error["message"]
    assert answer.headers["x-request-id"].startswith("req_")
    return answer.status_code, error["param"], error["code"]


async def test_an_answer() -> None:
    link = FakeLink(says(thinks("Hm."), "Hello", " there.", prompt=20, reused=8))
    answer = await post(
        make_server(link), **body(instructions="Be kind.", temperature=0.25, max_output_tokens=9)
    )
    assert answer.status_code == 200
    response = check_response(answer.json())
    assert [item["type"] for item in response["output"]] == ["reasoning", "message"]
    assert response["output"][1]["content"][0]["text"] == "Hello there."
    assert (response["status"], response["model"]) == ("completed", MODEL)
    assert (response["temperature"], response["top_p"]) == (0.25, 0.95)
    assert (response["max_output_tokens"], response["instructions"]) == (9, "Be kind.")
    assert response["usage"]["input_tokens_details"]["cached_tokens"] == 8
    assert link.jobs[0].options.max_new == 9
    assert "Be kind." in prompt_of(link)


async def test_a_stream_says_the_same() -> None:
    link = FakeLink(says(thinks("Hm."), "Hello", " there."))
    answer = await post(make_server(link), **body(stream=True))
    assert answer.headers["content-type"].startswith("text/event-stream")
    events = checked_events(answer.content)
    assert events[-1]["type"] == "response.completed"
    assert events[-1]["response"]["output"][1]["content"][0]["text"] == "Hello there."
    assert b"[DONE]" not in answer.content


async def test_limits_and_log_probabilities() -> None:
    link = FakeLink(says("Hello", reason=FinishReason.OUTPUT_LIMIT))
    response = (await post(make_server(link), **body(max_output_tokens=1))).json()
    assert (response["status"], response["incomplete_details"]) == (
        "incomplete",
        {"reason": "max_output_tokens"},
    )
    token = logprob(65, -0.5, (66, -1.0))
    link = FakeLink(says(Output(Channel.CONTENT, "A", (token,))))
    asked = body(include=["message.output_text.logprobs"], top_logprobs=1)
    response = check_response((await post(make_server(link), **asked)).json())
    (entry,) = response["output"][0]["content"][0]["logprobs"]
    assert entry["logprob"] == -0.5
    assert len(entry["top_logprobs"]) == 1
    assert link.jobs[0].options.logprobs == 1


async def test_failures_before_and_inside_a_stream() -> None:
    server = make_server(FakeLink([QueueTimeoutError("Too late.")]))
    async with client(server) as http:
        answer = await http.post("/responses", json=body())
        assert error_of(answer) == (503, None, "request_queue_timeout")
        answer = await http.post("/responses", json=body(stream=True))
        assert answer.status_code == 200
        events = checked_events(answer.content)
        assert events[-1]["type"] == "response.failed"
        failed = events[-1]["response"]
        assert failed["error"] == {"code": "request_queue_timeout", "message": "Too late."}
        # What the terminal event says can be fetched.
        assert (await http.get(f"/responses/{failed['id']}")).json() == failed
    broken = make_server(FakeLink(says("Hel", QueueTimeoutError("Late."))))
    events = checked_events((await post(broken, **body(stream=True))).content)
    assert (events[-1]["type"], events[-1]["response"]["output"]) == ("response.failed", [])


async def test_a_broken_renderer_still_ends_the_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> Any:
        raise KeyError("x")

    monkeypatch.setattr("ninfer.serve.responses.stream.ResponseStream.feed", fail)
    seen = Recorder()
    answer = await post(make_server(FakeLink(says("Hello")), seen), **body(stream=True, store=False))
    events = checked_events(answer.content)
    assert events[-1]["response"]["error"]["code"] == "server_error"
    assert "response_failed" in [name for name, _ in seen.told]


async def test_a_defect_is_a_server_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> Any:
        raise KeyError("x")

    monkeypatch.setattr("ninfer.serve.responses.stream.ResponseStream.finish", fail)
    answer = await post(make_server(FakeLink(says("Hello"))), **body())
    assert (answer.status_code, answer.json()["error"]["type"]) == (500, "server_error")


async def test_refusals_have_openais_form() -> None:
    server = make_server(FakeLink(max_context=64))
    async with client(server) as http:
        for raw in (b"", b"{", b"[]", b"\xff", b'"x"', b'{"model": "\\ud800"}'):
            assert error_of(await http.post("/responses", content=raw))[0] == 400
        assert error_of(await http.post("/responses", json={})) == (400, "model", None)
        unknown = await http.post("/responses", json=body(model="gpt-9"))
        assert error_of(unknown) == (404, "model", "model_not_found")
        long = await http.post("/responses", json=body(input="word " * 200))
        assert error_of(long) == (400, "input", "context_length_exceeded")
        assert long.json()["error"]["max_context"] == 64
        label = await http.post("/responses", json=body(), headers={"X-Ninfer-Client": "a b"})
        assert error_of(label) == (400, "X-Ninfer-Client", "invalid_client_label")
        effort = body(reasoning={"effort": "low"}, chat_template_kwargs={"enable_thinking": False})
        assert error_of(await http.post("/responses", json=effort))[1] == "reasoning.effort"


async def test_stored_responses_can_be_fetched_listed_and_forgotten() -> None:
    server = make_server()
    async with client(server) as http:
        raw = [
            {"role": "system", "content": "S"},
            user("a"),
            {"role": "assistant", "content": "b"},
            user("c"),
        ]
        made = (await http.post("/responses", json=body(input=raw))).json()
        path = f"/responses/{made['id']}"
        assert (await http.get(path)).json() == made
        assert (
            await http.get(path, params={"include_obfuscation": "true", "stream": "false"})
        ).json() == made
        for query, code in (
            ("include=x", "include_not_supported"),
            ("include[]=x", "include_not_supported"),
            ("starting_after=3", "stream_recovery_not_supported"),
            ("stream=true", "retrieve_stream_not_supported"),
            ("stream=maybe", None),
            ("x=1", "unknown_parameter"),
        ):
            assert error_of(await http.get(f"{path}?{query}"))[::2] == (400, code)
        page = (await http.get(f"{path}/input_items", params={"limit": 2})).json()
        assert [item["content"][0]["text"] for item in page["data"]] == ["c", "b"]
        assert page["has_more"] is True
        rest = (await http.get(f"{path}/input_items", params={"after": page["last_id"]})).json()
        assert [item["content"][0]["text"] for item in rest["data"]] == ["a", "S"]
        assert error_of(await http.post(f"{path}/cancel")) == (400, None, "background_not_supported")
        deleted = await http.delete(path)
        assert deleted.json() == {"id": made["id"], "object": "response.deleted", "deleted": True}
        for answer in (
            await http.get(path),
            await http.delete(path),
            await http.get(f"{path}/input_items"),
            await http.post(f"{path}/cancel"),
        ):
            assert error_of(answer) == (404, None, "response_not_found")


async def test_unstored_responses_are_gone() -> None:
    server = make_server()
    made = (await post(server, **body(store=False))).json()
    assert made["store"] is False
    async with client(server) as http:
        assert error_of(await http.get(f"/responses/{made['id']}"))[0] == 404
        chained = await http.post("/responses", json=body(previous_response_id=made["id"]))
        assert error_of(chained) == (404, "previous_response_id", "response_not_found")


async def test_a_chain_renders_what_a_client_would_have_sent() -> None:
    link = FakeLink(says(thinks("Hm."), "Hello"), says("Fine."))
    server = make_server(link)
    async with client(server) as http:
        first = (
            await http.post("/responses", json=body(instructions="Once.", preserve_thinking=True))
        ).json()
        chained = body(input="How are you?", previous_response_id=first["id"])
        second = (await http.post("/responses", json=chained)).json()
        whole = body(input=[user("hi"), *first["output"], user("How are you?")], preserve_thinking=True)
        assert (await http.post("/responses", json=whole)).status_code == 200
        assert prompt_of(link, 1) == prompt_of(link, 2)
        assert "Hm." in prompt_of(link, 1)
        assert "Once." not in prompt_of(link, 1)
        # The parent's end doesn't touch its children.
        await http.delete(f"/responses/{first['id']}")
        third = await http.post("/responses", json=body(input="And?", previous_response_id=second["id"]))
        assert third.status_code == 200
        assert "How are you?" in prompt_of(link)
        assert "Fine." in prompt_of(link)
        items = (await http.get(f"/responses/{second['id']}/input_items")).json()["data"]
        assert [item["content"][0]["text"] for item in items] == ["How are you?"]


async def test_an_item_may_be_named_instead_of_sent() -> None:
    link = FakeLink(says(thinks("Hm."), "Hello"))
    server = make_server(link)
    async with client(server) as http:
        first = (await http.post("/responses", json=body())).json()
        named = [
            user("hi"),
            *({"type": "item_reference", "id": i["id"]} for i in first["output"]),
            user("more"),
        ]
        await http.post("/responses", json=body(input=named, store=False))
        await http.post("/responses", json=body(input=[user("hi"), *first["output"], user("more")]))
        assert prompt_of(link, 1) == prompt_of(link, 2)
        gone = await http.post("/responses", json=body(input=[{"type": "item_reference", "id": "msg_x"}]))
        assert error_of(gone) == (404, "input", "item_not_found")


async def test_reasoning_survives_a_client_that_stores_nothing_here() -> None:
    link = FakeLink(says(thinks("Deep thought."), "Hello"))
    server = make_server(link)
    async with client(server) as http:
        asked = body(store=False, include=["reasoning.encrypted_content"], preserve_thinking=True)
        first = (await http.post("/responses", json=asked)).json()
        reasoning, message = first["output"]
        returned = {"type": "reasoning", "id": reasoning["id"], "summary": [], "content": None,
                    "encrypted_content": reasoning["encrypted_content"]}  # fmt: skip
        again = {**asked, "input": [user("hi"), returned, message, user("more")]}
        await http.post("/responses", json=again)
        assert "Deep thought." in prompt_of(link)


async def test_old_responses_make_room() -> None:
    server = make_server(response_store_records=2)
    async with client(server) as http:
        ids = [(await http.post("/responses", json=body())).json()["id"] for _ in range(3)]
        found = [(await http.get(f"/responses/{name}")).status_code for name in ids]
        assert found == [404, 200, 200]


async def test_what_cannot_be_stored_is_refused_at_once_or_said_at_the_end() -> None:
    link = FakeLink(says("x" * 3000))
    server = make_server(link, response_store_bytes=2500)
    refused = await post(server, **body(input="y" * 3000))
    assert error_of(refused) == (400, "store", "response_store_capacity_exceeded")
    assert not link.jobs
    assert error_of(await post(server, **body()))[2] == "response_store_capacity_exceeded"
    events = checked_events((await post(server, **body(stream=True))).content)
    assert events[-1]["response"]["error"]["code"] == "response_store_capacity_exceeded"
    assert (await post(server, **body(store=False))).status_code == 200


async def test_counting() -> None:
    link = FakeLink()
    server = make_server(link)
    counted = await post(server, "/responses/input_tokens", input="hi", tools=[WEATHER])
    tokens = counted.json()["input_tokens"]
    assert counted.json() == {"object": "response.input_tokens", "input_tokens": tokens}
    assert not link.jobs
    response = (await post(server, **body(tools=[WEATHER]))).json()
    assert tokens == response["usage"]["input_tokens"] == len(link.jobs[0].prompt.tokens)
    assert error_of(await post(server, "/responses/input_tokens", model="x", input="hi"))[0] == 404
    assert error_of(await post(server, "/responses/input_tokens", stream=True))[2] == "unknown_parameter"


async def test_truncation_drops_the_oldest_turns_only_if_asked() -> None:
    link = FakeLink(max_context=300)
    server = make_server(link)
    turns = [
        item
        for n in range(12)
        for item in (user(f"question {n} " + "word " * 30), {"role": "assistant", "content": f"answer {n}"})
    ]
    raw = [{"role": "system", "content": "Kept."}, *turns, user("last")]
    refused = await post(server, **body(input=raw, truncation="disabled"))
    assert error_of(refused)[2] == "context_length_exceeded"
    answer = await post(server, **body(input=raw, truncation="auto", max_output_tokens=40))
    assert answer.json()["truncation"] == "auto"
    prompt = prompt_of(link)
    kept = [n for n in range(12) if f"question {n} " in prompt]
    assert "Kept." in prompt
    assert "last" in prompt
    assert kept
    assert kept == list(range(kept[0], 12))
    longer = [{"role": "system", "content": "Kept."}, *turns[2 * (kept[0] - 1) :], user("last")]
    counted = await post(server, "/responses/input_tokens", input=longer)
    assert counted.json()["input_tokens"] > 300 - 40 >= len(link.jobs[0].prompt.tokens)
    short = await post(server, **body(input="short", truncation="auto"))
    assert short.status_code == 200
    assert error_of(await post(server, **body(input="word " * 400, truncation="auto")))[0] == 400


async def test_websockets_are_refused_so_that_clients_fall_back() -> None:
    async with client(make_server()) as http:
        upgrade = await http.get("/responses", headers={"Upgrade": "websocket", "Connection": "Upgrade"})
        assert error_of(upgrade)[0] == 426
        plain = await http.get("/responses")
        assert error_of(plain)[0] == 405
        assert plain.headers["allow"] == "POST"
        assert error_of(await http.post("/responses/compact", json={})) == (
            400, "context_management", "compaction_not_supported",
        )  # fmt: skip


async def test_a_server_that_takes_upgrades_itself_gets_426_too() -> None:
    sent: list[Any] = []
    scope = {
        "type": "websocket", "path": "/v1/responses", "raw_path": b"/v1/responses", "query_string": b"",
        "headers": [], "scheme": "ws", "server": ("127.0.0.1", 80), "client": ("127.0.0.1", 1),
        "subprotocols": [], "extensions": {"websocket.http.response": {}}, "asgi": {"version": "3.0"},
    }  # fmt: skip

    async def receive() -> Any:
        return {"type": "websocket.connect"}

    async def send(message: Any) -> None:
        sent.append(message)

    await app(make_server())(scope, receive, send)
    assert (sent[0]["type"], sent[0]["status"]) == ("websocket.http.response.start", 426)


async def test_a_client_that_leaves_cancels_its_answer_and_stores_nothing() -> None:
    forever = asyncio.Event()
    for stream in (True, False):
        link = FakeLink(says("Hel", forever))
        server = make_server(link)
        call = Call(app(server), "POST", "/v1/responses", body(stream=stream))
        if stream:
            await call.start()
            assert b"response.created" in (await call.read() or b"")
        else:
            while not link.streams:
                await asyncio.sleep(0.01)
        call.leave()
        await asyncio.wait_for(call.task, 5)
        await asyncio.wait_for(server.service.idle(), 5)
        assert link.streams[0].cancelled


async def test_keep_alives_while_nothing_comes() -> None:
    link = FakeLink(says(0.25, "Hello"))
    answer = await post(make_server(link, keep_alive=0.05), **body(stream=True))
    assert b": keep-alive\n\n" in answer.content
    assert checked_events(answer.content)[-1]["type"] == "response.completed"


async def test_the_sdk_reads_answers_and_streams() -> None:
    link = FakeLink(says(thinks("Hm."), "Hello", " there."))
    server = make_server(link)
    http: Any = client(server)
    sdk = AsyncOpenAI(base_url="http://test/v1", api_key="x", http_client=http, max_retries=0)
    response = await sdk.responses.create(model=MODEL, input="hi")
    assert response.output_text == "Hello there."
    assert (await sdk.responses.retrieve(response.id)).output_text == "Hello there."
    items = [item async for item in sdk.responses.input_items.list(response.id)]
    assert [item.type for item in items] == ["message"]
    async with sdk.responses.stream(model=MODEL, input="hi", previous_response_id=response.id) as stream:
        deltas = [event.delta async for event in stream if event.type == "response.output_text.delta"]
        final = await stream.get_final_response()
    assert "".join(deltas) == final.output_text == "Hello there."
    counted = await sdk.responses.input_tokens.count(model=MODEL, input="hi")
    assert counted.input_tokens > 0
    assert await sdk.responses.delete(response.id) is None
    await sdk.close()


NAMESPACE = {"type": "namespace", "name": "crm", "description": "Customers.", "tools": [WEATHER]}


async def test_calls_in_a_stream_and_what_a_client_sends_back() -> None:
    patch = '*** Begin Patch\n+ <a> & "b" \\n é\n*** End Patch'
    written = call_text("crm__weather", city="Oslo") + "\n" + call_text("apply_patch", input=patch)
    pieces = [written[i : i + 7] for i in range(0, len(written), 7)]
    turn = says(thinks("Hm."), "Look:\n", *map(calls, pieces))
    link = FakeLink(turn, turn, says("done."))
    server = make_server(link)
    asked = body(tools=[NAMESPACE, PATCH], store=False, preserve_thinking=True,
                 include=["reasoning.encrypted_content"])  # fmt: skip
    async with client(server) as http:
        events = checked_events((await http.post("/responses", json={**asked, "stream": True})).content)
        response = events[-1]["response"]
        whole = check_response((await http.post("/responses", json=asked)).json())
        reasoning, message, weather, custom = response["output"]
        assert message["content"][0]["text"] == "Look:"
        assert (weather["namespace"], weather["name"]) == ("crm", "weather")
        assert json.loads(weather["arguments"]) == {"city": "Oslo"}
        assert (custom["type"], custom["input"]) == ("custom_tool_call", patch)
        deltas = [event["type"].split(".")[1] for event in events if event["type"].endswith(".delta")]
        assert deltas.count("function_call_arguments") > 1
        assert deltas.count("custom_tool_call_input") > 3
        bare = [[{**item, "id": "", "call_id": ""} for item in made["output"]] for made in (response, whole)]
        assert bare[0] == bare[1]

        history = [
            user("hi"), {**reasoning, "content": None}, message, weather, custom,
            {"type": "function_call_output", "call_id": weather["call_id"], "output": "Fine."},
            {"type": "custom_tool_call_output", "call_id": custom["call_id"], "output": "Done."},
        ]  # fmt: skip
        await http.post("/responses", json={**asked, "input": history})
    # The model reads its own words again, so that the prefix with them can be reused.
    first, *_, last = link.jobs
    assert last.prompt.text.startswith(first.prompt.text)
    continued = last.prompt.text[len(first.prompt.text) :]
    assert continued.startswith("Hm.\n</think>\n\nLook:\n\n" + written)
    assert continued.index("Fine.") < continued.index("Done.")


async def test_parallel_calls_and_choices_reach_the_engine() -> None:
    link = FakeLink(says(calls(call_text("weather", city="Oslo"))))
    server = make_server(link)
    response = (await post(server, **body(tools=[WEATHER], parallel_tool_calls=False))).json()
    assert [item["type"] for item in response["output"]] == ["function_call"]
    assert link.jobs[0].options.single_call is True
    # What may not be called is text.
    none = (await post(server, **body(tools=[WEATHER], tool_choice="none"))).json()
    assert [item["type"] for item in none["output"]] == ["message"]
    assert "<tool_call>" in none["output"][0]["content"][0]["text"]


async def test_a_search_loads_a_tool_that_is_called_then() -> None:
    search = call_text("tool_search", query="mail")
    link = FakeLink(says(calls(search)), says(calls(call_text("crm__weather", city="Oslo"))))
    server = make_server(link)
    async with client(server) as http:
        asked = body(tools=[SEARCH], stream=True)
        events = checked_events((await http.post("/responses", json=asked)).content)
        (found,) = events[-1]["response"]["output"]
        assert (found["type"], found["execution"], found["arguments"]) == (
            "tool_search_call", "client", {"query": "mail"},
        )  # fmt: skip
        loaded = {"type": "tool_search_output", "call_id": found["call_id"], "execution": "client",
                  "status": "completed", "tools": [NAMESPACE]}  # fmt: skip
        again = {**asked, "input": [loaded], "previous_response_id": events[-1]["response"]["id"]}
        events = checked_events((await http.post("/responses", json=again)).content)
        (call,) = events[-1]["response"]["output"]
        assert (call["namespace"], call["name"]) == ("crm", "weather")
    assert link.jobs[1].prompt.text.startswith(link.jobs[0].prompt.text)
    assert '"name": "crm__weather"' in link.jobs[1].prompt.text
