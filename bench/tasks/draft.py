"""From one drawn question to a task: which split it belongs to, system prompts, earlier turns, room."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from bench.tasks.task import Generator, Reply, Split, Task

HELD_OUT_TENTH = 10  # one key in ten is held out

SYSTEM_SHARE = 0.12
EARLIER_SHARE = 0.1
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


def held_out(key: str) -> bool:
    """Whether `key` belongs to the held-out split: a fixed tenth of all keys."""
    return hashlib.blake2b(key.encode(), digest_size=4).digest()[0] * HELD_OUT_TENTH < 256


def in_split(keys: tuple[str, ...], split: Split) -> bool:
    """Whether an instance with `keys` may be drawn for `split`."""
    return held_out(keys[0]) if split == "heldout" else not any(map(held_out, keys))


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
            if in_split(draft.keys, split):
                return draft

    def generate(rng: random.Random, split: Split) -> Task:
        draft = one(rng, split)
        messages: list[dict[str, Any]] = []
        if rng.random() < SYSTEM_SHARE:
            messages.append({"role": "system", "content": rng.choice(_SYSTEMS)})
        if rng.random() < EARLIER_SHARE:
            earlier = one(rng, split)
            messages.append({"role": "user", "content": earlier.prompt})
            messages.append({"role": "assistant", "content": earlier.content})
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
