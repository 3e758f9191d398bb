"""The arguments of tool calls: a parameter's text becomes a JSON value of the type its schema declares."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

SPACE = " \t\r\n"
_TYPES = frozenset(("string", "integer", "number", "boolean", "object", "array", "null"))
_OMITTED = object()

Types = frozenset[str] | None
"""JSON types that a parameter may have; None if its schema doesn't say."""


class Argument(NamedTuple):
    """An argument's JSON (None: it is left out), and whether it doesn't fit its schema."""

    json: str | None
    mismatch: bool = False


@dataclass(frozen=True)
class DeclaredTool:
    """A declared function: parameter -> its types, or None where two tools of this name differ."""

    parameters: Mapping[str, Types] | None

    def is_text(self, key: str) -> bool:
        """Is the argument the parameter's text as it stands, whatever it is?"""
        return "string" in (self._types(key) or ())

    def argument(self, key: str, text: str) -> Argument:
        """The argument that the text between a parameter's markers stands for."""
        types = self._types(key)
        if types is None:
            undeclared = self.parameters is not None and key not in self.parameters
            bare = text.strip(SPACE)
            return Argument(bare if _parsed(bare) is not _OMITTED else encoded(bare), undeclared)
        framed = re.sub(r"\A\r?\n|\r?\n\Z", "", text)
        if "string" in types:
            return Argument(encoded(framed))
        bare = framed.strip(SPACE)
        if not bare:
            return Argument(None)
        value = _parsed(bare)
        if value is not _OMITTED:
            return Argument(bare, not any(_is(value, name) for name in types))
        if "boolean" in types and bare.lower() in ("true", "false"):
            return Argument(bare.lower())
        return Argument(encoded(framed), True)

    def _types(self, key: str) -> Types:
        return self.parameters.get(key) if self.parameters is not None else None


class ArrivingValue:
    """The value of the parameter `key` as far as it is there.

    If it `streams`, its text less the newlines that frame it becomes the inside of a JSON string as it comes,
    else it is kept. `depth` counts the open parameter markers, `doubtful` is text from the first marker on
    that might begin the next parameter.
    """

    def __init__(self, key: str, *, streams: bool) -> None:
        self.key = key
        self.streams = streams
        self.depth = 1
        self.doubtful: list[str] | None = None
        self._parts: list[str] = []
        self._started = False
        self._held = ""

    @property
    def text(self) -> str:
        return "".join(self._parts)

    def add(self, text: str) -> str:
        """Take in text; returns the new JSON."""
        if not self.streams:
            self._parts.append(text)
            return ""
        text = self._held + text
        if not self._started:
            if text in ("", "\r"):
                self._held = text
                return ""
            self._started = True
            text = re.sub(r"\A\r?\n", "", text)
        ready = re.sub(r"(?:\r?\n|\r)\Z", "", text)
        self._held = text[len(ready) :]
        return encoded(ready)[1:-1]

    def rest(self, *, framed: bool) -> str:
        """The JSON of what was held back at the end, where a newline is the frame's if there is one."""
        return "" if framed and self._held.endswith("\n") else encoded(self._held)[1:-1]


def declared_tools(tools: Sequence[Mapping[str, Any]]) -> dict[str, DeclaredTool]:
    """The tools (OpenAI form, or bare functions) by name."""
    schemas: dict[str, Any] = {}
    ambiguous = set()
    for tool in tools:
        function = tool.get("function", tool)
        name, schema = function["name"], function.get("parameters") or {}
        if name in schemas and not _same(schemas[name], schema):
            ambiguous.add(name)
        schemas.setdefault(name, schema)
    return {
        name: DeclaredTool(
            None
            if name in ambiguous
            else {key: types_of(value) for key, value in properties_of(schema).items()}
        )
        for name, schema in schemas.items()
    }


def properties_of(schema: Any) -> Mapping[str, Any]:
    """The schemas of an object's declared members."""
    properties = schema.get("properties") if isinstance(schema, Mapping) else None
    return properties if isinstance(properties, Mapping) else {}


def _same(one: Any, other: Any) -> bool:
    try:
        return one == other
    except RecursionError:
        return False


def types_of(schema: Any) -> Types:
    """The types that a parameter's schema names: by `type`, or by one `anyOf` or `oneOf` made of such."""
    try:
        return _types_of(schema)
    except RecursionError:
        return None


def _types_of(schema: Any) -> Types:
    if not isinstance(schema, Mapping):
        return None
    if "type" in schema:
        names = [schema["type"]] if isinstance(schema["type"], str) else schema["type"]
        known = isinstance(names, list) and all(isinstance(name, str) and name in _TYPES for name in names)
        return frozenset(names) if names and known else None
    unions = [schema[word] for word in ("anyOf", "oneOf") if word in schema]
    if len(unions) != 1 or not isinstance(unions[0], list) or not unions[0]:
        return None
    parts = [_types_of(part) for part in unions[0]]
    known_parts = [part for part in parts if part is not None]
    return frozenset().union(*known_parts) if len(known_parts) == len(parts) else None


def encoded(text: str) -> str:
    """`text` as a JSON string."""
    return json.dumps(text, ensure_ascii=False)


def _parsed(text: str) -> Any:
    """The value of a JSON text, or `_OMITTED` if it is none, or spells a half of a surrogate pair: clients
    could not send that back."""
    try:
        value = json.loads(text, parse_constant=_refuse)
        if "\\u" in text:
            json.dumps(value, ensure_ascii=False).encode()
        return value
    except (ValueError, RecursionError):
        return _OMITTED


def _refuse(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _is(value: Any, name: str) -> bool:
    """Does a JSON value have the type? Numbers without a fraction are integers."""
    if isinstance(value, bool):
        return name == "boolean"
    if name == "integer":
        return isinstance(value, int) or (isinstance(value, float) and value.is_integer())
    kinds: dict[str, Any] = {
        "string": str, "number": int | float, "object": dict, "array": list, "null": type(None),
    }  # fmt: skip
    return name in kinds and isinstance(value, kinds[name])
