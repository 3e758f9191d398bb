"""schemathesis for longer, over HTTP and with the real engine."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import requests
import schemathesis
from schemathesis import GenerationMode

from tests.serve.soak.server import Server
from tests.serve.test_openapi_contract import CHECKED, PATIENCE, ROUTES, Send, challenge

pytestmark = pytest.mark.soak


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    options = ("--max-context", "2048", "--default-max-tokens", "32", "--seed", "1")
    with Server(tmp_path_factory.mktemp("contract"), *options) as server:
        yield server
        assert not server.complaints(), server.complaints()


@pytest.fixture(scope="module")
def document(server: Server) -> Any:
    return schemathesis.openapi.from_dict(httpx.get(f"{server.url}/openapi.json").json())


@pytest.fixture(scope="module")
def send(server: Server) -> Iterator[Send]:
    with httpx.Client(timeout=6 * PATIENCE) as http:

        def send(case: schemathesis.Case) -> httpx.Response:
            shortened(case.body)
            request: Any = requests.Request(**case.as_transport_kwargs(base_url=server.url)).prepare()
            return http.request(request.method, request.url, headers=request.headers, content=request.body)

        yield send


def shortened(body: Any) -> None:
    """Answers as long as they may be would take the time that other requests could have."""
    for name in ("max_tokens", "max_completion_tokens", "max_output_tokens"):
        if isinstance(body, dict) and isinstance(body.get(name), int) and body[name] > 32:
            body[name] = 32


@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE])
@pytest.mark.parametrize("route", ROUTES)
def test_a_route_keeps_its_promises(route: str, mode: GenerationMode, document: Any, send: Send) -> None:
    if mode is GenerationMode.POSITIVE or route in CHECKED:
        challenge(document, route, send, mode, 100)
