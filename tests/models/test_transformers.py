"""transformers as the oracle: teacher-forced logits of tiny random checkpoints, fed whole and in pieces."""

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from ninfer import models
from ninfer.artifact import Artifact
from ninfer.models import Batch, Model
from ninfer.runtime.memory import allocate

from .draft import draft
from .tiny import FULL, LINEAR, Geometry, LlamaGeometry, Qwen35Geometry, build, reference_logits

TOKENS = 150
GEOMETRIES: dict[str, Geometry] = {
    "irregular": Qwen35Geometry(),
    "all-linear": Qwen35Geometry(layer_types=(LINEAR,) * 3, value_heads=2, key_head_dim=32, value_head_dim=8),
    "all-full": Qwen35Geometry(layer_types=(FULL,) * 2, kv_heads=1, tied=True),
    "threefold": Qwen35Geometry(
        layer_types=(LINEAR, LINEAR, LINEAR, FULL),
        value_heads=6,
        heads=6,
        kv_heads=3,
        head_dim=20,
        partial_rotary_factor=0.5,
        mrope_section=(2, 2, 1),
        taps=3,
        tied=True,
        rope_theta=1e7,
    ),
    "whole-rotary": Qwen35Geometry(
        layer_types=(FULL, LINEAR), partial_rotary_factor=1.0, mrope_section=(6, 5, 5), head_dim=32, eps=1e-5
    ),
    "wide-value": Qwen35Geometry(
        layer_types=(LINEAR, FULL), key_head_dim=128, value_head_dim=128, key_heads=1, value_heads=2
    ),
    "llama": LlamaGeometry(),
    "llama-tied": LlamaGeometry(tied=True, kv_heads=1, head_dim=16, rope_theta=500000.0),
    "llama-many": LlamaGeometry(layers=1, heads=4, kv_heads=4, head_dim=24),
}
SPLITS = {
    "at once": [TOKENS],
    "in chunks": [64, 1, 5, 70, 10],
    "by token": [1] * TOKENS,
}


@cache
def checkpoint(name: str) -> tuple[Any, tuple[int, ...], torch.Tensor]:
    model = build(GEOMETRIES[name], seed=len(name))
    generator = torch.Generator().manual_seed(1)
    tokens = tuple(torch.randint(GEOMETRIES[name].vocab_size, (TOKENS,), generator=generator).tolist())
    return model, tokens, reference_logits(model, tokens)


def teacher_forced(model: Model, tokens: tuple[int, ...], split: list[int]) -> torch.Tensor:
    """Logits of every column, fed in pieces, with scattered pages and another state slot for each piece."""
    pages, slots = 7, 3
    cache = allocate(
        model.kv_layout(), model.state_layout(), pages=pages, slots=slots, device=torch.device("cpu")
    )
    page_table = torch.tensor([[5, 0, 3]], dtype=torch.int32)
    logits, begin, slot = [], 0, 2
    for width in split:
        target = (slot + 1) % slots
        batch = Batch(
            tokens=torch.tensor(tokens[begin : begin + width], dtype=torch.int32),
            positions=torch.arange(begin, begin + width, dtype=torch.int32),
            rows=1,
            page_table=page_table,
            source_slots=torch.tensor([slot], dtype=torch.int32),
            target_slots=torch.tensor([target], dtype=torch.int32),
        )
        logits.append(model.logits(model.forward(batch, cache)))
        begin, slot = begin + width, target
    return torch.cat(logits)


def assert_close(ours: torch.Tensor, reference: torch.Tensor, limit: float) -> None:
    """RMS difference within `limit` standard deviations; equal argmax wherever the reference is decided."""
    scale = reference.std()
    assert (ours - reference).square().mean().sqrt() <= limit * scale
    best = reference.topk(2).values
    decided = best[:, 0] - best[:, 1] > 0.3 * scale
    assert decided.any()
    assert torch.equal(ours.argmax(1)[decided], reference.argmax(1)[decided])


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("name", GEOMETRIES)
def test_logits_match(name: str, split: str, tmp_path: Path) -> None:
    hf, tokens, reference = checkpoint(name)
    path = draft(GEOMETRIES[name], hf).write(tmp_path / "tiny.ninfer")
    with Artifact.open(path) as artifact:
        exact = models.load(artifact, activation_dtype=torch.float32)
        assert_close(teacher_forced(exact, tokens, SPLITS[split]), reference, 0.002)
        public = models.load(artifact)
        assert_close(teacher_forced(public, tokens, SPLITS[split]), reference, 0.04)


@pytest.mark.parametrize("name", ["irregular", "llama"])
def test_separate_parents_give_the_same_logits(name: str, tmp_path: Path) -> None:
    hf, tokens, reference = checkpoint(name)
    path = draft(GEOMETRIES[name], hf, packed=False).write(tmp_path / "tiny.ninfer")
    with Artifact.open(path) as artifact:
        model = models.load(artifact, activation_dtype=torch.float32)
        assert_close(teacher_forced(model, tokens, [TOKENS]), reference, 0.002)


@pytest.mark.parametrize("name", ["irregular", "llama"])
def test_two_rows_are_two_sequences(name: str, tmp_path: Path) -> None:
    """Rows of one batch give what each would give alone, from their own pages, slots and positions."""
    hf, tokens, reference = checkpoint(name)
    other = tokens[::-1]
    with Artifact.open(draft(GEOMETRIES[name], hf).write(tmp_path / "tiny.ninfer")) as artifact:
        model = models.load(artifact, activation_dtype=torch.float32)
        memory = allocate(
            model.kv_layout(), model.state_layout(), pages=6, slots=4, device=torch.device("cpu")
        )
        tables = torch.tensor([[0, 1, 2], [5, 4, 3]], dtype=torch.int32)
        source, target = torch.tensor([0, 1]).int(), torch.tensor([2, 3]).int()
        columns = []
        for begin, end in ((0, 70), (70, 71), (71, 75)):
            positions = torch.arange(begin, end, dtype=torch.int32)
            batch = Batch(
                tokens=torch.tensor(tokens[begin:end] + other[begin:end], dtype=torch.int32),
                positions=positions.repeat(2),
                rows=2,
                page_table=tables,
                source_slots=source,
                target_slots=target,
            )
            columns.append(model.logits(model.forward(batch, memory)).unflatten(0, (2, -1)))
            source, target = target, source
        ours = torch.cat(columns, 1)
    assert_close(ours[0], reference[:75], 0.002)
    assert_close(ours[1], reference_logits(hf, other[:75]), 0.002)


def test_only_public_rows_are_scored(tmp_path: Path) -> None:
    hf, tokens, reference = checkpoint("llama")
    with Artifact.open(draft(GEOMETRIES["llama"], hf).write(tmp_path / "tiny.ninfer")) as artifact:
        model = models.load(artifact, activation_dtype=torch.float32, public_tokens=150)
        ours = teacher_forced(model, tokens[:20], [20])
    assert ours.shape == (20, 150)
    assert_close(ours, reference[:20, :150], 0.002)
