"""What every route does with a request: its body, its client, its headers."""

from __future__ import annotations

import re
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any, TypeVar

import orjson
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from ninfer.serve.answer import Answer
from ninfer.serve.calls import GenerationRequest
from ninfer.serve.connection import Gone, connected
from ninfer.serve.errors import ApiError, invalid
from ninfer.serve.sse import event_stream, sse

if TYPE_CHECKING:
    from ninfer.serve.server import Server

__all__ = [
    "Gone",
    "client_label",
    "event_stream",
    "json_response",
    "known_model",
    "prepare",
    "read_json",
    "request_id",
    "sse",
    "until_disconnect",
]

_T = TypeVar("_T")
_MOST_PARTS = 500_000
_LABEL = re.compile(r"[A-Za-z0-9._:/@+-]{1,64}")


class JsonResponse(Response):
    """A value as JSON, its members in their order."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return orjson.dumps(content)


def json_response(content: Any, status: int = 200, headers: dict[str, str] | None = None) -> JsonResponse:
    """A response whose body is `content` as JSON."""
    return JsonResponse(content, status, headers)


async def read_json(request: Request, server: Server) -> Any:
    """The value of a JSON body. Raises `ApiError` 413, 415 or 400."""
    encoding = request.headers.get("content-encoding", "identity").strip().lower()
    if encoding not in ("", "identity"):
        raise ApiError(
            415,
            f"Content-Encoding {encoding!r:.40} is not supported; send the body uncompressed.",
            code="unsupported_content_encoding",
        )
    body = await _read(request, server.options.max_request_bytes)
    if len(body) > _MOST_PARTS:
        _check_parts(body)
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise invalid(f"The request body is not valid JSON: {error}.") from None


async def read_object(request: Request, server: Server) -> dict[str, Any]:
    """The object that a JSON body must be. Raises `ApiError` 413, 415 or 400."""
    body = await read_json(request, server)
    if not isinstance(body, dict):
        raise invalid("The request body must be a JSON object.")
    return body


async def _read(request: Request, limit: int) -> bytearray:
    length = request.headers.get("content-length", "")
    if length.isdecimal() and int(length[:20]) > limit:
        raise _too_large(limit)
    body = bytearray()
    try:
        async for chunk in request.stream():
            if len(body) + len(chunk) > limit:
                raise _too_large(limit)
            body += chunk
    except ClientDisconnect:
        raise Gone from None
    return body


def _check_parts(body: bytearray) -> None:
    """Reading and checking millions of objects would hold up all other requests."""
    parts = body.count(b"{") + body.count(b"[")
    if parts > _MOST_PARTS:
        raise ApiError(
            413,
            f"The request body has {parts} objects and arrays (or braces and brackets in texts); at most "
            f"{_MOST_PARTS} are allowed.",
            code="request_too_large",
        )


def _too_large(limit: int) -> ApiError:
    return ApiError(
        413,
        f"The request body is larger than {limit >> 20} MiB; send less or start the server with a larger "
        f"--max-request-mib.",
        code="request_too_large",
    )


def request_id(request: Request) -> str:
    """The id that the response carries in its header."""
    return request.state.request_id


def known_model(name: Any, server: Server) -> str:
    """The public id of the model that a request names. Raises `ApiError` 400 or 404."""
    if not isinstance(name, str) or not name:
        raise invalid("model must be the id of a model, as GET /v1/models lists it.", "model")
    if name not in server.names:
        raise ApiError(
            404,
            f"The model {name!r:.200} does not exist; this server has {server.model_id!r}.",
            param="model",
            code="model_not_found",
        )
    return server.model_id


def client_label(request: Request) -> str | None:
    """The value of X-Ninfer-Client, which is only logged. Raises `ApiError` 400."""
    values = request.headers.getlist("x-ninfer-client")
    if not values:
        return None
    if len(values) > 1 or not _LABEL.fullmatch(values[0]):
        raise ApiError(
            400,
            "X-Ninfer-Client must be one header of 1 to 64 characters A-Z a-z 0-9 . _ : / @ + -.",
            param="X-Ninfer-Client",
            code="invalid_client_label",
        )
    return values[0]


async def prepare(
    request: Request, server: Server, generation: GenerationRequest, *, snapshots: bool = False
) -> Answer:
    """`Service.prepare` while the client is there. Raises `ApiError`, or `Gone`."""
    async with connected(request.receive):
        return await server.service.prepare(generation, snapshots=snapshots)


async def until_disconnect(request: Request, answer: Answer, work: Coroutine[Any, Any, _T]) -> _T:
    """The result of `work`, which makes the body of a non-streaming response; closes the answer.

    Raises `Gone` when the client closes the connection, and what `work` raises.
    """
    try:
        async with connected(request.receive):
            return await work
    except (ApiError, Gone):
        raise
    except Exception as error:
        answer.response_failed("render", error)
        raise
    finally:
        work.close()
        answer.close()
