"""Norms on the GPU against float64."""

from __future__ import annotations

import pytest
import torch

from ninfer.errors import OptionError
from ninfer.ops.cuda.norms import gated_rms_norm, rms_norm
from tests.ops.criteria import ELEMENTWISE
from tests.ops.test_norms import reference_norm

gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.parametrize("width", [1, 15, 64, 576, 1025])
@pytest.mark.parametrize("rows", [1, 9])
@pytest.mark.parametrize("unit_offset", [False, True])
def test_rms_norm(width: int, rows: int, unit_offset: bool, device) -> None:
    check(rows, width, unit_offset, device)


@pytest.mark.gpu
@gpu
@pytest.mark.parametrize("width", [64, 128, 256, 2048, 3072, 5120, 8192])
@pytest.mark.parametrize("rows", [1, 2, 7, 128, 4096])
def test_rms_norm_of_models(width: int, rows: int, device) -> None:
    check(rows, width, True, device)


def check(rows: int, width: int, unit_offset: bool, device) -> None:
    x, weight = torch.randn(rows, width).bfloat16().to(device), torch.randn(width).bfloat16().to(device)
    before = x.clone()
    out = rms_norm(x, weight, 1e-6, unit_offset)
    ELEMENTWISE.check(out, reference_norm(x, weight.double() + unit_offset, 1e-6))
    assert torch.equal(x, before)
    for row in {0, rows // 2, rows - 1}:
        assert torch.equal(rms_norm(x[row], weight, 1e-6, unit_offset), out[row])


def test_rms_norm_of_zeros_and_of_float32_weights(device) -> None:
    zeros = torch.zeros(2, 8, dtype=torch.bfloat16, device=device)
    assert torch.equal(rms_norm(zeros, torch.ones(8, device=device), 1e-6, True), zeros)
    x, weight = torch.randn(2, 3, 24).bfloat16().to(device), torch.randn(24).to(device)
    ELEMENTWISE.check(rms_norm(x, weight, 1e-5, False), reference_norm(x, weight, 1e-5))


@pytest.mark.parametrize(("columns", "heads", "width"), [(5, 3, 16), (5, 3, 20), (2, 6, 128)])
def test_gated_rms_norm(columns: int, heads: int, width: int, device) -> None:
    check_gated(columns, heads, width, device)


@pytest.mark.gpu
@gpu
@pytest.mark.parametrize("columns", [1, 4, 129, 4096])
def test_gated_rms_norm_of_models(columns: int, device) -> None:
    check_gated(columns, 48, 128, device)


def check_gated(columns: int, heads: int, width: int, device) -> None:
    o = torch.randn(columns, heads, width).bfloat16().to(device)
    weight = torch.randn(width).to(device)
    z = torch.randn(columns, heads * width + 8).bfloat16().to(device)[:, 3 : 3 + heads * width]
    gate = z.double().view(o.shape)
    reference = reference_norm(o, weight, 1e-6) * gate * gate.sigmoid()
    plain = gated_rms_norm(o, z, weight, 1e-6)
    ELEMENTWISE.check(plain, reference)
    order = torch.randperm(heads).int().to(device)
    assert torch.equal(gated_rms_norm(o, z.view(o.shape), weight, 1e-6, order), plain[:, order.long()])


def test_what_does_not_fit_is_refused(device) -> None:
    x = torch.zeros(2, 8, dtype=torch.bfloat16, device=device)
    with pytest.raises(OptionError, match=r"bf16, got torch\.float32"):
        rms_norm(x.float(), torch.ones(8), 1e-6, False)
    with pytest.raises(OptionError, match="7 weights does not fit rows of 8"):
        rms_norm(x, torch.ones(7), 1e-6, False)
    with pytest.raises(OptionError, match="gate"):
        gated_rms_norm(x, torch.zeros(2, 7), torch.ones(8), 1e-6)
    with pytest.raises(OptionError, match="an order of 2 heads must be int32"):
        gated_rms_norm(x.view(1, 2, 8), x.view(1, 2, 8), torch.ones(8), 1e-6, torch.tensor([0, 1]))
