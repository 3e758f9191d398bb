"""What happens between the passes of a round on the CPU."""

from __future__ import annotations

import random

import pytest
import torch

from ninfer import ops
from ninfer.ops import cpu
from tests.ops import speculation

CPU = torch.device("cpu")


@pytest.mark.parametrize("width", range(2, 7))
def test_drafts_stand_up_to_the_first_that_differs(width: int) -> None:
    rng = random.Random(width)
    for trial in range(40):
        speculation.check_accept(cpu, CPU, rng, trial % 8 + 1, width)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("width", [1, 4])
def test_last_columns_are_taken_and_kept(dtype: torch.dtype, width: int) -> None:
    for rows in range(1, 9):
        speculation.check_columns(cpu, CPU, random.Random(rows), rows, width, dtype)


@pytest.mark.parametrize("size", [1, 37, 5000])
@pytest.mark.parametrize("mapped", [False, True])
def test_drafts_are_the_likeliest_tokens(size: int, mapped: bool) -> None:
    rng = random.Random(size)
    for trial in range(24):
        speculation.check_drafts(cpu, CPU, rng, trial % 8 + 1, size, mapped)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("rows", [1, 3, 40])
@pytest.mark.parametrize("width", [50, 384])
def test_two_norms_stand_side_by_side(dtype: torch.dtype, rows: int, width: int) -> None:
    a, b = (torch.randn(rows, width).to(dtype) for _ in range(2))
    gains = torch.randn(width).bfloat16(), torch.randn(width).bfloat16()
    wanted = [ops.rms_norm(x, gain, 1e-6, True) for x, gain in zip((a, b), gains, strict=True)]
    assert torch.equal(ops.norm_pair(a, b, *gains, 1e-6), torch.cat(wanted, 1))
