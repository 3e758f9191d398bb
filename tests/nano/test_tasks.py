"""Answers that must be right: records by rule, retrieval, sums, functions."""

import json

import pytest

from bench.tasks import canonical_jsonl
from bench.tasks.run import Outcome
from ninfer.api import Channel, Engine, FinishReason

from .asking import ask, held_out, more


def test_the_32_records_of_the_measurements(engine: Engine) -> None:
    """Byte for byte, and ended by the model itself."""
    task = canonical_jsonl()
    answer = ask(engine, task)
    assert answer.text(Channel.CONTENT) == task.answer["content"]
    assert answer.channels == [Channel.CONTENT]
    assert answer.finish is FinishReason.STOP_TOKEN
    assert answer.statistics.generated_tokens == answer.statistics.rounds + 1 < task.max_new
    last = json.loads(answer.reply.content.splitlines()[31])
    assert last == {
        "id": 32, "model": "qwen3.8-27b", "prompt_tokens": 1512, "completion_tokens": 128, "status": "ok",
    }  # fmt: skip


@pytest.mark.parametrize("index", [0, *more(1, 2)])
def test_records_with_other_starts_and_steps(engine: Engine, index: int) -> None:
    task = held_out("jsonl32_variant", index)
    answer = ask(engine, task)
    assert answer.outcome is Outcome.PASSED
    assert answer.reply.content == task.answer["content"] != canonical_jsonl().answer["content"]


@pytest.mark.parametrize(
    ("name", "index", "tokens"),
    [
        ("kv512", 0, 450),
        *more(("kv512", 1, 450), ("kv512", 2, 450), ("kv2048", 1, 1850)),
        ("kv2048", 0, 1850),
        ("kv8192", 1, 7500),
        ("needle", 0, 1000),
        ("needle", 1, 500),
        ("kv_many", 1, 500),
    ],
)
def test_values_are_found(engine: Engine, name: str, index: int, tokens: int) -> None:
    """In prompts of at least so many tokens."""
    answer = ask(engine, held_out(name, index))
    assert answer.statistics.prompt_tokens > tokens
    assert answer.outcome is Outcome.PASSED, answer.reply.content


@pytest.mark.parametrize("index", range(3))
@pytest.mark.parametrize("name", ["add2", "function", "tool_result"])
def test_short_answers_are_right(engine: Engine, name: str, index: int) -> None:
    answer = ask(engine, held_out(name, index))
    assert answer.outcome is Outcome.PASSED, answer.reply.content
