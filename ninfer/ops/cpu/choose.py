"""Sampling: one pass over the scores finds the best 20, the draw is made among them.

Roofline: 4 bytes a score; 16 scores are compared with the twentieth best at once, and almost none passes, so
a row of 248,077 takes about 20 us. The draw is done here as well: in Python it takes 200 us after a decode
step has emptied the caches.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch

from ninfer.errors import OptionError
from ninfer.ops.cpu.block import argument
from ninfer.ops.cpu.functions import draw
from ninfer.ops.cpu.instructions import device
from ninfer.ops.cpu.kernel import Kernel, bits, launch
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
    put_f64,
    put_i32,
    put_i64,
    splat,
    stack,
    store_f32,
    sub,
    zeros,
)
from ninfer.ops.sampling import SamplingParams

_LOWEST = np.float32(-np.inf)


@device
def _find_best(scores, total, n, counts, presence, frequency, values, ids):
    """The n best scores after penalties, descending, lower ids first among equals; how many (a NaN is
    none)."""
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
            x = sub(x, add(mul(splat(presence), positive(c)), mul(splat(frequency), c)))
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
    return found


def choose_kernel(data):
    """The token of one row, or -1 if its best score is not finite.

    Arguments: 0 scores, 1 how many, 2 candidates, 3 counts (int32) or 0, 4 presence, 5 frequency, 6
    temperature, 7 top_p, 8 min_p (all float64), 9 seed, 10 position, 11 purpose, 12 where the token goes
    (int64).
    """
    n, temperature = argument(data, 2), get_f64(data + 48)
    top_p, min_p, out = get_f64(data + 56), get_f64(data + 64), argument(data, 12)
    values, ids, weights = stack(4 * 32), stack(4 * 32), stack(8 * 32)
    presence, frequency = get_f64(data + 32), get_f64(data + 40)
    scores, size, counts = argument(data, 0), argument(data, 1), argument(data, 3)
    found = _find_best(scores, size, n, counts, presence, frequency, values, ids)
    best = get_f32(values)
    if found == 0 or best - best != 0.0:
        put_i64(out, -1)
        return
    if temperature <= 0.0:
        put_i64(out, get_i32(ids))
        return
    total = 0.0
    for i in range(found):
        weight = math.exp((get_f32(values + 4 * i) * 1.0 - best) / temperature)
        put_f64(weights + 8 * i, weight)
        total += weight
    mass, kept = 0.0, 0
    for i in range(found):
        weight = get_f64(weights + 8 * i)
        if kept and min_p > 0.0 and weight < min_p * get_f64(weights):
            break
        mass += weight
        kept += 1
        if top_p < 1.0 and mass >= top_p * total:
            break
    goal = draw(argument(data, 9), argument(data, 10), argument(data, 11)) * mass
    reached, chosen = 0.0, 0
    while chosen < kept - 1:
        reached += get_f64(weights + 8 * chosen)
        if reached > goal:
            break
        chosen += 1
    put_i64(out, get_i32(ids + 4 * chosen))


_choose = Kernel(choose_kernel)
_MOST_SIGNED = 1 << 63


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
    count, total = logits.shape
    tokens = torch.empty(count, dtype=torch.int64)
    for b, (p, position) in enumerate(zip(params, positions, strict=True)):
        penalized = counts is not None and (p.presence_penalty or p.frequency_penalty)
        launch(
            _choose.address, 1, 0, logits.data_ptr() + 4 * total * b, total, min(p.candidates, total),
            counts.data_ptr() + 4 * total * b if penalized and counts is not None else 0,
            bits(p.presence_penalty), bits(p.frequency_penalty), bits(p.temperature), bits(p.top_p),
            bits(p.min_p), p.seed if p.seed < _MOST_SIGNED else p.seed - 2 * _MOST_SIGNED, position, purpose,
            tokens.data_ptr() + 8 * b,
        )  # fmt: skip
    return tokens.tolist()
