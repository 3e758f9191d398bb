"""Grammars: what they let through is what they promise, checked token by token through a session's masks."""

import json
import random
from collections.abc import Callable, Mapping
from typing import Any

import jsonschema_rs
import numpy as np
import pytest

from ninfer.errors import FrontendError, GrammarError
from ninfer.events import Channel
from ninfer.frontend import (
    ANY_OBJECT,
    CallEnded,
    CallParser,
    ContentText,
    Frontend,
    OutputSession,
    Prompt,
    json_object,
    json_schema,
    maintained_template,
    tool_calls,
)

TOOLED = Prompt([], "", starts_in_thinking=False, declares_tools=True)
WORDS = 32


def tool(name: str, properties: Mapping[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    parameters = {} if properties is None else {"type": "object", "properties": properties, **more}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


def allowed(session: OutputSession) -> set[int]:
    masks = np.zeros((1, WORDS), np.int32)
    assert session.fill_masks((), masks) == 1
    return set(np.flatnonzero(np.unpackbits(masks.view(np.uint8), bitorder="little")).tolist())


def accepted(frontend: Frontend, grammar: str | None, text: str) -> str | None:
    """None if the grammar lets `text` through as a whole answer, else how far it got."""
    assert grammar is not None
    session = frontend.session(TOOLED, grammar=grammar)
    done = b""
    for token in frontend._tokenizer.encode_exactly(text):
        if token not in allowed(session):
            return done.decode("utf-8", "replace")
        session.push(token)
        done += frontend.token_bytes(token)
    return None if allowed(session) & set(frontend.stop_token_ids) else done.decode() + "…"


Check = Callable[[str | None, str], str | None]


@pytest.fixture
def check(qwen: Frontend) -> Check:
    return lambda grammar, text: accepted(qwen, grammar, text)


# JSON

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer", "minimum": 0}},
    "required": ["name"],
    "additionalProperties": False,
}


@pytest.mark.parametrize(
    "text", ["{}", '{"a": [1, {"b": null}], "c": "é\\n<tool_call>"}', "\n\n{\n    \n\t}"[:3] + "}"]
)
def test_any_object(check: Check, text: str) -> None:
    assert check(json_object(), text) is None


@pytest.mark.parametrize(
    "text",
    ["[]", "1", '"a"', "{} ", "{}{}", "{a: 1}", "x", "{'a': 1}", '{"a": NaN}', '{"a": 1,}', "```json\n{}```"],
)
def test_nothing_but_an_object(check: Check, text: str) -> None:
    assert check(json_object(), text) is not None


@pytest.mark.parametrize(
    ("text", "fits"),
    [
        ('{"name": "Ada"}', True),
        ('{"name": "Ada", "age": 36}', True),
        ('\n\n{\n    "name": "Ada",\n    "age": 36\n}', True),
        ('{"name":"Ada","age":36}', True),
        ('{"age": 36, "name": "Ada"}', False),
        ('{"name": "Ada", "age": -1}', False),
        ('{"name": "Ada", "size": 1}', False),
        ('{"name": 1}', False),
        ("{}", False),
    ],
)
def test_a_schema(check: Check, text: str, fits: bool) -> None:
    assert (check(json_schema(PERSON), text) is None) is fits


def test_space_is_bounded(check: Check) -> None:
    grammar = json_object()
    assert check(grammar, "\n" * 8 + "{}") is None
    assert check(grammar, "\n" * 9 + "{}") is not None
    assert check(grammar, '{\n\t\t\t\t"a":  1}') is None
    assert check(grammar, '{\n\n"a": 1}') is not None
    assert check(grammar, '{   "a": 1}') is not None
    assert check(grammar, "{\n" + " " * 65 + "}") is not None


@pytest.mark.parametrize(
    "schema", [True, {}, {"type": "array", "items": {"enum": [1, "b"]}}, {"const": {"a": []}}]
)
def test_schemas_of_other_things(check: Check, schema: Any) -> None:
    for value in ({"a": []}, [1, "b"], "x"):
        valid = jsonschema_rs.validator_for(schema).is_valid(value)
        assert (check(json_schema(schema), json.dumps(value)) is None) is valid


def test_a_recursive_schema(check: Check) -> None:
    schema = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "type": "object",
        "properties": {"next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}},
        "required": ["next"],
        "additionalProperties": False,
        "propertyNames": {"type": "string"},
        "x-guidance": {"whitespace_flexible": False, "lenient": True},
    }
    grammar = json_schema(schema)
    assert check(grammar, '{"next": {"next": null}}') is None
    assert check(grammar, '{"next": {"next": 1}}') is not None


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"not": {}}, r"^The JSON schema can't be enforced: Unimplemented keys: \[\"not\"\]\.$"),
        (
            {"type": "object", "properties": {"a": {"type": "array", "items": {"uniqueItems": True}}}},
            r"^The JSON schema can't be enforced at #/properties/a/items: Unimplemented keys: ..uniqueItems",
        ),
        (
            {"anyOf": [{}, {"$ref": "#/$defs/x"}], "$defs": {"x": {"if": {}}}},
            r"at #/(anyOf/1|\$defs/x): .*if",
        ),
        ({"properties": {"a": {"pattern": "(?=a)", "type": "string"}}}, "at #/properties/a: look-around"),
        ({"type": "text"}, "Invalid type"),
        ({"type": "object", "required": ["a"], "properties": {"a": False}}, "unsatisfiable"),
        (False, "^The JSON schema false allows no value"),
        ({"type": "string", "minLength": 3, "maxLength": 1}, "minLength"),
        ({"$ref": "https://example.com/schema"}, "not present"),
        (7, "^A JSON schema must be an object, not 7"),
        ({"enum": ["\ud800"]}, "surrogate"),
    ],
)
def test_what_cannot_be_enforced_is_named(schema: Any, message: str) -> None:
    with pytest.raises(GrammarError, match=message) as raised:
        json_schema(schema)
    assert isinstance(raised.value, FrontendError)
    assert "\n" not in str(raised.value)
    assert str(raised.value).endswith(".")


@pytest.mark.parametrize("depth", [200, 20_000])
def test_deep_schemas_are_refused(depth: int) -> None:
    schema: dict[str, Any] = {}
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    with pytest.raises(GrammarError, match=r"can't be enforced: (it is nested too deeply|.*recursion limit)"):
        json_schema(schema)


def test_a_schema_without_any_value_is_refused_by_the_session(qwen: Frontend) -> None:
    with pytest.raises(GrammarError, match="allows nothing here"):
        qwen.session(TOOLED, grammar='start: json\njson: %json {"$ref": "#"}')
    # Or later, where the first tokens might begin a value.
    schema = {"type": "array", "prefixItems": [{"$ref": "#/prefixItems/0"}], "minItems": 1}
    session = qwen.session(TOOLED, grammar=json_schema(schema))

    def go_on() -> None:
        for _ in range(80):
            session.accept([min(allowed(session))])

    with pytest.raises(GrammarError, match="allows nothing here"):
        go_on()


# Tool calls

LOOK = tool("look", {"text": {"type": "string"}, "count": {"type": "integer"}}, required=["text"])
FIND = tool("find", {"query": {"type": "string"}, "limit": {}})
FREE = tool("free")
TOOLS = [LOOK, FIND, FREE]


def call(name: str, *parameters: tuple[str, str]) -> str:
    body = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in parameters)
    return f"<tool_call>\n<function={name}>\n{body}</function>\n</tool_call>"


GOOD = call(
    "look", ("text", "a <b>\n\n</p> <parameters </parameter </function>\n</tool_call>"), ("count", "3")
)


@pytest.mark.parametrize("template", ["qwen3_6", "qwen3_8"])
def test_calls_as_templates_show_them(check: Check, with_template: Any, template: str) -> None:
    calls = [
        {"name": "look", "arguments": {"text": "a\nb\n", "count": 3}},
        {"name": "free", "arguments": {"deep": {"a": [1, "é"]}}},
        {"name": "find", "arguments": {"limit": "", "query": "x"}},
    ]
    messages = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "", "tool_calls": calls},
        {"role": "tool", "content": "ok"},
    ]
    text = with_template(maintained_template(template)).render(messages).text
    shown = text[text.index("<tool_call>") : text.rindex("</tool_call>") + len("</tool_call>")]
    for strict in ((), ("look",)):
        assert check(tool_calls(TOOLS, "required", strict=strict), "\n\n" + shown) is None
        assert check(tool_calls(TOOLS, "auto", strict=["look"]), shown) is None


@pytest.mark.parametrize(
    "text",
    [
        "",
        "Sure.",
        "Sure.\n" + GOOD,
        GOOD + "\n",
        GOOD + "Done.",
        GOOD + GOOD,
        call("other"),
        call("look", ("what", "a")),
        call("look", ("text", "a"), ("text", "b")),
        call("look", ("text", "<parameter=x>")),
        call("look").replace("</function>", ""),
        "<tool_call><function=look></function></tool_call>",
        '<tool_call>\n{"name": "look"}\n</tool_call>',
    ],
)
def test_required_means_calls_and_nothing_else(check: Check, text: str) -> None:
    assert check(tool_calls(TOOLS, "required"), text) is not None


def test_required(check: Check) -> None:
    grammar = tool_calls(TOOLS, "required")
    assert check(grammar, GOOD) is None
    assert check(grammar, f"\n\n{GOOD}\n{call('free', ('any key', '1'), ('é', ''))}\n{call('find')}") is None
    swapped = call("look", ("count", "no number"), ("text", ""))
    assert check(grammar, swapped) is None  # not strict
    single = tool_calls(TOOLS, "required", parallel=False)
    assert check(single, GOOD) is None
    assert check(single, f"{GOOD}\n{GOOD}") is not None
    named = tool_calls(TOOLS, "required", names=["find"])
    assert check(named, call("find")) is None
    assert check(named, GOOD) is not None
    with_text = tool_calls(TOOLS, "required", content=True)
    assert check(with_text, "Sure <tool_ca>.\n" + GOOD) is None
    assert check(with_text, "Sure.") is not None


def test_strict(check: Check) -> None:
    grammar = tool_calls(TOOLS, "required", strict=["look"])
    assert check(grammar, GOOD) is None
    assert check(grammar, call("look", ("text", "a"))) is None
    for text in (
        call("look"),
        call("look", ("count", "3")),
        call("look", ("count", "3"), ("text", "a")),
        call("look", ("text", "a"), ("count", "3.5")),
        call("look", ("text", "a"), ("count", "")),
        call("look", ("text", "a"), ("more", "1")),
    ):
        assert check(grammar, text) is not None
    assert check(grammar, call("find", ("limit", "x"), ("query", ""))) is None


def test_auto(check: Check) -> None:
    assert tool_calls(TOOLS) is None
    assert tool_calls(TOOLS, names=["find"], strict=["look"]) is None
    grammar = tool_calls(TOOLS, strict=["look"])
    for text in ("", "Sure.", "a <tool_cal> <", "Sure.\n\n" + GOOD, f"{GOOD}\n{call('free')}"):
        assert check(grammar, text + "\n" * text.endswith("<")) is None
    for text in ("<tool_call>", "Sure <tool_call>\nno", call("look"), call("other"), GOOD + "\nDone."):
        assert check(grammar, text) is not None
    assert check(tool_calls(TOOLS, strict=["look"], parallel=False), f"{GOOD}\n{GOOD}") is not None


def test_auto_with_a_schema(check: Check) -> None:
    for strict in ((), ("look",)):
        grammar = tool_calls(TOOLS, strict=strict, schema=ANY_OBJECT)
        assert check(grammar, '\n\n{"a": "<tool"}') is None
        assert check(grammar, GOOD) is None
        for text in ("Sure.", '{"a": "<tool_call>"}', "{}\n" + GOOD, ""):
            assert check(grammar, text) is not None
    assert tool_calls([], schema=PERSON) == json_schema(PERSON)


def test_none(check: Check) -> None:
    grammar = tool_calls(TOOLS, "none")
    for text in ("", "Sure, with {braces} & </tool_call>.", "<tool_call", "a <<tool_<tool_calls"):
        assert check(grammar, text + "\n") is None
    for text in ("<tool_call>", "Sure. <tool_call>\n", "<<tool_<tool_call>"):
        assert check(grammar, text) is not None


def test_what_a_choice_needs() -> None:
    for tools, names in (([], None), (TOOLS, ["other"])):
        with pytest.raises(GrammarError, match="no tool that may be called"):
            tool_calls(tools, "required", names=names)


def test_llama_models_follow_the_same_grammars(llama: Frontend) -> None:
    assert accepted(llama, json_object(), '{"a": 1}') is None
    grammar = tool_calls(TOOLS, "required")
    assert grammar is not None
    assert accepted(llama, grammar, GOOD) is None
    assert accepted(llama, grammar, "Sure.") is not None


# Values of strict parameters

VALUES = [
    ({"type": "string"}, ["", "a\nb\n", " 7 ", "\n"], []),
    ({"type": "string", "minLength": 2, "maxLength": 3}, ["ab", "é<\n"], ["", "a", "abcd"]),
    ({"type": "string", "pattern": "^a+$"}, ["a", "aaa"], ["", "b", "ab", "ba", "a\n"]),
    ({"type": "string", "pattern": "a|^b$|[|$^]/"}, ["xax", "b", "|/", "^/"], ["xb", "c", "|"]),
    ({"type": "string", "pattern": "^(a|b)c"}, ["ac", "bcd"], ["c", "xac"]),
    ({"type": "string", "pattern": "\\$$"}, ["a$"], ["a", "$a"]),
    ({"type": "string", "pattern": "[]^]\\n"}, ["]\n", "^\n"], ["\n"]),
    ({"type": "string", "allOf": [{"pattern": "^[^x]*$"}, {"maxLength": 2}]}, ["ab"], ["ax", "abc"]),
    ({"type": "string", "enum": ["a", "a\nb", "</parameter>"]}, ["a", "a\nb"], ["b", "</parameter>", ""]),
    ({"type": "string", "enum": ["a", "bb", "c"], "minLength": 2}, ["bb"], ["a"]),
    ({"type": "string", "const": "x y"}, ["x y"], ["x"]),
    ({"type": ["string", "null"]}, ["a", "null"], []),
    ({"anyOf": [{"type": "string", "maxLength": 1}, {"type": "integer"}]}, ["a", "1"], ["12"]),
    ({"anyOf": [{"type": "string", "const": "a"}, {"enum": ["b"], "type": "string"}]}, ["a", "b"], ["c"]),
    ({"type": "string", "format": "date"}, ["2024-02-29"], ["2024-13-01", "24-01-01", "today"]),
    ({"type": "string", "format": "date-time"}, ["2024-02-29T23:59:59.5+01:00"], ["2024-02-29"]),
    ({"type": "string", "format": "time"}, ["23:59:59Z"], ["24:00:00Z"]),
    ({"type": "string", "format": "duration"}, ["P3D", "PT1H30M0S", "P1DT12H"], ["3 days", "P"]),
    ({"type": "string", "format": "email"}, ["a.b@example.com"], ["a@", "@b", "a b@c.d"]),
    ({"type": "string", "format": "hostname"}, ["example.com", "a"], ["-a", "a..b"]),
    ({"type": "string", "format": "ipv4"}, ["127.0.0.1"], ["256.0.0.1", "1.2.3"]),
    ({"type": "string", "format": "ipv6"}, ["::1", "2001:db8:0:0:0:0:0:1", "fe80::1"], ["1", ":::"]),
    ({"type": "string", "format": "uuid"}, ["12345678-1234-1234-1234-123456789abc"], ["1234"]),
    ({"type": "string", "format": "uri"}, ["https://example.com/a?b=c#d"], ["example", "a b:c"]),
    ({"type": "integer", "minimum": 1, "maximum": 20}, ["1", "20"], ["0", "21", "1.0", "x", '"1"', ""]),
    ({"type": "number"}, ["1", "-1.5e3"], ["NaN", "1.", ""]),
    ({"type": "boolean"}, ["true", "false"], ["True", "1"]),
    ({"type": "null"}, ["null"], ["", "None"]),
    ({"type": ["integer", "null"]}, ["3", "null"], ["a"]),
    ({"type": "array", "items": {"type": "string"}}, ['["a"]', '[\n  "b<"\n]'], ["a", '["</parameter>"]']),
    ({"type": "object", "properties": {"a": {"const": 2}}}, ['{"a": 2, "c": 1}'], ['{"a": 1}', '{"<": 1}']),
    ({"type": "object"}, ['{"a": {"b": ["c<"]}}'], ['{"a": "<parameter="}', '{"a": ["</parameter>"]}']),
    ({"type": "array"}, ['[1, "<p>"]'], ['["<parameter=a>"]', "{}"]),
    ({"type": "object", "additionalProperties": {"type": "integer"}}, ['{"a": 1}'], ['{"a": "b"}']),
    ({"enum": ["a", 1, "1", None, "x<y"]}, ["a", "1", '"1"', "null", "x<y"], ["b", ""]),
    ({"enum": ["</parameter>"]}, ['"\\u003c/parameter>"'], ["</parameter>"]),
    ({"const": [1, "a"]}, ['[1, "a"]'], ["[1]"]),
    ({"$ref": "#/$defs/side"}, ['"left"'], ['"up"', "left"]),
    ({"$ref": "#/properties/other"}, ["7"], ["x"]),
    ({"anyOf": [{"$ref": "#/$defs/side"}, {"type": "null"}]}, ['"right"', "null"], ['"up"']),
    (True, ["a", "", "{"], []),
    ({"description": "anything"}, ["a", "7"], []),
]  # fmt: skip
ROOT = {"$defs": {"side": {"type": "string", "enum": ["left", "right"]}}}


@pytest.mark.parametrize(("schema", "good", "bad"), VALUES, ids=[json.dumps(case[0])[:60] for case in VALUES])
def test_values_of_strict_parameters(check: Check, schema: Any, good: list[str], bad: list[str]) -> None:
    """What is let through is read as a value that follows the schema."""
    declared = tool("f", {"x": schema, "other": {"type": "integer"}}, required=["x"], **ROOT)
    grammar = tool_calls([declared], "required", strict=["f"])
    validator = jsonschema_rs.validator_for(declared["function"]["parameters"], validate_formats=True)
    for value in good:
        text = call("f", ("x", value))
        assert check(grammar, text) is None
        parser = CallParser([declared])
        *_, ended = parser.feed(Channel.TOOL, text)
        assert isinstance(ended, CallEnded)
        assert validator.is_valid(json.loads(ended.arguments_json))
    for value in bad:
        assert check(grammar, call("f", ("x", value))) is not None


DEEP: dict[str, Any] = {"type": "string"}
for _ in range(20_000):
    DEEP = {"anyOf": [DEEP]}


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"type": "string", "pattern": "a(^b)"}, "anchor inside"),
        ({"type": "string", "pattern": "(?=a)"}, "look-around"),
        ({"type": "string", "pattern": "(a"}, "."),
        ({"type": "string", "pattern": 5}, "must be text"),
        ({"type": "string", "format": "color"}, "format 'color'"),
        ({"type": "string", "minLength": -1}, "minLength"),
        ({"type": "string", "minLength": 2, "maxLength": 1}, "above"),
        ({"type": "string", "anyOf": [{}]}, "'anyOf' beside"),
        ({"type": "string", "allOf": [{"enum": ["a"]}]}, "'allOf' beside"),
        ({"anyOf": [{"type": "string"}], "minLength": 1}, "'minLength' beside"),
        ({"oneOf": [{"type": "string"}, {"type": "string", "minLength": 1}]}, "'oneOf' with several"),
        ({"type": "string", "enum": ["</parameter>"]}, "none of its values"),
        ({"type": "string", "enum": [1]}, "none of its values"),
        ({"type": "string", "enum": 1}, "must be an array"),
        ({"type": "string", "enum": ["a" * 40 + "!"], "pattern": "^(a+)+$"}, "beside listed values"),
        ({"enum": ["a"], "maxLength": "1"}, "whole numbers"),
        (5, "is no object"),
        (DEEP, "nested too deeply|recursion limit"),
        ({"const": DEEP}, "nested too deeply|recursion limit"),
        ({"type": "object", "anyOf": DEEP}, "nested too deeply|recursion limit|anyOf"),
        ({"type": "array", "items": {"not": {}}}, r"at #/items: Unimplemented keys"),
        ({"type": "array", "items": {"$ref": "#/$defs/bad"}}, "Unimplemented keys"),
        ({"$ref": "#/$defs/missing"}, "."),
    ],
)
def test_parameters_that_cannot_be_enforced_are_named(schema: Any, message: str) -> None:
    declared = tool("f", {"x": schema}, **{"$defs": {"bad": {"not": {}}}})
    pattern = f"^(Parameter 'x' of the tool 'f'|Tool calls) can't be enforced.*({message})"
    with pytest.raises(GrammarError, match=pattern) as raised:
        tool_calls([declared], "required", strict=["f"])
    assert "\n" not in str(raised.value)
    if "nested" not in message:
        assert tool_calls([declared, declared], "required") is not None  # fine as long as it isn't strict


@pytest.mark.parametrize(
    ("declared", "message"),
    [
        ([tool("f", {}, required=["x"])], "requires 'x'"),
        ([tool("f", {"x": False}, required=["x"])], "requires 'x'"),
        ([tool("f", {}, anyOf=[])], "'anyOf' at the top"),
        ([tool("f", {}, required=[[]])], "array of strings"),
        ([tool("f", {}, required=5)], "'required' must be an array"),
        ([tool("f", {"a>b": {}})], "no form in a call"),
        ([tool("f>g")], "no form in a call"),
        ([tool("f", {"a": {"type": "string"}}), tool("f", {"a": {"type": "integer"}})], "twice"),
        (
            [{"type": "function", "function": {"name": "f", "parameters": {"type": "array"}}}],
            "no object schema",
        ),
        ([tool("f\ud800", {})], "surrogate"),
    ],
)
def test_tools_that_cannot_be_enforced_are_named(declared: list[Any], message: str) -> None:
    names = [entry["function"]["name"] for entry in declared]
    with pytest.raises(
        GrammarError, match=f"^(The tool|Parameter|Tool calls).* can't be enforced.*{message}"
    ):
        tool_calls(declared, "required", strict=names)


def test_many_parameters(check: Check) -> None:
    properties = {f"p{number}": {"type": "string"} for number in range(70)}
    grammar = tool_calls([tool("f", properties)], "required")
    assert check(grammar, call("f", ("p0", "a"), ("p69", "b"))) is None
    assert check(grammar, call("f", ("p0", "a"), ("p0", "b"))) is not None


# Whatever comes out can be read

WALKED = [
    tool(
        "get",
        {
            "a": {"type": "string"},
            "n": {"type": "integer", "minimum": 0, "maximum": 99},
            "e": {"enum": ["x", 1, "1", "y<z"]},
            "t": {"type": "string", "pattern": "^a+|b", "maxLength": 3},
            "o": {
                "type": "object",
                "properties": {"k": {"type": "string", "maxLength": 5}},
                "required": ["k"],
            },
            "l": {"type": "array", "items": {"anyOf": [{"type": "string"}, {"$ref": "#/$defs/r"}]}},
            "d": {"type": ["string", "null"], "format": "date"},
            "x": {},
            "r": {"$ref": "#/$defs/r"},
            "j": {"type": "object"},
        },
        required=["a", "n", "r"],
        **{
            "$defs": {
                "r": {
                    "type": "object",
                    "properties": {"v": {"type": "integer"}, "next": {"$ref": "#/$defs/r"}},
                    "additionalProperties": False,
                }
            }
        },
    ),
    FIND,
]
GOALS = [
    "\n</parameter>\n", "</function>\n</tool_call>", '"', "}", "]", "</parameter>", "\n", "<", "</tool_call>",
    "<tool_call>", "<parameter=", '"</parameter>', "1", ":", ",", '"a"', "\\", "\r", "<</param", "</functio",
]  # fmt: skip


def walk(frontend: Frontend, grammar: str, seed: int, begin: str = "") -> str | None:
    """An answer by chance, with a liking for what ends things or looks like a marker; None if too long."""
    chance = random.Random(seed)
    session = frontend.session(TOOLED, grammar=grammar)
    goals = [frontend._tokenizer.encode_exactly(goal) for goal in GOALS]
    matcher = session._constraint._matcher  # pyright: ignore
    liking = chance.choice((0.3, 0.6, 0.9))
    text = frontend._tokenizer.encode_exactly(begin)
    session.accept(text)
    while len(text) < 300:
        tokens = allowed(session)
        ends = tokens & set(frontend.stop_token_ids)
        if ends and (tokens == ends or chance.random() < 0.7):
            return frontend.decode(text)
        possible = [goal for goal in goals if matcher.validate_tokens(goal) == len(goal)]
        if possible and chance.random() < liking:
            step = chance.choice(possible)
        else:
            step = [chance.choice(sorted(tokens - ends))]
        session.accept(step)
        text += step
    return None


@pytest.mark.parametrize("choice", ["required", "auto"])
def test_every_answer_can_be_read(qwen: Frontend, choice: Any) -> None:
    grammar = tool_calls(WALKED, choice, strict=["get"])
    assert grammar is not None
    validator = jsonschema_rs.validator_for(WALKED[0]["function"]["parameters"], validate_formats=True)
    calls = 0
    for seed in range(60):
        text = walk(qwen, grammar, seed, "Hm. <tool_call>" if choice == "auto" and seed % 2 else "")
        if text is None:
            continue
        parser = CallParser(WALKED)
        events = parser.feed(Channel.TOOL, text) + parser.close()
        assert parser.report.fallback == "none", text
        for event in events:
            if isinstance(event, CallEnded):
                calls += 1
                assert event.name == "find" or validator.is_valid(json.loads(event.arguments_json)), text
        if choice == "required":
            assert calls
            assert not any(isinstance(event, ContentText) for event in events)
    assert calls > 20


def test_every_json_answer_follows_its_schema(qwen: Frontend) -> None:
    schema = WALKED[0]["function"]["parameters"]
    validator = jsonschema_rs.validator_for(schema, validate_formats=True)
    done = 0
    for seed in range(40):
        text = walk(qwen, json_schema(schema), seed)
        if text is not None:
            assert validator.is_valid(json.loads(text)), text
            done += 1
    assert done > 10
