"""A conversation that a client sends again, as it does, is computed only from where it differs."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from copy import deepcopy
from typing import Any

import httpx
import pytest

from ninfer.serve.calls import GenerationRequest
from ninfer.serve.chat.request import read_request as read_chat
from ninfer.serve.messages.request import read_request as read_message
from ninfer.serve.options import ServeOptions
from ninfer.serve.resolve import template_options
from ninfer.serve.responses.request import read_create
from ninfer.serve.responses.store import Store
from tests.serve.e2e.process import NANO, ServerProcess
from tests.serve.e2e.test_replay import REQUESTS
from tests.serve.fakes import nano_frontend
from tests.serve.messages.conftest import TERMS

ENOUGH = 0.95
Body = dict[str, Any]


def recording(client: str, case: str) -> Body:
    for request in REQUESTS:
        if request.values[:2] == (client, case):
            return deepcopy(request.values[2]["body"])  # type: ignore[index]
    raise LookupError(f"{client} {case}")


@pytest.fixture(scope="module")
def http(nano: ServerProcess) -> Iterator[httpx.Client]:
    with nano.http() as client:
        yield client


def protocol_of(body: Body) -> str:
    if "input" in body:
        return "responses"
    return "messages" if "system" in body else "chat"


def rendered(body: Body) -> list[int]:
    """The tokens of a body's prompt."""
    request: GenerationRequest
    frontend = nano_frontend()
    match protocol_of(body):
        case "responses":
            request = read_create(body, Store(1, 1)).generation
        case "messages":
            request = read_message(body, TERMS).generation
        case _:
            request = read_chat(body, "stub-model").generation
    chosen = template_options(request, ServeOptions(NANO))
    prompt = frontend.render(
        request.messages,
        tools=[tool.declared() for tool in request.tools if tool.listed] or None,
        thinking=chosen.thinking,
        reasoning_effort=chosen.effort,
        preserve_thinking=chosen.preserve_thinking,
        template_kwargs=chosen.kwargs,
    )
    return list(prompt.tokens)


def common(first: list[int], second: list[int]) -> int:
    pairs = enumerate(zip(first, second, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(first), len(second)))


def asked(http: httpx.Client, body: Body) -> tuple[int, int]:
    """(tokens of the prompt, those of them that were known) as the usage of a short answer says."""
    protocol = protocol_of(body)
    path = {"chat": "/v1/chat/completions"}.get(protocol, f"/v1/{protocol}")
    limit = "max_output_tokens" if protocol == "responses" else "max_tokens"
    whole = {name: value for name, value in body.items() if name != "stream_options"}
    answer = http.post(path, json={**whole, "stream": False, limit: 8})
    assert answer.status_code == 200, answer.text
    usage = answer.json()["usage"]
    match protocol:
        case "messages":
            known = usage["cache_read_input_tokens"]
            return usage["input_tokens"] + known, known
        case "responses":
            return usage["input_tokens"], usage["input_tokens_details"]["cached_tokens"]
    return usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]


def in_other_words(body: Body) -> Body:
    """The same conversation with another billing suffix, blocks for strings, strings for blocks, and the
    cache's marks elsewhere."""

    def turned(value: Any) -> Any:
        if isinstance(value, str):
            return [{"type": "text", "text": value, "cache_control": {"type": "ephemeral"}}]
        if len(value) == 1 and value[0]["type"] == "text":
            return value[0]["text"]
        return [{k: v for k, v in block.items() if k != "cache_control"} for block in value]

    again = json.loads(json.dumps(body).replace(".sfx1;", ".sfx9;"))
    assert again != body
    for message in again["messages"]:
        message["content"] = turned(message["content"])
    again["system"] = [{k: v for k, v in block.items() if k != "cache_control"} for block in again["system"]]
    again["system"][-1]["cache_control"] = {"type": "ephemeral"}
    return again


def with_the_note_behind(body: Body) -> Body:
    """The next turn: what was the last message, a note of the system, stands behind it and says another
    number."""
    again = deepcopy(body)
    note = again["messages"].pop()
    assert note["role"] == "system"
    again["messages"] += [
        {"role": "assistant", "content": [
            {"type": "tool_use", "id": "toolu_9", "name": "Bash", "input": {"command": "cat a.txt"}}]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "toolu_9", "content": "text of a"}]},
        {"role": "system", "content": note["content"][0]["text"].replace("14999895", "14998888")},
    ]  # fmt: skip
    return again


def recorded(client: str, case: str) -> Callable[[Body], Body]:
    return lambda _: recording(client, case)


@pytest.mark.parametrize(
    ("client", "case", "next_body"),
    [
        pytest.param("claude-code", "bash 1", recorded("claude-code", "bash 2"), id="next-turn"),
        pytest.param("claude-code", "thinking 2", in_other_words, id="other-words"),
        pytest.param("claude-code", "opus48 1", with_the_note_behind, id="system-note"),
        pytest.param("claude-code", "toolsearch 1", recorded("claude-code", "toolsearch 2"), id="late-tools"),
        pytest.param("codex", "normal 1", recorded("codex", "normal 2"), id="codex"),
        pytest.param("opencode", "bash 2", recorded("opencode", "bash 3"), id="opencode-chat"),
        pytest.param("opencode", "responses 2", recorded("opencode", "responses 3"), id="opencode-responses"),
        pytest.param("opencode", "anthropic 1", recorded("opencode", "anthropic 3"), id="opencode-messages"),
    ],
)
def test_what_comes_again_is_not_computed_again(
    http: httpx.Client, request: pytest.FixtureRequest, client: str, case: str, next_body: Any
) -> None:
    first = recording(client, case)
    bodies = [as_of_its_own(body, request.node.callspec.id) for body in (first, next_body(first))]
    check_reuse(http, *bodies)


@pytest.mark.xfail(
    strict=True,
    reason="engine: a request whose first blocks are in the cache already, in other pages, leaves no "
    "snapshot before its end (PrefixCache.publish refuses while it is active)",
)
def test_what_two_conversations_share_keeps_neither_from_being_reused(http: httpx.Client) -> None:
    """The same tools before other texts of the system, as in two sessions of one agent."""
    first, second = recording("claude-code", "bash 1"), recording("claude-code", "bash 2")
    other = json.loads(json.dumps(first).replace("[text, ", "[another text, "))
    asked(http, other)
    check_reuse(http, first, second)


def as_of_its_own(body: Body, name: str) -> Body:
    """The body with texts and a first tool that no other test has, so that nothing of it is known."""
    tools = deepcopy(body["tools"])
    own = deepcopy(tools[0])
    own.get("function", own)["name"] = f"{name.replace('-', '_')}_own"
    texts = {key: value for key, value in body.items() if key != "tools"}
    return {**json.loads(json.dumps(texts).replace("[text, ", f"[{name}, ")), "tools": [own, *tools]}


def check_reuse(http: httpx.Client, first: Body, second: Body) -> None:
    """The second is known up to where it differs from the first, which is none that was known."""
    shared = common(rendered(first), rendered(second))
    length, known = asked(http, first)
    assert length == len(rendered(first))
    assert known < 0.5 * shared
    length, known = asked(http, second)
    assert length == len(rendered(second))
    assert shared > 0.7 * length
    assert known >= ENOUGH * shared
