"""The example conversations for ninfer-nano are held-out tasks, as the benchmark draws them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.tasks import generators
from bench.tasks.structured import canonical_jsonl
from bench.tasks.task import Task, rng_for

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def held_out(name: str, index: int) -> Task:
    return generators()[name](rng_for(name, "heldout", index), "heldout")


@pytest.mark.parametrize(
    ("file", "task"),
    [
        ("nano-records", canonical_jsonl()),
        ("nano-lookup", held_out("kv512", 1)),
        ("nano-tools", held_out("tool_call", 3)),
    ],
)
def test_examples_are_held_out_tasks(file: str, task: Task) -> None:
    conversation = json.loads((EXAMPLES / f"{file}.json").read_text("utf-8"))
    assert conversation["messages"] == task.messages
    assert conversation.get("tools", []) == task.tools
    assert not task.thinking
