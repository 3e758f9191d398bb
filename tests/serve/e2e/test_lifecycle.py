"""Limits, failures and ends of a real server, as its clients see them."""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from threading import Thread
from typing import Any

import anthropic
import httpx
import openai
import pytest

from tests.serve.e2e import prompts
from tests.serve.e2e.process import NANO, ServerProcess, wait_for, within

QUICK: dict[str, Any] = {"model": "ninfer-nano", "temperature": 0, "reasoning_effort": "none"}
SOON = 3.0
"""Seconds for what should take a fraction of one, on a machine with other work."""
ENDLESS = {
    "type": "json_schema",
    "json_schema": {"name": "bits", "schema": {"type": "string", "pattern": "^(?:ab|ba){3000}$"}},
}


@pytest.fixture(scope="module")
def busy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """One answer at a time, one that may wait for half a second, and a key."""
    options = ["--max-concurrency", "1", "--max-pending-requests", "1", "--pending-timeout-ms", "500"]
    options += ["--presence-penalty", "0", "--max-context", "8192", "--prefill-chunk", "128"]
    folder = tmp_path_factory.mktemp("busy")
    with ServerProcess(NANO, folder, *options, key="sk-loopback-1") as server:
        yield server


def chat(text: str, **members: Any) -> dict[str, Any]:
    return {**QUICK, "messages": [{"role": "user", "content": text}], **members}


def endless(server: ServerProcess) -> Any:
    """A stream that has begun to say something and won't end for seconds."""
    client = server.openai()
    stream = client.chat.completions.create(**chat("hi", stream=True, response_format=ENDLESS))
    chunks = iter(stream)
    assert any(chunk.choices[0].delta.content for chunk in chunks)
    return stream


@contextmanager
def occupied(server: ServerProcess) -> Iterator[Any]:
    """Inside, the only lane is taken."""
    stream = endless(server)
    try:
        yield stream
    finally:
        stream.close()


def finished(server: ServerProcess) -> int:
    """How many requests have a result, when the log tells the end of all that it tells the start of."""

    def settled() -> bool:
        ends = len(server.records()) + len(server.records("request_error"))
        return len(server.records("request_start")) == ends

    wait_for(settled)
    return len(server.records())


def results_after(server: ServerProcess, before: int, count: int) -> list[dict[str, Any]]:
    """The results of the next `count` requests that the log tells of behind `before`; it is written by and
    by."""
    wait_for(lambda: len(server.records()) >= before + count)
    done = server.records()[before:]
    assert len(done) == count
    return [record["result"] for record in done]


def events_of(answer: httpx.Response) -> list[tuple[str | None, Any]]:
    answer.read()
    found = []
    for block in answer.text.strip().split("\n\n"):
        lines = dict(line.split(": ", 1) for line in block.splitlines() if not line.startswith(":"))
        if "data" in lines:
            data = lines["data"]
            found.append((lines.get("event"), json.loads(data) if data != "[DONE]" else data))
    return found


def test_keys(busy: ServerProcess) -> None:
    assert "sk-loopback-1" not in busy.output()
    assert httpx.get(f"{busy.url}/health").json() == {"status": "ok"}
    with pytest.raises(openai.AuthenticationError):
        busy.openai(api_key="wrong").chat.completions.create(**chat("hi"))
    with pytest.raises(anthropic.AuthenticationError):
        busy.anthropic(api_key="wrong").messages.create(
            model="m", max_tokens=9, messages=chat("hi")["messages"]
        )
    with pytest.raises(openai.AuthenticationError):
        busy.openai(api_key="sk-loopback-12").models.list()
    headers = {"x-api-key": "sk-loopback-1"}
    assert httpx.get(f"{busy.url}/v1/models", headers=headers).status_code == 200
    assert busy.openai().models.list().data


@pytest.mark.parametrize("path", ["chat/completions", "responses", "messages"])
def test_who_leaves_makes_room(busy: ServerProcess, path: str) -> None:
    """The next one is admitted at once, though there is one lane only."""
    before = finished(busy)
    body = chat(prompts.RECORDS, stream=True, max_tokens=4000)
    if path == "responses":
        body = {"model": "ninfer-nano", "input": prompts.RECORDS, "stream": True}
    with busy.http() as http:
        with http.stream("POST", f"/v1/{path}", json=body) as answer:
            lines = answer.iter_lines()
            for _ in range(30):
                next(lines)
        with within(SOON):
            assert (
                busy.openai().chat.completions.create(**chat(prompts.SUM)).choices[0].message.content == "85"
            )
    left, stayed = results_after(busy, before, 2)
    assert (left["finish_reason"], stayed["finish_reason"]) == ("cancelled", "stop_token")


@pytest.mark.parametrize("stream", [False, True])
def test_who_leaves_during_prefill_makes_room(busy: ServerProcess, stream: bool) -> None:
    text, before = prompts.long_text(busy, 7000), finished(busy)
    with busy.http() as http, pytest.raises(httpx.ReadTimeout), within(SOON):
        http.post("/v1/chat/completions", json=chat(text, stream=stream), timeout=0.7).read()
    with within(SOON):
        assert busy.openai().chat.completions.create(**chat(prompts.SUM)).choices[0].message.content == "85"
    left, stayed = results_after(busy, before, 2)
    assert (left["finish_reason"], left["completion_tokens"]) == ("cancelled", 0)
    assert stayed["finish_reason"] == "stop_token"


def test_who_waits_too_long_is_told(busy: ServerProcess) -> None:
    """By a status if nothing was sent, else in the stream."""
    question = chat(prompts.SUM)["messages"]
    with occupied(busy), busy.http() as http:
        with pytest.raises(openai.InternalServerError) as refused:
            busy.openai().chat.completions.create(**chat(prompts.SUM))
        assert (refused.value.status_code, refused.value.code) == (503, "request_queue_timeout")
        with http.stream("POST", "/v1/chat/completions", json=chat(prompts.SUM, stream=True)) as answer:
            assert answer.status_code == 200
            *_, (_, last) = events_of(answer)
            assert last["error"]["code"] == "request_queue_timeout"
        body = {"model": "ninfer-nano", "input": prompts.SUM, "stream": True}
        with http.stream("POST", "/v1/responses", json=body) as answer:
            *_, (name, last) = events_of(answer)
            assert name == "response.failed"
            assert last["response"]["error"]["code"] == "request_queue_timeout"
        body = {"model": "m", "max_tokens": 9, "messages": question, "stream": True}
        with http.stream("POST", "/v1/messages", json=body) as answer:
            *_, (name, last) = events_of(answer)
            assert (name, last["error"]["type"]) == ("error", "timeout_error")
        with pytest.raises(anthropic.APIStatusError) as late:
            busy.anthropic().messages.create(model="m", max_tokens=9, messages=question)
        assert late.value.status_code == 504
    with pytest.raises(openai.APIError, match="waited"), occupied(busy):
        list(busy.openai().chat.completions.create(**chat(prompts.SUM, stream=True)))


def test_a_full_queue(busy: ServerProcess) -> None:
    with occupied(busy), ExitStack() as stack, busy.http() as http:
        waiting = stack.enter_context(
            http.stream("POST", "/v1/chat/completions", json=chat(prompts.SUM, stream=True))
        )
        assert waiting.status_code == 200
        with pytest.raises(openai.RateLimitError) as full, within(SOON):
            busy.openai().chat.completions.create(**chat(prompts.SUM))
        assert full.value.code == "server_overloaded"
        assert full.value.response.headers["retry-after"] == "1"
        with pytest.raises(anthropic.APIStatusError) as overloaded:
            busy.anthropic().messages.create(model="m", max_tokens=9, messages=chat("hi")["messages"])
        assert overloaded.value.status_code == 529
        assert http.get("/health").json() == {"status": "ok"}
    # An SDK that may retry gets its answer when there is room.
    client = busy.openai(max_retries=2)
    assert client.chat.completions.create(**chat(prompts.SUM)).choices[0].message.content == "85"


def test_logs_know_requests_but_no_text(busy: ServerProcess) -> None:
    asked, before = chat(prompts.ORDER, tools=prompts.chat_tools(prompts.ORDER_TOOLS)), finished(busy)
    client = busy.openai(default_headers={"X-Ninfer-Client": "tests/e2e"})
    assert client.chat.completions.create(**asked).choices[0].message.tool_calls
    with pytest.raises(openai.BadRequestError):
        client.chat.completions.create(**{**asked, "reasoning_effort": "loud" * 1000})
    (result,) = results_after(busy, before, 1)
    assert result["tool_call_count"] == 1
    wait_for(lambda: busy.records("request_rejected")[-1:])
    done = busy.records()[-1]
    assert (done["schema_version"], done["request"]["client"]) == (27, "tests/e2e")
    starts = {record["request"]["request_id"] for record in busy.records("request_start")}
    ends = [record["request"]["request_id"] for record in busy.records() + busy.records("request_error")]
    assert sorted(starts) == sorted(ends)
    said = ["guitar", "buy_item", "qwen3.8-27b", "JSONL records", "47 + 38", "sk-loopback", "loud" * 100]
    for text in (busy.output(), busy.log_of_requests()):
        assert text
        assert not [words for words in said if words in text]


def test_the_end_lets_answers_end(busy: ServerProcess) -> None:
    """Last of those with this server: it is told to stop while a stream runs, which goes on to its end."""
    stream = iter(busy.openai().chat.completions.create(**chat(prompts.RECORDS, stream=True)))
    text = next(filter(None, (chunk.choices[0].delta.content for chunk in stream)))
    busy.process.send_signal(signal.SIGTERM)
    wait_for(lambda: "stopping" in busy.output())
    wait_for(lambda: not accepts(busy))
    reason = None
    for chunk in stream:
        text += chunk.choices[0].delta.content or ""
        reason = chunk.choices[0].finish_reason
    assert reason == "stop"
    assert len(text.splitlines()) == 32
    assert text.startswith(prompts.RECORD)
    assert busy.process.wait(SOON) == 0
    assert "server stopped" in busy.output()
    assert busy.records()[-1]["result"]["finish_reason"] == "stop_token"


def accepts(server: ServerProcess) -> bool:
    url = httpx.URL(server.url)
    try:
        socket.create_connection((url.host, url.port or 80), 1).close()
    except OSError:
        return False
    return True


def test_an_engine_that_is_killed_ends_the_server(tmp_path: Path) -> None:
    """Who connects while it loads waits. Later the stream says what happened, and the exit code is 2."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    early: list[httpx.Response] = []
    server = ServerProcess(NANO, tmp_path, "--port", str(port), "--max-context", "8192")

    def look() -> None:
        url = f"http://127.0.0.1:{port}"
        wait_for(lambda: accepts_at(port))
        early.append(httpx.get(f"{url}/health", timeout=60))

    try:
        looking = Thread(target=look)
        looking.start()
        server.ready()
        looking.join(10)
        assert [answer.status_code for answer in early] == [200]
        stream = endless(server)
        os.kill(server.engine, signal.SIGKILL)
        with pytest.raises(openai.APIError) as failed, within(SOON):
            list(stream)
        assert failed.value.body["code"] == "service_unavailable"  # type: ignore[index]
        assert server.process.wait(SOON) == 2
    finally:
        server.__exit__()


def accepts_at(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), 1).close()
    except OSError:
        return False
    return True


def test_an_idle_engine_ends_and_comes_back(tmp_path: Path) -> None:
    with ServerProcess(NANO, tmp_path, "--idle-unload", "0.5", "--presence-penalty", "0") as server:
        client = server.openai()
        first = wait_for(lambda: (server.engines or [0])[0])
        assert client.chat.completions.create(**chat(prompts.SUM)).choices[0].message.content == "85"
        wait_for(lambda: server.engines == [], 5)
        assert httpx.get(f"{server.url}/health").json() == {"status": "ok"}
        assert client.models.list().data  # asks nothing of the engine
        assert server.engines == []
        began = time.monotonic()
        answers: list[str | None] = []

        def ask() -> None:
            answers.append(client.chat.completions.create(**chat(prompts.SUM)).choices[0].message.content)

        threads = [Thread(target=ask) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60 - (time.monotonic() - began))
        assert answers == ["85", "85"]
        assert server.engine != first
