"""What the OpenAPI document says of the routes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ninfer.serve.openapi import GENERATION, PLAIN, operation, path_parameter
from ninfer.serve.responses.request import COUNT_FIELDS, CREATE_FIELDS

_OBJECT = {"type": "object"}
_STRING = {"type": "string"}
_FLAG = {"type": "boolean"}
_TOOLS = {
    "type": "array",
    "items": {"type": "object", "properties": {"type": _STRING}, "required": ["type"]},
}
_ITEM = {
    "type": "object",
    "properties": {
        "type": {"const": "message"},
        "role": {"enum": ["user", "assistant", "system", "developer"]},
        "content": _STRING,
    },
    "required": ["role", "content"],
}
_NOTHING = {"type": "null"}
_OTHER = {"type": "object", "properties": {"type": _STRING}, "required": ["type"]}
_INPUT = {"oneOf": [_STRING, {"type": "array", "minItems": 1, "items": {"anyOf": [_ITEM, _OTHER]}}]}
_FIELDS: dict[str, Any] = {
    "background": {"enum": [False]},
    "chat_template_kwargs": _OBJECT,
    "client_metadata": _OBJECT,
    "context_management": _NOTHING,
    "conversation": _NOTHING,
    "include": {"type": "array", "items": _STRING},
    "input": _INPUT,
    "instructions": _STRING,
    "max_output_tokens": {"type": "integer", "minimum": 0},
    "max_tool_calls": {"type": "integer", "minimum": 0},
    "metadata": {"type": "object", "additionalProperties": {"type": "string", "maxLength": 512}},
    "moderation": _NOTHING,
    "parallel_tool_calls": _FLAG,
    "personality": _NOTHING,
    "preserve_thinking": _FLAG,
    "previous_response_id": _STRING,
    "prompt": _NOTHING,
    "prompt_cache_key": {"type": "string", "maxLength": 64},
    "prompt_cache_options": _OBJECT,
    "prompt_cache_retention": {"enum": ["in_memory", "24h"]},
    "reasoning": {
        "type": "object",
        "properties": {
            "effort": {"enum": ["none", "minimal", "low", "medium", "high", "xhigh", "max"]},
            "summary": _STRING,
        },
    },
    "safety_identifier": {"type": "string", "maxLength": 128},
    "service_tier": {"enum": ["auto", "default"]},
    "store": _FLAG,
    "stream": _FLAG,
    "stream_options": {"type": "object", "properties": {"include_obfuscation": _FLAG}},
    "temperature": {"type": "number", "minimum": 0, "maximum": 2},
    "text": {"type": "object", "properties": {"format": _OBJECT, "verbosity": _STRING}},
    "tool_choice": {"oneOf": [{"enum": ["auto", "none", "required"]}, _OBJECT]},
    "tools": _TOOLS,
    "top_logprobs": {"type": "integer", "minimum": 0, "maximum": 20},
    "top_p": {"type": "number", "minimum": 0, "maximum": 1},
    "truncation": {"enum": ["auto", "disabled"]},
    "user": _STRING,
}


def _query(name: str, schema: Any) -> Any:
    return {"name": name, "in": "query", "required": False, "schema": schema}


def _body(names: frozenset[str], required: list[str], models: Iterable[str]) -> Any:
    fields = {**_FIELDS, "model": {"enum": sorted(models)}}
    properties = {name: fields[name] for name in sorted(names)}
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def _object(kind: str, *members: str) -> Any:
    properties = {"object": {"const": kind}, **{name: {} for name in members}}
    return {"type": "object", "properties": properties, "required": list(properties)}


_RESPONSE = _object("response", "id", "status", "model", "output", "usage")
_ID = path_parameter("response_id")
_STORED = (400, 401, 404)


def create(models: Iterable[str]) -> dict[str, Any]:
    """The route that answers, of a server with models of these names."""
    return operation(
        "Answer an input (OpenAI Responses)",
        body=_body(CREATE_FIELDS, ["model", "input"], models),
        ok=_RESPONSE,
        stream=True,
        errors=GENERATION,
    )


def count(models: Iterable[str]) -> dict[str, Any]:
    """The route that counts tokens."""
    return operation(
        "Count the tokens of an input",
        body=_body(COUNT_FIELDS, ["input"], models),
        ok=_object("response.input_tokens", "input_tokens"),
        errors=(*PLAIN, 404),
    )


COMPACT = operation("Refused: there is no compaction", body=_OBJECT, errors=(400, 401))
RETRIEVE = operation(
    "A stored response",
    ok=_RESPONSE,
    errors=_STORED,
    parameters=[_ID, _query("include_obfuscation", _FLAG)],
)
DELETE = operation(
    "Forget a stored response",
    ok=_object("response.deleted", "id", "deleted"),
    errors=(401, 404),
    parameters=[_ID],
)
ITEMS = operation(
    "The input of a stored response",
    ok=_object("list", "data", "first_id", "last_id", "has_more"),
    errors=_STORED,
    parameters=[
        _ID,
        _query("after", _STRING),
        _query("limit", {"type": "integer", "minimum": 1, "maximum": 100}),
        _query("order", {"enum": ["asc", "desc"]}),
    ],
)
CANCEL = operation("Refused: nothing runs in the background", errors=_STORED, parameters=[_ID])
