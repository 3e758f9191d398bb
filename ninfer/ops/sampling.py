"""Choosing the next token from a row of scores.

Order: the mask, whose forbidden tokens take no part in anything below; penalties; temperature 0 = lowest-id
argmax; the n best by (score descending, id ascending) with n =
top_k if 1..19, else 20; weights `exp((x - x0) / T)`; min_p cuts the tail, then top_p against the mass of all
n; one draw. The draw is stateless: a function of seed, position and purpose, never of the row's place in a
batch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
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


@dataclass(frozen=True, eq=False)
class Draws:
    """How each of B rows draws; tensors `[B]`, so that a recorded step can be used for any requests.

    temperature, top_p, min_p, presence, frequency   float64, as in `SamplingParams`
    top_k        int32
    seed         int64, the bits of the unsigned number
    position     int32  keys the random number; see `uniform`
    purpose      int32  a `Purpose`; -1: this row draws nothing
    count_rows   int32  row of the counts that penalties go by; -1: no penalties
    mask_row     int32  row of the masks that says what is allowed; -1: everything
    """

    temperature: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor
    presence: torch.Tensor
    frequency: torch.Tensor
    top_k: torch.Tensor
    seed: torch.Tensor
    position: torch.Tensor
    purpose: torch.Tensor
    count_rows: torch.Tensor
    mask_row: torch.Tensor

    @classmethod
    def of(
        cls,
        params: Sequence[SamplingParams],
        positions: Sequence[int],
        purposes: Sequence[int],
        count_rows: Sequence[int],
        device: torch.device | None = None,
        *,
        mask_row: Sequence[int] | None = None,
    ) -> Draws:
        """Draws of these values, one of each for every row (`mask_row` None: no masks)."""

        def tensor(values: list, kind: type[np.generic]) -> torch.Tensor:
            return torch.from_numpy(np.array(values, kind)).to(device)

        return cls(
            temperature=tensor([p.temperature for p in params], np.float64),
            top_p=tensor([p.top_p for p in params], np.float64),
            min_p=tensor([p.min_p for p in params], np.float64),
            presence=tensor([p.presence_penalty for p in params], np.float64),
            frequency=tensor([p.frequency_penalty for p in params], np.float64),
            top_k=tensor([min(p.top_k, CANDIDATES) for p in params], np.int32),
            seed=torch.from_numpy(np.array([p.seed for p in params], np.uint64).view(np.int64)).to(device),
            position=tensor(list(positions), np.int32),
            purpose=tensor(list(purposes), np.int32),
            count_rows=tensor(list(count_rows), np.int32),
            mask_row=tensor([-1] * len(params) if mask_row is None else list(mask_row), np.int32),
        )


def mask_words(tokens: int) -> int:
    """32-bit words of a mask over so many tokens."""
    return -(-tokens // 32)


def draw(
    logits: torch.Tensor,
    draws: Draws,
    counts: torch.Tensor,
    masks: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """One token id per row of `logits` (float32 `[B, V]`, public ids): int32 `[B]`, in `out` if it is given.

    -1 where the best score is not finite, -2 where the row draws nothing, -3 where its mask allows no token.
    `counts` (int32 `[R, V]`) says how often each id was generated; it is read, never written: the caller
    counts a token when it is committed. `masks` (int32 `[M, ceil(V / 32)]`): bit i of word w allows token
    32 w + i; bits from V on mean nothing. Without masks a row that names one is allowed nothing.
    """
    return backend(logits.device.type).draw(logits, draws, counts, masks, out)


def token_logprobs(
    logits: torch.Tensor,
    tokens: torch.Tensor,
    wanted: torch.Tensor,
    logprob: torch.Tensor,
    top_ids: torch.Tensor,
    top_logprobs: torch.Tensor,
) -> None:
    """Natural log-softmax of rows of raw scores, for those that ask.

    `logits` float32 `[B, V]`; `tokens` int32 `[B]`; `wanted` int32 `[B]`: how many of the likeliest tokens
    (0 to `CANDIDATES`), negative for a row that is left out, as is one with a negative token. For the others
    `logprob` float32 `[B]` gets that of the token, and the first min(wanted, V) columns of `top_ids` int32
    `[B, 20]` and `top_logprobs` float32 `[B, 20]` the likeliest ids, best first, ties by lower id, and theirs
    (-1 and -inf where fewer scores are numbers). Nothing else is written. Sums are at least as
    good as float32 sums of 1,024 terms; the result is rounded once.
    """
    backend(logits.device.type).token_logprobs(logits, tokens, wanted, logprob, top_ids, top_logprobs)


def count_tokens(tokens: torch.Tensor, count_rows: torch.Tensor, counts: torch.Tensor) -> None:
    """Add one to `counts[count_rows[b], tokens[b]]` for each b; a negative token or row counts nothing.

    `tokens`, `count_rows` int32 `[B]`, `counts` int32 `[R, V]`.
    """
    backend(counts.device.type).count_tokens(tokens, count_rows, counts)


def clear_counts(count_rows: torch.Tensor, counts: torch.Tensor) -> None:
    """Zero the rows of `counts` (int32 `[R, V]`) that `count_rows` (int32 `[B]`) names; -1 names none."""
    backend(counts.device.type).clear_counts(count_rows, counts)


def sample(
    logits: torch.Tensor,
    params: Sequence[SamplingParams],
    positions: Sequence[int],
    purpose: Purpose,
    counts: torch.Tensor | None = None,
) -> list[int]:
    """`draw` with parameters in Python, row b with the counts of row b (needed only with penalties)."""
    if len(params) != logits.shape[0] or len(positions) != logits.shape[0]:
        raise OptionError(
            f"{logits.shape[0]} rows of scores need as many parameters and positions, "
            f"got {len(params)} and {len(positions)}"
        )
    rows = range(len(params)) if counts is not None else [-1] * len(params)
    draws = Draws.of(params, positions, [purpose] * len(params), rows, logits.device)
    if counts is None:
        counts = torch.zeros((0, logits.shape[1]), dtype=torch.int32, device=logits.device)
    return draw(logits, draws, counts).tolist()


def _mix(x: int) -> int:
    x = (x + 0x9E3779B97F4A7C15) & _MASK
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB & _MASK
    return x ^ (x >> 31)
