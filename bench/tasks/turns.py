"""What generators share: the division between splits, and the turns before a question."""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable, Sequence
from typing import Any

from bench.tasks.task import Split

HELD_OUT_SHARE = 8  # one key of eight belongs to the held-out split

SYSTEM_PROMPTS = (
    "You are a helpful assistant.",
    "You are a careful assistant that does exactly what is asked.",
    "You are NInfer Nano, a small assistant.",
    "Follow the user's instructions exactly.",
)


def in_split(key: str, split: Split) -> bool:
    """Whether `key` belongs to `split`: every key belongs to exactly one, in every process and version."""
    return (zlib.crc32(key.encode()) % HELD_OUT_SHARE == 0) == (split == "heldout")


def part(values: Sequence[str], split: Split) -> list[str]:
    """Those of `values` that belong to `split`: an eighth, and at least one, is held out."""
    ordered = sorted(values, key=lambda value: zlib.crc32(value.encode()))
    held_out = max(1, len(ordered) // HELD_OUT_SHARE)
    return ordered[:held_out] if split == "heldout" else ordered[held_out:]


def opening(
    rng: random.Random, earlier: Callable[[], tuple[str, str]] | None, system: float = 0.12
) -> list[dict[str, Any]]:
    """Messages before the question: seldom a system prompt, in a tenth of cases an earlier exchange.

    earlier: draws another instance's question and answer; None for no earlier exchange.
    """
    messages: list[dict[str, Any]] = []
    if rng.random() < system:
        messages.append({"role": "system", "content": rng.choice(SYSTEM_PROMPTS)})
    if earlier is not None and rng.random() < 0.1:
        question, answer = earlier()
        messages.append({"role": "user", "content": question})
        messages.append({"role": "assistant", "content": answer})
    return messages


def words(text: str) -> list[str]:
    """The words of a table."""
    return text.split()
