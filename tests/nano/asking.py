"""Held-out tasks asked through the public interface, and what came back."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from bench.tasks import generators
from bench.tasks.run import Outcome, judge, read_reply
from bench.tasks.task import Reply, Task, rng_for
from ninfer.api import (
    Channel,
    Done,
    Engine,
    Event,
    FinishReason,
    GenerationOptions,
    Output,
    Started,
    Statistics,
)

ROOT = Path(__file__).resolve().parents[2]
NANO = Path(os.environ.get("MODELS", ROOT / "models")).expanduser() / "ninfer-nano.ninfer"
GREEDY: dict[str, Any] = {"temperature": 0.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}


def more(*cases: Any) -> list[Any]:
    """Cases like others, for `make soak`."""
    return [
        pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.soak)
        for case in cases
    ]


@dataclass(frozen=True)
class Answer:
    """A finished answer: its reply as the benchmark reads it, its events' texts, and its statistics."""

    task: Task
    reply: Reply
    outputs: tuple[Output, ...]
    reused: int
    statistics: Statistics
    call_failure: str | None

    @property
    def outcome(self) -> Outcome:
        return judge(self.task, self.reply, self.finish)

    @property
    def finish(self) -> FinishReason:
        return self.statistics.finish_reason

    @property
    def ids(self) -> tuple[int, ...]:
        return self.statistics.token_ids

    @property
    def pieces(self) -> list[tuple[Channel, str]]:
        """The outputs but for their times."""
        return [(output.channel, output.text) for output in self.outputs]

    @property
    def channels(self) -> list[Channel]:
        """In order, neighbours being different."""
        every = [output.channel for output in self.outputs]
        return [one for index, one in enumerate(every) if index == 0 or every[index - 1] is not one]

    def text(self, channel: Channel) -> str:
        return "".join(output.text for output in self.outputs if output.channel is channel)


def held_out(name: str, index: int) -> Task:
    """Held-out instance `index`, the one that the benchmark gives this number."""
    return generators()[name](rng_for(name, "heldout", index), "heldout")


def options(task: Task, **changes: Any) -> GenerationOptions:
    """Greedy and cold, unless changed."""
    chosen = {"max_new": task.max_new, "thinking": task.thinking, "prefix_reuse": False, **GREEDY}
    return GenerationOptions(**{**chosen, **changes})


def ask(engine: Engine, task: Task, messages: list[dict[str, Any]] | None = None, **changes: Any) -> Answer:
    """Answer the task, or `messages` in its place."""
    asked = task.messages if messages is None else messages
    return read(engine.chat(asked, options(task, **changes), tools=task.tools or None), task)


def read(events: Iterable[Event], task: Task) -> Answer:
    """All events of one answer."""
    started, *middle, done = events
    assert isinstance(started, Started)
    assert isinstance(done, Done)
    outputs = tuple(event for event in middle if isinstance(event, Output))
    reply, failure, _ = read_reply(outputs, task)
    return Answer(task, reply, outputs, started.reused_tokens, done.statistics, failure)
