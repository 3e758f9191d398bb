"""Text of training tasks, for the tokenizer to learn their words from."""

from __future__ import annotations

import json
from collections.abc import Iterator

from bench.tasks import generators
from bench.tasks.task import Task, rng_for

PER_GENERATOR = 1_000_000  # characters, so that no generator of long prompts outweighs the others


def task_texts(characters: int = PER_GENERATOR) -> Iterator[str]:
    """The first instances of every generator's training split, each as one text."""
    for name, generate in sorted(generators().items()):
        index = taken = 0
        while taken < characters:
            text = text_of(generate(rng_for(name, "train", index), "train"))
            yield text
            taken += len(text)
            index += 1


def text_of(task: Task) -> str:
    """What the model reads and writes: tools as JSON, messages, the answer."""
    parts = [json.dumps(tool, ensure_ascii=False) for tool in task.tools]
    for message in (*task.messages, task.answer):
        parts += [message.get("reasoning_content") or "", message.get("content") or ""]
        for call in message.get("tool_calls") or ():
            parts += [call["function"]["name"], json.dumps(call["function"]["arguments"], ensure_ascii=False)]
    return "\n".join(filter(None, parts))
