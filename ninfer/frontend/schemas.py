"""JSON schemas as parts of grammars: what llguidance can enforce, and text that isn't JSON.

Schemas go to llguidance nearly as they are; it enforces all it accepts and refuses the rest by name.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NoReturn

from ninfer.errors import GrammarError

# Between the parts of a JSON value: one newline with indentation, or two blanks, so that no model can go on
# with space for ever.
JSON_SPACE = r"\n[ \t]{0,64}| {1,2}"
_ANY = "any-value"
COMBINERS = ("allOf", "anyOf", "oneOf", "not", "if", "then", "else", "$ref", "$dynamicRef")
ANNOTATIONS = frozenset(
    (
        "title", "description", "default", "examples", "example", "deprecated", "readOnly", "writeOnly",
        "$comment", "$schema", "$id",
    )
)  # fmt: skip
_MAX_TRIED = 200
_DIGITS = "[0-9]"
_DATE = rf"{_DIGITS}{{4}}-(0[1-9]|1[0-2])-(0[1-9]|[12][0-9]|3[01])"
_TIME = rf"([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\.{_DIGITS}{{1,9}})?(Z|[+-]([01][0-9]|2[0-3]):[0-5][0-9])"
_LABEL = r"[A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
_OCTET = r"(25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])"
_FORMATS = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}T{_TIME}",
    "duration": r"P([0-9]+[YMWD]|([0-9]+D)?T([0-9]+H)?([0-9]+M)?[0-9]+S|([0-9]+D)?T([0-9]+H|[0-9]+M))",
    "email": rf"[A-Za-z0-9_+-]+(\.[A-Za-z0-9_+-]+)*@{_LABEL}(\.{_LABEL}){{1,3}}",
    "hostname": rf"{_LABEL}(\.{_LABEL}){{0,3}}",
    "ipv4": rf"{_OCTET}(\.{_OCTET}){{3}}",
    "ipv6": r"([0-9a-fA-F]{1,4}:){7}[0-9a-fA-F]{1,4}|([0-9a-fA-F]{1,4}:){1,5}(:[0-9a-fA-F]{1,4}){1,2}|::1?",
    "uuid": "[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}",
    "uri": r"[A-Za-z][A-Za-z0-9+.-]*:[A-Za-z0-9._~:/?#@!$&'()*+,;=-]+",
}


# JSON


def json_part(schema: Any, *, root: Any = None, forbidden: Sequence[str] = ()) -> str:
    """The grammar of the JSON values that follow `schema`.

    References in it are relative to `root` (None: to itself). No string spells a text of `forbidden`, each of
    which begins with its only `<`, as far as the schema says what is a string.
    """
    whole: dict[str, Any]
    if root is not None and any(True for _ in _references(schema)):
        whole = {"$defs": {"root": _rebased(root), "this": _rebased(schema)}, "$ref": "#/$defs/this"}
    else:
        whole = {} if schema is True else _mapping(schema)
    whole = _plain(whole)
    if forbidden:
        whole = _Guard(forbidden).root(whole)
    whole["x-guidance"] = {"whitespace_pattern": JSON_SPACE}
    return "%json " + json.dumps(whole, ensure_ascii=False)


def _mapping(schema: Any) -> dict[str, Any]:
    if schema is False:
        raise GrammarError("The JSON schema false allows no value at all.")
    if not isinstance(schema, Mapping):
        raise GrammarError(f"A JSON schema must be an object, not {json.dumps(schema, default=repr):.80}.")
    return dict(schema)


def subschemas(schema: Any) -> Iterator[tuple[str, Any]]:
    """The schemas directly inside a schema, each with its path from there."""
    if not isinstance(schema, Mapping):
        return
    for word, value in schema.items():
        if word in ("properties", "patternProperties", "$defs", "definitions") and isinstance(value, Mapping):
            for name, inner in value.items():
                yield f"{word}/{name}", inner
        elif word in ("allOf", "anyOf", "oneOf", "prefixItems") and isinstance(value, list):
            for number, inner in enumerate(value):
                yield f"{word}/{number}", inner
        elif word in ("items", "additionalProperties", "propertyNames", "not", "contains"):
            yield word, value


def _replaced(schema: Any, change: Any) -> Any:
    """A copy in which `change(word, inner)` stands for each schema directly inside, under keyword `word`."""
    if not isinstance(schema, Mapping):
        return schema
    copy: dict[str, Any] = {}
    for word, value in schema.items():
        if word in ("properties", "patternProperties", "$defs", "definitions") and isinstance(value, Mapping):
            copy[word] = {name: change(word, inner) for name, inner in value.items()}
        elif word in ("allOf", "anyOf", "oneOf", "prefixItems") and isinstance(value, list):
            copy[word] = [change(word, inner) for inner in value]
        elif word in ("items", "additionalProperties"):
            copy[word] = change(word, value)
        else:
            copy[word] = value
    return copy


def _references(schema: Any) -> Iterator[str]:
    if isinstance(schema, Mapping):
        if isinstance(schema.get("$ref"), str):
            yield schema["$ref"]
        for _, inner in subschemas(schema):
            yield from _references(inner)


def _rebased(schema: Any) -> Any:
    """References to the root, which now lies below `$defs`."""
    copy = _replaced(schema, lambda _, inner: _rebased(inner))
    if isinstance(copy, dict) and isinstance(copy.get("$ref"), str) and copy["$ref"].startswith("#"):
        copy["$ref"] = "#/$defs/root" + copy["$ref"][1:]
    return copy


def _plain(schema: Any) -> Any:
    """Without what says nothing, but llguidance would refuse or take for its own."""
    copy = _replaced(schema, lambda _, inner: _plain(inner))
    if isinstance(copy, dict):
        copy.pop("x-guidance", None)
        if copy.get("propertyNames") in ({}, True, {"type": "string"}):
            del copy["propertyNames"]
        if "format" in copy and copy.get("type") in (
            "integer",
            "number",
            "boolean",
            "object",
            "array",
            "null",
        ):
            del copy["format"]
    return copy


class _Guard:
    """Keeps the strings of JSON values from spelling certain texts."""

    def __init__(self, forbidden: Sequence[str]) -> None:
        self._words = tuple(forbidden)
        self._pattern = f"^{pattern_without(forbidden)}$"

    def root(self, schema: dict[str, Any]) -> dict[str, Any]:
        """The guarded schema of a whole value."""
        self._used = False
        guarded = self._schema("", schema)
        if self._used:
            any_value = {"$ref": f"#/$defs/{_ANY}"}
            scalars = [{"type": name} for name in ("null", "boolean", "number")]
            map_of_any = {"patternProperties": {"^[^<]*$": any_value}, "additionalProperties": False}
            nested = [{"type": "array", "items": any_value}, {"type": "object", **map_of_any}]
            text = {"type": "string", "pattern": self._pattern}
            definitions = {**guarded.get("$defs", {}), _ANY: {"anyOf": [*scalars, text, *nested]}}
            guarded = {**guarded, "$defs": definitions}
        return guarded

    def _schema(self, word: str, schema: Any) -> Any:
        inside = "allOf" if word == "allOf" else ""
        if schema is True or (isinstance(schema, Mapping) and not schema.keys() - ANNOTATIONS):
            return schema if inside else self._any()
        copy = _replaced(schema, lambda name, inner: self._schema(inside or name, inner))
        if not isinstance(copy, dict):
            return copy
        if "enum" in copy and isinstance(copy["enum"], list):
            copy["enum"] = [value for value in copy["enum"] if not self._spells(value)]
        if self._spells(copy.get("const")):
            raise GrammarError(f"The constant {copy['const']!r:.80} spells a marker of tool calls.")
        types = copy.get("type")
        types = [types] if isinstance(types, str) else types if isinstance(types, list) else []
        if "string" in types and not copy.keys() & {"enum", "const"}:
            if copy.keys() & {"pattern", "format"}:
                copy["allOf"] = [*copy.get("allOf", ()), {"pattern": self._pattern}]
            else:
                copy["pattern"] = self._pattern
        if inside or copy.keys() & set(COMBINERS):
            return copy
        if "array" in types and "items" not in copy:
            copy["items"] = self._any()
        if "object" in types:
            self._members(copy)
        return copy

    def _members(self, schema: dict[str, Any]) -> None:
        """Members that an object's schema doesn't name: none of their keys has a `<`."""
        others = schema.get("additionalProperties", True)
        others = self._any() if others is True else others
        if others is not False and "patternProperties" not in schema:
            named = schema.get("properties", {})
            required = schema.get("required", [])
            if isinstance(named, dict) and isinstance(required, list):
                named = {**named, **{name: others for name in required if name not in named}}
                schema["properties"] = named
                schema["patternProperties"] = {f"^{_keys_but(list(named))}$": others}
                others = False
        schema["additionalProperties"] = others

    def _any(self) -> dict[str, Any]:
        self._used = True
        return {"$ref": f"#/$defs/{_ANY}"}

    def _spells(self, value: Any) -> bool:
        return any(word in json.dumps(value, ensure_ascii=False) for word in self._words)


def pattern_without(words: Sequence[str]) -> str:
    """A regular expression of the texts without any of `words`, each of which begins with its only `<`."""

    def chunk(tails: Sequence[str]) -> str:
        """Text without `<` that begins with none of `tails`."""
        heads = sorted({tail[0] for tail in tails})
        parts = [f"[^<{''.join(map(re.escape, heads))}][^<]*"]
        for head in heads:
            rests = [tail[1:] for tail in tails if tail[0] == head]
            if "" not in rests:
                parts.append(re.escape(head) + chunk(rests))
        return f"({'|'.join(parts)})?"

    return f"[^<]*(<{chunk([word[1:] for word in words])})*"


def _keys_but(names: Sequence[str]) -> str:
    """A regular expression of the texts without `<` that are none of `names`."""
    heads = sorted({name[0] for name in names if name and name[0] != "<"})
    parts = [f"[^<{''.join(map(re.escape, heads))}][^<]*"]
    parts += [
        re.escape(head) + _keys_but([name[1:] for name in names if name.startswith(head)]) for head in heads
    ]
    return f"({'|'.join(parts)})" + "?" * ("" not in names)


# Text


def text_regexes(schema: Mapping[str, Any]) -> list[str]:
    """Regular expressions that a text must match as a whole to follow the schema of a string."""
    regexes = []
    for word in COMBINERS:
        parts = schema.get(word)
        if word == "allOf" and isinstance(parts, list) and all(map(_is_text_rule, parts)):
            regexes += [regex for part in parts for regex in text_regexes(part)]
        elif word in schema:
            raise GrammarError(f"'{word}' beside a string type can't be enforced in a parameter's text.")
    low, high = schema.get("minLength", 0), schema.get("maxLength")
    for bound in (low, 0 if high is None else high):
        if isinstance(bound, bool) or not isinstance(bound, int) or bound < 0:
            raise GrammarError(f"minLength and maxLength must be whole numbers, not {bound!r:.80}.")
    if high is not None and low > high:
        raise GrammarError(f"minLength {low} is above maxLength {high}.")
    if low or high is not None:
        regexes.append(f"(?s:.{{{low},{'' if high is None else high}}})")
    if "pattern" in schema:
        regexes.append(_whole(schema["pattern"]))
        for regex in (schema["pattern"], regexes[-1]):
            why = complaint(f"start: PATTERN\nPATTERN: {regex_literal(regex)}")
            if why is not None:
                raise GrammarError(f"Its pattern is refused: {why}.")
    if "format" in schema:
        if schema["format"] not in _FORMATS:
            raise GrammarError(
                f"The format {schema['format']!r:.80} can't be enforced; known are {', '.join(_FORMATS)}."
            )
        regexes.append(_FORMATS[schema["format"]])
    return regexes


def _is_text_rule(schema: Any) -> bool:
    words = {"type", "pattern", "minLength", "maxLength", "format"} | ANNOTATIONS
    return isinstance(schema, Mapping) and schema.keys() <= words and schema.get("type", "string") == "string"


def _whole(pattern: Any) -> str:
    """A schema's pattern, which may match anywhere, as an expression of the whole text."""
    if not isinstance(pattern, str):
        raise GrammarError(f"A pattern must be text, not {pattern!r:.80}.")
    parts = []
    for part in _alternatives(pattern):
        begins, ends = part.startswith("^"), re.search(r"(?<!\\)(\\\\)*\$\Z", part) is not None
        inner = part[begins : len(part) - ends]
        if any(character in "^$" for _, character in _bare(inner)):
            raise GrammarError(f"The pattern {pattern!r:.80} has an anchor inside, which can't be enforced.")
        parts.append(("" if begins else "(?s:.*)") + f"(?:{inner})" + ("" if ends else "(?s:.*)"))
    return "|".join(parts)


def _alternatives(pattern: str) -> list[str]:
    depth, begin, parts = 0, 0, []
    for at, character in _bare(pattern):
        if character in "()":
            depth += 1 if character == "(" else -1
        elif character == "|" and depth == 0:
            parts.append(pattern[begin:at])
            begin = at + 1
    return [*parts, pattern[begin:]]


def _bare(pattern: str) -> Iterator[tuple[int, str]]:
    """The characters of a pattern that are neither escaped nor in a class, with their places."""
    at, in_class = 0, False
    while at < len(pattern):
        character = pattern[at]
        if character == "\\":
            at += 1
        elif in_class:
            in_class = character != "]"
        elif character == "[":
            in_class = True
            at += pattern[at + 1 : at + 2] == "^"
            at += pattern[at + 1 : at + 2] == "]"
        else:
            yield at, character
        at += 1


def regex_literal(regex: str) -> str:
    """A regular expression as a literal of a Lark grammar."""
    body = re.sub(r"(\\.)|/", lambda match: match[1] or r"\/", regex, flags=re.DOTALL)
    return "/" + body.replace("\n", r"\n") + "/"


def text_literal(text: str) -> str:
    """A text as a literal of a Lark grammar."""
    return json.dumps(text, ensure_ascii=False)


# Errors


def complaint(grammar: str) -> str | None:
    """Why llguidance refuses a grammar, in a few words; None if it doesn't."""
    from llguidance import LLMatcher

    try:
        grammar.encode()
    except UnicodeEncodeError:
        return "it contains an unpaired surrogate"
    failed, messages = LLMatcher.validate_grammar_with_warnings(grammar)
    return first_line(messages[0]) if failed else None


def first_line(message: str) -> str:
    """What a message of llguidance says, without place, source and dumps."""
    causes = [line for line in message.split("\n") if line.startswith("error: ")]
    line = causes[0][len("error: ") :] if causes else message.split("\n", 1)[0]
    line = re.sub(r"^at \d+\(\d+\): (failed to compile JSON schema: )?", "", line)
    return re.sub(r'token ".*', "the answer left the grammar", line).strip(". ")


def refuse(schema: Any, what: str, why: str, *, root: Any = None) -> NoReturn:
    """Raise GrammarError for `what`, naming the innermost part of `schema` that llguidance refuses too."""
    path, tried = "", 0
    parts = [] if "recursion limit" in why else list(subschemas(schema))
    while parts and tried < _MAX_TRIED:
        step, part = parts.pop(0)
        tried += 1
        if isinstance(part, Mapping) and complaint(f"start: {json_part(part, root=root or schema)}") == why:
            path = f"{path}/{step}"
            parts = list(subschemas(part))
    at = f" at #{path:.300}" if path else ""
    raise GrammarError(f"{what} can't be enforced{at}: {why}.")
