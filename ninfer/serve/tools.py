"""What tools have in common in every API: their names, text as input, and arguments in a history."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, NoReturn

from ninfer.serve.fields import Fields, spelled

INPUT_SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"input": {"type": "string"}},
    "required": ["input"],
}
"""The parameters of a tool that takes text: to the model it is a function with one string."""

# Clients that bridge other systems use dots (MCP servers in editors), spaces (OpenFox), slashes, colons; only
# what would end the name inside `<function=...>` can't be had.
_NAME = re.compile(r"[^\s<>\"'={}]([^<>\"'={}\x00-\x1f\x7f]{0,126}[^\s<>\"'={}])?")


def read_name(tool: Fields) -> str:
    """The name of a declared tool. Raises `ApiError` 400."""
    name = tool.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        tool.refuse(
            "name",
            "must have 1 to 128 characters, none of them < > = { } or a quote, and no space at its ends, "
            f"not {spelled(name)}",
            "invalid_tool_name",
        )
    return name


def arguments_of(text: str | Mapping[str, Any] | None) -> dict[str, Any]:
    """The arguments of a call in the history, as an object.

    Clients send back what a model once wrote, broken JSON included: that becomes one argument `arguments`,
    so that the conversation goes on and the model sees its mistake.
    """
    if isinstance(text, Mapping):
        return dict(text)
    if not text or not text.strip():
        return {}
    try:
        value = json.loads(text, parse_constant=_refuse)
        if "\\u" in text:
            json.dumps(value, ensure_ascii=False).encode()  # fails at halves of surrogate pairs
    except (ValueError, RecursionError):
        value = None
    return value if isinstance(value, dict) else {"arguments": text}


def _refuse(constant: str) -> NoReturn:
    raise ValueError(constant)
