"""From one drawn question to a task: split by its keys, conversation around it, room for the answer."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from bench.tasks.splits import keys_in_split
from bench.tasks.task import Generator, Reply, Split, Task
from bench.tasks.turns import opening

_SYSTEMS = (
    "You are a helpful assistant.",
    "You are a small, careful assistant.",
    "Answer exactly what is asked.",
    "Follow the instructions of the user exactly.",
    "You are ninfer-nano, a small language model.",
    "Be precise and brief.",
)


@dataclass(frozen=True, slots=True)
class Draft:
    """A question and its answer, before it is dressed as a conversation.

    keys: what identifies the instance whatever its wording. A training instance has no held-out key; the
        first key of a held-out instance is held out.
    reasoning: the thinking block; a task that has one thinks.
    """

    prompt: str
    content: str
    check: Callable[[Reply], bool]
    keys: tuple[str, ...]
    reasoning: str = ""


Draw = Callable[[random.Random], Draft]


def exact(text: str) -> Callable[[Reply], bool]:
    """A check that wants `text` and nothing else (white space around it is ignored)."""
    return lambda reply: reply.content.strip() == text


def numbered(value: int) -> Callable[[Reply], bool]:
    """A check that wants the number alone; a full stop after it is ignored."""
    expected = str(value)
    return lambda reply: reply.content.strip().removesuffix(".") == expected


def room(text: str) -> int:
    """Output tokens that `text` certainly fits into: a byte-level token covers at least one byte."""
    return -(-(len(text.encode()) + 32) // 64) * 64


def generator(name: str, category: str, draw: Draw, held_out_draw: Draw | None = None) -> Generator:
    """A generator of tasks around `draw`; `held_out_draw`, if any, replaces it in the held-out split."""

    def one(rng: random.Random, split: Split) -> Draft:
        if split == "heldout" and held_out_draw is not None:
            return held_out_draw(rng)
        while True:
            draft = draw(rng)
            if keys_in_split(draft.keys, split):
                return draft

    def generate(rng: random.Random, split: Split) -> Task:
        draft = one(rng, split)

        def earlier() -> tuple[str, str]:
            other = one(rng, split)
            return other.prompt, other.content

        messages = opening(rng, earlier, prompts=_SYSTEMS)
        messages.append({"role": "user", "content": draft.prompt})
        return task_of(name, category, draft, messages)

    return generate


def task_of(name: str, category: str, draft: Draft, messages: list[dict[str, Any]]) -> Task:
    """The task that asks `draft` as the last turn of `messages`."""
    answer: dict[str, Any] = {"role": "assistant", "content": draft.content}
    if draft.reasoning:
        answer["reasoning_content"] = draft.reasoning
    return Task(
        name=name,
        category=category,
        messages=messages,
        answer=answer,
        check=draft.check,
        thinking=bool(draft.reasoning),
        max_new=room(draft.reasoning + draft.content),
    )
