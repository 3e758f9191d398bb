"""The attention output gate: `BF16(a * sigmoid(gate))`, from the already rounded attention output."""

from __future__ import annotations

import torch

from ninfer.ops.dispatch import backend


def sigmoid_mul(a: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """Elementwise product of `a` and `sigmoid(gate)`, equally many elements; rows of `gate` may be
    strided."""
    return backend(a.device.type).sigmoid_mul(a, gate)
