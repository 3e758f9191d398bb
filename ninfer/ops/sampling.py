"""Choosing the next token from one row of scores.

Order: penalties; temperature 0 = lowest-id argmax; the n best by (score descending, id ascending) with n =
top_k if 1..19, else 20; weights `exp((x - x0) / T)`; min_p cuts the tail, then top_p against the mass of all
n; one draw. The draw is stateless: a function of seed, position and purpose, never of the row's place in a
batch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

import torch

from ninfer.errors import OptionError
from ninfer.ops.dispatch import backend

CANDIDATES = 20
_MASK = (1 << 64) - 1


class Purpose(IntEnum):
    """What a draw is for; part of the random number's key."""

    PREFILL = 0
    DECODE = 1
    ACCEPT = 2
    CORRECTION = 3
    BONUS = 4
    PROPOSAL = 5


@dataclass(frozen=True)
class SamplingParams:
    """Sampling options of one request; temperature 0 (or less) is greedy."""

    temperature: float = 1.0
    top_k: int = 20
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty"):
            value = getattr(self, name)
            if not math.isfinite(value):
                raise OptionError(f"{name} must be finite, got {value}")
        for name in ("top_p", "min_p"):
            value = getattr(self, name)
            if not 0.0 <= value <= 1.0:
                raise OptionError(f"{name} must be between 0 and 1, got {value}")
        if self.top_k < 0:
            raise OptionError(f"top_k must not be negative, got {self.top_k}")
        if not 0 <= self.seed <= _MASK:
            raise OptionError(f"seed must be an unsigned 64-bit number, got {self.seed}")

    @property
    def candidates(self) -> int:
        """How many of the best tokens take part in the draw."""
        return self.top_k if 1 <= self.top_k < CANDIDATES else CANDIDATES


def uniform(seed: int, position: int, purpose: int, sub: int = 0) -> float:
    """The draw in [0, 1) of 24 bits that belongs to this seed, position and purpose."""
    key = _mix(seed ^ ((position & 0xFFFFFFFF) * 0xD1B54A32D192ED03 & _MASK))
    key = _mix(key ^ ((purpose & 0xFFFFFFFF) << 21) ^ (sub * 0x2545F4914F6CDD1D & _MASK))
    return (key >> 40) * 2.0**-24


def sample(
    logits: torch.Tensor,
    params: Sequence[SamplingParams],
    positions: Sequence[int],
    purpose: Purpose,
    counts: torch.Tensor | None = None,
) -> list[int]:
    """One token id per row of `logits` (float32 `[B, V]`, public ids); -1 where the best score is not finite.

    `positions[b]` keys the draw (see `uniform`). `counts` (int32 `[B, V]`, needed only with penalties) says
    how often each id was generated; it is read, never written: the caller counts a token when it is
    committed.
    """
    if len(params) != logits.shape[0] or len(positions) != logits.shape[0]:
        raise OptionError(
            f"{logits.shape[0]} rows of scores need as many parameters and positions, "
            f"got {len(params)} and {len(positions)}"
        )
    return backend(logits.device.type).sample(logits, params, positions, purpose, counts)


def _mix(x: int) -> int:
    x = (x + 0x9E3779B97F4A7C15) & _MASK
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB & _MASK
    return x ^ (x >> 31)
