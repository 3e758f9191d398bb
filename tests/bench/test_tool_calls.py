"""The strict parser of tool calls: what counts as calls, and what type their arguments get."""

from typing import Any

import pytest

from bench.tasks.calls import parse_calls


def tool(name: str = "find", **properties: Any) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


FIND = tool(text={"type": "string"}, count={"type": "integer"})


def call(*parameters: tuple[str, str], name: str = "find") -> str:
    body = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in parameters)
    return f"<tool_call>\n<function={name}>\n{body}</function>\n</tool_call>"


def typed(schema: Any, raw: str) -> tuple[dict[str, Any], int]:
    """Arguments and mismatches of one parameter `x` with the schema, whose text is exactly `raw`."""
    text = f"<tool_call><function=f><parameter=x>{raw}</parameter></function></tool_call>"
    parsed = parse_calls(text, [tool("f", x=schema)])
    assert parsed.failure is None
    return parsed.calls[0][1], parsed.mismatches


def test_content_before_calls_is_trimmed_at_its_end_and_order_is_kept():
    text = "  Let me look. \n\n" + call(("count", "3"), ("text", "a b")) + " \r\n\t" + call() + "\n"
    parsed = parse_calls(text, [FIND])
    assert parsed.content == "  Let me look."
    assert parsed.calls == (("find", {"count": 3, "text": "a b"}), ("find", {}))
    assert list(parsed.calls[0][1]) == ["count", "text"]
    assert (parsed.failure, parsed.mismatches) == (None, 0)


def test_parts_need_no_space():
    bare = "<tool_call><function=find><parameter=text>x</parameter></function></tool_call>"
    assert parse_calls(bare, [FIND]).calls == (("find", {"text": "x"}),)


@pytest.mark.parametrize(
    ("text", "failure"),
    [
        (call() + " done", "trailing_content"),
        (call() + call(name="other"), "undeclared_tool"),
        (call(name="other"), "undeclared_tool"),
        (call(name="fi nd"), "invalid_tool_name"),
        (call(name=""), "invalid_tool_name"),
        (call(name="f" * 129), "invalid_tool_name"),
        (call(("text", "a"), ("text", "b")), "duplicate_parameter"),
        (call(("", "a")), "malformed_structure"),
        (call()[: -len("</tool_call>")], "malformed_structure"),
        (call().replace("</function>", ""), "malformed_structure"),
        (call(("text", "a")).replace("</parameter>", ""), "malformed_structure"),
        (call(("text", "<parameter=a> is never closed")), "malformed_structure"),
        (call(("text", "closed </parameter> twice")), "malformed_structure"),
        ("<tool_call>\u00a0<function=find></function></tool_call>", "malformed_structure"),
        ('<tool_call>{"name": "find"}</tool_call>', "malformed_structure"),
        ("<tool_call>", "malformed_structure"),
    ],
)
def test_what_is_no_call_stays_content_as_it_is(text: str, failure: str):
    parsed = parse_calls("so:  \n" + text, [FIND])
    assert (parsed.content, parsed.calls, parsed.failure) == ("so:  \n" + text, (), failure)


def test_the_first_marker_from_which_all_is_calls_counts_and_the_first_failure_is_told():
    parsed = parse_calls("I write <tool_call> and then " + call(("text", "x")), [FIND])
    assert parsed.content == "I write <tool_call> and then"
    assert (parsed.calls, parsed.failure) == ((("find", {"text": "x"}),), None)
    # Of two calls with text between them only the second is one.
    parsed = parse_calls(call(("count", "1")) + " then " + call(("count", "2")), [FIND])
    assert parsed.content == call(("count", "1")) + " then"
    assert parsed.calls == (("find", {"count": 2}),)
    assert parse_calls(call(name="no") + " x " + call(name="-,-"), [FIND]).failure == "undeclared_tool"


def test_without_declared_tools_all_is_content():
    parsed = parse_calls(call(), [])
    assert (parsed.content, parsed.calls, parsed.failure) == (call(), (), None)


def test_parameters_nest_and_other_markers_in_values_are_text():
    value = (
        "a <parameter=text>\nb\n</parameter> </function> <tool_call> </tool_call> <parameter=c></parameter>"
    )
    assert parse_calls(call(("text", value)), [FIND]).calls == (("find", {"text": value}),)


@pytest.mark.parametrize(
    ("schema", "raw", "value", "mismatches"),
    [
        ({"type": "string"}, "\n a \n\n", " a \n", 0),  # one newline at each end is framing
        ({"type": "string"}, "\r\na\r\n", "a", 0),
        ({"type": "string"}, "", "", 0),
        ({"type": "string"}, "\n", "", 0),
        ({"type": "string"}, "12", "12", 0),
        ({"type": ["string", "null"]}, "null", "null", 0),
        ({"type": "integer"}, "\n 12 \n", 12, 0),
        ({"type": "integer"}, "1e3", 1000, 0),
        ({"type": "integer"}, "1.5", 1.5, 1),
        ({"type": "integer"}, "\n a \n", " a ", 1),
        ({"type": "number"}, "-0.5", -0.5, 0),
        ({"type": "number"}, "7", 7, 0),
        ({"type": "number"}, "true", True, 1),
        ({"type": "number"}, "NaN", "NaN", 1),
        ({"type": "boolean"}, "True", True, 0),
        ({"type": "boolean"}, " FALSE ", False, 0),
        ({"type": "boolean"}, "1", 1, 1),
        ({"type": "boolean"}, "yes", "yes", 1),
        ({"type": "null"}, "null", None, 0),
        ({"type": "array"}, "[1, {}]", [1, {}], 0),
        ({"type": "object"}, '\n{"a": [1]}\n', {"a": [1]}, 0),
        ({"type": "object"}, "[1]", [1], 1),
        ({"type": "integer", "anyOf": [{"type": "string"}]}, "1", 1, 0),  # `type` wins
        ({"anyOf": [{"type": "integer"}, {"oneOf": [{"type": "boolean"}]}]}, "tRue", True, 0),
        ({"oneOf": [{"type": "integer"}, {"type": "string"}]}, "1", "1", 0),
        # Untyped: no schema, enum or reference alone, unknown names, two unions, an untyped member.
        ({}, "\n 12 \n", 12, 0),
        ({"enum": ["a"]}, " a b ", "a b", 0),
        ({"$ref": "#/x"}, "", "", 0),
        ({"type": "int"}, "true", True, 0),
        ({"type": []}, "True", "True", 0),
        ({"anyOf": [{"type": "string"}], "oneOf": [{"type": "string"}]}, "1", 1, 0),
        ({"anyOf": [{"type": "string"}, {"enum": [1]}]}, "1", 1, 0),
        ({"type": ["string", {}]}, "1", 1, 0),
        ({"anyOf": []}, "Infinity", "Infinity", 0),
    ],
)
def test_the_schema_types_a_value(schema: dict, raw: str, value: Any, mismatches: int):
    arguments, count = typed(schema, raw)
    assert arguments == {"x": value}
    assert type(arguments["x"]) is type(value) or isinstance(value, int)
    assert isinstance(arguments["x"], bool) == isinstance(value, bool)
    assert count == mismatches


@pytest.mark.parametrize("kind", ["integer", "boolean", "object", "null"])
def test_an_empty_value_that_can_be_no_string_is_left_out(kind: str):
    assert typed({"type": kind}, " \n ") == ({}, 0)


def test_undeclared_parameters_are_untyped_and_counted():
    parsed = parse_calls(call(("more", "[1]"), ("count", "2")), [FIND])
    assert (parsed.calls, parsed.mismatches) == ((("find", {"more": [1], "count": 2}),), 1)


def test_tools_of_one_name_that_differ_leave_their_parameters_untyped():
    other = tool(text={"type": "integer"})
    assert parse_calls(call(("text", "1")), [FIND, other]).calls == (("find", {"text": 1}),)
    assert parse_calls(call(("text", "1")), [FIND, FIND]).calls == (("find", {"text": "1"}),)


def test_deep_json_is_text():
    deep = "[" * 100_000
    assert typed({"type": "array"}, deep) == ({"x": deep}, 1)
