"""Matrices that exercise ties, subnormals, zeros and large ratios, as float32 and as Python numbers."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import strategies as st


@st.composite
def rows(draw: st.DrawFn, columns: int, *, low: int = -140, high: int = 100) -> list[float]:
    """One row of float32 values of a random scale: halves and quarters of it (ties), random ones, zeros."""
    scale = 2.0 ** draw(st.integers(low, high))
    value = st.one_of(
        st.integers(-64, 64).map(lambda n: n / 8 * scale),
        st.floats(-8, 8, width=32).map(lambda x: x * scale),
        st.sampled_from([0.0, -0.0, scale, -scale, scale / 1024]),
    )
    return as_floats(torch.tensor(draw(st.lists(value, min_size=columns, max_size=columns))).float())


def as_floats(values: torch.Tensor) -> list[Any]:
    """Nested lists of exact Python numbers."""
    return values.double().tolist()  # type: ignore[return-value]


def matrix(values: list[list[float]]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64).float()


def special_rows(columns: int, seed: int) -> torch.Tensor:
    """`[24, columns]`: normal rows over many magnitudes, an all-zero row, a row of one spike, exact ties."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(24, columns, generator=generator)
    values[:12] *= torch.logspace(-30, 3, 12).unsqueeze(1)
    values[12] = 0
    values[13] = -0.0
    values[14] = 0
    values[14, columns // 2] = -3.5
    values[15] = torch.arange(columns).remainder(29).sub(14) / 2
    values[16] = torch.arange(columns).remainder(15).sub(7) * 0.25
    values[17] = 2.0**-24
    values[18] = values[18].sign() * 65504
    return values
