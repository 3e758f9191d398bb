"""Grammars of answers, for `Frontend.session`: JSON by a schema, and tool calls.

They are Lark grammars as llguidance reads them, and begin where a thinking block has ended: with the space
that models write there. Tool calls have exactly the form that chat templates show (see `calls`).
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Collection, Mapping, Sequence
from functools import lru_cache
from typing import Any, Literal

from ninfer.errors import GrammarError
from ninfer.frontend.calls import CLOSE, FUNCTION, FUNCTION_CLOSE, OPEN, PARAMETER, PARAMETER_CLOSE
from ninfer.frontend.callvalues import DeclaredTool, declared_tools, properties_of, types_of
from ninfer.frontend.schemas import (
    ANNOTATIONS,
    COMBINERS,
    complaint,
    json_part,
    refuse,
    regex_literal,
    text_literal,
    text_regexes,
)

ANY_OBJECT: dict[str, Any] = {"type": "object"}
"""The schema of any JSON object."""

_LEAD = r"LEAD: /[ \t\r\n]{1,8}/"
_MARKERS = (PARAMETER, PARAMETER_CLOSE)
_END_OF_VALUE = f"\n{PARAMETER_CLOSE}\n"
# Text with other rules is one expression. A CR before the end would be taken for a part of the newline.
_SHORT_TEXT = rf"SHORT: /(?s:.*)/ & ~/(?s:.*)({PARAMETER}|<\/parameter>)(?s:.*)/ & ~/(?s:.*)\r/"
_MAX_UNIQUE = 64  # bits of a parametric rule
_UNHEARD = (
    *COMBINERS, "patternProperties", "minProperties", "maxProperties", "dependentRequired",
    "dependentSchemas", "dependencies", "unevaluatedProperties",
)  # fmt: skip
_TEXT_WORDS = ("enum", "const", "pattern", "minLength", "maxLength", "format")


def json_object() -> str:
    """Any JSON object."""
    return json_schema(ANY_OBJECT)


def json_schema(schema: Any) -> str:
    """A JSON value by `schema`: keys in its order, little space. Raises GrammarError, naming the part of the
    schema that can't be enforced."""
    try:
        return _json_schema(json.dumps(schema))
    except RecursionError as error:
        raise GrammarError("The JSON schema can't be enforced: it is nested too deeply.") from error


@lru_cache(maxsize=64)
def _json_schema(asked: str) -> str:
    return _lines("start: LEAD? json", _LEAD, f"json: {_json(json.loads(asked), 'The JSON schema')}")


def tool_calls(
    tools: Sequence[Mapping[str, Any]],
    choice: Literal["auto", "none", "required"] = "auto",
    *,
    names: Collection[str] | None = None,
    strict: Collection[str] = (),
    parallel: bool = True,
    content: bool = False,
    schema: Any = None,
) -> str | None:
    """What `choice` demands of an answer that may call `tools` (OpenAI form); None if it demands nothing.

    none: no call begins. required: a call, or several if `parallel`; `content`: text may come first. auto:
    text, and perhaps such calls behind it; with a `schema`, either a JSON value by it or calls; None without
    one and without strict tools (then a session's `single_call` does what `parallel` says).

    `names` narrows which tools may be called. The arguments of tools in `strict` follow their schemas:
    required parameters are there, undeclared ones are not, in the schema's order. Other tools may be given
    any declared parameters once (any at all if none are declared), whose values are not looked at.

    Raises GrammarError, naming the tool and the part of its schema that can't be enforced.
    """
    try:
        asked = json.dumps(
            [tools, choice, names and sorted(names), sorted(strict), parallel, content, schema]
        )
    except RecursionError as error:
        raise GrammarError("Tool calls can't be enforced: a schema is nested too deeply.") from error
    return _tool_calls(asked)


@lru_cache(maxsize=64)  # clients send their tools with every turn
def _tool_calls(asked: str) -> str | None:
    tools, choice, names, strict, parallel, content, schema = json.loads(asked)
    if choice == "none":
        return _lines("start: text", *_text("text", OPEN))
    declared = declared_tools(tools)
    functions: dict[str, Any] = {}
    for tool in tools:
        function = tool.get("function", tool)
        if names is None or function["name"] in names:
            functions[function["name"]] = function.get("parameters") or {}
    if not functions and choice == "required":
        raise GrammarError("A tool call is required, but there is no tool that may be called; declare one.")
    if choice == "auto" and not (functions.keys() & set(strict) or (functions and schema is not None)):
        return None if schema is None else json_schema(schema)

    rules = _Rules()
    for name, parameters in functions.items():
        rules.tool(declared[name], name, parameters, strict=name in strict)
    bodies = " | ".join(f"tool{number}" for number in range(len(functions)))
    calls = "body" + f" ({text_literal(chr(10) + OPEN)} body)*" * parallel
    calls = f"{text_literal(OPEN)} {calls}"
    if choice == "required":
        start, also = f"text {calls}" if content else f"LEAD? {calls}", [_LEAD]
    elif schema is not None:
        start = f"LEAD? (json | {calls})"
        also = [_LEAD, f"json: {_json(schema, 'The JSON schema', forbidden=(OPEN,))}"]
    else:
        start, also = f"text ({calls})?", []
    grammar = _lines(
        f"start: {start}",
        f"body: {text_literal(chr(10) + FUNCTION)} ({bodies})",
        *_text("text", OPEN),
        *also,
        *rules.lines,
    )
    why = complaint(grammar)
    if why is not None:
        raise GrammarError(f"Tool calls can't be enforced: {why}.")
    return grammar


class _Rules:
    """The rules of tools, `tool0`, `tool1` and so on: each the text of a call from the tool's name on."""

    def __init__(self) -> None:
        self.lines = [
            f"value: plain {text_literal(PARAMETER_CLOSE + chr(10))}",
            *_text("plain", *_MARKERS),
            _SHORT_TEXT,
        ]
        self._tools = 0
        self._values = 0

    def tool(self, tool: DeclaredTool, name: str, parameters: Any, *, strict: bool) -> None:
        self._where = f"The tool {name!r:.140}"
        if not name or ">" in name or "\n" in name:
            raise GrammarError(f"{self._where} can't be enforced: its name has no form in a call.")
        begin, end = text_literal(f"{name}>\n"), text_literal(f"{FUNCTION_CLOSE}\n{CLOSE}")
        rule = f"tool{self._tools}"
        self._tools += 1
        if strict:
            self.lines.append(f"{rule}: {begin} {self._strict(tool, parameters)} {end}")
            return
        keys = [key for key in properties_of(parameters) if _is_key(key)]
        if not keys:
            anything = (
                f"({text_literal(PARAMETER)} /[^<>\\r\\n]{{1,64}}/ {text_literal('>' + chr(10))} value)*"
            )
            self.lines.append(f"{rule}: {begin} {anything} {end}")
        elif len(keys) <= _MAX_UNIQUE:
            self.lines += [f"{rule}: {begin} {rule}_::0x0", f"{rule}_::_: {end}"]
            self.lines += [
                f" | {_opening(key)} value {rule}_::set_bit({bit}) %if bit_clear({bit})"
                for bit, key in enumerate(keys)
            ]
        else:
            optional = " ".join(f"({_opening(key)} value)?" for key in keys)
            self.lines.append(f"{rule}: {begin} {optional} {end}")

    def _strict(self, tool: DeclaredTool, parameters: Any) -> str:
        """What stands for the parameters of a strict tool."""
        if tool.parameters is None:
            raise GrammarError(f"{self._where} can't be enforced: it is declared twice, and differently.")
        if not isinstance(parameters, Mapping) or parameters.get("type", "object") != "object":
            raise GrammarError(f"{self._where} can't be enforced: its parameters are no object schema.")
        for word in _UNHEARD:
            if word in parameters:
                raise GrammarError(f"{self._where} can't be enforced: '{word}' at the top of its parameters.")
        properties, required = properties_of(parameters), parameters.get("required", [])
        if not isinstance(required, list) or not all(isinstance(key, str) for key in required):
            raise GrammarError(f"{self._where} can't be enforced: 'required' must be an array of strings.")
        for key in required:
            if properties.get(key, False) is False:
                raise GrammarError(
                    f"{self._where} can't be enforced: it requires {key!r:.80}, without schema."
                )
        parts = []
        for key, schema in properties.items():
            if schema is False:
                continue
            where = f"Parameter {key!r:.140} of {self._where[0].lower() + self._where[1:]}"
            if not _is_key(key):
                raise GrammarError(f"{where} can't be enforced: its name has no form in a call.")
            if schema is not True and not isinstance(schema, Mapping):
                raise GrammarError(f"{where} can't be enforced: its schema is no object.")
            try:
                value = self._value(tool, key, schema, parameters, where)
            except RecursionError as error:
                raise GrammarError(f"{where} can't be enforced: it is nested too deeply.") from error
            except GrammarError as error:
                if str(error).startswith(where):
                    raise
                cause = str(error).rstrip(".")
                raise GrammarError(f"{where} can't be enforced: {cause[0].lower()}{cause[1:]}.") from error
            parts.append(f"({_opening(key)} {value})" + "?" * (key not in required))
        return " ".join(parts)

    def _value(self, tool: DeclaredTool, key: str, schema: Any, root: Any, where: str) -> str:
        """The text of a strict parameter, with the marker at its end."""
        if schema is True or not schema.keys() - ANNOTATIONS:
            return "value"
        listed = not schema.keys() & set(COMBINERS) and bool(schema.keys() & {"enum", "const"})
        if tool.is_text(key):
            return self._alternatives(tool, key, _text_branches(schema))
        if listed and types_of(schema) is None:
            return self._alternatives(tool, key, [schema])
        self._values += 1
        self.lines.append(f"json{self._values}: {_json(schema, where, root=root, forbidden=_MARKERS)}")
        return f"json{self._values} {text_literal(_END_OF_VALUE)}"

    def _alternatives(self, tool: DeclaredTool, key: str, branches: Sequence[Mapping[str, Any]]) -> str:
        """Texts that follow one of `branches`."""
        parts = []
        for branch in branches:
            if branch.keys() & {"enum", "const"}:
                parts += [text_literal(text + _END_OF_VALUE) for text in _listed(tool, key, branch)]
                continue
            regexes = text_regexes(branch)
            if not regexes:
                return "value"
            self._values += 1
            number, both = self._values, " & ".join(map(regex_literal, regexes))
            self.lines += [
                f"TEXT{number}: SHORT & {both}",
                f"VALUE{number}: TEXT{number} {text_literal(_END_OF_VALUE)}",
            ]
            parts.append(f"VALUE{number}")
        if not parts:
            raise GrammarError("None of its values has a form in a call.")
        return f"({' | '.join(parts)})"


def _text_branches(schema: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The alternatives of a schema that allow a string."""
    if "type" in schema:
        return [schema]
    word = "anyOf" if "anyOf" in schema else "oneOf"
    for beside in _TEXT_WORDS:
        if beside in schema:
            raise GrammarError(f"'{beside}' beside '{word}' can't be enforced in a parameter's text.")
    branches = [
        branch
        for part in schema[word]
        if "string" in (types_of(part) or ())
        for branch in _text_branches(part)
    ]
    if word == "oneOf" and len(branches) > 1:
        raise GrammarError("'oneOf' with several string types can't be enforced; use 'anyOf'.")
    return branches


def _listed(tool: DeclaredTool, key: str, schema: Mapping[str, Any]) -> list[str]:
    """The values that `enum` and `const` list, as texts which are read as them."""
    values = schema.get("enum", [schema.get("const")])
    if not isinstance(values, list):
        raise GrammarError("'enum' must be an array.")
    for word in ("pattern", "format", *COMBINERS):
        if word in schema:
            raise GrammarError(f"'{word}' beside listed values can't be enforced; drop it.")
    low, high = schema.get("minLength", 0), schema.get("maxLength", math.inf)
    if not isinstance(low, int) or not isinstance(high, int | float):
        raise GrammarError("minLength and maxLength must be whole numbers.")
    texts = []
    for value in values:
        if "const" in schema and value != schema["const"]:
            continue
        if isinstance(value, str) and not low <= len(value) <= high:
            continue
        wanted = json.dumps(value)
        for text in (value, wanted.replace("<", "\\u003c")):
            if not isinstance(text, str) or any(marker in text for marker in _MARKERS):
                continue
            argument = tool.argument(key, f"\n{text}\n").json
            if argument is not None and json.dumps(json.loads(argument)) == wanted:
                texts.append(text)
                break
    return texts


def _json(schema: Any, where: str, *, root: Any = None, forbidden: Sequence[str] = ()) -> str:
    """The checked grammar of a JSON value."""
    try:
        part = json_part(schema, root=root, forbidden=forbidden)
    except RecursionError as error:
        raise GrammarError(f"{where} can't be enforced: it is nested too deeply.") from error
    why = complaint(f"start: {part}")
    if why is not None:
        refuse(schema, where, why, root=root)
    return part


def _is_key(key: str) -> bool:
    return key != "" and ">" not in key


def _opening(key: str) -> str:
    return text_literal(f"{PARAMETER}{key}>\n")


def _text(name: str, *excluded: str) -> list[str]:
    """A rule for text that contains none of `excluded`, each of which begins with its only `<`.

    The text is cut up where one of those might begin: as a single expression it would cost some milliseconds
    a token, the longer the vocabulary the more. It doesn't end where one of them may have begun.
    """
    tails = [word[1:] for word in excluded]
    high = name.upper()
    maybe = regex_literal(f"(<{_beginnings(tails)})*<{_departures(tails)}")
    return [f"{name}: ({high}_PLAIN | {high}_MAYBE)*", f"{high}_PLAIN: /[^<]+/", f"{high}_MAYBE: {maybe}"]


def _beginnings(words: Sequence[str]) -> str:
    """A regular expression of the beginnings of `words`, the empty one included, but not the whole ones."""
    parts = [re.escape(head) + _beginnings(rests) for head, rests in _by_head(words) if "" not in rests]
    return f"({'|'.join(parts)})?" if parts else ""


def _departures(words: Sequence[str]) -> str:
    """A regular expression of the beginnings of `words` and one character more, with which none goes on."""
    heads = _by_head(words)
    parts = [f"[^<{''.join(re.escape(head) for head, _ in heads)}]"]
    parts += [re.escape(head) + _departures(rests) for head, rests in heads if "" not in rests]
    return f"({'|'.join(parts)})"


def _by_head(words: Sequence[str]) -> list[tuple[str, list[str]]]:
    """First characters of `words`, each with what follows it."""
    heads = sorted({word[0] for word in words})
    return [(head, [word[1:] for word in words if word[0] == head]) for head in heads]


def _lines(*lines: str) -> str:
    return "\n".join(lines) + "\n"
