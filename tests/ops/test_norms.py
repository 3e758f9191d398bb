"""Norms and the attention gate against float64."""

from __future__ import annotations

import pytest
import torch

from ninfer.errors import OptionError
from ninfer.ops import gated_rms_norm, rms_norm, sigmoid_mul
from tests.ops.criteria import ELEMENTWISE, criterion


def reference_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    x = x.double()
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight.double()


@pytest.mark.parametrize("width", [1, 15, 16, 17, 40, 576, 5120])
@pytest.mark.parametrize("rows", [1, 3, 70])
@pytest.mark.parametrize("unit_offset", [False, True])
def test_rms_norm(width: int, rows: int, unit_offset: bool, dtype: torch.dtype) -> None:
    x, weight = torch.randn(rows, width).to(dtype), torch.randn(width).bfloat16()
    before = x.clone()
    out = rms_norm(x, weight, 1e-6, unit_offset)
    criterion(ELEMENTWISE, dtype).check(out, reference_norm(x, weight.double() + unit_offset, 1e-6))
    assert torch.equal(x, before)


def test_rms_norm_of_zeros_and_of_float32_weights(dtype: torch.dtype) -> None:
    assert torch.equal(rms_norm(torch.zeros(2, 8, dtype=dtype), torch.ones(8), 1e-6, True), torch.zeros(2, 8))
    x, weight = torch.randn(2, 3, 24).to(dtype), torch.randn(24)
    criterion(ELEMENTWISE, dtype).check(rms_norm(x, weight, 1e-5, False), reference_norm(x, weight, 1e-5))


@pytest.mark.parametrize("width", [16, 20, 128])
def test_gated_rms_norm(width: int, dtype: torch.dtype) -> None:
    o, z, weight = torch.randn(5, 3, width).to(dtype), torch.randn(5, 3 * width).to(dtype), torch.randn(width)
    gate = z.double().view(5, 3, width)
    reference = reference_norm(o, weight, 1e-6) * gate * gate.sigmoid()
    criterion(ELEMENTWISE, dtype).check(gated_rms_norm(o, z, weight, 1e-6), reference)


@pytest.mark.parametrize("columns", [1, 5, 40])
@pytest.mark.parametrize("width", [20, 128])
def test_gated_rms_norm_in_another_order_of_heads(columns: int, width: int, dtype: torch.dtype) -> None:
    o, weight = torch.randn(columns, 6, width).to(dtype), torch.randn(width)
    z = torch.randn(columns, 6 * width + 8).to(dtype)[:, 3 : 3 + 6 * width].view(columns, 6, width)
    plain = gated_rms_norm(o, z, weight, 1e-6)
    order = torch.tensor([3, 0, 5, 1, 4, 2], dtype=torch.int32)
    assert torch.equal(gated_rms_norm(o, z, weight, 1e-6, order), plain[:, order.long()])


@pytest.mark.parametrize(("rows", "width"), [(1, 3), (2, 1024), (3, 1025), (5, 4096)])
def test_sigmoid_mul(rows: int, width: int, dtype: torch.dtype) -> None:
    a, wide = torch.randn(rows, width).to(dtype), (torch.randn(rows, width + 20) * 30).to(dtype)
    gate = wide[:, 7 : 7 + width]
    reference = a.double() * gate.double().sigmoid()
    criterion(ELEMENTWISE, dtype).check(sigmoid_mul(a, gate), reference)
    heads = gate.contiguous().view(rows, -1, 1)
    criterion(ELEMENTWISE, dtype).check(sigmoid_mul(a, heads), reference)


def test_shapes_that_do_not_fit_are_refused() -> None:
    x = torch.zeros(2, 8)
    with pytest.raises(OptionError, match="7 weights does not fit rows of 8"):
        rms_norm(x, torch.ones(7), 1e-6, False)
    with pytest.raises(OptionError, match="gate"):
        gated_rms_norm(x, torch.zeros(2, 7), torch.ones(8), 1e-6)
    for order in (torch.tensor([0, 1]), torch.tensor([0], dtype=torch.int32)):
        with pytest.raises(OptionError, match="an order of 2 heads must be int32"):
            gated_rms_norm(x.view(1, 2, 8), x.view(1, 2, 8), torch.ones(8), 1e-6, order)
    with pytest.raises(OptionError, match="gate"):
        sigmoid_mul(x, torch.zeros(2, 8, dtype=torch.bfloat16))
