"""Every route keeps what the OpenAPI document promises of it; schemathesis decides what is asked."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
import requests
import schemathesis
from fastapi import FastAPI
from hypothesis import HealthCheck, given, settings
from schemathesis import GenerationMode
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from ninfer.serve.app import create_app
from ninfer.serve.observe import build
from tests.serve.fakes import FakeLink, call_text, calls, make_server, says, thinks

BASE = "http://test"
PATIENCE = 10.0
"""Seconds after which a request hangs."""
CHECKS: list[Any] = [
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
]
"""None of them knows a 5xx as such: those that the document names are looked at here."""
SLOW: Any = list(HealthCheck)
UNAVAILABLE = (503, 504, 529)
Send = Callable[[schemathesis.Case], httpx.Response]


def application() -> FastAPI:
    """All routes; the engine thinks, answers, or calls a tool."""
    scripts = itertools.cycle(
        [says(thinks("Hm."), "Hello", " there."), says(calls(call_text("read", path="a"))), says("Hi.")]
    )
    link = FakeLink(lambda job: next(scripts)(job), max_context=100_000)
    server = make_server(link, max_concurrency=8, max_pending=8)
    observers = build(server.options, server.frontend)
    app = create_app(server, [observers])
    app.include_router(observers.router())
    return app


@pytest.fixture(scope="module")
def runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture(scope="module")
def app(runner: asyncio.Runner) -> FastAPI:
    async def start() -> FastAPI:
        return application()

    return runner.run(start())


@pytest.fixture(scope="module")
def document(app: FastAPI) -> Any:
    return schemathesis.openapi.from_dict(app.openapi())


@pytest.fixture(scope="module")
def send(runner: asyncio.Runner, app: FastAPI) -> Iterator[Send]:
    http = httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url=BASE)

    def send(case: schemathesis.Case) -> httpx.Response:
        request: Any = requests.Request(**case.as_transport_kwargs(base_url=BASE)).prepare()
        call = http.request(request.method, request.url, headers=request.headers, content=request.body)
        return runner.run(asyncio.wait_for(call, PATIENCE))

    yield send
    runner.run(http.aclose())


ROUTES = """
GET /health
GET /metrics
GET /v1/models
GET /v1/models/{model_id}
POST /v1/chat/completions
POST /v1/responses
POST /v1/responses/input_tokens
POST /v1/responses/compact
GET /v1/responses/{response_id}
DELETE /v1/responses/{response_id}
GET /v1/responses/{response_id}/input_items
POST /v1/responses/{response_id}/cancel
POST /v1/messages
POST /v1/messages/count_tokens
POST /tokenize
POST /detokenize
""".strip().splitlines()

NEVER_FOUND = [route for route in ROUTES if "compact" in route or "{response_id}" in route]
"""Without a stored response that schemathesis could know of."""
CHECKED = [route for route in ROUTES if "POST" in route and "cancel" not in route] + [
    "GET /v1/models/{model_id}",
    "GET /v1/responses/{response_id}",
    "GET /v1/responses/{response_id}/input_items",
]
"""Routes with something that can be wrong."""
AMBIGUOUS = {"/v1/responses/compact", "/v1/responses/input_tokens"}
"""Paths that could as well name a response."""


def test_the_document_has_these_routes(app: FastAPI) -> None:
    paths = app.openapi()["paths"]
    assert {f"{m.upper()} {path}" for path, methods in paths.items() for m in methods} == set(ROUTES)


def challenge(document: Any, route: str, send: Send, mode: GenerationMode, examples: int) -> Counter[int]:
    """Send requests that follow the document, or don't; look at the answers. How many of each status came."""
    method, path = route.split()
    statuses: Counter[int] = Counter()

    @settings(
        max_examples=examples,
        derandomize=True,
        deadline=None,
        database=None,
        suppress_health_check=SLOW,
    )
    @given(document[path][method].as_strategy(mode))
    def ask(case: schemathesis.Case) -> None:
        if isinstance(case.body, dict):
            case.body.pop("previous_response_id", None)  # one that exists can't be guessed
        answer = send(case)
        statuses[answer.status_code] += 1
        assert answer.status_code < 500 or answer.status_code in UNAVAILABLE, answer.text
        case.validate_response(answer, checks=CHECKS)

    ask()
    return statuses


@pytest.mark.parametrize("route", ROUTES)
def test_what_follows_the_document_is_answered_by_it(route: str, document: Any, send: Send) -> None:
    statuses = challenge(document, route, send, GenerationMode.POSITIVE, 20)
    assert statuses[200] or route in NEVER_FOUND, statuses


@pytest.mark.parametrize("route", CHECKED)
def test_what_does_not_follow_the_document_is_answered_by_it(route: str, document: Any, send: Send) -> None:
    statuses = challenge(document, route, send, GenerationMode.NEGATIVE, 20)
    assert set(statuses) & {400, 404}, statuses


@pytest.mark.parametrize("path", sorted({route.split()[1] for route in ROUTES} - AMBIGUOUS))
def test_another_method_is_refused_with_those_that_there_are(
    path: str, runner: asyncio.Runner, app: FastAPI
) -> None:
    known = {route.split()[0] for route in ROUTES if route.split()[1] == path}

    async def ask() -> dict[str, httpx.Response]:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url=BASE) as http:
            methods = {"GET", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "BREW"} - known
            return {method: await http.request(method, path, content=b"{}") for method in sorted(methods)}

    for method, answer in runner.run(ask()).items():
        assert answer.status_code == 405, method
        assert set(answer.headers["allow"].split(", ")) - {"HEAD"} == known, method
        body = answer.json()
        assert body["error"]["message"]
        assert (body.get("type") == "error") == path.startswith("/v1/messages")
