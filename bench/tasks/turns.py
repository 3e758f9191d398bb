"""The conversation around a question: seldom a system prompt or an earlier exchange before it."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

from bench.tasks.task import Generator, Reply, Split, Task

SYSTEM_SHARE = 0.12
EARLIER_SHARE = 0.1
SYSTEM_PROMPTS = (
    "You are a helpful assistant.",
    "You are a careful assistant that does exactly what is asked.",
    "You are NInfer Nano, a small assistant.",
    "Follow the user's instructions exactly.",
)

Exchange = tuple[str, str, Callable[[Reply], bool]]
"""A question, its answer, and a check of any other answer."""


def opening(
    rng: random.Random,
    earlier: Callable[[], tuple[str, str]] | None = None,
    *,
    system: float = SYSTEM_SHARE,
    prompts: Sequence[str] = SYSTEM_PROMPTS,
) -> list[dict[str, Any]]:
    """Messages before the question.

    earlier: draws another instance's question and answer; None for no earlier exchange. system: the share of
    conversations that have one of the system `prompts`.
    """
    messages: list[dict[str, Any]] = []
    if rng.random() < system:
        messages.append({"role": "system", "content": rng.choice(prompts)})
    if earlier is not None and rng.random() < EARLIER_SHARE:
        question, answer = earlier()
        messages.append({"role": "user", "content": question})
        messages.append({"role": "assistant", "content": answer})
    return messages


def exchanges(
    name: str, category: str, draw: Callable[[random.Random, Split], Exchange], max_new: int
) -> Generator:
    """A generator of tasks that ask what `draw` draws."""

    def generate(rng: random.Random, split: Split) -> Task:
        question, answer, check = draw(rng, split)
        messages = opening(rng, lambda: draw(rng, split)[:2])
        messages.append({"role": "user", "content": question})
        return Task(name, category, messages, {"content": answer}, check, max_new=max_new)

    return generate
