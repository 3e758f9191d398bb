"""What a task is: a conversation, the answer that a perfect model gives, and a check of any other answer."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

Split = Literal["train", "heldout"]
CATEGORIES = ("structured", "retrieval", "code", "story", "translation", "reasoning", "tools")


@dataclass(frozen=True, slots=True)
class Reply:
    """What a model answered: visible content, reasoning, and tool calls as `(name, arguments)`."""

    content: str
    reasoning: str = ""
    tool_calls: tuple[tuple[str, dict[str, Any]], ...] = ()


@dataclass(frozen=True, slots=True)
class Task:
    """One conversation to answer.

    messages: chat messages up to and including the one to answer (roles system, user, assistant, tool).
    answer: the assistant message of a perfect reply: `content`, and where they apply `reasoning_content` and
        `tool_calls` (`[{"type": "function", "function": {"name": ..., "arguments": {...}}}]`).
    check: whether a reply is right. It accepts `answer`, and rejects answers to other instances.
    thinking: whether the reply starts inside a thinking block. tools: the declared functions, OpenAI form.
    max_new: output tokens that a right answer certainly fits into.
    """

    name: str
    category: str
    messages: list[dict[str, Any]]
    answer: dict[str, Any]
    check: Callable[[Reply], bool]
    thinking: bool = False
    tools: list[dict[str, Any]] = field(default_factory=list)
    max_new: int = 512


# A generator draws one instance. The split is passed because small instance spaces (pairs of numbers) are
# divided between the splits, so that no held-out instance is ever trained on.
Generator = Callable[[random.Random, Split], Task]


def rng_for(name: str, split: Split, index: int) -> random.Random:
    """The random source of instance `index` of generator `name`; splits and names never share one."""
    digest = hashlib.sha256(f"{name}/{split}/{index}".encode()).digest()
    return random.Random(int.from_bytes(digest[:16], "little"))


def reply_of(answer: dict[str, Any]) -> Reply:
    """A task's own answer as a reply, to test its check."""
    calls = tuple(
        (call["function"]["name"], call["function"]["arguments"]) for call in answer.get("tool_calls", ())
    )
    return Reply(answer.get("content") or "", answer.get("reasoning_content", ""), calls)
