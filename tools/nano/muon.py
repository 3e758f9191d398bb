"""Muon (orthogonalized momentum, Jordan et al. 2024) for stacks of matrices, AdamW for everything else."""

from __future__ import annotations

from collections.abc import Mapping

import torch

# Quintic iteration whose fixed points are near 1 for singular values in (0, 1].
_A, _B, _C = 3.4445, -4.7750, 2.0315
_STEPS = 5


def orthogonalize(x: torch.Tensor) -> torch.Tensor:
    """Roughly the nearest semi-orthogonal matrices of a stack `[n, rows, columns]`, rows <= columns."""
    y = x.to(torch.bfloat16) if x.is_cuda else x
    y = y / (y.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(_STEPS):
        square = y @ y.mT
        y = torch.baddbmm(y, torch.baddbmm(square, square, square, beta=_B, alpha=_C), y, beta=_A)
    return y


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
        self._matrix_rate, self._momentum = matrix_rate, momentum
        others = [p for name, p in parameters.items() if name not in matrices]
        self._adam = torch.optim.AdamW(others, lr=other_rate, betas=betas, eps=1e-10, weight_decay=0.0)
        self._other_rate = other_rate
        # Stacks of one shape, or of one shape and its transpose, are orthogonalized together.
        shapes: dict[tuple[int, ...], list[str]] = {}
        for name, parameter in self._matrices.items():
            shapes.setdefault(tuple(sorted(parameter.shape[1:])), []).append(name)
        self._groups = list(shapes.values())

    @torch.no_grad()
    def step(self, factor: float) -> None:
        """One update with both rates times `factor`; clears the gradients."""
        for names in self._groups:
            parameters = [self._matrices[name] for name in names]
            wide = torch.cat([self._direction(name) for name in names])
            parts = orthogonalize(wide).split([len(parameter) for parameter in parameters])
            for parameter, part in zip(parameters, parts, strict=True):
                rows, columns = parameter.shape[1:]
                update = part.mT if rows > columns else part
                rate = self._matrix_rate * factor * max(1.0, rows / columns) ** 0.5
                parameter.add_(update.to(parameter.dtype), alpha=-rate)
                parameter.grad = None
        for group in self._adam.param_groups:
            group["lr"] = self._other_rate * factor
        self._adam.step()
        self._adam.zero_grad(set_to_none=True)

    def _direction(self, name: str) -> torch.Tensor:
        """Nesterov momentum of a stack, transposed if it is tall."""
        gradient, momentum = self._matrices[name].grad, self._momenta[name]
        assert gradient is not None
        momentum.lerp_(gradient, 1 - self._momentum)
        direction = torch.lerp(gradient, momentum, self._momentum)
        return direction.mT if direction.shape[-2] > direction.shape[-1] else direction
