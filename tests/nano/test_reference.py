"""transformers on the rebuilt BF16 folder: the same prompt ids, and the same greedy answers."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from ninfer.api import Engine, EngineOptions

from .asking import ask, held_out

PROMPTS = [("jsonl32_variant", 0, 200), ("kv512", 0, 24)]
NEAR = 0.5
"""Logits by which the reference's best token may be ahead of ours: BF16 activations against FP32."""


@pytest.fixture(scope="module")
def plain(profile: Callable[[str], Path]) -> Iterator[Engine]:
    """Our engine on the same BF16 weights."""
    with Engine.load(profile("bf16"), EngineOptions(max_context=2048, threads=1)) as engine:
        yield engine


@pytest.fixture(scope="module")
def reference(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@pytest.mark.parametrize(("name", "index", "count"), PROMPTS)
def test_greedy_answers_are_those_of_transformers(
    plain: Engine, reference: Any, name: str, index: int, count: int
) -> None:
    """One pass over prompt and answer: each of our tokens is the reference's best, near-ties aside."""
    task = held_out(name, index)
    prompt = plain.frontend.render(task.messages, thinking=False).tokens
    answer = ask(plain, task, max_new=count)
    ids = torch.tensor([[*prompt, *answer.ids]])
    with torch.no_grad():
        logits = reference(ids, use_cache=False).logits[0, len(prompt) - 1 : -1].float()
    ours = torch.tensor(answer.ids)
    deficit = logits.max(1).values - logits.gather(1, ours[:, None])[:, 0]
    assert len(deficit) == len(answer.ids) > 2
    assert deficit.max() <= NEAR
    assert (deficit == 0).float().mean() > 0.98


def test_prompts_are_those_of_the_folders_own_tokenizer(plain: Engine, folder: Path) -> None:
    """Template and tokenizer as transformers runs them: chats, tools and their results, thinking or not."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    names = ("jsonl32_variant", "kv512", "arith", "tool_call", "tool_result", "kv_many", "story")
    for name in names:
        for index in range(3):
            task = held_out(name, index)
            theirs = tokenizer.apply_chat_template(
                task.messages,
                tools=task.tools or None,
                add_generation_prompt=True,
                enable_thinking=task.thinking,
            )
            ours = plain.frontend.render(task.messages, tools=task.tools or None, thinking=task.thinking)
            assert list(ours.tokens) == list(theirs["input_ids"]), (name, index)  # type: ignore[index]
