"""Window plans, sums of scores, and the public scorer."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ninfer.api import Scorer, ScorerOptions
from ninfer.api.perplexity import Score, Window, total, window_plan
from ninfer.api.signature import prefill_signature, weight_formats
from ninfer.artifact import Artifact
from ninfer.convert import convert
from ninfer.errors import CapacityError, EngineError, ModelError, OptionError

WINDOWS = st.integers(2, 200).flatmap(
    lambda context: st.tuples(st.integers(2, 1000), st.just(context), st.integers(1, context - 1))
)


@given(WINDOWS)
def test_every_token_after_the_first_is_scored_once(case: tuple[int, int, int]) -> None:
    tokens, context, stride = case
    plan = window_plan(tokens, context, stride)
    scored = [i for w in plan for i in range(w.begin + w.first_target, w.end)]
    assert scored == list(range(1, tokens))
    for number, window in enumerate(plan):
        length = window.end - window.begin
        assert 2 <= length <= context
        assert 1 <= window.first_target < length
        if number == 0:
            assert window == Window(0, min(tokens, context), 1)
        else:
            assert length - window.first_target == min(stride, tokens - plan[number - 1].end)
            # As much history as the context holds.
            assert length == min(context, window.end)


def test_published_plans() -> None:
    """31 windows of 4096/2048 and one of 65536/32768 for a stream of about 65,000 tokens."""
    for tokens in (65305, 65456, 65511, 64899):
        assert len(window_plan(tokens, 4096, 2048)) == 31
        assert window_plan(tokens, 65536, 32768) == [Window(0, tokens, 1)]


def test_a_plan_by_hand() -> None:
    assert window_plan(10, 4, 3) == [Window(0, 4, 1), Window(3, 7, 1), Window(6, 10, 1)]
    assert window_plan(9, 4, 2) == [Window(0, 4, 1), Window(2, 6, 2), Window(4, 8, 2), Window(5, 9, 3)]


@pytest.mark.parametrize(
    ("context", "stride", "words"),
    [
        (1, 1, "--context must be at least 2 tokens, not 1"),
        (8, 0, "--stride must be between 1 and 7"),
        (8, 8, "not 8"),
    ],
)
def test_bad_plans(context: int, stride: int, words: str) -> None:
    with pytest.raises(OptionError, match=words):
        window_plan(100, context, stride)


def test_sums() -> None:
    whole = total([Score(3, 1.5), Score(1, 2.5)])
    assert (whole.scored_tokens, whole.total_nll, whole.mean_nll) == (4, 4.0, 1.0)
    assert whole.perplexity == pytest.approx(math.e)
    with pytest.raises(ModelError, match="no finite perplexity"):
        _ = Score(1, 1000.0).perplexity


def test_scorer(tiny: Path) -> None:
    threads = torch.get_num_threads()
    with Scorer.load(tiny, ScorerOptions(context=128, kv_dtype="bf16", threads=1)) as scorer:
        d = scorer.description
        assert (d.name, d.architecture, d.device, d.threads) == ("tiny", "Qwen3_5ForCausalLM", "cpu", 1)
        assert (d.context, d.kv_dtype, d.formats) == (128, "bf16", ("bf16",))
        assert d.window_bytes > 0
        tokens = scorer.encode("Hello there, this is plain text: <|im_end|>")
        scores = scorer.score(tokens)
        assert scores.shape == (len(tokens) - 1,)
        assert (scores < 0).all()
        np.testing.assert_array_equal(scorer.score(tokens, 5), scores[4:])
        with pytest.raises(CapacityError, match="129 tokens"):
            scorer.score([1] * 129)
    scorer.close()
    with pytest.raises(EngineError, match="the scorer is closed"):
        scorer.score(tokens)
    torch.set_num_threads(threads)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"context": 1}, "context must be a whole number between 2 and"),
        ({"kv_dtype": "fp4"}, "invalid KV format: 'fp4'; use one of bf16, int8, fp8, nvfp4, k8v4"),
        ({"threads": 0}, "threads"),
    ],
)
def test_bad_options(options: dict, words: str) -> None:
    with pytest.raises(OptionError, match=words):
        ScorerOptions(**options)


def test_a_signature_tells_shapes_and_formats_apart(tiny: Path, tmp_path: Path) -> None:
    signatures = {}
    for recipe in ("bf16", "groupwise-int"):
        out = tmp_path / f"{recipe}.ninfer"
        convert(tiny.parent / "checkpoint", out, recipe=recipe, name="other")
        with Artifact.open(out) as artifact:
            signatures[recipe] = prefill_signature(artifact)
            formats = weight_formats(artifact)
            assert formats == sorted(set(formats))
            assert (formats == ["bf16"]) == (recipe == "bf16")
    with Artifact.open(tiny) as artifact:
        assert prefill_signature(artifact) == signatures["bf16"] != signatures["groupwise-int"]
    assert signatures["bf16"].startswith("Qwen3_5ForCausalLM-5x96-")
