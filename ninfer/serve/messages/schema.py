"""The JSON schemas of the Messages API for the OpenAPI document; `request` is what checks."""

from __future__ import annotations

from typing import Any

from ninfer.frontend.options import EFFORTS
from ninfer.serve.openapi import PLAIN, nullable, operation

Schema = dict[str, Any]
_TEXT: Schema = {"type": "string"}
_NAME: Schema = {"type": "string", "minLength": 1, "maxLength": 128}
_FLAG = nullable({"type": "boolean"})
_OBJECT: Schema = {"type": "object"}


def _object(required: dict[str, Schema], optional: dict[str, Schema] | None = None) -> Schema:
    return {
        "type": "object",
        "properties": {**required, **(optional or {})},
        "required": list(required),
    }


def _array(items: Schema, **members: Any) -> Schema:
    return {"type": "array", "items": items, **members}


def _one_of(*values: str) -> Schema:
    return {"enum": list(values)}


_CACHE = nullable(_object({"type": {"const": "ephemeral"}}, {"ttl": _one_of("5m", "1h")}))


def _block(kind: str, **members: Schema) -> Schema:
    return _object({"type": {"const": kind}, **members}, {"cache_control": _CACHE})


_TEXT_BLOCK = _block("text", text=_TEXT)
_IMAGE = _block("image", source=_OBJECT)
_DOCUMENT = _block("document", source=_OBJECT)
_REFERENCE = _block("tool_reference", tool_name=_TEXT)
_CALL = _block("tool_use", id=_TEXT, name=_NAME, input=_OBJECT)
_THINKING = _object({"type": {"const": "thinking"}, "thinking": _TEXT, "signature": _TEXT})
_HIDDEN = _object({"type": {"const": "redacted_thinking"}, "data": _TEXT})
_RESULT = _object(
    {"type": {"const": "tool_result"}, "tool_use_id": _TEXT},
    {
        "content": {"anyOf": [_TEXT, _array({"anyOf": [_TEXT_BLOCK, _IMAGE, _DOCUMENT, _REFERENCE]})]},
        "is_error": _FLAG,
        "cache_control": _CACHE,
    },
)


def _message(role: str, *blocks: Schema) -> Schema:
    content = {"anyOf": [_TEXT, _array({"anyOf": list(blocks)})]}
    return _object({"role": {"const": role}, "content": content})


_MESSAGE: Schema = {
    "anyOf": [
        _message("user", _TEXT_BLOCK, _IMAGE, _DOCUMENT, _RESULT),
        _message("assistant", _TEXT_BLOCK, _THINKING, _HIDDEN, _CALL),
        _message("system", _TEXT_BLOCK),
    ]
}
_TOOL = _object(
    {"name": _NAME, "input_schema": _OBJECT},
    {
        "type": nullable({"const": "custom"}),
        "description": nullable(_TEXT),
        "strict": _FLAG,
        "defer_loading": _FLAG,
        "cache_control": _CACHE,
    },
)
_CHOICE = _object(
    {"type": _one_of("auto", "any", "tool", "none")}, {"name": _TEXT, "disable_parallel_tool_use": _FLAG}
)
_THINK = _object(
    {"type": _one_of("enabled", "adaptive", "disabled")},
    {
        "budget_tokens": {"type": "integer", "minimum": 1024},
        "display": nullable(_one_of("summarized", "omitted")),
    },
)
_FORMAT = _object({"type": {"const": "json_schema"}, "schema": _OBJECT})
_PROMPT = {
    "system": nullable({"anyOf": [_TEXT, _array(_TEXT_BLOCK)]}),
    "tools": nullable(_array(_TOOL)),
    "tool_choice": nullable(_CHOICE),
    "thinking": nullable(_THINK),
    "output_config": nullable(
        _object({}, {"effort": nullable(_one_of(*EFFORTS)), "format": nullable(_FORMAT)})
    ),
    "cache_control": _CACHE,
    "preserve_thinking": _FLAG,
    "chat_template_kwargs": nullable(_OBJECT),
}
_GENERATION = {
    "max_tokens": nullable({"type": "integer", "minimum": 1}),
    "stream": _FLAG,
    "stop_sequences": nullable(_array({"type": "string", "minLength": 1})),
    "temperature": nullable({"type": "number", "minimum": 0, "maximum": 1}),
    "top_p": nullable({"type": "number", "minimum": 0, "maximum": 1}),
    "top_k": nullable({"type": "integer", "minimum": 0, "maximum": 20}),
}
_REQUIRED = {"model": {"type": "string", "minLength": 1}, "messages": _array(_MESSAGE, minItems=1)}
_COUNT: Schema = {"type": "integer", "minimum": 0}
_USAGE = _object({"input_tokens": _COUNT, "cache_read_input_tokens": _COUNT, "output_tokens": _COUNT})
_ANSWER = _object(
    {
        "id": _TEXT,
        "type": {"const": "message"},
        "role": {"const": "assistant"},
        "model": _TEXT,
        "content": _array({"anyOf": [_TEXT_BLOCK, _THINKING, _CALL]}),
        "stop_reason": _one_of(
            "end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"
        ),
        "stop_sequence": nullable(_TEXT),
        "usage": _USAGE,
    }
)

CREATE = operation(
    "Answer a conversation (Anthropic Messages)",
    body=_object(_REQUIRED, {**_PROMPT, **_GENERATION}),
    ok=_ANSWER,
    stream=True,
    errors=(*PLAIN, 504, 529),
    anthropic=True,
)
COUNT = operation(
    "Count the tokens of a conversation (Anthropic Messages)",
    body=_object(_REQUIRED, _PROMPT),
    ok=_object({"input_tokens": _COUNT}),
    errors=(*PLAIN, 504),
    anthropic=True,
)
