"""Tool calls from the model's tokens to names and arguments, and the answer to a tool's result."""

import pytest

from bench.tasks.calls import parse_calls
from bench.tasks.run import Outcome
from bench.tasks.task import reply_of
from ninfer.api import Channel, Engine, FinishReason

from .asking import ask, held_out


def test_a_call_has_a_channel_of_its_own(engine: Engine) -> None:
    task = held_out("tool_call", 0)
    answer = ask(engine, task)
    assert answer.channels == [Channel.TOOL]
    text = answer.text(Channel.TOOL)
    assert text.startswith("<tool_call>\n<function=")
    assert text.endswith("</function>\n</tool_call>")
    assert parse_calls(text, task.tools).calls == reply_of(task.answer).tool_calls
    raw = ask(engine, task, raw=True)
    assert raw.ids == answer.ids
    assert raw.channels == [Channel.CONTENT]
    assert raw.text(Channel.CONTENT).startswith(text)


def test_calls_are_well_formed_and_mostly_right(engine: Engine) -> None:
    """To eight questions that a declared function fits: all parse, three of four are exact."""
    answers = [ask(engine, held_out("tool_call", index)) for index in range(8)]
    for answer in answers:
        assert answer.channels == [Channel.TOOL]
        assert answer.call_failure is None
        assert len(answer.reply.tool_calls) == len(answer.task.answer["tool_calls"])
        assert answer.finish is FinishReason.STOP_TOKEN
    assert sum(answer.outcome is Outcome.PASSED for answer in answers) >= 6


@pytest.mark.parametrize("index", [0, 1, 3])  # 3: two calls, two results
def test_a_result_is_answered(engine: Engine, index: int) -> None:
    """The model's own calls, as they were parsed, and the results go back; nothing is computed twice."""
    task = held_out("tool_result", index)
    question = next(i for i, message in enumerate(task.messages) if "tool_calls" in message)
    results = task.messages[question + 1 :]
    first = ask(engine, task, task.messages[:question], prefix_reuse=True)
    assert list(first.reply.tool_calls) == [
        (call["function"]["name"], call["function"]["arguments"])
        for call in task.messages[question]["tool_calls"]
    ]
    calls = [
        {"type": "function", "function": {"name": name, "arguments": arguments}}
        for name, arguments in first.reply.tool_calls
    ]
    turn = {"role": "assistant", "content": first.reply.content, "tool_calls": calls}
    answer = ask(engine, task, [*task.messages[:question], turn, *results], prefix_reuse=True)
    assert answer.outcome is Outcome.PASSED, answer.reply.content
    # The stop token is part of the history too; all but it was computed by the first answer.
    assert answer.reused >= first.statistics.prompt_tokens + first.statistics.generated_tokens - 1


def test_a_call_after_thinking(engine: Engine) -> None:
    answer = ask(engine, held_out("tool_thinking", 0))
    assert answer.channels == [Channel.REASONING, Channel.TOOL]
    assert answer.outcome is Outcome.PASSED
