"""Operator tests on the GPU; without one, Triton's interpreter runs the same kernels on the CPU."""

from __future__ import annotations

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when a module with kernels is imported

pytest.importorskip("triton")


@pytest.fixture
def device() -> torch.device:
    """The GPU, or the CPU under the interpreter."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
