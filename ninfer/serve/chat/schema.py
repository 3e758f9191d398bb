"""The JSON schemas of Chat Completions for the OpenAPI document; `request` is what checks."""

from __future__ import annotations

from typing import Any

from ninfer.serve.chat.messages import ROLES
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
_MESSAGE = {
    "type": "object",
    "properties": {
        "role": {"enum": list(ROLES)},
        "content": {"anyOf": [{"type": "string"}, {"type": "array", "items": _PART}, {"type": "null"}]},
        "reasoning_content": _TEXT,
        "tool_calls": nullable({"type": "array", "items": _CALL}),
        "tool_call_id": _TEXT,
        "name": _TEXT,
    },
    "required": ["role"],
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
    "type": "object",
    "properties": {
        "type": {"enum": ["text", "json_object", "json_schema"]},
        "json_schema": {
            "type": "object",
            "properties": {"name": {"type": "string"}, "schema": _OBJECT, "strict": _FLAG},
        },
    },
    "required": ["type"],
}
_STOP = {"type": "string", "minLength": 1}

REQUEST: dict[str, Any] = {
    "type": "object",
    "properties": {
        "model": {"type": "string"},
        "messages": {"type": "array", "minItems": 1, "items": _MESSAGE},
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
