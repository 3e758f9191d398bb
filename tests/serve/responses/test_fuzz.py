"""Bodies and paths that no client would send: always an answer or an error of the API, never a 5xx."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import orjson
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ninfer.serve.responses.request import CREATE_FIELDS
from ninfer.serve.server import Server
from tests.serve.fakes import MODEL, FakeLink, make_server, says, thinks
from tests.serve.responses.support import PATCH, SEARCH, WEATHER, client, recorded

RELAXED = settings(
    max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)
WORDS = ("auto", "message", "user", "assistant", "input_text", "function", "required", "\x00", "c1")
MEMBERS = ("type", "role", "content", "text", "id", "name", "call_id", "output", "tools", "x")
SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**63), 2**64 - 1),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(st.characters(codec="utf-8"), max_size=8),
    st.sampled_from(WORDS),
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.sampled_from(MEMBERS), inner, max_size=4)
    ),
    max_leaves=12,
)
KINDS = st.sampled_from(
    [
        "message", "reasoning", "function_call", "function_call_output", "custom_tool_call",
        "custom_tool_call_output", "tool_search_call", "tool_search_output", "additional_tools",
        "local_shell_call", "local_shell_call_output", "web_search_call", "item_reference", "odd",
    ]
)  # fmt: skip
ITEMS = st.fixed_dictionaries(
    {"type": KINDS},
    optional={
        "role": st.one_of(st.sampled_from(["user", "assistant", "system", "developer"]), SCALARS),
        "content": st.one_of(st.text(max_size=5), VALUES),
        "call_id": st.one_of(st.sampled_from(["c1", "c2"]), SCALARS),
        "name": st.one_of(st.sampled_from(["weather", "apply_patch"]), SCALARS),
        "arguments": VALUES, "input": VALUES, "output": VALUES, "summary": VALUES, "action": VALUES,
        "encrypted_content": st.one_of(st.just("ninfer-reasoning.v1:QQ=="), SCALARS),
        "tools": st.one_of(st.just([WEATHER]), VALUES), "id": SCALARS, "namespace": SCALARS,
        "execution": SCALARS, "status": SCALARS,
    },
)  # fmt: skip
USER = {"role": "user", "content": "hi"}
BODIES = st.fixed_dictionaries(
    {"input": st.one_of(VALUES, st.lists(ITEMS, max_size=4).map(lambda items: [USER, *items]))},
    optional={
        **dict.fromkeys(sorted(CREATE_FIELDS - {"input", "model", "store"}), VALUES),
        "tools": st.one_of(st.just([WEATHER, PATCH, SEARCH]), VALUES),
        "store": st.booleans(),
    },
)
Check = Callable[..., list[int]]


@pytest.fixture(scope="module")
def check() -> Iterator[Check]:
    """The statuses of some bodies; what is no 200 has the API's error body. One server gets them all."""
    with asyncio.Runner() as runner:

        async def start() -> tuple[Server, httpx.AsyncClient]:
            server = make_server(FakeLink(says(thinks("Hm."), "Hello")), max_concurrency=2)
            return server, client(server)

        server, http = runner.run(start())

        async def post(body: Any) -> int:
            data = body if isinstance(body, bytes) else orjson.dumps(body)
            answer = await http.post("/responses", content=data)
            if answer.status_code != 200:
                assert answer.status_code in (400, 404), (answer.status_code, answer.text)
                assert set(answer.json()["error"]) >= {"message", "type", "param", "code"}
            await asyncio.wait_for(server.service.idle(), 5)
            return answer.status_code

        yield lambda *bodies: [runner.run(post(body)) for body in bodies]
        server.service.close()


@RELAXED
@given(BODIES)
def test_fuzzed_bodies(check: Check, body: dict[str, Any]) -> None:
    check({"model": MODEL, **body})


@RELAXED
@given(st.lists(ITEMS, max_size=6))
def test_fuzzed_histories(check: Check, items: list[Any]) -> None:
    check({"model": MODEL, "input": [USER, *items, USER], "tools": [WEATHER, PATCH, SEARCH]})


RECORDED = [request["body"] for _, request in recorded("codex", "openai-python", "opencode")]


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The path of everything in a body."""
    found = [path] if path else []
    if isinstance(value, dict):
        for name, inner in value.items():
            found += places(inner, (*path, name))
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            found += places(inner, (*path, index))
    return found


@RELAXED
@given(st.data())
def test_recorded_bodies_with_a_wrong_value_somewhere(check: Check, data: st.DataObject) -> None:
    body = copy.deepcopy(data.draw(st.sampled_from(RECORDED)))
    path = data.draw(st.sampled_from(places(body)))
    inside = body
    for step in path[:-1]:
        inside = inside[step]
    if isinstance(inside, dict) and data.draw(st.booleans()):
        del inside[path[-1]]
    else:
        inside[path[-1]] = data.draw(VALUES)
    if path[0] != "model":
        body["model"] = MODEL
    check(body)


def test_odd_bytes(check: Check) -> None:
    deep = b"[" * 900 + b"]" * 900
    wide = orjson.dumps({"model": MODEL, "input": "hi", "metadata": {str(n): "x" for n in range(50_000)}})
    nested = b'{"model":"%s","input":"hi","tools":%s}' % (MODEL.encode(), deep)
    huge = b'{"model":"%s","input":"hi","temperature":1e400}' % MODEL.encode()
    lone = b'{"model":"%s","input":"\\ud800"}' % MODEL.encode()
    nul = {"model": MODEL, "input": "a\x00b", "instructions": "\x00"}
    statuses = check(b"", b"{", b"null", b"\x00", deep, nested, huge, lone, wide, nul)
    assert statuses == [400] * 9 + [200]
