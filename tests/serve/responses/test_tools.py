"""Tools of the API to functions of the engine and back."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ninfer.serve.calls import ToolChoice
from ninfer.serve.errors import ApiError
from ninfer.serve.fields import Fields
from ninfer.serve.responses.tools import Toolbox, engine_name
from tests.serve.responses.support import PATCH, SEARCH, WEATHER

NAMESPACE = {"type": "namespace", "name": "crm", "description": "Customers.", "tools": [WEATHER, PATCH]}
HOSTED = [
    {"type": kind}
    for kind in (
        "web_search", "web_search_preview", "file_search", "code_interpreter", "image_generation", "mcp",
        "computer_use_preview", "local_shell", "shell", "apply_patch", "tool_search", "of_next_year",
    )
]  # fmt: skip


def names(*tools: Any) -> list[str]:
    return [tool.name for tool in Toolbox(list(tools)).tools]


def test_a_function_is_itself() -> None:
    (tool,) = Toolbox([{**WEATHER, "strict": True}]).tools
    assert (tool.name, tool.description, tool.strict) == ("weather", "Tells the weather.", True)
    assert tool.parameters == WEATHER["parameters"]
    (bare,) = Toolbox([{"type": "function", "name": "f", "strict": None, "parameters": None}]).tools
    assert (bare.parameters, bare.strict) == ({"type": "object", "properties": {}}, False)
    nested = {"type": "function", "function": {"name": "g", "parameters": {"type": "object"}}}
    assert names(nested) == ["g"]


def test_a_namespace_is_its_tools() -> None:
    box = Toolbox([NAMESPACE])
    weather, patch = box.tools
    assert (weather.name, weather.description) == ("crm__weather", "Customers.\n\nTells the weather.")
    assert patch.name == "crm__apply_patch"
    assert (box["crm__weather"].name, box["crm__weather"].namespace) == ("weather", "crm")
    assert box["crm__apply_patch"].kind == "custom"


def test_the_default_namespace_is_no_part_of_a_name() -> None:
    box = Toolbox([{**NAMESPACE, "name": "functions", "description": ""}])
    assert [tool.name for tool in box.tools] == ["weather", "apply_patch"]
    assert box["weather"].namespace is None
    assert box.find("apply_patch", "functions") == box.find("apply_patch", None) == "apply_patch"


def test_a_custom_tool_is_a_function_of_one_text_that_knows_its_grammar() -> None:
    (tool,) = Toolbox([PATCH]).tools
    assert tool.parameters["required"] == ["input"]
    assert tool.description is not None
    assert tool.description.endswith("(lark):\nstart: /(.|\\n)+/")
    (free,) = Toolbox([{"type": "custom", "name": "note", "description": "Notes."}]).tools
    assert free.description == "Notes.\n\n`input` is free text."


def test_what_we_cannot_offer_is_accepted_and_left_out() -> None:
    assert names(*HOSTED, WEATHER) == ["weather"]
    assert names({**NAMESPACE, "tools": [{"type": "odd"}, WEATHER]}) == ["crm__weather"]


def test_deferred_tools_wait_for_a_search_of_the_client() -> None:
    deferred = {**WEATHER, "defer_loading": True}
    space = {**NAMESPACE, "tools": [{**WEATHER, "name": "find", "defer_loading": True}]}
    box = Toolbox([SEARCH, deferred, space, PATCH])
    assert [tool.name for tool in box.tools] == ["tool_search", "apply_patch"]
    description = box["tool_search"].tool.description
    assert description == "Finds tools.\n\nTools that a search can load: weather, crm."
    # OpenAI's search isn't here: nothing would ever load them.
    assert names({"type": "tool_search"}, deferred) == ["weather"]


def test_names_of_reported_clients_are_mapped() -> None:
    for namespace, name, expected in (
        (None, "read file", "read_file"),
        (None, "server.read", "server_read"),
        ("mcp__git", "log", "mcp__git__log"),
    ):
        assert engine_name(namespace, name) == expected
    box = Toolbox([{**WEATHER, "name": "my tool.v2"}])
    assert box["my_tool_v2"].name == "my tool.v2"
    long = engine_name("mcp__" + "a" * 60, "b" * 60)
    assert len(long) == 64
    assert long != engine_name("mcp__" + "a" * 60, "b" * 59 + "c")


@given(st.one_of(st.none(), st.text()), st.text(min_size=1))
def test_engine_names_are_names(namespace: str | None, name: str) -> None:
    made = engine_name(namespace, name)
    assert 1 <= len(made) <= 64
    assert made.replace("_", "a").replace("-", "a").isalnum()
    assert made.isascii()


def test_a_name_without_its_namespace_is_found_if_it_is_the_only_one() -> None:
    box = Toolbox([NAMESPACE])
    assert box.find("weather", None) == "crm__weather"
    assert box.find("weather", "crm") == "crm__weather"
    assert Toolbox([NAMESPACE, WEATHER]).find("weather", None) == "weather"
    assert Toolbox([NAMESPACE, {**NAMESPACE, "name": "b"}]).find("weather", None) == "weather"
    assert box.find("gone", "crm") == "crm__gone"


def test_a_later_declaration_replaces_an_earlier_one() -> None:
    box = Toolbox([WEATHER])
    box.load([{**WEATHER, "description": "New."}, PATCH], "input", listed=False)
    assert [(tool.name, tool.description, tool.listed) for tool in box.tools][:1] == [
        ("weather", "New.", True)
    ]
    assert [tool.listed for tool in box.tools] == [True, False]


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        (None, ToolChoice()),
        ("auto", ToolChoice()),
        ("none", ToolChoice("none")),
        ("required", ToolChoice("required")),
        ({"type": "function", "name": "weather"}, ToolChoice("required", ("weather",))),
        ({"type": "function", "function": {"name": "weather"}}, ToolChoice("required", ("weather",))),
        ({"type": "custom", "name": "apply_patch"}, ToolChoice("required", ("apply_patch",))),
        ({"type": "tool_search"}, ToolChoice("required", ("tool_search",))),
        (
            {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "weather"}]},
            ToolChoice("auto", ("weather",)),
        ),
        (
            {"type": "allowed_tools", "mode": "required", "tools": [
                {"type": "web_search"}, {"type": "custom", "name": "apply_patch"},
                {"type": "function", "name": "weather", "namespace": "crm"}]},
            ToolChoice("required", ("apply_patch", "crm__weather")),
        ),
        ({"type": "allowed_tools", "tools": [{"type": "web_search"}]}, ToolChoice("none")),
    ],
)  # fmt: skip
def test_choices(raw: Any, expected: ToolChoice) -> None:
    assert (
        Toolbox([WEATHER, PATCH, SEARCH, NAMESPACE, *HOSTED]).choice(Fields({"tool_choice": raw})) == expected
    )


@pytest.mark.parametrize(
    ("raw", "code"),
    [
        ("any", None),
        (3, None),
        ({}, "tool_choice_not_supported"),
        ({"type": ["function"]}, "tool_choice_not_supported"),
        ({"type": "web_search"}, "tool_choice_not_supported"),
        ({"type": "function", "name": "gone"}, None),
        ({"type": "function"}, None),
        ({"type": "allowed_tools", "mode": "some"}, None),
        ({"type": "allowed_tools", "mode": "required", "tools": [{"type": "web_search"}]}, None),
        ({"type": "allowed_tools", "tools": [3]}, None),
        ({"type": "allowed_tools", "tools": [{"type": "function", "name": "gone"}]}, None),
    ],
)
def test_choices_that_cannot_be(raw: Any, code: str | None) -> None:
    with pytest.raises(ApiError) as caught:
        Toolbox([WEATHER]).choice(Fields({"tool_choice": raw}))
    assert (caught.value.status, caught.value.code) == (400, code)
    assert (caught.value.param or "").startswith("tool_choice")


def test_nothing_can_be_required_of_no_tools() -> None:
    with pytest.raises(ApiError, match="no tool can be called"):
        Toolbox(HOSTED).choice(Fields({"tool_choice": "required"}))


@pytest.mark.parametrize(
    ("raw", "code", "param"),
    [
        (3, None, "tools"),
        ([3], None, "tools[0]"),
        ([{}], None, "tools[0].type"),
        ([{"type": "function"}], "invalid_tool_name", "tools[0].name"),
        ([{"type": "function", "name": ""}], "invalid_tool_name", "tools[0].name"),
        ([{"type": "function", "name": "a" * 129}], "invalid_tool_name", "tools[0].name"),
        ([{"type": "function", "name": "a\n"}], "invalid_tool_name", "tools[0].name"),
        ([WEATHER, WEATHER], "duplicate_tool_name", "tools"),
        ([{**WEATHER, "name": "a b"}, {**WEATHER, "name": "a.b"}], "duplicate_tool_name", "tools"),
        ([{**WEATHER, "parameters": [1]}], None, "tools[0].parameters"),
        ([{**WEATHER, "strict": "yes"}], None, "tools[0].strict"),
        ([{**WEATHER, "description": 3}], None, "tools[0].description"),
        ([{**NAMESPACE, "tools": [WEATHER, 3]}], None, "tools[0].tools[1]"),
        ([{**PATCH, "format": "lark"}], None, "tools[0].format"),
    ],
)
def test_wrong_tools_are_refused(raw: Any, code: str | None, param: str) -> None:
    with pytest.raises(ApiError) as caught:
        Toolbox(raw)
    assert (caught.value.status, caught.value.code, caught.value.param) == (400, code, param)
