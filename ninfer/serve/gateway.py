"""What every request passes on its way in and out: its id, the API key, CORS, and errors as bodies."""

from __future__ import annotations

import hashlib
import hmac
import logging
import secrets
from collections.abc import Iterable

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ninfer.serve.errors import ApiError, anthropic_body, anthropic_status, as_api_error, openai_body
from ninfer.serve.http import json_response
from ninfer.serve.options import ServeOptions

_log = logging.getLogger("ninfer.serve")
_CORS = [
    (b"access-control-allow-origin", b"*"),
    (b"access-control-expose-headers", b"x-request-id, request-id"),
    (
        b"access-control-allow-headers",
        b"Authorization, Content-Type, X-API-Key, X-Ninfer-Client, anthropic-version, anthropic-beta, "
        b"anthropic-user-profile-id",
    ),
    (b"access-control-allow-methods", b"GET, POST, DELETE, OPTIONS"),
]
_ALLOWED = 2
"""Which of them names the headers that may be sent."""


def is_anthropic(scope: Scope) -> bool:
    """Does the client expect answers in the form of Anthropic's API?"""
    if under(scope, "/v1/messages"):
        return True
    # Both APIs have models; only Anthropic's clients send a version.
    return under(scope, "/v1/models") and any(name == b"anthropic-version" for name, _ in scope["headers"])


def under(scope: Scope, prefix: str) -> bool:
    """Is the path this one or below it?"""
    return scope["path"] == prefix or scope["path"].startswith(prefix + "/")


def error_response(request: Request, error: ApiError) -> Response:
    """The error in the words of the API that was asked."""
    if is_anthropic(request.scope):
        body = anthropic_body(error, request.scope["state"]["request_id"])
        return json_response(body, anthropic_status(error), error.headers)
    if error.type == "internal_error" and under(request.scope, "/v1/responses"):
        error.type = "server_error"
    return json_response(openai_body(error), error.status, error.headers)


class Gateway:
    """ASGI middleware around all routes."""

    def __init__(self, app: ASGIApp, options: ServeOptions) -> None:
        self._app = app
        self._key = None if options.api_key is None else _digest(options.api_key.encode())
        self._cors = options.cors

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        added = list(_CORS) if self._cors else []
        state = scope.setdefault("state", {})
        state["request_id"] = ""
        if scope["path"].startswith("/v1/"):
            messages = under(scope, "/v1/messages")
            state["request_id"] = f"req_{secrets.token_hex(8 if messages else 16)}"
            names = [b"request-id"] * is_anthropic(scope) + [b"x-request-id"] * (not messages)
            added += [(name, state["request_id"].encode()) for name in names]
        begun = False

        async def send_with_headers(message: Message) -> None:
            nonlocal begun
            if message["type"] == "http.response.start":
                begun = True
                message["headers"] = [*message.get("headers", ()), *added]
            await send(message)

        if self._cors and scope["method"] == "OPTIONS":
            asked = [value for name, value in scope["headers"] if name == b"access-control-request-headers"]
            # SDKs in a browser send headers of their own; one that isn't allowed would stop the request.
            added[_ALLOWED] = (_CORS[_ALLOWED][0], b", ".join([_CORS[_ALLOWED][1], *asked]))
            await Response(status_code=204)(scope, receive, send_with_headers)
            return
        request = Request(scope, receive)
        try:
            if not self._admitted(scope):
                await error_response(request, _unauthorized())(scope, receive, send_with_headers)
                return
            await self._app(scope, receive, send_with_headers)
        except Exception as error:
            if begun:
                _log.error("a response broke off: %s", type(error).__name__)
                return  # the server closes the connection
            await error_response(request, as_api_error(error))(scope, receive, send_with_headers)

    def _admitted(self, scope: Scope) -> bool:
        if self._key is None or scope["method"] == "OPTIONS":
            return True
        if scope["path"] == "/health" and scope["method"] in ("GET", "HEAD"):
            return True
        # Digests are compared, so that the time depends neither on a key's length nor on where it differs.
        return any(hmac.compare_digest(_digest(key), self._key) for key in _offered(scope["headers"]))


def _offered(headers: Iterable[tuple[bytes, bytes]]) -> list[bytes]:
    keys = []
    for name, value in headers:
        if name == b"x-api-key":
            keys.append(value.strip(b" \t"))
        elif name == b"authorization" and value[:7].lower() in (b"bearer ", b"bearer\t"):
            keys.append(value[7:].strip(b" \t"))
    return keys


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def _unauthorized() -> ApiError:
    return ApiError(
        401,
        "The API key is missing or wrong; send it as 'Authorization: Bearer KEY' or 'x-api-key: KEY'.",
        code="invalid_api_key",
        headers={"WWW-Authenticate": "Bearer"},
    )
