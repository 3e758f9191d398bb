from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anthropic.types
import httpx
import pytest

from ninfer.serve import tokenize
from ninfer.serve.address import bind
from ninfer.serve.app import create_app
from ninfer.serve.jobs import LinkState
from ninfer.serve.run import _config, _Http
from tests.serve.fakes import MODEL, Call, FakeLink, Recorder, make_server

pytestmark = pytest.mark.anyio
QUESTION = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}
CHAT = "/v1/chat/completions"


@asynccontextmanager
async def client(
    link: FakeLink | None = None, *observers: Any, **options: Any
) -> AsyncIterator[httpx.AsyncClient]:
    app = create_app(make_server(link, **options), observers)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as http:
        yield http


# Health and models


@pytest.mark.parametrize(
    ("state", "status"),
    [
        (LinkState.READY, 200), (LinkState.UNLOADED, 200), (LinkState.STARTING, 503),
        (LinkState.FAILED, 503), (LinkState.STOPPED, 503),
    ],
)  # fmt: skip
async def test_health(state: LinkState, status: int) -> None:
    async with client(FakeLink(state=state), api_key="k") as http:
        answer = await http.get("/health")
        assert answer.status_code == status
        assert answer.json() == {"status": "ok" if status == 200 else "unavailable"}
        assert (await http.head("/health")).status_code == status


async def test_an_engine_that_comes_back_is_no_illness() -> None:
    """A supervisor would end the server in the middle of the loading that a request has asked for."""
    link = FakeLink(state=LinkState.UNLOADED, reload_seconds=0.2)
    async with client(link) as http:
        asking = asyncio.create_task(http.post(CHAT, json=QUESTION))
        while link.state is not LinkState.STARTING:
            await asyncio.sleep(0.01)
        assert (await http.get("/health")).status_code == 200
        assert (await http.get("/v1/models")).json()["data"][0]["max_model_len"] == 4096
        assert (await asking).status_code == 200


async def test_a_draining_server_is_unavailable() -> None:
    server = make_server()
    server.service.draining = True
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(create_app(server)), base_url="http://test"
    ) as http:
        assert (await http.get("/health")).status_code == 503
        assert (await http.get("/v1/models")).status_code == 200
        assert (await http.post(CHAT, json=QUESTION)).status_code == 503


async def test_models_in_openai_s_form() -> None:
    async with client(model_id="mine", model_aliases=("other/one",)) as http:
        listed = (await http.get("/v1/models")).json()
        assert listed["object"] == "list"
        assert [m["id"] for m in listed["data"]] == ["mine", "other/one"]
        one = listed["data"][0]
        assert (one["object"], one["owned_by"], one["max_model_len"]) == ("model", "ninfer", 4096)
        assert (await http.get("/v1/models/other/one")).json()["id"] == "other/one"
        missing = await http.get("/v1/models/ninfer-nano")
        assert missing.status_code == 404
        assert missing.json()["error"]["code"] == "model_not_found"
        assert (await http.post(CHAT, json=QUESTION)).status_code == 404
        assert (await http.post(CHAT, json={**QUESTION, "model": "other/one"})).json()["model"] == "mine"


async def test_models_in_anthropic_s_form() -> None:
    async with client(model_aliases=("claude-x",)) as http:
        http.headers["anthropic-version"] = "2023-06-01"
        page = (await http.get("/v1/models?limit=1000")).json()
        assert [m["id"] for m in page["data"]] == [MODEL, "claude-x"]
        assert (page["first_id"], page["last_id"], page["has_more"]) == (MODEL, "claude-x", False)
        one = (await http.get("/v1/models/claude-x")).json()
        assert (one["type"], one["display_name"]) == ("model", "claude-x")
        assert one["created_at"].endswith("Z")
        anthropic.types.ModelInfo.model_validate(one)
        assert one["max_input_tokens"] == one["max_tokens"] > 0
        missing = await http.get("/v1/models/claude-y")
        assert missing.status_code == 404
        assert missing.json()["error"]["type"] == "not_found_error"
        assert missing.json()["request_id"] == missing.headers["request-id"]


async def test_models_are_listed_while_the_engine_loads() -> None:
    async with client(FakeLink(state=LinkState.STARTING)) as http:
        assert (await http.get("/v1/models")).json()["data"][0]["id"] == MODEL


# Keys, ids, CORS


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 401),
        ({"authorization": "Bearer secret"}, 200),
        ({"authorization": "bEaReR \t secret \t"}, 200),
        ({"x-api-key": "secret"}, 200),
        ({"x-api-key": "wrong", "authorization": "Bearer secret"}, 200),
        ({"authorization": "Bearer secre"}, 401),
        ({"authorization": "Bearer secret2"}, 401),
        ({"authorization": "Basic secret"}, 401),
        ({"authorization": "secret"}, 401),
        ({"x-api-key": ""}, 401),
    ],
)
async def test_the_api_key(headers: dict[str, str], status: int) -> None:
    async with client(api_key="secret") as http:
        for method, path in (("GET", "/v1/models"), ("POST", CHAT), ("GET", "/openapi.json")):
            answer = await http.request(method, path, json=QUESTION, headers=headers)
            assert answer.status_code == status
        unknown = await http.get("/v1/unknown", headers=headers)
        assert unknown.status_code == (404 if status == 200 else 401)
        if status == 401:
            assert unknown.json()["error"]["code"] == "invalid_api_key"
            assert "secret" not in unknown.text
            anthropic = await http.post("/v1/messages/unknown", headers=headers)
            assert anthropic.status_code == 401
            assert anthropic.json()["type"] == "error"
            assert anthropic.json()["error"]["type"] == "authentication_error"


async def test_an_error_without_a_key_is_no_oracle_for_paths() -> None:
    async with client(api_key="secret") as http:
        assert (await http.get("/v1/unknown")).text.replace("x", "") == (
            await http.get("/v1/models")
        ).text.replace("x", "")


async def test_request_ids() -> None:
    async with client() as http:
        for path in ("/v1/models", "/v1/unknown"):
            number = (await http.get(path)).headers["x-request-id"]
            assert number.startswith("req_")
            assert len(number) == 36
        answer = await http.get("/v1/messages/unknown")
        assert len(answer.headers["request-id"]) == 20
        assert answer.json()["request_id"] == answer.headers["request-id"]
        assert "x-request-id" not in answer.headers
        assert "x-request-id" not in (await http.get("/health")).headers


async def test_cors_only_if_asked() -> None:
    async with client() as http:
        plain = await http.options(CHAT)
        assert plain.status_code == 405
        assert "access-control-allow-origin" not in (await http.get("/v1/models")).headers
    async with client(cors=True, api_key="secret") as http:
        preflight = await http.options(CHAT)
        assert preflight.status_code == 204
        for answer in (preflight, await http.get("/v1/models"), await http.get("/health")):
            assert answer.headers["access-control-allow-origin"] == "*"
        assert "X-Ninfer-Client" in preflight.headers["access-control-allow-headers"]
        wanted = {"Access-Control-Request-Headers": "authorization,x-stainless-os"}
        allowed = (await http.options(CHAT, headers=wanted)).headers["access-control-allow-headers"]
        assert {"authorization", "x-stainless-os", "x-api-key"} <= set(
            allowed.lower().replace(" ", "").split(",")
        )


# Routes that aren't there


async def test_unknown_paths_and_methods() -> None:
    async with client() as http:
        for method, path in (("GET", "/"), ("HEAD", "/"), ("HEAD", "/api/hello"), ("POST", "/v1/nothing")):
            assert (await http.request(method, path)).status_code == 404
        assert (await http.get("/v1/nothing")).json()["error"]["type"] == "invalid_request_error"
        wrong = await http.get(CHAT)
        assert (wrong.status_code, wrong.headers["allow"]) == (405, "POST")
        assert (await http.get("/docs")).status_code == 404
        assert (await http.post(CHAT + "/", json=QUESTION)).status_code == 404


async def test_the_openapi_document_describes_every_route() -> None:
    document = create_app(make_server()).openapi()
    routes = {(path, method) for path, item in document["paths"].items() for method in item}
    assert routes >= {
        ("/health", "get"), ("/v1/models", "get"), ("/v1/models/{model_id}", "get"), (CHAT, "post"),
        ("/tokenize", "post"), ("/detokenize", "post"),
    }  # fmt: skip
    chat = document["paths"][CHAT]["post"]
    assert "messages" in chat["requestBody"]["content"]["application/json"]["schema"]["properties"]
    assert "text/event-stream" in chat["responses"]["200"]["content"]


# Bodies


@pytest.mark.parametrize(
    "body",
    [
        b"", b"{", b"[]", b'"x"', b"null", b"NaN", b"1e999", b"\xff\xfe", b'{"a":"\\ud800"}',
        b'{"a":"\xed\xa0\x80"}',
        b"[" * 100_000, b'{"a":' * 2000, b"\xef\xbb\xbf{}", b'{"model":' + b"9" * 5000 + b"}", b"\x00",
    ],
)  # fmt: skip
async def test_bodies_that_are_no_json_objects(body: bytes) -> None:
    async with client() as http:
        for path in (CHAT, "/tokenize", "/detokenize"):
            answer = await http.post(path, content=body)
            assert answer.status_code == 400
            error = answer.json()["error"]
            assert error["type"] == "invalid_request_error"
            assert error["message"].endswith(".")
            assert len(error["message"]) < 300


async def test_a_body_that_says_it_is_too_large_is_not_read() -> None:
    app = create_app(make_server(max_request_bytes=1 << 20))
    pieces = [b"x" * 1000] * 2000
    call = Call(app, "POST", CHAT, pieces=pieces, headers={"content-length": "2000000"})
    assert await call.start() == 413
    assert call.taken == 0
    assert b'"request_too_large"' in await call.rest()
    assert "connection" not in call.headers  # or who is still writing would not get to read it


async def test_a_body_that_turns_out_too_large_is_read_no_further() -> None:
    app = create_app(make_server(max_request_bytes=100_000))
    call = Call(app, "POST", CHAT, pieces=[b"x" * 1000] * 100_000)
    assert await call.start() == 413
    assert call.taken == 101
    lying = Call(app, "POST", CHAT, pieces=[b"x" * 1000] * 200, headers={"content-length": "5"})
    assert await lying.start() == 413


async def test_a_client_that_reads_only_when_it_has_written_learns_that_it_was_too_much() -> None:
    app = create_app(make_server(max_request_bytes=100_000))
    listener = bind("127.0.0.1", 0)
    http = _Http(_config(app), lambda: None)
    serving = asyncio.create_task(http.serve(sockets=[listener]))
    reader, writer = await asyncio.open_connection(*listener.getsockname())
    size = 30 << 20
    writer.write(f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Length: {size}\r\n\r\n".encode() + bytes(size))
    async with asyncio.timeout(20):
        await writer.drain()
        assert b" 413 " in await reader.readline()
    writer.close()
    http.should_exit = True
    await serving


async def test_large_bodies_within_the_limit_are_served() -> None:
    async with client(FakeLink(max_context=100_000_000)) as http:
        text = "Words, many of them. " * 30_000
        answer = await http.post(CHAT, json={**QUESTION, "messages": [{"role": "user", "content": text}]})
        assert answer.status_code == 200


async def test_a_body_of_too_many_parts_is_not_parsed() -> None:
    async with client() as http:
        for filler, status in ((b"{},", 413), (b"[],", 413), (b"77,", 200)):
            body = b'{"model":"%b","messages":[{"role":"user","content":"a"}],"x":[' % MODEL.encode()
            answer = await http.post(CHAT, content=body + filler * 500_000 + b"1]}")
            assert answer.status_code == status
        answer = await http.post("/v1/messages", content=b"[" * 500_001)
        assert answer.json()["error"]["type"] == "request_too_large"
        assert (await http.post("/v1/messages", content=b"[" * 500_000)).status_code == 400


@pytest.mark.parametrize("encoding", ["gzip", "br", "deflate, gzip", "nonsense"])
async def test_encoded_bodies_are_refused(encoding: str) -> None:
    async with client() as http:
        answer = await http.post(CHAT, json=QUESTION, headers={"content-encoding": encoding})
        assert answer.status_code == 415
        assert encoding in answer.json()["error"]["message"]
        assert (
            await http.post(CHAT, json=QUESTION, headers={"content-encoding": "identity"})
        ).status_code == 200


@pytest.mark.parametrize(
    ("value", "ok"),
    [
        ("bench/serve-ttft", True),
        ("a" * 64, True),
        ("a" * 65, False),
        ("a b", False),
        ("", False),
        ("ä", False),
    ],
)
async def test_the_client_label(value: str, ok: bool) -> None:
    seen = Recorder()
    async with client(None, seen) as http:
        answer = await http.post(CHAT, json=QUESTION, headers={"x-ninfer-client": value.encode("latin-1")})  # type: ignore[dict-item]
        assert answer.status_code == (200 if ok else 400)
        if ok:
            assert seen.records[0].request.client == value
        else:
            assert answer.json()["error"]["code"] == "invalid_client_label"
            assert answer.json()["error"]["param"] == "X-Ninfer-Client"
            assert not seen.told
        twice = await http.post(
            CHAT, json=QUESTION, headers=[("x-ninfer-client", "a"), ("x-ninfer-client", "b")]
        )
        assert twice.status_code == 400


async def test_a_defect_is_a_500_without_its_text(caplog: pytest.LogCaptureFixture) -> None:
    class Broken(FakeLink):
        async def submit(self, job: Any) -> Any:
            raise ValueError(job.prompt.text)

    secret = {"role": "user", "content": "a secret"}
    async with client(Broken()) as http:
        answer = await http.post(CHAT, json={**QUESTION, "messages": [secret]})
    assert answer.status_code == 500
    assert answer.json()["error"]["type"] == "internal_error"
    assert "secret" not in answer.text
    assert "ValueError" in caplog.text
    assert "secret" not in caplog.text


# Tokens


async def test_tokenize_and_detokenize_are_inverse() -> None:
    text = "Héllo <|im_start|> 世界\n\x00 done"
    async with client() as http:
        for field in ("content", "prompt"):
            answer = (await http.post("/tokenize", json={field: text, "model": MODEL})).json()
            assert answer["count"] == len(answer["tokens"]) > 0
            assert answer["max_model_len"] == 4096
            back = (await http.post("/detokenize", json={"tokens": answer["tokens"]})).json()
            assert back == {"content": text, "prompt": text}
        pieces = (await http.post("/tokenize", json={"content": text, "with_pieces": True})).json()["tokens"]
        joined = b"".join(
            p["piece"].encode() if isinstance(p["piece"], str) else bytes(p["piece"]) for p in pieces
        )
        assert joined.decode() == text
        assert any(isinstance(p["piece"], list) for p in pieces)


async def test_tokenize_renders_conversations() -> None:
    link = FakeLink()
    async with client(link) as http:
        counted = (await http.post("/tokenize", json=QUESTION)).json()
        await http.post(CHAT, json=QUESTION)
        assert counted["tokens"] == list(link.jobs[0].prompt.tokens)


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "content"),
        ("/tokenize", {"content": 5}, "content"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/tokenize", {"content": "a", "with_pieces": "yes"}, "with_pieces"),
        ("/tokenize", {"content": "a", "model": "nope"}, "model"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": "a"}, "tokens"),
        ("/detokenize", {"tokens": [1, -1]}, "tokens[1]"),
        ("/detokenize", {"tokens": [1, 1 << 40]}, "tokens[1]"),
        ("/detokenize", {"tokens": [True]}, "tokens[0]"),
    ],
)
async def test_bad_tokenize_requests(path: str, body: Any, param: str) -> None:
    async with client() as http:
        answer = await http.post(path, json=body)
        assert answer.status_code == (404 if param == "model" else 400)
        assert answer.json()["error"]["param"] == param


async def test_tokenize_takes_no_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenize, "_MOST_CHARACTERS", 10)
    monkeypatch.setattr(tokenize, "_MOST_TOKENS", 10)
    async with client() as http:
        for count, status in ((10, 200), (11, 400)):
            texts = await http.post("/tokenize", json={"content": "a" * count})
            tokens = await http.post("/detokenize", json={"tokens": [1] * count})
            assert (texts.status_code, tokens.status_code) == (status, status)
            assert status == 200 or "at most 10" in texts.text + tokens.text


async def test_a_busy_server_is_still_healthy() -> None:
    server = make_server(FakeLink([asyncio.Event()]), max_concurrency=1, max_pending=0)
    app = create_app(server)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as http:
        first = Call(app, "POST", CHAT, {**QUESTION, "stream": True})
        await first.start()
        busy = await http.post(CHAT, json=QUESTION)
        assert (busy.status_code, busy.headers["retry-after"]) == (429, "1")
        assert busy.json()["error"]["type"] == "rate_limit_error"
        assert (await http.get("/health")).status_code == 200
        first.leave()
        await first.task
