"""The engine and the scorer on a GPU say what they say on the CPU."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch

import ninfer
from ninfer.api import Done, Engine, EngineOptions, GenerationOptions, Scorer, ScorerOptions
from ninfer.artifact import Artifact
from ninfer.convert.attach import Attachment
from ninfer.convert.proposal import choose

NANO = (
    Path(os.environ.get("MODELS", Path(__file__).parents[2] / "models")).expanduser() / "ninfer-nano.ninfer"
)
TEXT = (Path(ninfer.__file__).parent / "ops" / "sampling.py").read_text(encoding="utf-8")
GREEDY = GenerationOptions(
    max_new=64, temperature=0.0, presence_penalty=0.0, frequency_penalty=0.0, prefix_reuse=False
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"),
    pytest.mark.skipif(not NANO.exists(), reason="no ninfer-nano"),
]


def answers(device: str, prompts: list[str], model: Path = NANO, **options) -> list[tuple[int, ...]]:
    """Token ids of greedy answers, one after the other, then all at a time; they must be the same."""
    choice = EngineOptions(device=device, max_context=4096, **options)
    with Engine.load(model, choice) as engine:
        messages = [[{"role": "user", "content": prompt}] for prompt in prompts]
        alone = [ids(engine.chat(message, GREEDY)) for message in messages]
        together = [engine.chat(message, GREEDY) for message in messages]
        assert [ids(generation) for generation in together] == alone
    return alone


def ids(generation) -> tuple[int, ...]:
    [done] = [event for event in generation if isinstance(event, Done)]
    return tuple(done.statistics.token_ids)


def test_greedy_answers() -> None:
    prompts = ["What is 17 + 25?", "What is 2718 + 3141?"]
    wanted = answers("cpu", prompts, threads=4)
    assert answers("cuda", prompts) == wanted
    assert answers("cuda", prompts, max_concurrency=2, kv_capacity=8192) == wanted
    assert answers("cuda", prompts, cuda_graph=False) == wanted


def test_a_long_prompt_fills_several_chunks() -> None:
    prompt = [f"Repeat the last line of this file:\n{TEXT}"]
    by_graph = answers("cuda", prompt, prefill_chunk=256)
    assert answers("cuda", prompt, prefill_chunk=256, cuda_graph=False) == by_graph


def test_drafts_change_no_answer() -> None:
    prompts = ["What is 17 + 25?", "Write a short story about a fox."]
    wanted = answers("cuda", prompts)
    for drafts in (1, 3, 5):
        spec = {"spec": "mtp", "draft_tokens": drafts}
        assert answers("cuda", prompts, **spec) == wanted
        assert answers("cuda", prompts, max_concurrency=2, kv_capacity=8192, **spec) == wanted
    assert answers("cuda", prompts, cuda_graph=False, spec="mtp", draft_tokens=3) == wanted


def test_drafts_by_a_proposal_head_change_no_answer(tmp_path: Path) -> None:
    model = tmp_path / "nano.ninfer"
    with Artifact.open(NANO) as artifact:
        attachment = Attachment(artifact, 4096, model)
        counts = np.arange(attachment.vocab, 0, -1)
        attachment.write(choose(counts, attachment.tokens, attachment.rows), {})
    prompts = ["What is 17 + 25?", "Write a short story about a fox."]
    wanted = answers("cuda", prompts)
    spec = {"spec": "mtp", "draft_tokens": 3, "lm_head_draft": True}
    assert answers("cuda", prompts, model, **spec) == wanted
    assert answers("cuda", prompts, model, max_concurrency=2, kv_capacity=8192, **spec) == wanted
    assert answers("cuda", prompts, model, cuda_graph=False, **spec) == wanted
    with Engine.load(model, EngineOptions(device="cuda", max_context=4096, **spec)) as engine:
        *_, done = engine.chat([{"role": "user", "content": prompts[1]}], GREEDY)
    assert isinstance(done, Done)
    # Drafts of wrong rows, or of rows that aren't mapped to their tokens, would hardly ever stand.
    assert done.statistics.accepted_tokens > 0.15 * done.statistics.drafted_tokens


def test_what_is_described() -> None:
    with Engine.load(NANO, EngineOptions(device="cuda:0")) as engine:
        description = engine.description
        assert description.device == "cuda:0"
        assert description.device_name == torch.cuda.get_device_name(0)
        assert description.cuda_graph
        assert description.upload_seconds > 0
        assert "without graphs" not in description.computes_on
        assert engine.plan.graph_bytes > 0


@pytest.mark.parametrize("kv_dtype", ["bf16", "int8", "fp8"])
def test_perplexity(kv_dtype: str) -> None:
    nll = {}
    for device in ("cpu", "cuda"):
        options = ScorerOptions(device=device, context=2048, kv_dtype=kv_dtype, threads=4)
        with Scorer.load(NANO, options) as scorer:
            nll[device] = -float(scorer.score(scorer.encode(TEXT)[:2048]).mean())
    assert abs(np.exp(nll["cuda"] - nll["cpu"]) - 1) < 1e-3
