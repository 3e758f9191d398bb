"""The one criterion for every operator: a relative L2 distance and a bound on each element."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Criterion:
    """`|out - ref|_2 <= relative_l2 |ref|_2`, and each `|error| <= absolute + relative max|ref|`."""

    relative_l2: float
    absolute: float
    relative: float

    def check(self, out: torch.Tensor, reference: torch.Tensor) -> None:
        assert out.shape == reference.shape
        out, reference = out.double(), reference.double()
        assert torch.isfinite(out).all(), "an element is not finite"
        error = (out - reference).abs()
        distance, norm = float(error.norm()), float(reference.norm())
        assert distance <= self.relative_l2 * norm + 1e-30, f"relative L2 {distance / norm:.3g}"
        bound = self.absolute + self.relative * float(reference.abs().max())
        assert float(error.max()) <= bound, f"largest error {float(error.max()):.3g}, bound {bound:.3g}"


LINEAR = Criterion(2**-8, 2**-8, 2 * 2**-8)
LINEAR_A8 = Criterion(0.04, 2**-8, 0.06)
ATTENTION = Criterion(2.8e-3, 1e-3, 2.7e-3)
GDN_OUTPUT = Criterion(4.1e-3, 5e-6, 5.5e-3)
GDN_STATE = Criterion(2.7e-3, 1e-5, 3.9e-3)
ELEMENTWISE = Criterion(4e-3, 1e-3, 8e-3)
FLOAT32 = Criterion(2e-6, 1e-6, 4e-6)
CONTROL = Criterion(1e-5, 1e-6, 1e-5)


def criterion(bf16: Criterion, dtype: torch.dtype) -> Criterion:
    """The criterion of a path for this activation type."""
    return bf16 if dtype == torch.bfloat16 else FLOAT32
