"""Muon (orthogonalized momentum, Jordan et al. 2024) for stacks of matrices, AdamW for everything else."""

from __future__ import annotations

from collections.abc import Mapping

import torch

# Quintic iteration whose fixed points are near 1 for singular values in (0, 1].
_A, _B, _C = 3.4445, -4.7750, 2.0315
_STEPS = 5


def orthogonalize(x: torch.Tensor) -> torch.Tensor:
    """Roughly the nearest (semi-)orthogonal matrices of a stack: singular values in about [0.7, 1.2]."""
    tall = x.shape[-2] > x.shape[-1]
    y = (x.mT if tall else x).to(torch.bfloat16)
    y = y / (y.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(_STEPS):
        square = y @ y.mT
        y = _A * y + (_B * square + _C * square @ square) @ y
    return y.mT if tall else y


class Optimizer:
    """Steps parameters of float32 in place: Muon for those named in `matrices`, AdamW for the others.

    The learning rates are those of the peak; `step(factor)` scales both. State starts at zero in every leg,
    so the first steps of a leg warm up.
    """

    def __init__(
        self, parameters: Mapping[str, torch.Tensor], matrices: frozenset[str], *, matrix_rate: float,
        other_rate: float, momentum: float = 0.95, betas: tuple[float, float] = (0.9, 0.95),
    ) -> None:  # fmt: skip
        self._matrices = {name: p for name, p in parameters.items() if name in matrices}
        self._momenta = {name: torch.zeros_like(p) for name, p in self._matrices.items()}
        self._others = {name: p for name, p in parameters.items() if name not in matrices}
        self._matrix_rate, self._momentum = matrix_rate, momentum
        self._adam = torch.optim.AdamW(
            list(self._others.values()), lr=other_rate, betas=betas, eps=1e-10, weight_decay=0.0, fused=None
        )
        self._other_rate = other_rate

    @torch.no_grad()
    def step(self, factor: float) -> None:
        """One update with both rates times `factor`; clears the gradients."""
        for name, parameter in self._matrices.items():
            gradient, momentum = parameter.grad, self._momenta[name]
            assert gradient is not None
            momentum.lerp_(gradient, 1 - self._momentum)
            update = orthogonalize(torch.lerp(gradient, momentum, self._momentum))
            rows, columns = parameter.shape[-2:]
            rate = self._matrix_rate * factor * max(1.0, rows / columns) ** 0.5
            parameter.add_(update.to(parameter.dtype), alpha=-rate)
            parameter.grad = None
        for group in self._adam.param_groups:
            group["lr"] = self._other_rate * factor
        self._adam.step()
        self._adam.zero_grad(set_to_none=True)
