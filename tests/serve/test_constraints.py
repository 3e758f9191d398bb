"""Which requests are constrained in sampling; what the grammars allow is tested with the frontend."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ninfer.serve.calls import GenerationRequest, JsonFormat, Protocol, Tool, ToolChoice
from ninfer.serve.constraints import constraint_for
from ninfer.serve.errors import ApiError
from tests.serve.fakes import MODEL, nano_frontend

SCHEMA = {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]}
READ, WRITE = Tool("read", SCHEMA), Tool("write", SCHEMA)
STRICT = Tool("strictly", SCHEMA, strict=True)


def ask(**changes: Any) -> GenerationRequest:
    return GenerationRequest(Protocol.CHAT, MODEL, [{"role": "user", "content": "hi"}], **changes)


def allows(request: GenerationRequest, text: str) -> bool:
    """May the answer be exactly this text?"""
    grammar = constraint_for(request)
    assert grammar is not None
    frontend = nano_frontend()
    session = frontend.session(frontend.render(request.messages, thinking=False), grammar=grammar)
    masks = np.zeros((1, (frontend.public_tokens + 31) // 32), np.int32)

    def allowed() -> set[int]:
        session.fill_masks([], masks)
        bits = np.unpackbits(masks.view(np.uint8), bitorder="little")
        return set(np.flatnonzero(bits).tolist())

    rest = text.encode()
    while rest:
        spelled = {frontend.token_bytes(token): token for token in allowed()}
        fitting = [piece for piece in spelled if piece and rest.startswith(piece)]
        if not fitting:
            return False
        longest = max(fitting, key=len)
        session.accept([spelled[longest]])
        rest = rest[len(longest) :]
    return not allowed().isdisjoint(frontend.stop_token_ids)


def call(name: str, value: str = "a") -> str:
    inner = f"<parameter=path>\n{value}\n</parameter>\n"
    return f"<tool_call>\n<function={name}>\n{inner}</function>\n</tool_call>"


def test_what_asks_for_nothing_is_free() -> None:
    assert constraint_for(ask()) is None
    assert constraint_for(ask(tools=(READ,))) is None
    assert constraint_for(ask(tools=(READ,), parallel_calls=False)) is None  # the session's own matter
    assert constraint_for(ask(tool_choice=ToolChoice("none"))) is None


def test_json() -> None:
    assert allows(ask(response_format=JsonFormat()), '{"any": [1]}')
    assert not allows(ask(response_format=JsonFormat()), "[1]")
    by_schema = ask(response_format=JsonFormat(SCHEMA))
    assert allows(by_schema, '{"path": "x"}')
    assert not allows(by_schema, '{"other": "x"}')
    assert not allows(by_schema, "Hello")
    with_tools = ask(response_format=JsonFormat(SCHEMA), tools=(READ,))
    assert allows(with_tools, '{"path": "x"}')
    assert allows(with_tools, call("read"))
    assert not allows(with_tools, "Hello")
    silent = ask(response_format=JsonFormat(SCHEMA), tools=(READ,), tool_choice=ToolChoice("none"))
    assert allows(silent, '{"path": "x"}')
    assert not allows(silent, call("read"))


def test_tool_choice() -> None:
    required = ask(tools=(READ, WRITE), tool_choice=ToolChoice("required"))
    assert allows(required, call("read"))
    assert allows(required, call("read") + "\n" + call("write"))
    assert not allows(required, "Hello")
    one = ask(tools=(READ, WRITE), tool_choice=ToolChoice("required"), parallel_calls=False)
    assert allows(one, call("write"))
    assert not allows(one, call("read") + "\n" + call("write"))
    named = ask(tools=(READ, WRITE), tool_choice=ToolChoice("required", ("write",)))
    assert allows(named, call("write"))
    assert not allows(named, call("read"))
    none = ask(tools=(READ,), tool_choice=ToolChoice("none"))
    assert allows(none, "Hello")
    assert not allows(none, call("read"))


def test_strict_tools() -> None:
    request = ask(tools=(STRICT, READ))
    assert allows(request, "Hello")
    assert allows(request, call("strictly"))
    assert not allows(request, "<tool_call>\n<function=strictly>\n</function>\n</tool_call>")
    assert allows(request, "<tool_call>\n<function=read>\n</function>\n</tool_call>")


@pytest.mark.parametrize(
    ("changes", "param", "code"),
    [
        ({"response_format": JsonFormat({"type": "nonsense"})}, "response_format", "invalid_json_schema"),
        ({"response_format": JsonFormat("string")}, "response_format", "invalid_json_schema"),
        (
            {"tools": (Tool("x", {"type": "object", "properties": {"a": {"not": {}}}}, strict=True),)},
            "tools",
            "invalid_function_parameters",
        ),
    ],
)
def test_schemas_that_can_not_be_enforced(changes: dict[str, Any], param: str, code: str) -> None:
    with pytest.raises(ApiError) as refused:
        constraint_for(ask(**changes))
    assert (refused.value.status, refused.value.param, refused.value.code) == (400, param, code)
    assert refused.value.message.endswith(".")


WORDS = st.sampled_from(
    [
        "type", "properties", "required", "additionalProperties", "enum", "const", "items", "anyOf",
        "oneOf", "allOf", "not", "$ref", "$defs", "pattern", "format", "minLength", "maxLength",
        "minimum", "maximum", "minItems", "maxItems", "prefixItems", "title", "default",
        "description", "patternProperties", "multipleOf", "exclusiveMinimum", "propertyNames",
        "uniqueItems", "if", "then", "a",
    ]
)  # fmt: skip
ATOMS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 70),
    st.floats(-1e6, 1e6),
    st.text(max_size=6),
    st.sampled_from(
        [
            "object",
            "string",
            "integer",
            "array",
            "null",
            "boolean",
            "#/$defs/a",
            "#",
            "a",
            "^a+$",
            "(",
            "date",
        ]
    ),
)
SCHEMAS = st.recursive(
    ATOMS,
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(WORDS, inner, max_size=4)),
    max_leaves=12,
)
OBJECTS = st.builds(
    lambda properties, more: {"type": "object", "properties": properties, **more},
    st.dictionaries(st.sampled_from(["a", "b", "<", "a b", ""]), SCHEMAS, max_size=3),
    st.dictionaries(WORDS, SCHEMAS, max_size=3),
)


@settings(max_examples=150, deadline=None)
@given(st.one_of(SCHEMAS, OBJECTS), st.one_of(OBJECTS, st.dictionaries(WORDS, SCHEMAS, max_size=4)))
def test_any_schema_is_enforced_or_refused(form: Any, parameters: dict[str, Any]) -> None:
    tools = (Tool("x", parameters, strict=True), Tool("y", parameters))
    for changes in (
        {"response_format": JsonFormat(form)},
        {"tools": tools},
        {"tools": tools, "tool_choice": ToolChoice("required"), "response_format": JsonFormat(form)},
    ):
        status = 200
        try:
            assert constraint_for(ask(**changes)) is not None
        except ApiError as refused:
            status = refused.status
        assert status in (200, 400)
