"""Tool calls in an answer, strictly: XML calls at its end become names and typed arguments, or stay text.

    <tool_call> <function=NAME> (<parameter=KEY>VALUE</parameter>)* </function> </tool_call>

with space (blank, tab, CR, LF) between the parts, one call or more up to the end of the answer. Parameters in
a VALUE nest; other markers in it are text. Only the schema of the declared tool gives a value its type.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

OPEN, CLOSE = "<tool_call>", "</tool_call>"
SPACE = " \t\r\n"
MAX_NAME = 128
_PARAMETER, _PARAMETER_END = "<parameter=", "</parameter>"
_NAME = re.compile(rf"[A-Za-z0-9_-]{{1,{MAX_NAME}}}")
_NESTING = re.compile(f"{_PARAMETER}|{_PARAMETER_END}")
_TYPES = frozenset(("string", "integer", "number", "boolean", "object", "array", "null"))
_OMITTED = object()

Types = frozenset[str] | None
"""JSON types that a parameter may have; None if its schema doesn't say."""


@dataclass(frozen=True)
class Parsed:
    """An answer taken apart.

    `failure` says why text with a marker is all content: malformed_structure, duplicate_parameter,
    invalid_tool_name, undeclared_tool or trailing_content. `mismatches` arguments don't fit their schema.
    """

    content: str
    calls: tuple[tuple[str, dict[str, Any]], ...] = ()
    failure: str | None = None
    mismatches: int = 0


def parse_calls(text: str, tools: Sequence[Mapping[str, Any]]) -> Parsed:
    """The calls at the end of `text`, from the first marker from which all the rest is calls.

    `tools` are the declared functions, OpenAI form; without any the text is content.
    """
    declared = _declared(tools)
    failure = None
    begin = text.find(OPEN) if declared else -1
    while begin >= 0:
        reader = _Reader(text, begin)
        try:
            calls = reader.calls(declared)
        except _Malformed as error:
            failure = failure or str(error)
            begin = text.find(OPEN, begin + 1)
        else:
            return Parsed(text[:begin].rstrip(SPACE), calls, None, reader.mismatches)
    return Parsed(text, failure=failure)


class _Malformed(Exception):
    """The text from a marker on isn't calls; the message is the kind of failure."""


class _Reader:
    """Reads calls from `begin` on."""

    def __init__(self, text: str, begin: int) -> None:
        self._text, self._at = text, begin
        self.mismatches = 0

    def calls(self, declared: Mapping[str, _Tool]) -> tuple[tuple[str, dict[str, Any]], ...]:
        calls = []
        while True:
            self._expect(OPEN)
            self._skip()
            calls.append(self._function(declared))
            self._skip()
            self._expect(CLOSE)
            self._skip()
            if self._at == len(self._text):
                return tuple(calls)
            if not self._text.startswith(OPEN, self._at):
                raise _Malformed("trailing_content")

    def _function(self, declared: Mapping[str, _Tool]) -> tuple[str, dict[str, Any]]:
        self._expect("<function=")
        name = self._until_bracket()
        if not _NAME.fullmatch(name):
            raise _Malformed("invalid_tool_name")
        if name not in declared:
            raise _Malformed("undeclared_tool")
        arguments, seen = {}, set()
        self._skip()
        while not self._take("</function>"):
            self._expect(_PARAMETER)
            key = self._until_bracket()
            if not key:
                raise _Malformed("malformed_structure")
            if key in seen:
                raise _Malformed("duplicate_parameter")
            seen.add(key)
            value, mismatch = declared[name].value(key, self._value())
            self.mismatches += mismatch
            if value is not _OMITTED:
                arguments[key] = value
            self._skip()
        return name, arguments

    def _value(self) -> str:
        begin, depth = self._at, 1
        for match in _NESTING.finditer(self._text, begin):
            depth += 1 if match[0] == _PARAMETER else -1
            if depth == 0:
                self._at = match.end()
                return self._text[begin : match.start()]
        raise _Malformed("malformed_structure")

    def _until_bracket(self) -> str:
        end = self._text.find(">", self._at)
        if end < 0:
            raise _Malformed("malformed_structure")
        begin, self._at = self._at, end + 1
        return self._text[begin:end]

    def _take(self, literal: str) -> bool:
        found = self._text.startswith(literal, self._at)
        self._at += len(literal) * found
        return found

    def _expect(self, literal: str) -> None:
        if not self._take(literal):
            raise _Malformed("malformed_structure")

    def _skip(self) -> None:
        while self._text[self._at : self._at + 1] in (*SPACE,):
            self._at += 1


@dataclass(frozen=True)
class _Tool:
    """A declared function: parameter -> its types, or None where two tools of this name differ."""

    parameters: Mapping[str, Types] | None

    def value(self, key: str, text: str) -> tuple[Any, bool]:
        """A parameter's value, `_OMITTED` if it is left out, and whether it doesn't fit the schema."""
        types = self.parameters.get(key) if self.parameters is not None else None
        undeclared = self.parameters is not None and key not in self.parameters
        if types is None:
            bare = text.strip(SPACE)
            return _json(bare, otherwise=bare), undeclared
        framed = re.sub(r"\A\r?\n|\r?\n\Z", "", text)
        if "string" in types:
            return framed, False
        bare = framed.strip(SPACE)
        if not bare:
            return _OMITTED, False
        value = _json(bare, otherwise=_OMITTED)
        if value is not _OMITTED:
            return value, not any(_is(value, name) for name in types)
        if "boolean" in types and bare.lower() in ("true", "false"):
            return bare.lower() == "true", False
        return framed, True


def _declared(tools: Sequence[Mapping[str, Any]]) -> dict[str, _Tool]:
    schemas: dict[str, Any] = {}
    ambiguous = set()
    for tool in tools:
        function = tool.get("function", tool)
        name, schema = function["name"], function.get("parameters") or {}
        if schemas.setdefault(name, schema) != schema:
            ambiguous.add(name)
    return {
        name: _Tool(
            None
            if name in ambiguous
            else {key: _types(value) for key, value in (schema.get("properties") or {}).items()}
        )
        for name, schema in schemas.items()
    }


def _types(schema: Any) -> Types:
    if not isinstance(schema, Mapping):
        return None
    if "type" in schema:
        names = [schema["type"]] if isinstance(schema["type"], str) else schema["type"]
        known = isinstance(names, list) and all(isinstance(name, str) and name in _TYPES for name in names)
        return frozenset(names) if names and known else None
    unions = [schema[word] for word in ("anyOf", "oneOf") if word in schema]
    if len(unions) != 1 or not isinstance(unions[0], list) or not unions[0]:
        return None
    parts = [_types(part) for part in unions[0]]
    known_parts = [part for part in parts if part is not None]
    return frozenset().union(*known_parts) if len(known_parts) == len(parts) else None


def _json(text: str, *, otherwise: Any) -> Any:
    try:
        return json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return otherwise


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
