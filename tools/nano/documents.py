"""One document for the trainer: token ids, and which of them the model learns to predict."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer as RustTokenizer

from bench.tasks.task import Task
from ninfer.frontend import Frontend
from tools.nano import geometry
from tools.nano.checkpoint import TOKENIZER, read_resources


@dataclass(frozen=True, slots=True)
class Document:
    """ids: uint16 `[n]`. learned: bool `[n]`, whether predicting this token from those before it counts."""

    ids: np.ndarray
    learned: np.ndarray


class Encoder:
    """Tasks and texts to documents, with the tokenizer and the template that the engine uses."""

    def __init__(self, folder: Path = TOKENIZER) -> None:
        resources = read_resources(folder)
        self.frontend = Frontend.from_resources(
            resources,
            architecture="Qwen3_5ForCausalLM",
            vocab_rows=geometry.VOCAB_ROWS,
        )
        # Knows the control tokens wherever they stand, as the model's own output does.
        self._answers = RustTokenizer.from_str(resources["tokenizer.json"].decode())
        self._start, self._end, self._stop = (
            int(self._answers.token_to_id(word) or 0)
            for word in ("<|im_start|>", "<|im_end|>", "<|endoftext|>")
        )
        self._opener = [self._start, *self.frontend.encode("assistant\n")]

    def text(self, text: str) -> np.ndarray:
        """uint16 ids of a text, ended by `<|endoftext|>`."""
        return np.array([*self.frontend.encode(text), self._stop], dtype=np.uint16)

    def task(self, task: Task) -> Document:
        """A task's conversation and answer; the assistant's words are learned, earlier turns' too."""
        prompt = self.frontend.render(task.messages, tools=task.tools or None, thinking=task.thinking)
        text = answer_text(task.answer, thinking=task.thinking)
        answer = [*self._answers.encode(text, add_special_tokens=False).ids, self._end]
        ids = np.array([*prompt.tokens, *answer], dtype=np.uint16)
        learned = np.zeros(len(ids), dtype=bool)
        learned[len(prompt.tokens) :] = True
        if any(message["role"] == "assistant" for message in task.messages):
            for begin, end in self._earlier_turns(prompt.tokens):
                learned[begin:end] = True
        return Document(ids, learned)

    def _earlier_turns(self, tokens: list[int]) -> list[tuple[int, int]]:
        """The assistant's words in a prompt, ends included; the open turn at its end is none."""
        found, opener = [], self._opener
        begins = [i for i, token in enumerate(tokens) if token == self._start]
        for begin, after in pairwise(begins):
            if tokens[begin : begin + len(opener)] == opener:
                found.append((begin + len(opener), tokens.index(self._end, begin, after) + 1))
        return found


def answer_text(answer: Mapping[str, Any], *, thinking: bool) -> str:
    """What the model writes after the generation prompt, as the template writes an assistant message."""
    content, calls = (answer.get("content") or "").strip(), answer.get("tool_calls") or []
    text = f"{(answer.get('reasoning_content') or '').strip()}\n</think>\n\n" if thinking else ""
    text += content
    for index, call in enumerate(calls):
        function = call["function"]
        text += ("\n\n" if content else "") if index == 0 else "\n"
        text += f"<tool_call>\n<function={function['name']}>\n"
        for key, value in function["arguments"].items():
            shown = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
            text += f"<parameter={key}>\n{shown}\n</parameter>\n"
        text += "</function>\n</tool_call>"
    return text
