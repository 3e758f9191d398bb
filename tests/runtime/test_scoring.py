"""Scores of windows: against the toy's known distribution, and against a plain forward pass in float64."""

from pathlib import Path

import numpy as np
import pytest
import torch

from ninfer import models
from ninfer.artifact import Artifact
from ninfer.errors import CapacityError, ModelError, NInferError, OptionError
from ninfer.formats import KvFormat
from ninfer.models import Batch, Model
from ninfer.runtime import Scoring
from ninfer.runtime.memory import allocate

from .toy import PUBLIC, ToyModel, expected_token

TEXT = [(7 * i * i + 3) % PUBLIC for i in range(300)]


def toy_scores(text: list[int], first_target: int, recurrent: bool) -> list[float]:
    """The toy gives its favourite a logit of 5 and every other token 0."""
    rest = np.log(np.exp(5.0) + PUBLIC - 1)
    hits = [expected_token(text[:i], recurrent) == text[i] for i in range(first_target, len(text))]
    return [5.0 * hit - rest for hit in hits]


def favourites(length: int, recurrent: bool) -> list[int]:
    """A text in which every third token is what the toy expects."""
    text: list[int] = []
    for i in range(length):
        text.append(expected_token(text, recurrent) if i % 3 == 2 else TEXT[i])
    return text


@pytest.mark.parametrize("recurrent", [True, False])
@pytest.mark.parametrize("tile", [7, 128, 1000])
def test_scores_of_every_window(recurrent: bool, tile: int) -> None:
    """One Scoring for all: nothing of an earlier window may be left in pages or state."""
    scoring = Scoring(ToyModel(recurrent), 512, chunk=128, tile=tile)
    for length, first in [
        (300, 1),
        (2, 1),
        (128, 1),
        (129, 64),
        (130, 129),
        (300, 129),
        (257, 256),
        (300, 1),
    ]:
        text = favourites(length, recurrent)
        scores = scoring.score(text, first)
        assert scores.dtype == np.float32
        np.testing.assert_allclose(scores, toy_scores(text, first, recurrent), rtol=1e-5)


def test_only_what_is_needed_is_computed() -> None:
    model = ToyModel()
    scored: list[int] = []
    logits = model.logits
    model.logits = lambda hidden: (scored.append(len(hidden)), logits(hidden))[1]
    fed: list[int] = []
    Scoring(model, 512, chunk=128, tile=50).score(TEXT, 200, fed.append)
    assert model.widths == [128, 128, 43]  # nothing follows the last token
    assert fed == [128, 256, 299]
    assert scored == [50, 7, 43]  # 199 to 255, then the rest


def test_a_failed_window_leaves_nothing() -> None:
    model = ToyModel()
    scoring = Scoring(model, 512, chunk=128)
    model.fail_at = 200
    with pytest.raises(KeyboardInterrupt):
        scoring.score(TEXT)
    model.fail_at = None
    np.testing.assert_allclose(scoring.score(TEXT), toy_scores(TEXT, 1, True), rtol=1e-5)


@pytest.mark.parametrize(
    ("tokens", "first", "error", "message"),
    [
        ([1], 1, OptionError, "at least 2 tokens, not 1"),
        ([1, PUBLIC], 1, OptionError, f"token id {PUBLIC} at position 1"),
        ([-1, 1], 1, OptionError, "token id -1"),
        (TEXT[:257], 1, CapacityError, "257 tokens.*256; raise --context"),
        ([1, 2, 3], 0, OptionError, "between 1 and 2, not 0"),
        ([1, 2, 3], 3, OptionError, "between 1 and 2, not 3"),
    ],
)
def test_bad_windows(tokens: list[int], first: int, error: type[NInferError], message: str) -> None:
    with pytest.raises(error, match=message):
        Scoring(ToyModel(), 256).score(tokens, first)


def test_bad_contexts(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(OptionError, match="--context must be at least 2 tokens, not 1"):
        Scoring(ToyModel(), 1)
    with pytest.raises(CapacityError, match=r"--context 4097.*4096 positions"):
        Scoring(ToyModel(), 4097)
    needed = Scoring(ToyModel(), 4096).bytes
    monkeypatch.setattr("ninfer.runtime.scoring.available_bytes", lambda device: needed)
    Scoring(ToyModel(), 4096)
    monkeypatch.setattr("ninfer.runtime.scoring.available_bytes", lambda device: needed - 1)
    monkeypatch.setattr("ninfer.runtime.scoring.allocate", None)  # refused before anything is taken
    with pytest.raises(CapacityError, match=r"windows of 4096 tokens.* MiB are free; lower --context"):
        Scoring(ToyModel(), 4096)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_score_that_is_not_finite_is_an_error(value: float) -> None:
    model = ToyModel()
    logits = model.logits

    def damaged(hidden: torch.Tensor) -> torch.Tensor:
        scores = logits(hidden)
        scores[17, 3] = value
        return scores

    model.logits = damaged
    with pytest.raises(ModelError, match=r"token 18 of a window is .*not a finite number"):
        Scoring(model, 256).score(TEXT[:50])


def whole_pass(model: Model, tokens: list[int]) -> np.ndarray:
    """Float64 log-probabilities of tokens 1.. from one pass over all of them, pages scattered."""
    pages = -(-len(tokens) // 64)
    cache = allocate(model.kv_layout(), model.state_layout(), pages=pages, slots=2, device=model.device)
    batch = Batch(
        tokens=torch.tensor(tokens, dtype=torch.int32),
        positions=torch.arange(len(tokens), dtype=torch.int32),
        rows=1,
        page_table=torch.arange(pages - 1, -1, -1, dtype=torch.int32)[None],
        source_slots=torch.tensor([1], dtype=torch.int32),
        target_slots=torch.tensor([0], dtype=torch.int32),
    )
    logits = model.logits(model.forward(batch, cache)).double().numpy()
    highest = logits.max(1, keepdims=True)
    normal = highest[:, 0] + np.log(np.exp(logits - highest).sum(1))
    return (logits[np.arange(len(tokens) - 1), tokens[1:]] - normal[:-1]).astype(np.float64)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_real_forward_pass(tiny: Path, dtype: torch.dtype) -> None:
    """Recurrent layers and attention, in chunks that continue in place."""
    with Artifact.open(tiny) as artifact:
        model = models.load(artifact, activation_dtype=dtype)
        tokens = torch.randint(
            model.public_tokens, (300,), generator=torch.Generator().manual_seed(3)
        ).tolist()
        scoring = Scoring(model, 320, chunk=64, tile=33)
        expected = whole_pass(model, tokens)
        limit = 2e-5 if dtype == torch.float32 else 0.04  # bf16: one step of a logit
        for first in (1, 150):
            assert np.abs(scoring.score(tokens, first) - expected[first - 1 :]).max() < limit


@pytest.mark.parametrize("kv_format", KvFormat)
def test_kv_formats_score_about_the_same_in_less_memory(tiny: Path, kv_format: KvFormat) -> None:
    with Artifact.open(tiny) as artifact:
        model = models.load(artifact)
        tokens = [(37 * i + 5) % model.public_tokens for i in range(200)]
        scoring = Scoring(model, 256, kv_format=kv_format)
        scores = scoring.score(tokens)
        plain = Scoring(model, 256)
        assert (scoring.bytes < plain.bytes) == (kv_format is not KvFormat.BF16)
        assert abs(float((scores - plain.score(tokens)).mean())) < 0.05
