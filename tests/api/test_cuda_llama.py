"""A Llama with heads of 64, SmolLM2's geometry, says on a GPU what it says on the CPU."""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter

import numpy as np
import pytest
import torch

from ninfer.api import Done, Engine, EngineOptions, GenerationOptions, Scorer, ScorerOptions
from ninfer.api.synthetic import Synthetic

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"),
]
GREEDY = GenerationOptions(
    max_new=48, temperature=0.0, presence_penalty=0.0, ignore_model_stops=True, prefix_reuse=False
)
PROMPT = [(7919 * i * i + 13 * i) % 49_000 for i in range(200)]
TIE = 1.01 * 2**-4
"""Two tokens whose log-probabilities are as close as that may be drawn either way: scores are bf16, whose
step between 8 and 16 is 2^-4, and where one backend sees both on one step the other may see them on two."""


class OnCpu(Synthetic):
    """The same weights for all devices."""

    def object_tensor(self, object_id: str, device: torch.device) -> torch.Tensor:
        return super().object_tensor(object_id, torch.device("cpu"))


def answers(profile: str, device: str, prompts: Sequence[Sequence[int]], **options) -> list[tuple[int, ...]]:
    choice = EngineOptions(device=device, max_context=1024, pending_timeout=None, **options)
    with Engine._load(OnCpu(f"synthetic:smollm2/{profile}"), choice, perf_counter(), None) as engine:
        found = []
        for generation in [engine.generate(prompt, GREEDY) for prompt in prompts]:
            [done] = [event for event in generation if isinstance(event, Done)]
            found.append(tuple(done.statistics.token_ids))
        return found


def scorer(profile: str, device: str, **options) -> Scorer:
    choice = ScorerOptions(device=device, context=1024, **options)
    return Scorer._load(OnCpu(f"synthetic:smollm2/{profile}"), choice, perf_counter(), None)


@pytest.mark.parametrize("profile", ["q4_1", "q8_0"])
def test_greedy_answers(profile: str) -> None:
    """They part only where two tokens are as good as equally likely."""
    prompts = [PROMPT[:20], PROMPT]
    wanted = answers(profile, "cpu", prompts, threads=4)
    found = answers(profile, "cuda", prompts, max_concurrency=2, kv_capacity=2048)
    assert answers(profile, "cuda", prompts, cuda_graph=False) == found
    with scorer(profile, "cpu", kv_dtype="bf16", threads=4) as judge:
        for prompt, a, b in zip(prompts, wanted, found, strict=True):
            same = next((i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y), len(a))
            if same < len(a):
                mine, theirs = (judge.score([*prompt, *a[:same], x[same]])[-1] for x in (b, a))
                assert abs(mine - theirs) < TIE, (same, mine, theirs)


@pytest.mark.parametrize("kv_dtype", ["bf16", "int8"])
def test_perplexity(kv_dtype: str) -> None:
    nll = {}
    for device in ("cpu", "cuda"):
        with scorer("q4_1", device, kv_dtype=kv_dtype, threads=4) as one:
            nll[device] = -float(one.score((PROMPT * 5)[:1000]).mean())
    assert abs(np.exp(nll["cuda"] - nll["cpu"]) - 1) < 2e-3
