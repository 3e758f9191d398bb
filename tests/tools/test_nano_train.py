"""Optimizer, quantized weights and one leg's steps on the CPU."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from ninfer import formats
from tools.nano import shards
from tools.nano.batches import IGNORED, Batch
from tools.nano.model import initialize
from tools.nano.muon import orthogonalize
from tools.nano.quantized import nvfp4
from tools.nano.train import Schedule, Trainer


@pytest.mark.parametrize("shape", [(3, 64, 64), (2, 96, 32), (2, 32, 96)])
def test_orthogonalized_matrices_have_singular_values_near_one(shape: tuple[int, int, int]) -> None:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    y = orthogonalize(x).float()
    values = torch.linalg.svdvals(y)
    assert values.min() > 0.6
    assert values.max() < 1.3
    # The directions stay: U^T Y V is near the identity, the polar factor.
    u, _, vh = torch.linalg.svd(x, full_matrices=False)
    polar = u @ vh
    cosine = (y * polar).sum((1, 2)) / (y.norm(dim=(1, 2)) * polar.norm(dim=(1, 2)))
    assert cosine.min() > 0.97


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


def test_steps_learn_and_a_checkpoint_restores_them(tmp_path) -> None:
    torch.manual_seed(0)
    pattern = np.arange(40, 48, dtype=np.uint16)
    tokens = np.tile(pattern, 32)
    sources = np.zeros(len(tokens), dtype=np.uint8)
    sources[127] = sources[-1] = IGNORED
    positions = np.tile(np.arange(128, dtype=np.int32), 2)
    batch = Batch(tokens, sources, positions, np.array([0, 128, 256], dtype=np.int32))
    trainer = Trainer(initialize(0, "cpu"), distilled=False, device="cpu")
    means = []
    for _ in range(12):
        trainer.step(batch, 0.5, quantized=False)
        loss, draft, count = trainer.sums.tolist()
        means.append((loss[0] / count[0], draft[0] / count[0]))
        trainer.sums.zero_()
    assert count[0] == 254
    assert means[0][0] == pytest.approx(np.log(8192), abs=0.3)
    assert means[-1][0] < 0.5 * means[0][0]
    assert means[-1][1] < 0.8 * means[0][1]

    paths = shards.save(trainer.parameters, tmp_path)
    assert all(path.stat().st_size <= shards.LIMIT for path in paths)
    assert sum(path.stat().st_size for path in paths) <= 60 << 20
    restored = initialize(1, "cpu")
    shards.restore(tmp_path, restored)
    for name, value in trainer.parameters.items():
        exact = name in ("delta.A_log", "delta.dt_bias")
        torch.testing.assert_close(restored[name], value, rtol=0 if exact else 2**-8, atol=0)
