"""What the OpenAPI document says of the two routes. The bodies are read by hand (`request`), so that what
clients add does no harm and errors have the API's own form."""

from __future__ import annotations

from typing import Any

_TEXT = {"type": "string"}
_CACHE = {
    "type": ["object", "null"],
    "properties": {"type": {"const": "ephemeral"}, "ttl": {"enum": ["5m", "1h"]}},
    "required": ["type"],
}
_BLOCK = {
    "type": "object",
    "description": "text, thinking, redacted_thinking, tool_use, tool_result, image, document, ...",
    "properties": {"type": _TEXT, "cache_control": _CACHE},
    "required": ["type"],
}
_TEXT_BLOCK = {
    "type": "object",
    "properties": {"type": {"const": "text"}, "text": _TEXT, "cache_control": _CACHE},
    "required": ["type", "text"],
}
_MESSAGE = {
    "type": "object",
    "properties": {
        "role": {"enum": ["user", "assistant", "system"]},
        "content": {"anyOf": [_TEXT, {"type": "array", "items": _BLOCK}]},
    },
    "required": ["role", "content"],
}
_TOOL = {
    "type": "object",
    "properties": {
        "type": {"type": ["string", "null"]},
        "name": {"type": "string", "minLength": 1, "maxLength": 128},
        "description": {"type": ["string", "null"]},
        "input_schema": {"type": "object"},
        "strict": {"type": ["boolean", "null"]},
        "defer_loading": {"type": ["boolean", "null"]},
        "cache_control": _CACHE,
    },
    "required": ["name", "input_schema"],
}
_PROMPT: dict[str, Any] = {
    "model": {"type": "string", "minLength": 1},
    "messages": {"type": "array", "items": _MESSAGE, "minItems": 1},
    "system": {"anyOf": [_TEXT, {"type": "array", "items": _TEXT_BLOCK}]},
    "tools": {"type": "array", "items": _TOOL},
    "tool_choice": {
        "type": "object",
        "properties": {
            "type": {"enum": ["auto", "any", "tool", "none"]},
            "name": _TEXT,
            "disable_parallel_tool_use": {"type": "boolean"},
        },
        "required": ["type"],
    },
    "thinking": {
        "type": "object",
        "properties": {
            "type": {"enum": ["enabled", "adaptive", "disabled"]},
            "budget_tokens": {"type": "integer", "minimum": 1024},
            "display": {"enum": ["summarized", "omitted"]},
        },
        "required": ["type"],
    },
    "output_config": {
        "type": "object",
        "properties": {
            "effort": {"enum": ["none", "minimal", "low", "medium", "high", "xhigh", "max"]},
            "format": {
                "type": ["object", "null"],
                "properties": {"type": {"const": "json_schema"}, "schema": {"type": "object"}},
                "required": ["type", "schema"],
            },
        },
    },
    "cache_control": _CACHE,
    "preserve_thinking": {"type": ["boolean", "null"]},
    "chat_template_kwargs": {"type": ["object", "null"]},
}
_GENERATION: dict[str, Any] = {
    "max_tokens": {"type": "integer", "minimum": 1},
    "stream": {"type": "boolean"},
    "stop_sequences": {"type": "array", "items": {"type": "string", "minLength": 1}},
    "temperature": {"type": "number", "minimum": 0, "maximum": 1},
    "top_p": {"type": "number", "minimum": 0, "maximum": 1},
    "top_k": {"type": "integer", "minimum": 0, "maximum": 20},
}
_ERROR = {
    "type": "object",
    "properties": {
        "type": {"const": "error"},
        "error": {
            "type": "object",
            "properties": {"type": _TEXT, "message": _TEXT},
            "required": ["type", "message"],
        },
        "request_id": _TEXT,
    },
    "required": ["type", "error"],
}
_USAGE = {
    "type": "object",
    "properties": {
        "input_tokens": {"type": "integer"},
        "cache_read_input_tokens": {"type": "integer"},
        "output_tokens": {"type": "integer"},
    },
    "required": ["input_tokens", "cache_read_input_tokens", "output_tokens"],
}
_ANSWER = {
    "type": "object",
    "properties": {
        "id": _TEXT,
        "type": {"const": "message"},
        "role": {"const": "assistant"},
        "model": _TEXT,
        "content": {"type": "array", "items": _BLOCK},
        "stop_reason": {
            "enum": ["end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"]
        },
        "stop_sequence": {"type": ["string", "null"]},
        "usage": _USAGE,
    },
    "required": ["id", "type", "role", "model", "content", "stop_reason", "stop_sequence", "usage"],
}
_COUNTED = {
    "type": "object",
    "properties": {"input_tokens": {"type": "integer"}},
    "required": ["input_tokens"],
}
_FAILURES = {
    400: "The body breaks a rule, or the prompt is too long",
    401: "The key is wrong",
    413: "The body is too large",
    415: "The body is compressed",
    500: "A defect of the server",
    503: "No engine can answer",
    504: "Not begun in time",
    529: "The server is busy",
}


def _json(schema: dict[str, Any]) -> dict[str, Any]:
    return {"application/json": {"schema": schema}}


def _route(summary: str, properties: dict[str, Any], answer: dict[str, Any]) -> dict[str, Any]:
    body = {"type": "object", "properties": properties, "required": ["model", "messages"]}
    failures = {status: {"description": text, "content": _json(_ERROR)} for status, text in _FAILURES.items()}
    return {
        "summary": summary,
        "openapi_extra": {"requestBody": {"required": True, "content": _json(body)}},
        "responses": {200: answer, **failures},
    }


CREATE = _route(
    "Answer a conversation",
    {**_PROMPT, **_GENERATION},
    {
        "description": "The message, or its events if `stream` is true",
        "content": {**_json(_ANSWER), "text/event-stream": {"schema": _TEXT}},
    },
)
COUNT = _route(
    "Count the tokens of a conversation", _PROMPT, {"description": "The count", "content": _json(_COUNTED)}
)
