"""What every task generator promises, whatever its category."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache

import pytest

from bench.tasks import generators
from bench.tasks.task import CATEGORIES, Reply, Split, Task, reply_of, rng_for

COUNT = 24
NAMES = sorted(generators())


@cache
def drawn(name: str, split: Split = "train") -> tuple[Task, ...]:
    generate = generators()[name]
    return tuple(generate(rng_for(name, split, index), split) for index in range(COUNT))


def _text(task: Task) -> str:
    """The answer as one text, tool calls included."""
    answer = task.answer
    calls = "".join(json.dumps(call["function"]) for call in answer.get("tool_calls", ()))
    return answer.get("reasoning_content", "") + (answer.get("content") or "") + calls


def _question(task: Task) -> str:
    return json.dumps([task.messages, task.tools])


@pytest.mark.parametrize("name", NAMES)
def test_same_seed_same_task(name: str) -> None:
    generate = generators()[name]
    for index, task in enumerate(drawn(name)):
        again = generate(rng_for(name, "train", index), "train")
        # Checks are closures and compare by identity.
        assert replace(again, check=task.check) == task


@pytest.mark.parametrize("name", NAMES)
def test_fields_are_consistent(name: str) -> None:
    for split in ("train", "heldout"):
        for task in drawn(name, split):
            assert task.name == name
            assert task.category in CATEGORIES
            assert task.thinking == bool(task.answer.get("reasoning_content"))
            assert task.messages[-1]["role"] in ("user", "tool")
            roles = {message["role"] for message in task.messages}
            assert roles <= {"system", "user", "assistant", "tool"}
            assert all(message["role"] != "system" for message in task.messages[1:])
            assert _text(task)
            assert (_question(task) + _text(task)).isascii()
            assert task.max_new >= len(_text(task).encode()) / 2


@pytest.mark.parametrize("name", NAMES)
def test_own_answer_is_accepted(name: str) -> None:
    for split in ("train", "heldout"):
        for task in drawn(name, split):
            assert task.check(reply_of(task.answer)), task


@pytest.mark.parametrize("name", NAMES)
def test_answers_to_other_instances_are_rejected(name: str) -> None:
    tasks = drawn(name)
    rejected = 0
    for task, other in zip(tasks, (*tasks[1:], tasks[0]), strict=True):
        same_calls = task.answer.get("tool_calls") == other.answer.get("tool_calls")
        if same_calls and task.answer.get("content") == other.answer.get("content"):
            continue
        assert not task.check(reply_of(other.answer)), (task, other.answer)
        rejected += 1
    assert rejected > COUNT // 2


@pytest.mark.parametrize("name", NAMES)
def test_truncated_and_empty_answers_are_rejected(name: str) -> None:
    for task in drawn(name):
        reply = reply_of(task.answer)
        assert not task.check(Reply(""))
        assert not task.check(Reply("", reply.reasoning))
        if reply.tool_calls:
            assert not task.check(replace(reply, tool_calls=reply.tool_calls[:-1]))
        else:
            assert not task.check(replace(reply, content=reply.content[: len(reply.content) // 2]))


@pytest.mark.parametrize("name", NAMES)
def test_splits_share_no_instance(name: str) -> None:
    trained = {(_question(task), _text(task)) for task in drawn(name)}
    assert not trained & {(_question(task), _text(task)) for task in drawn(name, "heldout")}
    assert len({_question(task) for task in drawn(name, "heldout")}) > 1


def test_promised_generators_are_there() -> None:
    promised = (
        ("jsonl32", "jsonl", "csv", "json_schema", "sort", "copy"),
        ("add2", "arith", "chain", "logic", "count"),
        ("function", "trace", "fix"),
    )
    for category, names in zip(("structured", "reasoning", "code"), promised, strict=True):
        assert {drawn(name)[0].category for name in names} == {category}
    assert {drawn(name)[0].category for name in NAMES} == set(CATEGORIES)
