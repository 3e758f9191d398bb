"""A conversation that is sent again begins with the tokens that it had before."""

import json
from copy import deepcopy
from typing import Any

import pytest

from ninfer.api.loading import load_frontend, opened
from ninfer.frontend import Frontend, Prompt, maintained_template
from ninfer.serve.calls import CallArguments, CallBegan, CallEnded, GenerationRequest, Text
from ninfer.serve.messages.request import read_request
from ninfer.serve.messages.response import MessageEvents, whole_message
from ninfer.serve.options import ServeOptions
from ninfer.serve.resolve import template_options
from ninfer.serve.system import fold_system, takes_system_anywhere
from tests.serve.fakes import NANO, nano_frontend
from tests.serve.messages.conftest import TERMS, body, recorded, recording, result, tool, use, user

STRICT = maintained_template("qwen3_6").replace(
    "{{- '<|im_start|>system\\n' ~ text_of(message.content, false, false)|trim ~ '<|im_end|>\\n' }}",
    "{{- raise_exception('System message must be at the beginning.') }}",
)


@pytest.fixture(scope="module", params=["maintained", "stock"])
def frontend(request) -> Frontend:
    """That of the nano model, and one whose template takes system messages only at the start."""
    if request.param == "maintained":
        return nano_frontend()
    with opened(NANO, None, None) as artifact:
        return load_frontend(artifact, STRICT)


def rendered(frontend: Frontend, sent: dict[str, Any]) -> Prompt:
    request: GenerationRequest = read_request(sent, TERMS).generation
    messages = request.messages if takes_system_anywhere(frontend) else fold_system(request.messages)
    options = template_options(request, ServeOptions(NANO))
    return frontend.render(
        messages,
        tools=[tool.declared() for tool in request.tools if tool.listed] or None,
        thinking=options.thinking,
        reasoning_effort=options.effort,
        preserve_thinking=options.preserve_thinking,
    )


def common(first: list[int], second: list[int]) -> int:
    return next(
        (i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b),
        min(len(first), len(second)),
    )


def test_the_two_kinds_of_templates(frontend):
    with_system = body("a", {"role": "system", "content": "note"}, {"role": "assistant", "content": "b"}, "c")
    text = rendered(frontend, with_system).text
    place = (
        "<|im_start|>system\nnote<|im_end|>"
        if takes_system_anywhere(frontend)
        else "a\n\n<system-reminder>\nnote"
    )
    assert place in text


@pytest.mark.parametrize(
    ("client", "case", "first", "second"),
    [
        ("claude-code", "bash", 1, 2),
        ("claude-code", "thinking", 1, 2),
        ("claude-code", "toolsearch", 1, 2),
        ("claude-code", "agent", 1, 3),
        ("claude-code", "sonnet", 1, 2),
        ("claude-code", "nobetas", 1, 2),
        ("claude-code", "reject-rolesys", 1, 2),
        ("opencode", "anthropic", 1, 3),
        ("anthropic-python", "sdk", 1, 2),
        ("anthropic-python", "sdk", 12, 13),
    ],
)
def test_recorded_next_steps_reuse_everything(frontend, client, case, first, second):
    before = rendered(frontend, recording(client, case, first))
    after = rendered(frontend, recording(client, case, second))
    assert before.opener is not None
    assert before.opener > 0
    assert after.tokens[: before.opener] == before.tokens[: before.opener]


def test_everything_that_moves_at_once(frontend):
    """Another billing suffix, blocks for strings and strings for blocks, marks elsewhere."""

    def turned(value: Any) -> Any:
        if isinstance(value, list) and len(value) == 1 and value[0].get("type") == "text":
            return value[0]["text"]
        return (
            [{"type": "text", "text": value, "cache_control": {"type": "ephemeral"}}]
            if isinstance(value, str)
            else value
        )

    for line in recorded("claude-code"):
        if "count_tokens" in line["path"]:
            continue
        sent = line["body"]
        again = json.loads(json.dumps(sent).replace(".sfx1;", ".sfx9;"))
        marked = 0
        for message in again["messages"]:
            message["content"] = turned(message["content"])
            for block in message["content"] if isinstance(message["content"], list) else ():
                marked += block.pop("cache_control", None) is not None
        again["system"] = [
            {k: v for k, v in block.items() if k != "cache_control"} for block in again["system"]
        ]
        assert rendered(frontend, again).tokens == rendered(frontend, sent).tokens


def test_main_agent_and_subagent_differ_only_behind_the_billing_line(frontend):
    main = recording("claude-code", "agent", 1)
    other = deepcopy(main)
    other["system"][0] = recording("claude-code", "agent", 2)["system"][0]
    assert other["system"][0] != main["system"][0]
    assert rendered(frontend, other).tokens == rendered(frontend, main).tokens


def test_a_note_at_the_end_spoils_nothing_before_it(frontend):
    first = recording("claude-code", "opus48", 1)
    note = first["messages"][-1]
    second = deepcopy(first)
    second["messages"][-1:] = [
        {"role": "assistant", "content": [use("toolu_9", command="cat a")]},
        user(result("toolu_9", "text")),
        {"role": "system", "content": note["content"][0]["text"].replace("14999895", "14998888")},
    ]
    before, after = rendered(frontend, first), rendered(frontend, second)
    without = deepcopy(first)
    without["messages"].pop()
    bare = rendered(frontend, without)
    assert bare.opener is not None
    assert common(before.tokens, after.tokens) >= 0.99 * bare.opener


def test_a_tool_that_becomes_known_spoils_nothing_before_it(frontend):
    search, late = tool("Search"), tool("Fetch", defer_loading=True)
    talk = body("find", thinking={"type": "adaptive"})
    first = {**talk, "tools": [search, tool("Write")]}
    reference = result("t1", [{"type": "tool_reference", "tool_name": "Fetch"}])
    said = [{"role": "assistant", "content": [use("t1", "Search")]}, user(reference)]
    second = {**talk, "tools": [search, late, tool("Write")], "messages": talk["messages"] + said}
    before, after = rendered(frontend, first), rendered(frontend, second)
    assert after.tokens[: before.opener] == before.tokens[: before.opener]
    assert '"name": "Fetch"' in after.text[len(before.text) :]


@pytest.mark.parametrize("display", ["summarized", "omitted"])
def test_an_answer_that_comes_back_is_what_the_model_wrote(frontend, display):
    thinking = {"type": "adaptive", "display": display}
    sent = body("list", tools=[tool("Bash"), tool("Read")], thinking=thinking, max_tokens=500)
    before = rendered(frontend, sent)
    assert before.starts_in_thinking
    answer = MessageEvents("m", prompt_tokens=9, omit_thinking=display == "omitted")
    said = [
        Text("reasoning", "First look,\n"),
        Text("reasoning", "then read."),
        Text("content", "I'll look."),
        CallBegan(0, "Bash"),
        CallArguments(0, '{"command": "ls'),
        CallArguments(0, ' -a"}'),
        CallEnded(0, "Bash", '{"command": "ls -a"}'),
        CallBegan(1, "Read"),
        CallEnded(1, "Read", '{"path": "ä.txt", "lines": [1, 2]}'),
    ]
    message = whole_message([item for event in said for item in answer.of(event)])
    calls = [block["id"] for block in message["content"] if block["type"] == "tool_use"]
    results = user(*(result(call, "done") for call in calls))
    turn = {"role": "assistant", "content": message["content"]}
    after = rendered(frontend, {**sent, "messages": [*sent["messages"], turn, results]})
    written = (
        "First look,\nthen read.\n</think>\n\nI'll look.\n\n"
        "<tool_call>\n<function=Bash>\n<parameter=command>\nls -a\n</parameter>\n</function>\n</tool_call>\n"
        "<tool_call>\n<function=Read>\n<parameter=path>\nä.txt\n</parameter>\n<parameter=lines>\n[1, 2]\n"
        "</parameter>\n</function>\n</tool_call><|im_end|>\n"
    )
    assert after.text.startswith(before.text + written)
