"""Sampling: one pass over the scores finds the best 20, the draw is made among them.

Roofline: 4 bytes a score; 16 scores are compared with the twentieth best at once, and almost none passes, so
a row of 248,077 takes about 20 us.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch

from ninfer.errors import OptionError
from ninfer.ops.cpu.block import argument
from ninfer.ops.cpu.kernel import Kernel, bits, launcher
from ninfer.ops.cpu.simd import (
    add,
    any_greater,
    copy_bytes,
    get_f32,
    get_f64,
    get_i32,
    load_f32,
    load_i32_as_f32,
    mul,
    positive,
    put_f32,
    put_i32,
    splat,
    stack,
    store_f32,
    sub,
    zeros,
)
from ninfer.ops.sampling import CANDIDATES, SamplingParams, uniform

_LOWEST = np.float32(-np.inf)

_launch = launcher()


def best_kernel(data):
    """The n best scores of a row, descending, lower ids first among equals.

    Arguments: 0 scores, 1 how many, 2 n, 3 counts (int32) or 0, 4 presence, 5 frequency (float64), 6 values
    out (float32 [n]), 7 ids out (int32 [n]), 8 where to write how many were found (a NaN is never found).
    """
    scores, total, n, counts = argument(data, 0), argument(data, 1), argument(data, 2), argument(data, 3)
    presence, frequency = splat(get_f64(data + 32)), splat(get_f64(data + 40))
    values, ids = argument(data, 6), argument(data, 7)
    block, rest, rest_counts = stack(64), stack(64), stack(64)
    found = 0
    for start in range(0, total, 16):
        lanes = min(16, total - start)
        x_at, c_at = scores + 4 * start, counts + 4 * start
        if lanes < 16:
            store_f32(rest, splat(_LOWEST))
            copy_bytes(rest, x_at, 4 * lanes)
            x_at = rest
            if counts:
                store_f32(rest_counts, zeros())
                copy_bytes(rest_counts, c_at, 4 * lanes)
                c_at = rest_counts
        x = load_f32(x_at)
        if counts:
            c = load_i32_as_f32(c_at)
            x = sub(x, add(mul(presence, positive(c)), mul(frequency, c)))
        if found == n and not any_greater(x, get_f32(values + 4 * (n - 1))):
            continue
        store_f32(block, x)
        for lane in range(lanes):
            value = get_f32(block + 4 * lane)
            if found < n and value == value:
                place = found
                found += 1
            elif found == n and value > get_f32(values + 4 * (n - 1)):
                place = n - 1
            else:
                continue
            while place > 0 and value > get_f32(values + 4 * (place - 1)):
                put_f32(values + 4 * place, get_f32(values + 4 * (place - 1)))
                put_i32(ids + 4 * place, get_i32(ids + 4 * (place - 1)))
                place -= 1
            put_f32(values + 4 * place, value)
            put_i32(ids + 4 * place, start + lane)
    put_i32(argument(data, 8), found)


_best = Kernel(best_kernel)


def sample(
    logits: torch.Tensor,
    params: Sequence[SamplingParams],
    positions: Sequence[int],
    purpose: int,
    counts: torch.Tensor | None,
) -> list[int]:
    if logits.dtype != torch.float32 or not logits.is_contiguous():
        raise OptionError(f"scores must be contiguous float32, got {logits.dtype}")
    if counts is not None and (
        counts.dtype != torch.int32 or counts.shape != logits.shape or not counts.is_contiguous()
    ):
        raise OptionError(f"counts must be contiguous int32 {tuple(logits.shape)}, got {tuple(counts.shape)}")
    rows = zip(params, positions, strict=True)
    return [_choose(logits, b, p, position, purpose, counts) for b, (p, position) in enumerate(rows)]


def _choose(
    logits: torch.Tensor,
    row: int,
    params: SamplingParams,
    position: int,
    purpose: int,
    counts: torch.Tensor | None,
) -> int:
    scores, ids = _best_of(logits, row, params, counts)
    if not scores or not math.isfinite(scores[0]):
        return -1
    if params.temperature <= 0:
        return ids[0]
    weights = [math.exp((x - scores[0]) / params.temperature) for x in scores]
    total, mass, kept = sum(weights), 0.0, 0
    for weight in weights:
        if kept and params.min_p > 0 and weight < params.min_p * weights[0]:
            break
        mass += weight
        kept += 1
        if params.top_p < 1 and mass >= params.top_p * total:
            break
    goal, reached = uniform(params.seed, position, purpose) * mass, 0.0
    for token, weight in zip(ids[:kept], weights, strict=False):
        reached += weight
        if reached > goal:
            return token
    return ids[kept - 1]


def _best_of(
    logits: torch.Tensor, row: int, params: SamplingParams, counts: torch.Tensor | None
) -> tuple[list[float], list[int]]:
    """The candidates of a row after penalties: values and ids, best first."""
    total = logits.shape[1]
    n = min(1 if params.temperature <= 0 else params.candidates, total)
    values = torch.empty(CANDIDATES, dtype=torch.float32)
    found = torch.empty(CANDIDATES + 1, dtype=torch.int32)
    penalized = counts is not None and (params.presence_penalty or params.frequency_penalty)
    _launch(
        _best.address, 1, 0, logits.data_ptr() + 4 * total * row, total, n,
        counts.data_ptr() + 4 * total * row if penalized and counts is not None else 0,
        bits(params.presence_penalty), bits(params.frequency_penalty), values.data_ptr(), found.data_ptr(),
        found.data_ptr() + 4 * CANDIDATES,
    )  # fmt: skip
    numbers = found.tolist()
    return values.tolist()[: numbers[-1]], numbers[: numbers[-1]]
