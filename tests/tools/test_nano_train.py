"""Optimizer, quantized weights and one leg's steps on the CPU."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import tools.nano
from ninfer import formats
from tools.nano.batches import IGNORED, Batch
from tools.nano.muon import Optimizer, orthogonalize
from tools.nano.quantized import nvfp4
from tools.nano.train import Schedule


@pytest.mark.parametrize("shape", [(3, 64, 64), (2, 32, 96)])
def test_orthogonalized_matrices_keep_their_directions_with_singular_values_near_one(
    shape: tuple[int, int, int],
) -> None:
    u, _, vh = torch.linalg.svd(
        torch.randn(shape, generator=torch.Generator().manual_seed(1)), full_matrices=False
    )
    spread = torch.logspace(-1.5, 0, shape[1])
    y = orthogonalize(3 * (u * spread) @ vh).float()
    values = torch.linalg.svdvals(y)
    assert values.min() > 0.6
    assert values.max() < 1.3
    polar = u @ vh
    cosine = (y * polar).sum((1, 2)) / (y.norm(dim=(1, 2)) * polar.norm(dim=(1, 2)))
    assert cosine.min() > 0.97


@pytest.mark.parametrize("shape", [(2, 8, 24), (2, 24, 8)])
def test_the_first_step_moves_a_stack_by_its_rate_against_the_gradient(shape: tuple[int, int, int]) -> None:
    stack = torch.zeros(shape, requires_grad=True)
    scalar = torch.ones(3, requires_grad=True)
    optimizer = Optimizer({"w": stack, "s": scalar}, frozenset({"w"}), matrix_rate=0.1, other_rate=0.01)
    gradient = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    ((stack * gradient).sum() + scalar.sum()).backward()
    optimizer.step(0.5)
    u, _, vh = torch.linalg.svd(gradient, full_matrices=False)
    expected = -0.05 * max(1.0, shape[1] / shape[2]) ** 0.5 * (u @ vh)
    assert (stack - expected).norm() < 0.3 * expected.norm()
    torch.testing.assert_close(scalar.detach(), torch.full((3,), 1 - 0.005))
    assert stack.grad is None


def test_nvfp4_in_training_is_the_format_and_passes_gradients() -> None:
    weight = (torch.randn(2, 128, 64, generator=torch.Generator().manual_seed(2)) * 0.1).requires_grad_()
    ours = nvfp4(weight)
    for matrix, row in zip(weight.detach(), ours.detach(), strict=True):
        divisor = formats.nvfp4_divisor(float(matrix.abs().max()), "nvfp4_absmax")
        expected = formats.decode("nvfp4", formats.encode("nvfp4", "nvfp4_absmax", matrix, divisor=divisor))
        torch.testing.assert_close(row, expected, rtol=1e-6, atol=0)
    ours.sum().backward()
    assert weight.grad is not None
    assert bool((weight.grad == 1).all())


def test_the_schedule_warms_up_stays_and_falls() -> None:
    schedule = Schedule(steps=1000, seconds=100.0, constant=0.5, quantized=0.5)
    assert schedule.factor(0, 0.0) == pytest.approx(0.01)
    assert schedule.factor(400, 0.4) == 1.0
    assert schedule.factor(750, 0.75) == pytest.approx(0.5)
    assert schedule.factor(999, 1.0) == 0.0


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Modules of the training for a model of 0.8 million parameters, whose shards hold a megabyte."""
    for name in [name for name in sys.modules if name.startswith("tools.nano.")]:
        monkeypatch.delitem(sys.modules, name)
        monkeypatch.delattr(tools.nano, name.removeprefix("tools.nano."))
    sizes = importlib.import_module("tools.nano.geometry")
    for name, value in {"HIDDEN": 128, "INTERMEDIATE": 128, "LAYERS": 4, "VOCAB_ROWS": 256}.items():
        monkeypatch.setattr(sizes, name, value)
    found = {name: importlib.import_module(f"tools.nano.{name}") for name in ("shards", "model", "train")}
    monkeypatch.setattr(found["shards"], "LIMIT", 1 << 20)
    return SimpleNamespace(**found)


def test_steps_learn_and_a_checkpoint_restores_them(small: SimpleNamespace, tmp_path: Path) -> None:
    pattern = np.arange(40, 48, dtype=np.uint16)
    tokens = np.tile(pattern, 16)
    sources = np.zeros(len(tokens), dtype=np.uint8)
    sources[63] = sources[-1] = IGNORED
    batch = Batch(tokens, sources, np.array([0, 64, 128], dtype=np.int32))
    trainer = small.train.Trainer(small.model.initialize(0, "cpu"), distilled=False, device="cpu")
    means = []
    for _ in range(8):
        trainer.step(batch, 1.0, quantized=False)
        loss, draft, count = trainer.sums.tolist()
        means.append((loss[0] / count[0], draft[0] / count[0]))
        trainer.sums.zero_()
    assert count[0] == 126
    assert means[0][0] > 5
    assert means[-1][0] < 0.5 * means[0][0]
    assert means[-1][1] < 0.9 * means[0][1]

    (tmp_path / "shard-9.safetensors").touch()  # of an earlier, longer run
    paths = small.shards.save(trainer.parameters, tmp_path)
    assert len(paths) > 1
    assert sorted(tmp_path.iterdir()) == paths
    assert all(path.stat().st_size <= small.shards.LIMIT for path in paths)
    restored = small.model.initialize(1, "cpu")
    small.shards.restore(tmp_path, restored)
    for name, value in trainer.parameters.items():
        exact = name in ("delta.A_log", "delta.dt_bias")
        torch.testing.assert_close(restored[name], value, rtol=0 if exact else 2**-8, atol=0)
