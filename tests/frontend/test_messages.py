"""The messages file: what is accepted, what it becomes, and a sentence for everything else."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ninfer.errors import FrontendError
from ninfer.frontend import parse_messages_file
from ninfer.frontend.messages import check_messages


def parse(document: Any) -> tuple[list[dict[str, Any]], list[Any] | None]:
    return parse_messages_file(json.dumps(document).encode())


def one(**message: Any) -> dict[str, Any]:
    return parse([message])[0][0]


def refused(words: str, *messages: Any) -> None:
    with pytest.raises(FrontendError, match=words) as failure:
        parse(list(messages))
    assert len(str(failure.value)) < 300


USER = {"role": "user", "content": "Hi"}


def test_array_and_object_form() -> None:
    tools = [{"type": "function", "z": 1, "a": [None, 1.5]}, "anything"]
    assert parse([USER]) == ([USER], None)
    assert parse({"messages": [USER]}) == ([USER], None)
    assert parse({"messages": [USER], "tools": tools}) == ([USER], tools)
    assert parse({"messages": [USER], "tools": None}) == ([USER], None)
    assert parse({"messages": [USER], "tools": []}) == ([USER], None)
    assert list(parse({"messages": [USER], "tools": tools})[1][0]) == ["type", "z", "a"]  # type: ignore[index]


def test_byte_order_mark_is_tolerated() -> None:
    assert parse_messages_file(b"\xef\xbb\xbf" + json.dumps([USER]).encode())[0] == [USER]


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "not valid JSON"),
        (b"[{]", "not valid JSON"),
        (b"\xff[]", "not UTF-8 .byte 0"),
        (b"[NaN]", "NaN is not a JSON number"),
        (b"[" * 200_000, "not valid JSON"),
        (b"[]", "no messages"),
        (b"3", "array of messages"),
        (b"{}", "array of messages"),
        (b'{"messages": []}', "no messages"),
        (b'{"messages": {}}', "array of messages"),
        (b'{"messages": [], "model": "x"}', "unsupported field 'model'"),
        (b'{"messages": [], "tools": {}}', "tools must be an array"),
    ],
)
def test_bad_files(data: bytes, words: str) -> None:
    with pytest.raises(FrontendError, match=words):
        parse_messages_file(data)


def test_members_and_roles() -> None:
    for role in ("system", "developer", "user", "assistant", "tool"):
        assert one(role=role, content="x") == {"role": role, "content": "x"}
    refused("Message 2 contains unsupported field 'name'", USER, {**USER, "name": "x"})
    refused("Message 1 lacks 'role'", {"content": "x"})
    refused(
        "Message 1 lacks 'content'", {"role": "assistant", "tool_calls": [{"name": "f", "arguments": {}}]}
    )
    for role in ("human", None, 3, ["user"], "x" * 9999):
        refused("it must be one of system, developer", {"role": role, "content": "x"})
    for message in ("text", None, [USER]):
        refused("Message 1 must be an object", message)


def test_content_forms() -> None:
    assert one(role="user", content="")["content"] == ""
    parts = [{"type": "text", "text": "a "}, {"text": "b"}]
    assert one(role="user", content=parts)["content"] == "a b"
    for role in ("user", "assistant", "tool"):
        refused("Message 1 has empty content", {"role": role, "content": None})
    for content in (3, {}, [], True):
        refused("neither a string, null nor a non-empty array", {"role": "user", "content": content})
    for part, words in (
        ("x", "part 1 must be an object"),
        ({}, "must have a type"),
        ({"text": "a", "image": "b"}, "must have a type"),
        ({"type": "audio", "text": "a"}, "'audio'; it must be"),
        ({"type": 4}, "4; it must be"),
        ({"type": "text"}, "lacks its text"),
        ({"text": None}, "lacks its text"),
    ):
        refused(words, {"role": "user", "content": [part]})


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image", "image": "a.png"},
        {"image": "a.png"},
        {"image_url": {"url": "https://x/y.png"}},
        {"type": "image_url", "image_url": "data:image/png;base64,AAAA", "media_type": "image/png"},
        {"type": "video", "video": {"url": "v.mp4"}},
        {"video_url": "file://v.mp4"},
    ],
)
def test_media_are_refused_without_vision(part: dict[str, Any]) -> None:
    refused(
        r"Message 1, part 2 is a (image|video), but Vision is disabled for this Engine\.",
        {"role": "user", "content": [{"text": "look:"}, part]},
    )


def test_reasoning() -> None:
    assert one(role="assistant", content="a", reasoning_content="r")["reasoning_content"] == "r"
    assert "reasoning_content" not in one(role="assistant", content="a", reasoning_content=None)
    assert "reasoning_content" not in one(role="user", content="a", reasoning_content="")
    refused("not a string", {"role": "assistant", "content": "a", "reasoning_content": 3})
    refused("only assistant messages", {"role": "user", "content": "a", "reasoning_content": "r"})
    refused("has empty content", {"role": "assistant", "content": None, "reasoning_content": "r"})


def test_tool_calls() -> None:
    wanted = {"type": "function", "function": {"name": "f", "arguments": {"b": 1, "a": [2.0]}}}
    for call in (
        {"name": "f", "arguments": {"b": 1, "a": [2.0]}},
        {"type": "function", "function": {"name": "f", "arguments": '{"b": 1, "a": [2.0]}'}, "index": 0},
    ):
        message = one(role="assistant", content=None, tool_calls=[call])
        assert message == {"role": "assistant", "content": "", "tool_calls": [wanted]}
        assert list(message["tool_calls"][0]["function"]["arguments"]) == ["b", "a"]
    assert one(role="assistant", content="x", tool_calls=None) == {"role": "assistant", "content": "x"}
    call = {"id": "c1", "name": "f", "arguments": {}}
    assert one(role="assistant", content="x", tool_calls=[call])["tool_calls"][0]["id"] == "c1"
    refused("only assistant messages", {**USER, "tool_calls": [call]})
    for calls in ([], {}, "x", 3):
        refused("not a non-empty array", {"role": "assistant", "content": "x", "tool_calls": calls})
    for bad, words in (
        (3, "tool call 1 must be an object"),
        ({"name": "f"}, "must have arguments"),
        ({"name": "", "arguments": {}}, "lacks the function's name"),
        ({"arguments": {}}, "lacks the function's name"),
        ({"function": 3}, "function that is not an object"),
        ({"type": "custom", "name": "f", "arguments": {}}, "'custom'; it must be 'function'"),
        ({"name": "f", "arguments": "{"}, "not valid JSON"),
        ({"name": "f", "arguments": "[1]"}, "must have arguments"),
        ({"name": "f", "arguments": "NaN"}, "not valid JSON"),
        ({"name": "f", "arguments": {}, "id": 3}, "id that is not a string"),
    ):
        refused(words, {"role": "assistant", "content": "x", "tool_calls": [bad]})


def test_tool_call_id() -> None:
    assert one(role="tool", content="r", tool_call_id="c1")["tool_call_id"] == "c1"
    assert one(role="tool", content="") == {"role": "tool", "content": ""}
    refused("only tool messages", {**USER, "tool_call_id": "c1"})
    refused("not a string", {"role": "tool", "content": "r", "tool_call_id": 1})


def test_checking_twice_changes_nothing() -> None:
    call = {"function": {"name": "f", "arguments": "{}"}, "id": "c"}
    messages = [
        {"role": "user", "content": [{"text": "a"}, {"text": "b"}]},
        {"role": "assistant", "content": None, "tool_calls": [call], "reasoning_content": "r"},
        {"role": "tool", "content": "", "tool_call_id": "c"},
    ]
    once = check_messages(messages)
    assert check_messages(once) == once
    assert once[0] is not messages[0]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                [
                    "role",
                    "content",
                    "tool_calls",
                    "name",
                    "arguments",
                    "type",
                    "text",
                    "image",
                    "messages",
                    "tools",
                ]
            ),
            inner | st.sampled_from(["user", "assistant", "text"]),
            max_size=4,
        )
    ),
    max_leaves=12,
)


@given(JSON)
def test_any_json_is_parsed_or_refused_in_a_sentence(document: Any) -> None:
    outcome = ""
    try:
        parse(document)
    except FrontendError as error:
        outcome = str(error)
    assert not outcome or outcome.endswith(".")
