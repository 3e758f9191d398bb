"""The MTP layer against its formula, in columns, chunks and recursion; what is refused."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from ninfer import models
from ninfer.artifact import Artifact
from ninfer.errors import ModelError
from ninfer.models import Batch, Model
from ninfer.ops import KvPages
from ninfer.runtime.memory import allocate_pages

from .draft import draft
from .mtp import GEOMETRIES, add_proposal, draft_with_mtp, mtp_tensors, reference
from .tiny import FULL, LINEAR, LlamaGeometry, Qwen35Geometry, build

G = Qwen35Geometry(layer_types=(LINEAR, FULL), max_positions=1024)
CPU = torch.device("cpu")
TABLE = torch.tensor([[2, 0, 1]], dtype=torch.int32)


def load(folder: Path, dtype: torch.dtype) -> Model:
    with Artifact.open(draft_with_mtp(G).write(folder / "tiny.ninfer")) as artifact:
        return models.load(artifact, activation_dtype=dtype, predictor=True)


def embedding() -> torch.Tensor:
    return build(G).state_dict()["model.embed_tokens.weight"]


def batch(tokens: torch.Tensor, begin: int) -> Batch:
    slots = torch.zeros(1, dtype=torch.int32)
    positions = torch.arange(begin, begin + len(tokens), dtype=torch.int32)
    return Batch(tokens.int(), positions, 1, TABLE, slots, slots)


def run(model: Model, pages: KvPages, tokens: torch.Tensor, hidden: torch.Tensor, begin: int) -> torch.Tensor:
    assert model.predictor is not None
    return model.predictor.score(model.predictor.forward(batch(tokens, begin), hidden, pages))[1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
def test_columns_chunks_and_recursion_follow_the_formula(dtype: torch.dtype, tmp_path: Path) -> None:
    model = load(tmp_path, dtype)
    assert model.predictor is not None
    generator = torch.Generator().manual_seed(2)
    tokens = torch.randint(0, G.vocab_size, (150,), generator=generator)
    hidden = torch.randn(150, G.hidden_size, generator=generator).to(dtype)
    wanted = reference(G, mtp_tensors(G), embedding(), tokens.tolist(), hidden)
    bound = 2e-5 if dtype is torch.float32 else 0.06
    whole, chunked = (allocate_pages(model.kv_layout(), 3, CPU) for _ in range(2))
    assert (run(model, whole, tokens, hidden, 0) - wanted).abs().max() < bound
    # Chunks of which only keys and values are wanted, then a few columns, then one at a time on its own
    # output.
    for begin, end in ((0, 70), (70, 130)):
        model.predictor.fill(batch(tokens[begin:end], begin), hidden[begin:end], chunked)
    few = run(model, chunked, tokens[130:134], hidden[130:134], 130)
    assert (few - wanted[130:134]).abs().max() < bound
    fed, m = hidden[:134], few[-1:]
    for position in range(134, 138):
        fed = torch.cat([fed, m])
        m = run(model, chunked, tokens[position : position + 1], m, position)
        recursed = reference(G, mtp_tensors(G), embedding(), tokens[: position + 1].tolist(), fed)
        assert (m - recursed[-1:]).abs().max() < bound, position


def test_layouts_count_the_layer_and_its_state(tmp_path: Path) -> None:
    path = draft_with_mtp(G).write(tmp_path / "tiny.ninfer")
    with Artifact.open(path) as artifact:
        plain, speculative = (models.load(artifact, predictor=wanted) for wanted in (False, True))
    assert plain.predictor is None
    assert speculative.kv_layout().layers == plain.kv_layout().layers + 1
    assert speculative.state_layout().slot_bytes == plain.state_layout().slot_bytes + 2 * G.hidden_size
    assert plain.state_layout().hidden == 0


@pytest.mark.parametrize(
    ("geometry", "advice"),
    [
        (G, "leave out --spec mtp, or convert the checkpoint again with --components text,mtp$"),
        (LlamaGeometry(), "leave out --spec mtp$"),
    ],
    ids=["qwen", "llama"],
)
def test_an_artifact_without_the_layer_is_refused(geometry: object, advice: str, tmp_path: Path) -> None:
    path = draft(geometry, build(geometry)).write(tmp_path / "tiny.ninfer")  # type: ignore[arg-type]
    with Artifact.open(path) as artifact, pytest.raises(ModelError, match=f"has no MTP layer; {advice}"):
        models.load(artifact, predictor=True)


IDS = [7, 3, 190, 55, *range(60, 110)]


def with_proposal(folder: Path, ids: Sequence[int]) -> Path:
    return add_proposal(draft_with_mtp(GEOMETRIES["mixed"]), ids).write(folder / "tiny.ninfer")


def test_a_proposal_head_scores_fewer_tokens(tmp_path: Path) -> None:
    with Artifact.open(with_proposal(tmp_path, IDS)) as artifact:
        small, full = (models.load(artifact, predictor=True, proposal=wanted) for wanted in (True, False))
        with pytest.raises(ModelError, match=r"has 54 rows, but the tokenizer only 53 tokens"):
            models.load(artifact, predictor=True, proposal=True, public_tokens=53)
        with pytest.raises(ModelError, match=r"must be different ones below 190"):
            models.load(artifact, predictor=True, proposal=True, public_tokens=190)
    assert small.predictor is not None
    assert full.predictor is not None
    x = torch.randn(3, small.hidden_size).bfloat16()
    assert small.predictor.token_ids is not None
    assert small.predictor.token_ids.tolist() == IDS
    assert full.predictor.token_ids is None
    scores, hidden = full.predictor.score(x)
    assert torch.equal(scores, full.logits(hidden))
    assert torch.equal(small.predictor.score(x)[0], scores[:, IDS])


def test_a_missing_proposal_head_is_refused(tmp_path: Path) -> None:
    path = draft_with_mtp(G).write(tmp_path / "tiny.ninfer")
    refused = pytest.raises(ModelError, match="has no proposal head; leave out --lm-head-draft")
    with Artifact.open(path) as artifact, refused:
        models.load(artifact, predictor=True, proposal=True)
