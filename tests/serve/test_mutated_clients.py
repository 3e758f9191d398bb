"""What released clients send, some part turned into another: never a defect, never a hang."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ninfer.serve.app import create_app
from tests.serve.fakes import FakeLink, call_text, calls, events_of, make_server, says, thinks

CLIENTS = Path(__file__).parents[1] / "data" / "clients"
PATIENCE = 10.0
RECORDED: list[tuple[str, Any]] = [
    (request["path"], request["body"])
    for file in sorted(CLIENTS.glob("*.jsonl"))
    for request in map(orjson.loads, file.read_bytes().splitlines())
    if request["method"] == "POST" and request["path"].startswith("/v1/")
]
NAMES = sorted({body["model"] for _, body in RECORDED if body})
EVERYTHING: Any = list(HealthCheck)
RELAXED = settings(max_examples=500, deadline=None, derandomize=True, suppress_health_check=EVERYTHING)
SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**63), 2**64 - 1),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(st.characters(codec="utf-8"), max_size=8),
    st.sampled_from(["auto", "text", "user", "system", "tool", "\0", "\ufdd0", "<|im_end|>", "", "x" * 5000]),
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=6,
)
Post = Callable[[str, bytes], httpx.Response]


@pytest.fixture(scope="module")
def post() -> Iterator[Post]:
    answers = [says(thinks("Hm."), "Hello"), says("Yes. ", calls(call_text("Bash", command="ls")))]

    async def start() -> httpx.AsyncClient:
        link = FakeLink(lambda job: answers[len(job.prompt.tokens) % 2](job), max_context=100_000)
        app = create_app(make_server(link, model_id=NAMES[0], model_aliases=tuple(NAMES[1:])))
        return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test")

    with asyncio.Runner() as runner:
        http = runner.run(start())

        def post(path: str, body: bytes) -> httpx.Response:
            return runner.run(asyncio.wait_for(http.post(path, content=body), PATIENCE))

        yield post
        runner.run(http.aclose())


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    if path:
        yield path
    if isinstance(value, dict | list):
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield from places(inner, (*path, key))


def mutate(data: st.DataObject, body: Any) -> None:
    """Replace, remove, repeat or move one part."""
    path = data.draw(st.sampled_from(list(places(body))))
    holder = body
    for key in path[:-1]:
        holder = holder[key]
    kind = data.draw(st.sampled_from(["replace", "remove", "repeat", "wrap", "other part"]))
    if kind == "replace":
        holder[path[-1]] = data.draw(VALUES)
    elif kind == "remove":
        del holder[path[-1]]
    elif kind == "repeat" and isinstance(holder, list):
        holder.insert(path[-1], copy.deepcopy(holder[path[-1]]))
    elif kind == "wrap":
        holder[path[-1]] = data.draw(st.sampled_from([[holder[path[-1]]], {"text": holder[path[-1]]}]))
    else:
        other: Any = body
        for key in data.draw(st.sampled_from(list(places(body)))):
            other = other[key]
        holder[path[-1]] = copy.deepcopy(other)


def check(path: str, answer: httpx.Response) -> None:
    anthropic = path.startswith("/v1/messages")
    if answer.status_code != 200:
        assert answer.status_code in (400, 404), answer.text
        body = answer.json()
        assert 10 < len(body["error"]["message"]) < 700
        assert (body.get("type") == "error") == anthropic
    elif answer.headers["content-type"] == "text/event-stream":
        name, last = events_of(answer.content)[-1]
        expected = {"message_stop", "response.completed", "response.incomplete"}
        assert last == "[DONE]" or name in expected, answer.text[-500:]
    else:
        assert answer.json()


def test_as_they_are(post: Post) -> None:
    served = [post(path, orjson.dumps(body)).status_code for path, body in RECORDED]
    assert served.count(200) > 0.8 * len(served) > 50


@RELAXED
@given(st.data())
def test_with_parts_changed(post: Post, data: st.DataObject) -> None:
    path, body = copy.deepcopy(data.draw(st.sampled_from(RECORDED)))
    for _ in range(data.draw(st.integers(1, 3))):
        if body:
            mutate(data, body)
    check(path, post(path, orjson.dumps(body)))


@RELAXED
@given(st.sampled_from(RECORDED), st.binary(min_size=1, max_size=8), st.integers(0, 1 << 16), st.booleans())
def test_with_bytes_changed(
    post: Post, request_: tuple[str, Any], garbage: bytes, at: int, cut: bool
) -> None:
    path, body = request_
    text = orjson.dumps(body)
    at %= len(text)
    check(path, post(path, text[:at] + garbage + (b"" if cut else text[at + len(garbage) :])))
