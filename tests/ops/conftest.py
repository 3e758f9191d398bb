"""Fixtures of the operator tests."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True)
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fresh memory is full of NaN (or 0xff bytes), so that an element which nobody wrote cannot pass for a
    result."""
    plain = torch.empty

    def empty(*args, **kwargs):
        tensor = plain(*args, **kwargs)
        if tensor.is_floating_point():
            return tensor.fill_(float("nan"))
        return tensor.fill_(255 if tensor.dtype == torch.uint8 else -1)

    monkeypatch.setattr(torch, "empty", empty)


@pytest.fixture(params=[torch.bfloat16, torch.float32], ids=["bf16", "f32"])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    """The activation type."""
    return request.param


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator().manual_seed(20)
