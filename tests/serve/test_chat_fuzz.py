"""Whatever a body holds, the answer is one of Chat Completions: never a defect, never a hang."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Iterator
from typing import Any

import httpx
import orjson
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ninfer.serve.app import create_app
from tests.serve.fakes import MODEL, FakeLink, make_server, says

SETTINGS = settings(
    max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**63), 2**64 - 1),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(st.characters(exclude_categories=("Cs",)), max_size=20),
    st.sampled_from(["auto", "none", "required", "text", "function", "user", "tool", "\x00", "\ufdd0", ""]),
)
NAMES = st.sampled_from(
    ["type", "function", "name", "role", "content", "text", "mode", "tools", "schema", "id", "arguments"]
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(NAMES, inner, max_size=4)),
    max_leaves=8,
)
FULL: dict[str, Any] = {
    "model": MODEL,
    "messages": [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "hi"}]},
        {
            "role": "assistant",
            "content": None,
            "reasoning_content": "I must.",
            "tool_calls": [
                {"id": "c", "type": "function", "function": {"name": "read", "arguments": '{"path": "a"}'}}
            ],
        },
        {"role": "tool", "tool_call_id": "c", "content": "b"},
    ],
    "tools": [
        {
            "type": "function",
            "function": {
                "name": "read",
                "description": "Reads.",
                "parameters": {
                    "type": "object",
                    "properties": {"path": {"type": "string", "minLength": 1}, "n": {"type": "integer"}},
                    "required": ["path"],
                },
                "strict": True,
            },
        },
        {"type": "custom", "custom": {"name": "patch", "format": {"type": "text"}}},
    ],
    "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": []}},
    "response_format": {
        "type": "json_schema",
        "json_schema": {"schema": {"type": "object", "properties": {"a": {"enum": ["b"]}}}},
    },
    "chat_template_kwargs": {"enable_thinking": True},
    "stream_options": {"include_usage": True},
    "logprobs": True,
    "top_logprobs": 2,
    "stop": ["x"],
    "seed": 1,
    "n": 1,
    "max_tokens": 5,
    "temperature": 1.0,
    "reasoning_effort": "low",
    "logit_bias": {},
}


def paths(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    if path:
        yield path
    if isinstance(value, dict | list):
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield from paths(inner, (*path, key))


@pytest.fixture(scope="module")
def ask() -> Iterator[Any]:
    with asyncio.Runner() as runner:

        async def start() -> httpx.AsyncClient:
            app = create_app(make_server(FakeLink(says("Hello", " there."))))
            return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test")

        http = runner.run(start())

        def post(body: bytes) -> httpx.Response:
            return runner.run(asyncio.wait_for(http.post("/v1/chat/completions", content=body), 10))

        yield post
        runner.run(http.aclose())


def check(answer: httpx.Response) -> None:
    assert answer.status_code in (200, 400, 404), answer.text
    if answer.status_code != 200:
        error = answer.json()["error"]
        assert error["type"] == "invalid_request_error"
        assert isinstance(error["message"], str)
        assert error["param"] is None or isinstance(error["param"], str)


@SETTINGS
@given(st.sampled_from(list(paths(FULL))), VALUES, st.booleans())
def test_one_member_replaced_or_taken_out(ask: Any, path: tuple[Any, ...], value: Any, remove: bool) -> None:
    body = copy.deepcopy(FULL)
    place = body
    for key in path[:-1]:
        place = place[key]
    if remove:
        del place[path[-1]]
    else:
        place[path[-1]] = value
    check(ask(orjson.dumps(body)))


@SETTINGS
@given(st.dictionaries(st.sampled_from([*FULL, "functions", "function_call"]), VALUES, max_size=6))
def test_members_at_random(ask: Any, body: dict[str, Any]) -> None:
    check(ask(orjson.dumps({"model": MODEL, "messages": FULL["messages"], **body})))


@SETTINGS
@given(st.binary(max_size=60), st.integers(0, 200))
def test_bytes_in_the_middle_of_a_body(ask: Any, garbage: bytes, at: int) -> None:
    body = orjson.dumps(FULL)
    check(ask(body[:at] + garbage + body[at:]))


@pytest.mark.parametrize("depth", [50, 200, 260, 900, 1020])
def test_deep_nesting(ask: Any, depth: int) -> None:
    nested: Any = {}
    for _ in range(depth):
        nested = {"properties": {"a": nested}} if depth < 500 else [nested]
    deep = orjson.dumps({**FULL, "tools": []})[:-1]
    inner = b"[" * depth + b"]" * depth
    for name in (b"metadata", b"chat_template_kwargs", b"tools", b"messages", b"stop"):
        check(ask(deep + b',"' + name + b'":' + inner + b"}"))
    schema = b'{"properties":' * depth + b"{}" + b"}" * depth
    tool = b'{"type":"function","function":{"name":"a","parameters":' + schema + b"}}"
    check(ask(deep + b',"tools":[' + tool + b"]}"))
    kwargs = b',"chat_template_kwargs":{"a":' + schema + b"}}"
    check(ask(deep + kwargs))
    form = b',"response_format":{"type":"json_schema","json_schema":{"schema":' + schema + b"}}}"
    check(ask(deep + form))


def test_huge_numbers_everywhere(ask: Any) -> None:
    body = orjson.dumps(FULL)
    for text in (b"1e308", b"-1e308", b"9" * 400, b"-" + b"9" * 19, b"0." + b"1" * 5000, b"1e-5000"):
        for name in (b'"seed":1', b'"n":1', b'"max_tokens":5', b'"temperature":1.0', b'"top_logprobs":2'):
            assert name in body
            field = name.split(b":")[0]
            check(ask(body.replace(name, field + b":" + text)))
