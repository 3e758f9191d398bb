"""The JSON schemas of Chat Completions for the OpenAPI document; `request` is what checks."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ninfer.serve.openapi import nullable

_TEXT, _FLAG = nullable({"type": "string"}), nullable({"type": "boolean"})
_OBJECT = {"type": "object"}


def _number(low: float, high: float) -> dict[str, Any]:
    return nullable({"type": "number", "minimum": low, "maximum": high})


def _integer(low: int, high: int) -> dict[str, Any]:
    return nullable({"type": "integer", "minimum": low, "maximum": high})


_PART = {
    "type": "object",
    "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
    "required": ["type", "text"],
}
_CALL = {
    "type": "object",
    "properties": {
        "id": {"type": "string"},
        "type": {"const": "function"},
        "function": {
            "type": "object",
            "properties": {"name": {"type": "string", "minLength": 1}, "arguments": {"type": "string"}},
            "required": ["name", "arguments"],
        },
    },
    "required": ["id", "type", "function"],
}
_CONTENT = [{"type": "string"}, {"type": "array", "items": _PART}]


def _message(*roles: str, required: tuple[str, ...] = ("content",), **members: Any) -> dict[str, Any]:
    content = {"anyOf": _CONTENT if "content" in required else [*_CONTENT, {"type": "null"}]}
    return {
        "type": "object",
        "properties": {"role": {"enum": list(roles)}, "content": content, **members},
        "required": ["role", *required],
    }


MESSAGE: dict[str, Any] = {
    "oneOf": [
        _message("system", "developer", "user"),
        _message(
            "assistant",
            required=(),
            reasoning_content=_TEXT,
            tool_calls=nullable({"type": "array", "items": _CALL}),
        ),
        _message("tool", required=("content", "tool_call_id"), tool_call_id={"type": "string"}),
    ]
}
_TOOL = {
    "type": "object",
    "properties": {
        "type": {"const": "function"},
        "function": {
            "type": "object",
            "properties": {
                "name": {"type": "string", "pattern": "^[A-Za-z0-9_-]{1,64}$"},
                "description": _TEXT,
                "parameters": nullable(_OBJECT),
                "strict": _FLAG,
            },
            "required": ["name"],
        },
    },
    "required": ["type", "function"],
}
_NAMED = {
    "type": "object",
    "properties": {
        "type": {"const": "function"},
        "function": {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]},
    },
    "required": ["type", "function"],
}
_ALLOWED = {
    "type": "object",
    "properties": {
        "type": {"const": "allowed_tools"},
        "allowed_tools": {
            "type": "object",
            "properties": {
                "mode": {"enum": ["auto", "required"]},
                "tools": {"type": "array", "items": _NAMED},
            },
            "required": ["mode", "tools"],
        },
    },
    "required": ["type", "allowed_tools"],
}
_FORMAT = {
    "oneOf": [
        {"type": "object", "properties": {"type": {"enum": ["text", "json_object"]}}, "required": ["type"]},
        {
            "type": "object",
            "properties": {
                "type": {"const": "json_schema"},
                "json_schema": {
                    "type": "object",
                    "properties": {"name": _TEXT, "schema": nullable(_OBJECT), "strict": _FLAG},
                },
            },
            "required": ["type", "json_schema"],
        },
    ]
}
_STOP = {"type": "string", "minLength": 1}

_REQUEST: dict[str, Any] = {
    "type": "object",
    "properties": {
        "messages": {"type": "array", "minItems": 1, "items": MESSAGE},
        "max_completion_tokens": nullable({"type": "integer", "minimum": 0}),
        "max_tokens": nullable({"type": "integer", "minimum": 0}),
        "temperature": _number(0, 2),
        "top_p": _number(0, 1),
        "top_k": _integer(0, 20),
        "min_p": _number(0, 1),
        "presence_penalty": _number(-2, 2),
        "frequency_penalty": _number(-2, 2),
        "seed": _integer(-(2**63), 2**64 - 1),
        "stop": {"anyOf": [_STOP, {"type": "array", "maxItems": 4, "items": _STOP}, {"type": "null"}]},
        "n": _integer(1, 8),
        "stream": _FLAG,
        "stream_options": nullable(
            {"type": "object", "properties": {"include_usage": _FLAG, "include_obfuscation": _FLAG}}
        ),
        "timings_per_token": _FLAG,
        "return_progress": _FLAG,
        "logprobs": _FLAG,
        "top_logprobs": _integer(0, 20),
        "reasoning_effort": nullable(
            {"enum": ["none", "minimal", "low", "medium", "high", "xhigh", "max", "default", "auto"]}
        ),
        "enable_thinking": _FLAG,
        "preserve_thinking": _FLAG,
        "thinking_budget": nullable({"type": "integer", "minimum": 1, "maximum": 2**32 - 1}),
        "chat_template_kwargs": nullable(_OBJECT),
        "tools": nullable({"type": "array", "items": _TOOL}),
        "tool_choice": {
            "anyOf": [{"enum": ["auto", "none", "required"]}, _NAMED, _ALLOWED, {"type": "null"}]
        },
        "parallel_tool_calls": _FLAG,
        "response_format": nullable(_FORMAT),
        "user": _TEXT,
        "safety_identifier": nullable({"type": "string", "maxLength": 64}),
        "prompt_cache_key": nullable({"type": "string", "maxLength": 64}),
    },
    "required": ["model", "messages"],
}


def request_schema(models: Iterable[str]) -> dict[str, Any]:
    """The schema of a request to one of these models."""
    return {**_REQUEST, "properties": {"model": {"enum": sorted(models)}, **_REQUEST["properties"]}}


_USAGE = {
    "type": "object",
    "properties": {
        "prompt_tokens": {"type": "integer"},
        "completion_tokens": {"type": "integer"},
        "total_tokens": {"type": "integer"},
    },
    "required": ["prompt_tokens", "completion_tokens", "total_tokens"],
}
_ANSWER = {
    "type": "object",
    "properties": {
        "index": {"type": "integer"},
        "message": {
            "type": "object",
            "properties": {"role": {"const": "assistant"}, "content": {"type": ["string", "null"]}},
            "required": ["role", "content"],
        },
        "finish_reason": {"enum": ["stop", "length", "tool_calls", "function_call"]},
    },
    "required": ["index", "message", "finish_reason"],
}
RESPONSE: dict[str, Any] = {
    "type": "object",
    "properties": {
        "id": {"type": "string"},
        "object": {"const": "chat.completion"},
        "created": {"type": "integer"},
        "model": {"type": "string"},
        "choices": {"type": "array", "items": _ANSWER},
        "usage": _USAGE,
        "timings": _OBJECT,
    },
    "required": ["id", "object", "created", "model", "choices", "usage", "timings"],
}
