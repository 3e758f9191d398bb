"""Items to messages."""

from __future__ import annotations

from typing import Any

import pytest

from ninfer.serve.errors import ApiError
from ninfer.serve.responses.conversation import messages_of
from ninfer.serve.responses.items import normalize
from ninfer.serve.responses.store import Store
from ninfer.serve.responses.tools import Toolbox
from ninfer.serve.sealing import sealed
from tests.serve.responses.support import ITEM, PATCH, WEATHER, user


def items_of(raw: Any) -> list[dict[str, Any]]:
    return normalize(raw, Store(1, 1).item)


def messages(raw: Any, tools: Any = (), instructions: str | None = None) -> list[dict[str, Any]]:
    return messages_of(items_of(raw), Toolbox(list(tools)), instructions)


def called(call_id: str = "c1", name: str = "f", arguments: str = "{}", **more: Any) -> dict[str, Any]:
    return {"type": "function_call", "call_id": call_id, "name": name, "arguments": arguments, **more}


def answered(call_id: str = "c1", output: Any = "ok") -> dict[str, Any]:
    return {"type": "function_call_output", "call_id": call_id, "output": output}


def said(text: str) -> dict[str, Any]:
    content = [{"type": "output_text", "text": text, "annotations": []}]
    return {
        "type": "message",
        "role": "assistant",
        "content": content,
        "id": f"msg_{text}",
        "status": "completed",
    }


def thought(text: str, **more: Any) -> dict[str, Any]:
    return {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": text}], **more}


def refused(raw: Any, **more: Any) -> ApiError:
    with pytest.raises(ApiError) as caught:
        messages(raw, **more)
    assert caught.value.status in (400, 404)
    return caught.value


def test_a_string_is_a_user_message_in_whatever_form() -> None:
    expected = [{"role": "user", "content": "hi"}]
    for raw in (
        "hi",
        [{"role": "user", "content": "hi"}],
        [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hi"}]}],
        [{"role": "user", "content": [{"type": "text", "text": "h"}, {"type": "input_text", "text": "i"}]}],
        [
            {
                "type": "message",
                "id": "msg_1",
                "status": None,
                "role": "user",
                "content": "hi",
                "extra": {"a": 1},
            }
        ],
    ):
        assert messages(raw) == expected
    assert messages("") == [{"role": "user", "content": ""}]


def test_leading_system_texts_are_one_message_and_later_ones_stay() -> None:
    raw = [
        {"role": "system", "content": "A"},
        {
            "role": "developer",
            "content": [{"type": "input_text", "text": "B"}, {"type": "input_text", "text": "C"}],
        },
        user("q"),
        {"role": "developer", "content": "D"},
    ]
    assert messages(raw, instructions="First.") == [
        {"role": "system", "content": "First.\n\nA\n\nBC"},
        {"role": "user", "content": "q"},
        {"role": "system", "content": "D"},
    ]


def test_neighbouring_assistant_items_are_one_turn() -> None:
    raw = [user("q"), thought("why"), said("a"), called("c1"), called("c2", "g", '{"x": [1]}'),
           answered("c2", "two"), answered("c1", "one"), said("b")]  # fmt: skip
    assert messages(raw) == [
        {"role": "user", "content": "q"},
        {
            "role": "assistant", "content": "a", "reasoning_content": "why",
            "tool_calls": [
                {"type": "function", "id": "c1", "function": {"name": "f", "arguments": {}}},
                {"type": "function", "id": "c2", "function": {"name": "g", "arguments": {"x": [1]}}},
            ],
        },
        {"role": "tool", "content": "one", "tool_call_id": "c1"},
        {"role": "tool", "content": "two", "tool_call_id": "c2"},
        {"role": "assistant", "content": "b"},
    ]  # fmt: skip


def test_any_order_of_assistant_items_is_taken() -> None:
    raw = [user(), called("c1"), said("a"), thought("x"), said("b"), thought("y"), answered("c1")]
    _, turn, result = messages(raw)
    assert (turn["content"], turn["reasoning_content"]) == ("a\n\nb", "x\n\ny")
    assert result["content"] == "ok"


def test_outputs_may_come_late_or_not_at_all() -> None:
    raw = [
        user(),
        called("c1"),
        called("c2"),
        answered("c1"),
        user("wait"),
        answered("c2", "late"),
        user("go"),
    ]
    assert [(m["role"], m["content"]) for m in messages(raw)] == [
        ("user", "hi"), ("assistant", ""), ("tool", "ok"), ("tool", "late"), ("user", "wait"), ("user", "go"),
    ]  # fmt: skip
    assert [m["role"] for m in messages([user(), called("c1"), user("no")])] == ["user", "assistant", "user"]


def test_ids_of_calls_may_repeat_once_answered() -> None:
    raw = [user(), called("c", "f"), answered("c", "1"), called("c", "g"), answered("c", "2")]
    assert [m["content"] for m in messages(raw) if m["role"] == "tool"] == ["1", "2"]


def test_outputs_without_a_call_are_refused() -> None:
    for raw in ([user(), answered("c1")], [user(), called("c1"), answered("c1"), answered("c1")]):
        assert refused(raw).code == "invalid_tool_history"


@pytest.mark.parametrize(
    "arguments", ['{"cmd": "ls -a', "[1]", "null", "3", '{"a": NaN}', "{'a': 1}", "[" * 5000]
)
def test_broken_arguments_are_shown_as_they_are(arguments: str) -> None:
    _, turn, _ = messages([user(), called(arguments=arguments), answered(output="parse error")])
    assert turn["tool_calls"][0]["function"]["arguments"] == {"arguments": arguments}


@pytest.mark.parametrize("arguments", ["", "  ", "{}"])
def test_no_arguments_are_an_empty_object(arguments: str) -> None:
    _, turn = messages([user(), called(arguments=arguments)])
    assert turn["tool_calls"][0]["function"]["arguments"] == {}


def test_members_of_arguments_keep_their_order() -> None:
    _, turn = messages([user(), called(arguments='{"z": 1, "a": {"y": 2, "b": 3}}')])
    arguments = turn["tool_calls"][0]["function"]["arguments"]
    assert list(arguments) == ["z", "a"]
    assert list(arguments["a"]) == ["y", "b"]


def test_outputs_are_text_whatever_they_hold() -> None:
    for output, expected in (
        ("x", "x"),
        (None, ""),
        ([], ""),
        ([{"type": "input_text", "text": "a\n"}, {"type": "input_text", "text": "b"}], "a\nb"),
        ([{"type": "output_text", "text": "a"}], "a"),
        ([{"type": "input_image", "image_url": "data:image/png;base64,AA=="}],
         "[image omitted: this model has no vision]"),
        ([{"type": "input_file", "file_id": "f"}], "[file omitted: files are not supported]"),
        ({"a": 1}, '{"a":1}'),
        (3, "3"),
        ([{"stdout": "é", "outcome": {"type": "exit"}}], '{"stdout": "é", "outcome": {"type": "exit"}}'),
    ):  # fmt: skip
        assert messages([user(), called(), answered(output=output)])[-1]["content"] == expected


def test_reasoning_comes_back_from_its_text_or_our_seal() -> None:
    def restored(**members: Any) -> str | None:
        raw = [user(), {"type": "reasoning", "id": "rs_1", **members}, said("a")]
        return messages(raw)[1].get("reasoning_content")

    assert restored(content=None, summary=[], encrypted_content=sealed("Grüße")) == "Grüße"
    assert (
        restored(content=[{"type": "reasoning_text", "text": "mine"}], encrypted_content=sealed("x"))
        == "mine"
    )
    summary = [{"type": "summary_text", "text": "I will list."}]
    assert restored(summary=summary, content=None, encrypted_content="c3R1Yg==") is None
    broken = [user(), {"type": "reasoning", "encrypted_content": "ninfer-reasoning.v1:?"}]
    assert refused(broken).code == "invalid_encrypted_content"


def test_calls_of_other_shapes_are_calls() -> None:
    shell = {"type": "local_shell_call", "id": "ls", "call_id": "c1", "status": "completed",
             "action": {"type": "exec", "command": ["ls"]}}  # fmt: skip
    output = {"type": "local_shell_call_output", "id": "c1", "output": "a.txt"}
    _, turn, result = messages([user(), shell, output])
    function = turn["tool_calls"][0]["function"]
    assert function == {"name": "local_shell", "arguments": {"type": "exec", "command": ["ls"]}}
    assert result["content"] == "a.txt"


def test_what_other_servers_did_is_left_out() -> None:
    hosted = [{"type": "web_search_call", "id": "ws_1", "status": "completed", "action": {"type": "search"}},
              {"type": "mcp_list_tools", "id": "mcp_1", "server_label": "x", "tools": []}]  # fmt: skip
    assert messages([user("q"), *hosted, said("a"), user("p")]) == messages([user("q"), said("a"), user("p")])


def test_custom_calls_have_one_argument() -> None:
    raw = [
        user(),
        {
            "type": "custom_tool_call",
            "call_id": "c1",
            "name": "apply_patch",
            "input": "*** x",
            "status": "completed",
        },
        {
            "type": "custom_tool_call_output",
            "call_id": "c1",
            "output": [{"type": "input_text", "text": "done"}],
        },
    ]
    _, turn, result = messages(raw, [PATCH])
    assert turn["tool_calls"][0]["function"] == {"name": "apply_patch", "arguments": {"input": "*** x"}}
    assert result["content"] == "done"


def test_leading_tools_are_listed_and_later_ones_told_at_their_place() -> None:
    extra = {"type": "additional_tools", "role": "developer", "tools": [WEATHER]}
    box = Toolbox(None)
    head = messages_of(items_of([extra, {"role": "developer", "content": "Be kind."}, user()]), box)
    assert [m["role"] for m in head] == ["system", "user"]
    assert [(tool.name, tool.listed) for tool in box.tools] == [("weather", True)]

    box = Toolbox([PATCH])
    _, told, _ = messages_of(items_of([user(), extra, user()]), box)
    assert told["role"] == "system"
    assert '{"type": "function", "function": {"name": "weather"' in told["content"]
    assert [(tool.name, tool.listed) for tool in box.tools] == [("apply_patch", True), ("weather", False)]

    box = Toolbox(None)  # the call syntax is explained with the list: one alone must be in it
    messages_of(items_of([user(), extra]), box)
    assert [(tool.name, tool.listed) for tool in box.tools] == [("weather", True)]


def test_a_search_loads_what_it_finds() -> None:
    found = {
        "type": "namespace",
        "name": "mail",
        "description": "Mail.",
        "tools": [{**WEATHER, "defer_loading": True}],
    }
    raw = [
        user(),
        {"type": "tool_search_call", "call_id": "c1", "execution": "client", "status": "completed",
         "arguments": {"query": "mail"}},
        {"type": "tool_search_output", "call_id": "c1", "execution": "client", "tools": [found]},
        called("c2", "weather", '{"city": "Oslo"}', namespace="mail"), answered("c2", "Fine."),
    ]  # fmt: skip
    box = Toolbox([PATCH])
    _, search, loaded, call, result = messages_of(items_of(raw), box)
    assert search["tool_calls"][0]["function"] == {"name": "tool_search", "arguments": {"query": "mail"}}
    assert loaded["role"] == "tool"
    assert '"name": "mail__weather"' in loaded["content"]
    assert call["tool_calls"][0]["function"]["name"] == "mail__weather"
    assert result["content"] == "Fine."
    assert [(tool.name, tool.listed) for tool in box.tools] == [
        ("apply_patch", True),
        ("mail__weather", False),
    ]
    assert box["mail__weather"].namespace == "mail"
    # OpenAI's own search has no call ids: what it found is told in a message.
    hosted = [
        user(),
        {"type": "tool_search_call", "call_id": None, "execution": "server", "arguments": {}},
        {"type": "tool_search_output", "call_id": None, "execution": "server", "tools": [found]},
    ]
    assert messages(hosted, [PATCH])[-1]["role"] == "system"


@pytest.mark.parametrize(
    ("raw", "code"),
    [
        ([], None),
        (None, None),
        ([{"role": "system", "content": "x"}], None),
        ([said("a")], None),
        (3, None),
        ([3], None),
        ([{}], None),
        ([{"role": "tool", "content": "x"}], None),
        ([{"role": "user"}], None),
        ([{"role": "user", "content": 3}], None),
        ([{"role": "user", "content": [{"type": "input_text", "text": 3}]}], None),
        ([{"role": "user", "content": [{"type": "input_image", "image_url": "data:x"}]}], "vision_disabled"),
        ([{"role": "user", "content": [{"type": "input_file"}]}], "file_inputs_not_supported"),
        ([{"role": "user", "content": [{"type": "input_audio"}]}], "audio_inputs_not_supported"),
        ([{"role": "user", "content": [{"type": "odd"}]}], "content_type_not_supported"),
        ([{"role": "user", "content": [{"type": "refusal", "refusal": "x"}]}], "content_type_not_supported"),
        ([{"type": "odd"}], "item_type_not_supported"),
        ([{"type": ["message"]}], None),
        ([{"type": "function_call", "call_id": "c", "name": ""}], None),
        ([{"type": "function_call", "call_id": "c", "name": "f", "arguments": 3}], None),
        ([{"type": "function_call_output", "output": "x"}], None),
        ([{"role": "user", "content": "a", "id": "x"}, {"role": "user", "content": "b", "id": "x"}], None),
        ([{"role": "user", "content": "a", "id": 3}], None),
        ([{"type": "item_reference", "id": "nowhere"}], "item_not_found"),
        ([{"role": "user", "content": [
            {"type": "input_text", "text": "a", "prompt_cache_breakpoint": {"mode": "x"}}]}],
         "invalid_cache_breakpoint"),
    ],
)  # fmt: skip
def test_wrong_items_are_refused(raw: Any, code: str | None) -> None:
    error = refused(raw)
    assert error.code == code
    assert (error.param or "").startswith("input")


def test_items_have_the_form_in_which_the_api_lists_them() -> None:
    raw = [
        user(),
        {"role": "assistant", "content": "yes"},
        thought("x"),
        called("c1", namespace="n"),
        answered("c1"),
        {"type": "custom_tool_call", "call_id": "c2", "name": "p", "input": "x"},
        {"type": "custom_tool_call_output", "call_id": "c2", "output": "x"},
        {"type": "tool_search_call", "call_id": "c3", "arguments": '{"query": "x"}'},
        {"type": "tool_search_output", "call_id": "c3", "tools": [WEATHER | {"strict": False}]},
        {"type": "additional_tools", "tools": []},
    ]
    made = items_of(raw)
    for item in made:
        assert ITEM.validate_python(item).type == item["type"]
    prefixes = [item["id"].split("_")[0] for item in made]
    assert prefixes == ["msg", "msg", "rs", "fc", "fco", "ctc", "ctco", "tsc", "tso", "at"]
    assert normalize(made, Store(1, 1).item) == made
