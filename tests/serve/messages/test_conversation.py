"""Messages as chat templates read them."""

import pytest

from ninfer.serve.errors import ApiError
from ninfer.serve.messages.blocks import NO_IMAGE
from ninfer.serve.sealing import sealed
from ninfer.serve.system import fold_system
from tests.serve.messages.conftest import assistant, read, result, text, use, user

IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "iVBO"}}


def said(*messages, **members):
    return read(*messages, **members).generation.messages


def system(words):
    return {"role": "system", "content": words}


def test_a_string_and_blocks_are_one_text():
    assert said("ab") == said(user(text("a"), text("b"))) == said(user(text("a")), user(text("b")))
    assert said("x", system=[text("a"), text("b")]) == said("x", system="ab")
    assert said("x", {"role": "system", "content": "note"}) == said(
        "x", {"role": "system", "content": [text("note")]}
    )


@pytest.mark.parametrize(
    "billing",
    [
        "x-anthropic-billing-header: cc_version=2.1.332.sfx1; cc_entrypoint=sdk-cli;",
        "x-anthropic-billing-header: cc_version=2.1.332.sfx2; cc_entrypoint=cli; cc_is_subagent=true;",
    ],
)
def test_the_billing_line_is_dropped(billing):
    plain = said("hi", system="You are Claude.\nBe kind.")
    assert said("hi", system=[text(billing), text("You are Claude.\nBe kind.")]) == plain
    assert said("hi", system=f"{billing}\nYou are Claude.\nBe kind.") == plain
    assert said("hi", system=f"{billing}You are Claude.\nBe kind.") == plain
    assert said("hi", system=[text(billing)]) == said("hi", system=billing) == said("hi")


def test_a_billing_line_elsewhere_is_text():
    late = [text("You."), text("x-anthropic-billing-header: a=b;")]
    assert said("hi", system=late)[0]["content"] == "You.x-anthropic-billing-header: a=b;"


def test_system_messages_stay_where_they_are():
    messages = said("a", system("one"), assistant(text("b")), "c", system("two"), system("three"))
    assert [(m["role"], m["content"]) for m in messages] == [
        ("user", "a"),
        ("system", "one"),
        ("assistant", "b"),
        ("user", "c"),
        ("system", "two"),
        ("system", "three"),
    ]


def test_calls_and_results():
    messages = said(
        "list",
        assistant(
            {"type": "thinking", "thinking": "Two calls.", "signature": "c3R1Yg=="},
            {"type": "redacted_thinking", "data": "xyz"},
            text("I will."),
            use("t1", command="ls"),
            use("t2", "Read", path="a", lines=[1, 2]),
        ),
        user(result("t2", [text("2"), text("!")]), result("t1", "1"), text("go on")),
    )
    assert messages[1:] == [
        {
            "role": "assistant",
            "content": "I will.",
            "reasoning_content": "Two calls.",
            "tool_calls": [
                {
                    "type": "function",
                    "id": "t1",
                    "function": {"name": "Bash", "arguments": {"command": "ls"}},
                },
                {
                    "type": "function",
                    "id": "t2",
                    "function": {"name": "Read", "arguments": {"path": "a", "lines": [1, 2]}},
                },
            ],
        },
        {"role": "tool", "content": "1", "tool_call_id": "t1"},
        {"role": "tool", "content": "2!", "tool_call_id": "t2"},
        {"role": "user", "content": "go on"},
    ]


def test_a_history_may_begin_with_results():
    messages = said(user(result("t9", "late"), text("and?")))
    assert messages == [
        {"role": "tool", "content": "late", "tool_call_id": "t9"},
        {"role": "user", "content": "and?"},
    ]


def test_a_system_message_between_a_call_and_its_result():
    roles = [m["role"] for m in said("x", assistant(use("t")), system("note"), user(result("t")))]
    assert roles == ["user", "assistant", "system", "tool"]


@pytest.mark.parametrize(
    ("content", "is_error", "shown"),
    [
        ("fine", False, "fine"),
        ("fine", None, "fine"),
        (None, False, ""),
        ([], False, ""),
        ("no such file", True, "Error: no such file"),
        ("<tool_use_error>\nno\n</tool_use_error>", True, "<tool_use_error>\nno\n</tool_use_error>"),
        ("Error: already", True, "Error: already"),
        ("Errorless", True, "Error: Errorless"),
        (None, True, "Error"),
        ([IMAGE], False, NO_IMAGE),
        ([text("see "), IMAGE], False, f"see {NO_IMAGE}"),
    ],
)
def test_results(content, is_error, shown):
    block = result("t", content, is_error=is_error)
    assert said("x", assistant(use("t")), user(block))[-1]["content"] == shown


@pytest.mark.parametrize(
    ("block", "shown"),
    [
        (IMAGE, NO_IMAGE),
        ({"type": "document", "source": {"type": "text", "data": "body"}, "title": "T"}, "T\nbody"),
        (
            {"type": "document", "source": {"type": "content", "content": [text("a"), IMAGE]}},
            f"a{NO_IMAGE}",
        ),
        (
            {"type": "document", "source": {"type": "base64", "data": "JVBE"}},
            "[document omitted: this server reads only documents that are sent as text]",
        ),
        (
            {"type": "search_result", "title": "T", "source": "http://x", "content": [text("found")]},
            "T\nhttp://x\nfound",
        ),
        ({"type": "container_upload", "file_id": "f"}, "[container_upload omitted]"),
        ({"type": "new_kind", "content": "inner"}, "inner"),
    ],
)
def test_other_blocks(block, shown):
    assert said(user(text("see: "), block))[0]["content"] == f"see: {shown}"


def test_broken_input_is_sent_back_as_it_came():
    broken = {"__unparsedToolInput": {"raw": '{"command": "ls -a', "len": 18}}
    messages = said("x", assistant(use("t", **broken)), user(result("t", "bad", is_error=True)))
    assert messages[1]["tool_calls"][0]["function"]["arguments"] == broken


def test_thinking_comes_back_from_a_signature():
    def reasoning(thinking, signature):
        block = {"type": "thinking", "thinking": thinking, "signature": signature}
        return said("x", assistant(block, text("y")), "z")[1].get("reasoning_content")

    assert reasoning("", sealed("höm\n")) == "höm\n"
    assert reasoning("shown", sealed("hidden")) == "shown"
    assert reasoning("shown", "msg_0123456789abcdef") == "shown"
    assert reasoning("", "EqQBCkgIARAB") is None
    for damage in ("!", "AA", "/w=="):
        with pytest.raises(ApiError, match="damaged") as caught:
            reasoning("", f"ninfer-reasoning.v1:{damage}")
        assert caught.value.code == "invalid_thinking_signature"


def test_a_final_assistant_message_is_continued_without_thinking():
    wanted = read("x", assistant(text("The ans")), output_config={"effort": "high"}).generation
    assert wanted.continue_final
    assert wanted.thinking is False
    assert wanted.effort is None
    assert wanted.messages[-1] == {"role": "assistant", "content": "The ans"}
    for empty in ({"role": "assistant", "content": ""}, assistant()):
        wanted = read("x", empty).generation
        assert not wanted.continue_final
        assert wanted.messages[-1]["role"] == "user"


@pytest.mark.parametrize(
    ("messages", "members", "code"),
    [
        (["x", assistant(text("a"))], {"thinking": {"type": "adaptive"}}, "assistant_prefill_not_supported"),
        (["x", assistant(text("a"), use("t"))], {}, "assistant_prefill_not_supported"),
        (["x", assistant({"type": "thinking", "thinking": "t"})], {}, "assistant_prefill_not_supported"),
        (["x", assistant(use("t")), "no result"], {}, "invalid_tool_history"),
        (["x", assistant(use("t")), user(text("first"), result("t"))], {}, "invalid_tool_history"),
        (["x", assistant(use("t")), user(result("t"), result("t"))], {}, "invalid_tool_history"),
        (["x", assistant(use("t")), user(result("t"), result("u"))], {}, "invalid_tool_history"),
        (["x", assistant(use("t"), use("u")), user(result("t"))], {}, "invalid_tool_history"),
        (["x", assistant(use("t")), system("no")], {}, "invalid_tool_history"),
        (["x", assistant(use("t"), use("t")), user(result("t"))], {}, "invalid_tool_history"),
        (["x", assistant(text("a")), user(result("t"))], {}, "invalid_tool_history"),
        (["x", assistant(result("t")), "y"], {}, "invalid_tool_history"),
    ],
)
def test_histories_that_are_refused(messages, members, code):
    with pytest.raises(ApiError) as caught:
        read(*messages, **members)
    assert caught.value.status == 400
    assert caught.value.code == code
    # Claude Code drops parts of its request when a 400 names them in these words.
    for word in (".role", "context_management", "adaptive", "display", "prompt is too long"):
        assert word not in caught.value.message


def test_counting_may_end_anywhere():
    for messages in (["x", assistant(use("t"))], ["x", assistant(text("a"), use("t"))]):
        wanted = read(*messages, counting=True).generation
        assert not wanted.continue_final
        assert "tool_calls" in wanted.messages[-1]
    assert read("x", assistant(text("a")), counting=True).generation.continue_final
    note = {"role": "system", "content": "note"}
    assert read("x", assistant(use("t")), note, counting=True).generation.messages[-1] == note


def test_system_messages_are_folded_into_what_the_user_sent():
    def fold(*messages):
        return [(m["role"], m["content"]) for m in fold_system(said(*messages, system="top"))]

    note = "<system-reminder>\nnote\n</system-reminder>"
    assert fold("a", system("note"), assistant(text("b")), "c") == [
        ("system", "top"),
        ("user", f"a\n\n{note}"),
        ("assistant", "b"),
        ("user", "c"),
    ]
    # A user message of its own behind a result would look like a new question.
    assert fold("a", assistant(use("t")), user(result("t", "r")), system("note"))[2:] == [
        ("assistant", ""),
        ("tool", f"r\n\n{note}"),
    ]
    assert fold("a", assistant(use("t")), system("note"), user(result("t", "r")))[2:] == [
        ("assistant", ""),
        ("tool", f"{note}\n\nr"),
    ]
    assert fold(system("note"), "a") == [("system", "top\n\nnote"), ("user", "a")]
    assert fold("a", assistant(text("b")), system("note"))[2:] == [("assistant", "b"), ("user", note)]
