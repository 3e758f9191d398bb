"""The same answers from every KV format and weight profile, and what they cost in perplexity."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from bench.tasks import canonical_jsonl
from bench.tasks.run import Outcome
from ninfer.api import Engine, EngineOptions, Scorer, ScorerOptions
from ninfer.api.corpus import read_manifest
from ninfer.api.perplexity import score_stream, total, window_plan

from .asking import NANO, ROOT, ask, held_out, more

MANIFEST = ROOT / "bench" / "heldout" / "manifest.json"
Profile = Callable[[str], Path]


def assert_right(artifact: Path, kv_dtype: str) -> None:
    """The 32 records and values out of lists of 512 and 2,048 tokens."""
    choice = EngineOptions(max_context=2048, kv_dtype=kv_dtype, threads=1)
    with Engine.load(artifact, choice) as engine:
        assert engine.description.kv_dtype == kv_dtype
        records = ask(engine, canonical_jsonl())
        assert records.outcome is Outcome.PASSED
        assert records.reply.content == canonical_jsonl().answer["content"]
        for name in ("kv512", "kv2048"):
            answer = ask(engine, held_out(name, 1))
            assert answer.outcome is Outcome.PASSED, answer.reply.content


@pytest.mark.parametrize("kv_dtype", ["int8", *more("fp8", "k8v4"), "nvfp4"])
def test_answers_with_quantized_kv(kv_dtype: str) -> None:
    assert_right(NANO, kv_dtype)


@pytest.mark.parametrize("recipe", ["quasar", *more("groupwise-int")])
def test_answers_with_four_bit_weights(profile: Profile, recipe: str) -> None:
    artifact = profile(recipe)
    assert artifact.stat().st_size < 0.75 * NANO.stat().st_size
    assert_right(artifact, "bf16")


def perplexity(artifact: Path, kv_dtype: str, *, tokens: int | None) -> float:
    """Of held-out prose and code in windows of 1,024 tokens; the first `tokens` of each text, or all."""
    corpus = read_manifest(MANIFEST)
    with Scorer.load(artifact, ScorerOptions(context=1024, kv_dtype=kv_dtype, threads=1)) as scorer:
        scores = []
        for stream in corpus.streams:
            ids = scorer.encode(stream.text)[:tokens]
            windows = window_plan(len(ids), 1024, 1023)
            scores.append(score_stream(scorer, ids, windows, lambda _: None).score)
    return total(scores).perplexity


@pytest.fixture(scope="module")
def costs(profile: Profile) -> Callable[[int | None], dict[str, float]]:
    """Perplexity against that of BF16 weights and KV, less 1."""

    def measure(tokens: int | None) -> dict[str, float]:
        plain = perplexity(profile("bf16"), "bf16", tokens=tokens)
        assert 10 < plain < 60
        cases = [("nvfp4-official", "bf16"), ("quasar", "bf16"), ("bf16", "int8")]
        return {
            f"{recipe}/{kv}": perplexity(profile(recipe), kv, tokens=tokens) / plain - 1
            for recipe, kv in cases
        }

    return measure


def assert_cheap(costs: dict[str, float]) -> None:
    """The promised bounds."""
    assert abs(costs["nvfp4-official/bf16"]) < 0.03, costs
    assert abs(costs["quasar/bf16"]) < 0.03, costs
    assert abs(costs["bf16/int8"]) < 0.002, costs
    assert all(np.array([*costs.values()]) != 0), "a format changed nothing: was it used?"


def test_perplexity_by_profile_and_kv_format(costs: Callable[[int | None], dict[str, float]]) -> None:
    """On 1,024 tokens of each text; all of them say nearly the same."""
    assert_cheap(costs(1024))


@pytest.mark.soak
def test_perplexity_on_all_held_out_texts(costs: Callable[[int | None], dict[str, float]]) -> None:
    """1.4 % (nvfp4-official), 2.4 % (quasar) and 0.01 % (INT8 KV) when this was written."""
    assert_cheap(costs(None))
