"""What happens between the passes of a round on the GPU."""

from __future__ import annotations

import random

import pytest
import torch

from ninfer.errors import OptionError
from ninfer.ops.cuda import speculation as module
from ninfer.ops.cuda.norms import rms_norm
from tests.ops.speculation import check_accept, check_columns, check_drafts


def gpu(test):
    """A test for the GPU alone."""
    return pytest.mark.gpu(pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")(test))


@pytest.mark.parametrize("width", [2, 4, 6])
def test_a_few_rounds(width: int, device: torch.device) -> None:
    rng = random.Random(width)
    for rows in (1, 3):
        check_accept(module, device, rng, rows, width)


@gpu
@pytest.mark.parametrize("width", range(2, 7))
@pytest.mark.parametrize("rows", range(1, 9))
def test_drafts_stand_up_to_the_first_that_differs(rows: int, width: int, device: torch.device) -> None:
    rng = random.Random(10 * rows + width)
    for _ in range(20):
        check_accept(module, device, rng, rows, width)


@pytest.mark.parametrize("width", [1, 4])
def test_a_few_columns(width: int, device: torch.device) -> None:
    check_columns(module, device, random.Random(width), 3, width, torch.bfloat16)


@gpu
@pytest.mark.parametrize("width", range(1, 7))
def test_last_columns_are_taken_and_kept(width: int, device: torch.device) -> None:
    for rows in range(1, 9):
        check_columns(module, device, random.Random(rows), rows, width, torch.bfloat16)


@pytest.mark.parametrize("size", [5, 2500])
def test_a_few_drafts(size: int, device: torch.device) -> None:
    rng = random.Random(size)
    for trial in range(4):
        check_drafts(module, device, rng, 3, size, trial % 2 > 0)


@gpu
@pytest.mark.parametrize("size", [1, 37, 2047, 2049, 8192, 131_072, 248_077, 300_000])
def test_drafts_are_the_likeliest_tokens(size: int, device: torch.device) -> None:
    rng = random.Random(size)
    for trial in range(16):
        check_drafts(module, device, rng, trial % 8 + 1, size, trial % 3 > 0)


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("width", [24, 384])
def test_two_norms_stand_side_by_side(rows: int, width: int, device: torch.device) -> None:
    check_pair(rows, width, device)


@gpu
@pytest.mark.parametrize("rows", [1, 4, 32, 1000])
@pytest.mark.parametrize("width", [64, 512, 1024, 2048, 5120])
def test_two_norms_of_models(rows: int, width: int, device: torch.device) -> None:
    check_pair(rows, width, device)


def check_pair(rows: int, width: int, device: torch.device) -> None:
    a, b = (torch.randn(rows, width).bfloat16().to(device) for _ in range(2))
    gains = torch.randn(width).bfloat16().to(device), torch.randn(width).to(device)
    wanted = [rms_norm(x, gain, 1e-6, True) for x, gain in zip((a, b), gains, strict=True)]
    assert torch.equal(module.norm_pair(a, b, *gains, 1e-6), torch.cat(wanted, 1))
    with pytest.raises(OptionError, match="side by side"):
        module.norm_pair(a, b[:, 1:], *gains, 1e-6)
