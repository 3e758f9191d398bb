"""Rotary position embedding: which frequency and which position axis each pair of dimensions has."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import torch

from ninfer.errors import OptionError


@dataclass(frozen=True)
class Rope:
    """Split-half rotation of the first `rotary_dim` dimensions: pair i couples i and i + rotary_dim/2.

    Angle of pair i is `position[axis(i)] * inverse_frequency(i)`, formed in float64. With `sections` (pairs
    of the temporal, height and width axes) the axes are interleaved; without, all pairs use axis 0.
    """

    rotary_dim: int
    theta: float
    sections: tuple[int, int, int] | None = None

    def __post_init__(self) -> None:
        if self.rotary_dim < 2 or self.rotary_dim % 2:
            raise OptionError(f"rotary dimension must be even and positive, got {self.rotary_dim}")
        if not (math.isfinite(self.theta) and self.theta > 0):
            raise OptionError(f"rope theta must be positive and finite, got {self.theta}")
        if self.sections is not None:
            counts = [self.axes.tolist().count(axis) for axis in range(3)]
            if counts != list(self.sections):
                raise OptionError(f"rope sections {self.sections} do not fit {self.rotary_dim // 2} pairs")

    @functools.cached_property
    def axes(self) -> torch.Tensor:
        """int32 `[rotary_dim / 2]`: the position axis of each pair."""
        pairs = range(self.rotary_dim // 2)
        _, high, wide = self.sections or (0, 0, 0)
        return torch.tensor(
            [1 if i % 3 == 1 and i < 3 * high else 2 if i % 3 == 2 and i < 3 * wide else 0 for i in pairs],
            dtype=torch.int32,
        )

    @functools.cached_property
    def quarter_turns(self) -> torch.Tensor:
        """float64: quarter turns per position of each pair, padded with zeros to whole sixteens."""
        padded = torch.zeros(-(-self.rotary_dim // 32) * 16, dtype=torch.float64)
        padded[: self.rotary_dim // 2] = self.inverse_frequencies * (2.0 / math.pi)
        return padded

    @functools.cached_property
    def inverse_frequencies(self) -> torch.Tensor:
        """float64 `[rotary_dim / 2]`: radians per position of each pair."""
        pairs = torch.arange(self.rotary_dim // 2, dtype=torch.float64)
        return torch.pow(torch.tensor(self.theta, dtype=torch.float64), -2.0 * pairs / self.rotary_dim)
