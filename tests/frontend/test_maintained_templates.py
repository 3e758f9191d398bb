"""Our templates, item by item of the described behaviour of the Qwen3.6 and Qwen3.8 families."""

from typing import Any

import pytest

from ninfer.errors import FrontendError
from ninfer.frontend import maintained_template
from ninfer.frontend.template import ChatTemplate

T36 = ChatTemplate(maintained_template("qwen3_6"))
T38 = ChatTemplate(maintained_template("qwen3_8"))
BOTH = pytest.mark.parametrize("template", [T36, T38], ids=["3.6", "3.8"])
TOOLS = [
    {
        "type": "function",
        "function": {"name": "look", "description": "Größe <b>&</b>", "parameters": {"z": 1, "a": {}}},
    },
    {"name": "second"},
]


def render(template: ChatTemplate, *messages: dict[str, Any], **options: Any) -> str:
    """A prompt, for 3.8 with an effort that adds nothing unless the test chooses one."""
    if template is T38:
        options.setdefault("reasoning_effort", "medium")
    options.setdefault("add_generation_prompt", False)
    return str.__str__(template.render({"messages": list(messages), **options}))


def user(content: Any = "Q") -> dict[str, Any]:
    return {"role": "user", "content": content}


def assistant(content: Any = "A", **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **more}


def tool(content: Any = "R") -> dict[str, Any]:
    return {"role": "tool", "content": content}


def system(content: Any = "S", role: str = "system") -> dict[str, Any]:
    return {"role": role, "content": content}


def call(name: str = "look", **arguments: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


Q = "<|im_start|>user\nQ<|im_end|>\n"


@BOTH
def test_turn_form_and_trimming(template: ChatTemplate) -> None:
    assert render(template, user(" \n Q \t\n")) == Q
    assert render(template, user([{"type": "text", "text": " a "}, {"type": "text", "text": "b "}])) == (
        "<|im_start|>user\na b<|im_end|>\n"
    )


@BOTH
def test_system_turn(template: ChatTemplate) -> None:
    for role in ("system", "developer"):
        assert render(template, system(" S ", role), user()) == "<|im_start|>system\nS<|im_end|>\n" + Q


def test_empty_system_text() -> None:
    assert render(T36, system(" "), user()) == "<|im_start|>system\n<|im_end|>\n" + Q
    assert render(T38, system(" "), user()) == Q


@BOTH
def test_further_system_messages_stay_in_place(template: ChatTemplate) -> None:
    text = render(template, user(), system("later", "developer"), user())
    assert text == Q + "<|im_start|>system\nlater<|im_end|>\n" + Q


@BOTH
def test_tools(template: ChatTemplate) -> None:
    text = render(template, system("S"), user(), tools=TOOLS)
    head, _, rest = text.partition("\n</tools>")
    start, _, lines = head.partition("<tools>\n")
    assert start.startswith("<|im_start|>system\n# Tools\n")
    assert lines.split("\n") == [
        '{"type": "function", "function": {"name": "look", "description": "Größe <b>&</b>", '
        '"parameters": {"z": 1, "a": {}}}}',
        '{"name": "second"}',
    ]
    assert "<tool_call>\n<function=" in rest
    assert rest.endswith("\n\nS<|im_end|>\n" + Q)
    assert render(template, user(), tools=TOOLS).split("<|im_end|>")[0] == text.split("\n\nS<|im_end|>")[0]


@BOTH
def test_tool_results_share_a_user_turn(template: ChatTemplate) -> None:
    text = render(template, user(), assistant("", tool_calls=[call()]), tool(" r1 "), tool("r2"), user())
    assert text.endswith(
        "<|im_start|>user\n<tool_response>\nr1\n</tool_response>\n<tool_response>\nr2\n</tool_response><|im_end|>\n"
        + Q
    )
    assert render(template, tool("r1"), user()).startswith("<|im_start|>user\n<tool_response>\nr1\n")


@BOTH
def test_calls(template: ChatTemplate) -> None:
    calls = [call("f", s='a "b"\n<c>', n=1, x=1.5, t=True, z=None, o={"k": "é", "l": [1, 2]}), call("g")]
    one = (
        '<tool_call>\n<function=f>\n<parameter=s>\na "b"\n<c>\n</parameter>\n<parameter=n>\n1\n</parameter>\n'
        "<parameter=x>\n1.5\n</parameter>\n<parameter=t>\ntrue\n</parameter>\n<parameter=z>\nnull\n</parameter>\n"
        '<parameter=o>\n{"k": "é", "l": [1, 2]}\n</parameter>\n</function>\n</tool_call>'
    )
    two = "\n<tool_call>\n<function=g>\n</function>\n</tool_call><|im_end|>\n"
    start = Q + "<|im_start|>assistant\n<think>\n\n</think>\n\n"
    assert render(template, user(), assistant(" A ", tool_calls=calls)) == f"{start}A\n\n{one}{two}"
    assert render(template, user(), assistant(" ", tool_calls=calls)) == f"{start}{one}{two}"
    bare = [{"name": "g", "arguments": {}}]
    assert render(template, user(), assistant("", tool_calls=bare)) == start + two[1:]


def test_reasoning_is_kept_after_the_last_question() -> None:
    history = [
        user(),
        assistant("A1", reasoning_content=" r1 "),
        user(),
        assistant("A2", reasoning_content="r2"),
    ]
    dropped, kept = "<|im_start|>assistant\nA1", "<|im_start|>assistant\n<think>\nr1\n</think>\n\nA1"
    last = "<|im_start|>assistant\n<think>\nr2\n</think>\n\nA2<|im_end|>\n"
    assert render(T36, *history) == f"{Q}{dropped}<|im_end|>\n{Q}{last}"
    assert render(T36, *history, preserve_thinking=False) == render(T36, *history)
    assert render(T36, *history, preserve_thinking=True) == f"{Q}{kept}<|im_end|>\n{Q}{last}"
    assert render(T38, *history) == f"{Q}{kept}<|im_end|>\n{Q}{last}"
    assert render(T38, *history, preserve_thinking=True) == render(T38, *history)
    assert render(T38, *history, preserve_thinking=False) == f"{Q}{dropped}<|im_end|>\n{Q}{last}"


@BOTH
def test_a_kept_turn_has_its_block_even_when_empty(template: ChatTemplate) -> None:
    for more in ({}, {"reasoning_content": " "}, {"reasoning_content": None}):
        assert render(template, user(), assistant(**more)).endswith("<think>\n\n</think>\n\nA<|im_end|>\n")


@BOTH
def test_wrapped_tool_results_are_no_question(template: ChatTemplate) -> None:
    wrapper = user(" <tool_response>\nr\n</tool_response> ")
    options = {"preserve_thinking": False}
    text = render(template, user(), assistant("A", reasoning_content="r"), wrapper, **options)
    assert "<think>\nr\n</think>" in text
    text = render(
        template, user(), assistant("A", reasoning_content="r"), user("<tool_response> x"), **options
    )
    assert "<think>" not in text


def test_content_is_split_only_without_reasoning() -> None:
    mixed = "<think>\nwhy\n</think>\n\nA"
    assert render(T36, user(), assistant(mixed)).endswith(
        "assistant\n<think>\nwhy\n</think>\n\nA<|im_end|>\n"
    )
    assert render(T36, user(), assistant("why\n</think>A")).endswith(
        "\n<think>\nwhy\n</think>\n\nA<|im_end|>\n"
    )
    kept = render(T36, user(), assistant(mixed, reasoning_content=""))
    assert kept.endswith(f"<think>\n\n</think>\n\n{mixed}<|im_end|>\n")
    assert render(T36, user(), assistant(mixed), user()).count("think") == 0
    assert render(T38, user(), assistant(mixed)).endswith(f"<think>\n\n</think>\n\n{mixed}<|im_end|>\n")


@BOTH
def test_no_question_at_all(template: ChatTemplate) -> None:
    for messages in ([system()], [assistant()], [user("<tool_response></tool_response>")]):
        with pytest.raises(FrontendError, match=r"refused the conversation: .*no user message"):
            render(template, *messages)
    text = render(
        template, assistant("", reasoning_content="r"), tool(), assistant("A"), preserve_thinking=False
    )
    first, second = text.split("<|im_start|>user")
    assert "<think>" not in first
    assert "<think>\n\n</think>\n\nA" in second


@BOTH
def test_generation_prompt(template: ChatTemplate) -> None:
    start = Q + "<|im_start|>assistant\n<think>\n"
    assert render(template, user(), add_generation_prompt=True) == start
    assert render(template, user(), add_generation_prompt=True, enable_thinking=True) == start
    off = render(template, user(), add_generation_prompt=True, enable_thinking=False)
    assert off == start + "\n</think>\n\n"


def test_effort() -> None:
    def turn(*messages: dict[str, Any], **options: Any) -> str:
        return render(T38, *messages, **options).split("<|im_start|>user")[0]

    high, low = (turn(user(), reasoning_effort=e) for e in ("xhigh", "low"))
    assert str.__str__(T38.render({"messages": [user()]})) == high + Q
    assert high != low
    for sentence, effort in ((high, "xhigh"), (low, "low")):
        assert sentence.startswith("<|im_start|>system\n")
        assert sentence.endswith(".<|im_end|>\n")
        begin = sentence.removesuffix("<|im_end|>\n")
        assert turn(system(), user(), reasoning_effort=effort) == f"{begin}\n\nS<|im_end|>\n"
        assert turn(system(" "), user(), reasoning_effort=effort) == sentence
        assert turn(user(), tools=TOOLS, reasoning_effort=effort).startswith(f"{begin}\n\n# Tools\n")
        assert turn(user(), reasoning_effort=effort, enable_thinking=False) == ""
    assert turn(user(), reasoning_effort="medium") == ""
    for effort in ("high", "max", "minimal", "none"):
        with pytest.raises(FrontendError, match=f"xhigh, medium or low, not {effort}"):
            turn(user(), reasoning_effort=effort)
    assert render(T36, user(), reasoning_effort="low") == Q


@BOTH
def test_media(template: ChatTemplate) -> None:
    parts = [{"type": "image", "image": "x"}, {"type": "text", "text": " and "}, {"video": "y"}]
    image, video = (
        "<|vision_start|><|image_pad|><|vision_end|>",
        "<|vision_start|><|video_pad|><|vision_end|>",
    )
    assert render(template, user(parts)) == f"<|im_start|>user\n{image} and {video}<|im_end|>\n"
    text = render(template, user(parts), user(parts), add_vision_id=True)
    assert text == (
        f"<|im_start|>user\nPicture 1: {image} and Video 1: {video}<|im_end|>\n"
        f"<|im_start|>user\nPicture 2: {image} and Video 2: {video}<|im_end|>\n"
    )
    with pytest.raises(FrontendError, match="cannot contain media"):
        render(template, system(parts), user())


@BOTH
def test_continuation(template: ChatTemplate) -> None:
    final = assistant(" a</think>b", reasoning_content="r")
    text = render(template, user(), final, continue_final_message=True)
    assert text == Q + "<|im_start|>assistant\na</think>b"


@BOTH
def test_unknown_role_and_content(template: ChatTemplate) -> None:
    with pytest.raises(FrontendError, match="Unknown message role: robot"):
        render(template, user(), {"role": "robot", "content": "x"})
    with pytest.raises(FrontendError, match="must be text or a list of parts"):
        render(template, user(3))
    with pytest.raises(FrontendError, match="must be text, an image or a video"):
        render(template, user([{"type": "sound"}]))
    with pytest.raises(FrontendError, match="no messages"):
        render(template)
