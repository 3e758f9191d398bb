"""Bodies that no client means: the API's own error in one sentence, from a server that goes on."""

from __future__ import annotations

import json
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from tests.serve.soak.asks import CHAT, MESSAGES, MODEL, RESPONSES
from tests.serve.soak.server import Server, peak_reset, seen

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")

MIB = 1 << 20
LIMIT = 8
CONTEXT = 512
USER = [{"role": "user", "content": "Hi."}]
TOOL = {"type": "object", "properties": {"path": {"type": "string"}}}
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {
        "model": MODEL, "messages": USER, "max_tokens": 1, "temperature": 1.0, "top_p": 0.9, "top_k": 5,
        "min_p": 0.1, "presence_penalty": 0, "frequency_penalty": 0, "seed": 1, "stop": ["x"], "n": 1,
        "stream": False, "stream_options": {"include_usage": True}, "logprobs": True, "top_logprobs": 1,
        "tools": [{"type": "function", "function": {"name": "read", "parameters": TOOL}}],
        "tool_choice": "auto", "parallel_tool_calls": True, "response_format": {"type": "text"},
        "chat_template_kwargs": {}, "enable_thinking": True, "reasoning_effort": "low",
        "thinking_budget": 1, "user": "u", "logit_bias": {},
    },
    RESPONSES: {
        "model": MODEL, "input": USER, "max_output_tokens": 1, "instructions": "Be brief.", "store": False,
        "temperature": 1.0, "top_p": 0.9, "stream": False, "tools": [{"type": "function", "name": "read",
        "parameters": TOOL}], "tool_choice": "auto", "reasoning": {"effort": "low"}, "metadata": {},
        "text": {"format": {"type": "text"}}, "include": [], "truncation": "disabled", "top_logprobs": 0,
        "previous_response_id": None, "parallel_tool_calls": True, "user": "u",
    },
    "/v1/responses/input_tokens": {"model": MODEL, "input": "Hi.", "instructions": "Be brief."},
    "/v1/responses/compact": {"model": MODEL, "input": "Hi."},
    MESSAGES: {
        "model": "m", "messages": USER, "max_tokens": 1, "system": "Be brief.", "temperature": 1.0,
        "top_p": 0.9, "top_k": 5, "stop_sequences": ["x"], "stream": False, "metadata": {},
        "tools": [{"name": "read", "input_schema": TOOL}], "tool_choice": {"type": "auto"},
        "thinking": {"type": "adaptive"}, "output_config": {"effort": "low"}, "cache_control": None,
    },
    "/v1/messages/count_tokens": {"model": "m", "messages": USER, "system": "Be brief."},
    "/tokenize": {"content": "Hi.", "add_special": True, "with_pieces": False},
    "/detokenize": {"tokens": [1, 2]},
}  # fmt: skip
READING = [path for path in BODIES if not path.endswith("compact")]
"""Routes that read their body."""
VALUES = (
    b"null", b"true", b"7", b"-1", b"-0", b"1.5", b'"x"', b'""', b"[]", b"{}", b"[[]]", b'[{"type":7}]',
    b'{"type":[]}', b"1" + b"0" * 400, b"-1" + b"0" * 400, b"18446744073709551616", b"1e308", b'"\\u0000"',
    b'"\\ud7ff\\ufdd0"', b"[null]", b'{"":{"":[]}}',
)  # fmt: skip
"""JSON values, each put into each field: where one of them is right, that is an answer."""
BROKEN = {
    "empty": b"",
    "spaces": b" \n\t ",
    "null": b"null",
    "number": b"7",
    "string": b'"model"',
    "array": b"[]",
    "cut": b'{"model": "m", "messages": [{"role": "us',
    "trailing": b'{"model": "m"} {}',
    "comment": b'{"model": "m" /* which? */}',
    "single quotes": b"{'model': 'm'}",
    "byte order mark": b"\xef\xbb\xbf{}x",
    "utf-16": '{"model": "m"}'.encode("utf-16"),
    "invalid utf-8": b'{"model": "\xff\xfe"}',
    "raw surrogate": b'{"model": "\xed\xa0\x80"}',
    "raw NUL": b'{"model": "\x00"}',
    "bare NUL": b"\x00" * 100,
    "NaN": b'{"model": NaN}',
    "Infinity": b'{"model": -Infinity}',
    "1e400": b'{"model": 1e400}',
    "arrays in arrays": b'{"model":' + b"[" * 100_000,
    "closed arrays": b'{"model":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "objects in objects": b'{"a":' * 100_000 + b"1" + b"}" * 100_000,
    "too many objects": b'{"messages":[' + b"{}," * 600_000 + b"{}]}",
    "form": b"model=m&messages=hi",
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder: Path = tmp_path_factory.mktemp("hostile")
    options = ("--max-context", str(CONTEXT), "--kv-capacity", "8192", "--default-max-tokens", "4")
    with Server(folder, "--max-request-mib", str(LIMIT), *options) as server:
        yield server
        assert not server.complaints(), server.complaints()


@pytest.fixture(scope="module")
def http(server: Server) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=60) as http:
        yield http


def check_error(path: str, answer: httpx.Response, *statuses: int) -> str:
    """It is the API's error body with one clear sentence; the sentence."""
    assert answer.status_code in (statuses or (400, 404)), (answer.status_code, answer.text[:300])
    assert answer.headers["content-type"] == "application/json"
    body = answer.json()
    message = body["error"]["message"]
    if path.startswith(MESSAGES):
        assert body["type"] == "error"
        assert set(body) == {"type", "error", "request_id"}
        assert body["request_id"] == answer.headers["request-id"]
    else:
        assert {"message", "type", "param", "code"} <= set(body["error"])
        assert set(body) == {"error"}
    assert 10 < len(message) < 600, message
    assert "Traceback" not in message
    assert "\n" not in message
    return message


def alive(http: httpx.Client) -> None:
    assert http.get("/health").json() == {"status": "ok"}


@pytest.mark.parametrize("path", READING)
def test_what_is_no_object_in_json(path: str, http: httpx.Client) -> None:
    for name, body in BROKEN.items():
        answer = http.post(path, content=body)
        message = check_error(path, answer, 413 if name == "too many objects" else 400)
        assert "body" in message or "JSON" in message, (name, message)
    alive(http)


@pytest.mark.parametrize("path", BODIES)
def test_each_value_in_each_field(path: str, http: httpx.Client) -> None:
    valid = BODIES[path]
    assert path not in READING or http.post(path, json=valid).status_code == 200
    wrong = 0
    for field in valid:
        for value in VALUES:
            members = [json.dumps(name).encode() + b":" + json.dumps(valid[name]).encode() for name in valid]
            members[list(valid).index(field)] = json.dumps(field).encode() + b":" + value
            answer = http.post(path, content=b"{" + b",".join(members) + b"}")
            if answer.status_code != 200:
                check_error(path, answer)
                wrong += 1
    assert wrong > 5 * len(valid)
    alive(http)


@pytest.mark.parametrize("path", READING)
def test_texts_that_are_no_unicode(path: str, http: httpx.Client) -> None:
    """A lone surrogate can be written in JSON, but not be said to a model."""
    body = json.dumps(BODIES[path])
    for text in ("\\ud800", "\\udfff", "a\\ud83d", "\\udc00\\ud800"):
        for old in ("Hi.", "Be brief.", '"read"', '"model": "', "[1, 2]"):
            if old in body:
                new = old.replace("Hi.", text).replace("Be brief.", text)
                new = (
                    new.replace("read", text)
                    .replace('"model": "', f'"model": "{text}')
                    .replace("1, 2", f'"{text}"')
                )
                check_error(path, http.post(path, content=body.replace(old, new).encode()), 400)
    alive(http)


def raw(server: Server, head: str, pieces: Iterator[bytes] | list[bytes], patience: float = 60) -> bytes:
    """What comes back for a request that we write ourselves; the rest isn't sent once the server hangs up."""
    address = urlsplit(server.url)
    with socket.create_connection((address.hostname, address.port), timeout=patience) as connection:
        connection.sendall(head.replace("\n", "\r\n").encode() + b"\r\n\r\n")
        try:
            for piece in pieces:
                connection.sendall(piece)
        except (BrokenPipeError, ConnectionResetError):
            pass
        got = b""
        try:
            while piece := connection.recv(65536):
                got += piece
                if b"\r\n\r\n" in got and b"}" in got.partition(b"\r\n\r\n")[2]:
                    break
        except ConnectionResetError:
            pass
        return got


def spaces(mib: int) -> Iterator[bytes]:
    for _ in range(mib):
        yield b" " * MIB


@pytest.mark.parametrize("path", READING)
def test_100_mb_are_refused_and_not_kept(path: str, server: Server, http: httpx.Client) -> None:
    """Announced ones before they are sent, others as soon as they are too much."""
    peak_reset(server.pid)
    before = seen(server.pid)
    head = f"POST {path} HTTP/1.1\nHost: x\nContent-Type: application/json\n"
    announced = raw(server, f"{head}Content-Length: {100 * MIB}", spaces(100))
    assert announced.startswith(b"HTTP/1.1 413"), announced[:300]
    chunks = (b"%x\r\n%b\r\n" % (MIB, piece) for piece in spaces(100))
    chunked = raw(server, f"{head}Transfer-Encoding: chunked", chunks)
    assert chunked.startswith(b"HTTP/1.1 413"), chunked[:300]
    message = check_error(path, http.post(path, content=b" " * (LIMIT * MIB + 1)), 413)
    assert "--max-request-mib" in message
    after = seen(server.pid)
    assert after.peak - before.resident_all < 64 * MIB
    alive(http)


@pytest.mark.parametrize("path", READING)
def test_a_text_of_millions_of_characters(path: str, http: httpx.Client) -> None:
    text = "word " * (LIMIT * MIB // 5 - 200)
    body = json.dumps(BODIES[path]).replace("Hi.", text).replace("[1, 2]", "[" + "1," * 2_000_000 + "1]")
    message = check_error(path, http.post(path, content=body.encode()), 400) if path != "/tokenize" else ""
    if "tokens" not in path and "token" not in path:
        assert str(CONTEXT) in message
    alive(http)


def test_headers_that_lie(server: Server, http: httpx.Client) -> None:
    for path in READING:
        body = json.dumps(BODIES[path]).encode()
        for encoding in ("gzip", "br", "zstd", "deflate", "gzip, identity", "?"):
            answer = http.post(path, content=body, headers={"content-encoding": encoding})
            assert encoding.split(",")[0] in check_error(path, answer, 415)
        # Whatever type it says it has: JSON it is, or it isn't.
        for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data", "", "\xff"):
            headers = [(b"content-type", kind.encode("latin-1"))]
            assert http.post(path, content=body, headers=headers).status_code == 200
            check_error(path, http.post(path, content=b"model=m", headers=headers), 400)
        head = f"POST {path} HTTP/1.1\nHost: x\nConnection: close"
        for length in ("-1", "1e9", "99999999999999999999999999", "abc", "0x10"):
            got = raw(server, f"{head}\nContent-Length: {length}", [body])
            assert got.startswith((b"HTTP/1.1 400", b"HTTP/1.1 413")), (length, got[:200])
        for chunk in (b"zz\r\n", b"-5\r\nabc\r\n", b"fffffffffffffffff\r\n"):
            got = raw(server, f"{head}\nTransfer-Encoding: chunked", [chunk])
            assert got.startswith((b"HTTP/1.1 400", b"HTTP/1.1 413")), (chunk, got[:200])
        got = raw(server, f"{head}\nContent-Length: {len(body)}\nX-Ninfer-Client: a b", [body])
        assert got.startswith(b"HTTP/1.1 400") or path.endswith("tokens") or "tokenize" in path, got[:200]
        short = raw(server, f"{head}\nContent-Length: 5", [body])
        assert short.startswith(b"HTTP/1.1 400"), short[:200]
    alive(http)
