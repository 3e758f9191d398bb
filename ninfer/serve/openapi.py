"""What routes say of themselves in the OpenAPI document. They check their bodies on their own."""

from __future__ import annotations

from typing import Any

OPENAI_ERROR: dict[str, Any] = {
    "type": "object",
    "properties": {
        "error": {
            "type": "object",
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
            "required": ["message", "type", "param", "code"],
        }
    },
    "required": ["error"],
}
ANTHROPIC_ERROR: dict[str, Any] = {
    "type": "object",
    "properties": {
        "type": {"const": "error"},
        "error": {
            "type": "object",
            "properties": {"type": {"type": "string"}, "message": {"type": "string"}},
            "required": ["type", "message"],
        },
        "request_id": {"type": "string"},
    },
    "required": ["type", "error"],
}
_MEANING = {
    400: "The request can't be served as it is",
    401: "The API key is missing or wrong",
    404: "There is no such thing",
    413: "The body is too large",
    415: "The body's encoding is not supported",
    426: "The route doesn't speak WebSocket",
    429: "Too many requests are running or waiting; try again later",
    500: "Internal error",
    503: "Not ready, shutting down, or the request waited too long",
    504: "The request waited too long",
    529: "Too many requests are running or waiting; try again later",
}
PLAIN = (400, 401, 413, 415, 500, 503)
"""Errors of a route with a body."""
GENERATION = (400, 401, 404, 413, 415, 429, 500, 503)
"""Errors of a route of the OpenAI APIs that generates."""


def operation(
    summary: str,
    *,
    body: dict[str, Any] | None = None,
    ok: dict[str, Any] | None = None,
    stream: bool = False,
    errors: tuple[int, ...] = (401,),
    anthropic: bool = False,
    parameters: list[dict[str, Any]] | None = None,
) -> dict[str, Any]:
    """Keyword arguments of `APIRouter.add_api_route` and its decorators.

    `body` and `ok` are JSON schemas of the request and of a successful response, which is also an event
    stream if `stream`; `parameters` those of path and query as OpenAPI spells them.
    """
    error = ANTHROPIC_ERROR if anthropic else OPENAI_ERROR
    content: dict[str, Any] = {"application/json": {"schema": ok or {"type": "object"}}}
    if stream:
        # Without a schema: readers disagree whether it would be that of the stream or of one event.
        content["text/event-stream"] = {}
    responses: dict[int | str, dict[str, Any]] = {200: {"description": "Success", "content": content}}
    for status in errors:
        responses[status] = {
            "description": _MEANING[status],
            "content": {"application/json": {"schema": error}},
        }
    extra: dict[str, Any] = {}
    if body is not None:
        extra["requestBody"] = {"required": True, "content": {"application/json": {"schema": body}}}
    if parameters is not None:
        extra["parameters"] = parameters
    return {"summary": summary, "responses": responses, "openapi_extra": extra, "response_model": None}


def path_parameter(name: str, values: list[str] | None = None) -> dict[str, Any]:
    """A string that stands in the path; `values` are those that exist, where they are known."""
    schema = {"type": "string", "minLength": 1} if values is None else {"enum": values}
    return {"name": name, "in": "path", "required": True, "schema": schema}


def nullable(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema of a member that may be null."""
    return {"anyOf": [schema, {"type": "null"}]}
