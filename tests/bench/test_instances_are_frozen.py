"""Every generator's instances, byte for byte: a model was trained on them, and published figures count them.

A new generator adds two digests; a changed one needs a new name, a new training run and new figures.
`python -m tests.bench.test_instances_are_frozen` writes the digests anew.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import get_args

import pytest

from bench.tasks import canonical_jsonl, generators
from bench.tasks.task import Split, Task, rng_for

COUNT = 200
FILE = Path(__file__).parents[1] / "data" / "task_instances.json"
FROZEN: dict[str, str] = json.loads(FILE.read_text("utf-8"))


def _shown(task: Task) -> bytes:
    """All of a task but its check, keys in their order."""
    parts = [task.name, task.category, task.messages, task.answer, task.thinking, task.tools, task.max_new]
    return json.dumps(parts).encode() + b"\n"


def _digest(name: str, split: Split) -> str:
    digest = hashlib.sha256()
    for index in range(COUNT):
        digest.update(_shown(generators()[name](rng_for(name, split, index), split)))
    return digest.hexdigest()


@pytest.mark.parametrize("split", get_args(Split))
@pytest.mark.parametrize("name", generators())
def test_instances_are_frozen(name: str, split: Split) -> None:
    assert _digest(name, split) == FROZEN[f"{name}/{split}"]


def test_the_canonical_task_is_frozen() -> None:
    assert hashlib.sha256(_shown(canonical_jsonl())).hexdigest() == FROZEN["canonical_jsonl"]


def test_no_generator_is_gone() -> None:
    names = [f"{name}/{split}" for name in generators() for split in get_args(Split)]
    assert FROZEN.keys() == {*names, "canonical_jsonl"}


def _write() -> None:
    digests = {f"{name}/{split}": _digest(name, split) for name in generators() for split in get_args(Split)}
    digests["canonical_jsonl"] = hashlib.sha256(_shown(canonical_jsonl())).hexdigest()
    FILE.write_text(json.dumps(digests, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    _write()
