"""Sampling: one pass over the scores finds the best 20, the draw is made among them.

Roofline: 4 bytes a score; 16 scores are compared with the twentieth best at once, and almost none passes, so
a row of 248,077 takes about 20 us. The draw is done here as well: in Python it takes 200 us after a decode
step has emptied the caches. Rows are shared out among the threads.
"""

from __future__ import annotations

import math

import numpy as np
import torch

from ninfer.ops.cpu.block import argument, next_shared
from ninfer.ops.cpu.functions import draw as random_number
from ninfer.ops.cpu.instructions import device
from ninfer.ops.cpu.kernel import Kernel, launch, threads
from ninfer.ops.cpu.simd import (
    add,
    any_greater,
    copy_bytes,
    get_f32,
    get_f64,
    get_i32,
    get_i64,
    load_f32,
    load_i32_as_f32,
    mul,
    only,
    positive,
    put_f32,
    put_f64,
    put_i32,
    splat,
    stack,
    store_f32,
    sub,
    zeros,
)
from ninfer.ops.sampling import CANDIDATES, Draws, mask_words
from ninfer.ops.sampling_checks import check_clearing, check_counting, check_draws, drawn_into

_PARALLEL = 1 << 14  # scores
_LOWEST = np.float32(-np.inf)


@device
def find_best(scores, total, n, mask, counts, presence, frequency, values, ids):
    """The n best allowed scores after penalties, descending, lower ids first among equals; how many (a NaN is
    none). `mask` or `counts` 0: without."""
    block, rest, rest_counts = stack(64), stack(64), stack(64)
    found = 0
    for start in range(0, total, 16):
        lanes = min(16, total - start)
        allowed = 0xFFFF
        if mask:
            allowed = (get_i32(mask + 4 * (start >> 5)) >> (start & 16)) & 0xFFFF
            if allowed == 0:
                continue
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
        if allowed != 0xFFFF:
            x = only(x, allowed)
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


@device
def _allows(mask, total):
    """Is any of the bits set?"""
    for start in range(0, total, 32):
        word = get_i32(mask + 4 * (start >> 5)) & 0xFFFFFFFF
        if total - start < 32:
            word = word & ((1 << (total - start)) - 1)
        if word:
            return 1
    return 0


@device
def _pick(values, found, temperature, top_p, min_p, u, weights):
    """Which of the found scores (descending) the number u in [0, 1) stands for."""
    best = get_f32(values)
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
    goal = u * mass
    reached, chosen = 0.0, 0
    while chosen < kept - 1:
        reached += get_f64(weights + 8 * chosen)
        if reached > goal:
            break
        chosen += 1
    return chosen


def choose_kernel(data):
    """An item is a row.

    Arguments: 0 scores, 1 rows, 2 scores of a row, 3 out (int32), 4 counts; the tensors of `Draws`: 5
    temperature, 6 top_p, 7 min_p, 8 presence, 9 frequency, 10 top_k, 11 seed, 12 position, 13 purpose, 14
    count rows, 15 mask rows; 16 masks, 17 words of a mask.
    """
    rows, size, out = argument(data, 1), argument(data, 2), argument(data, 3)
    values, ids, weights = stack(4 * 32), stack(4 * 32), stack(8 * 32)
    while True:
        row = next_shared(data, 1)
        if row >= rows:
            break
        purpose = get_i32(argument(data, 13) + 4 * row)
        if purpose < 0:
            put_i32(out + 4 * row, -2)
            continue
        presence = get_f64(argument(data, 8) + 8 * row)
        frequency = get_f64(argument(data, 9) + 8 * row)
        count_row, counts = get_i32(argument(data, 14) + 4 * row), 0
        if count_row >= 0 and (presence != 0.0 or frequency != 0.0):
            counts = argument(data, 4) + 4 * size * count_row
        n = get_i32(argument(data, 10) + 4 * row)
        if n < 1 or n > CANDIDATES:
            n = CANDIDATES
        n = min(n, size)
        scores = argument(data, 0) + 4 * size * row
        mask_row = get_i32(argument(data, 15) + 4 * row)
        if mask_row < 0:  # a copy of the search without masks: they slow it down by a tenth
            found = find_best(scores, size, n, 0, counts, presence, frequency, values, ids)
        else:
            mask = argument(data, 16) + 4 * argument(data, 17) * mask_row
            if argument(data, 16) == 0 or not _allows(mask, size):
                put_i32(out + 4 * row, -3)
                continue
            found = find_best(scores, size, n, mask, counts, presence, frequency, values, ids)
        best = get_f32(values)
        if found == 0 or best - best != 0.0:
            put_i32(out + 4 * row, -1)
            continue
        chosen = 0
        temperature = get_f64(argument(data, 5) + 8 * row)
        if temperature > 0.0:
            seed, position = get_i64(argument(data, 11) + 8 * row), get_i32(argument(data, 12) + 4 * row)
            u = random_number(seed, position, purpose)
            top_p, min_p = get_f64(argument(data, 6) + 8 * row), get_f64(argument(data, 7) + 8 * row)
            chosen = _pick(values, found, temperature, top_p, min_p, u, weights)
        put_i32(out + 4 * row, get_i32(ids + 4 * chosen))


def count_kernel(data):
    """For one thread. Arguments: 0 tokens, 1 count rows, 2 how many, 3 counts, 4 their row's length."""
    tokens, rows, counts, size = argument(data, 0), argument(data, 1), argument(data, 3), argument(data, 4)
    for b in range(argument(data, 2)):
        token, row = get_i32(tokens + 4 * b), get_i32(rows + 4 * b)
        if token >= 0 and row >= 0:
            place = counts + 4 * (size * row + token)
            put_i32(place, get_i32(place) + 1)


def clear_kernel(data):
    """For one thread. Arguments: 0 count rows, 1 how many, 2 counts, 3 their row's length."""
    rows, counts, size = argument(data, 0), argument(data, 2), argument(data, 3)
    for b in range(argument(data, 1)):
        row = get_i32(rows + 4 * b)
        if row >= 0:
            for i in range(size):
                put_i32(counts + 4 * (size * row + i), 0)


_choose = Kernel(choose_kernel)
_count = Kernel(count_kernel, "count_tokens")
_clear = Kernel(clear_kernel, "clear_counts")


def draw(
    logits: torch.Tensor,
    draws: Draws,
    counts: torch.Tensor,
    masks: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    fields = check_draws(logits, draws, counts, masks)
    rows, size = logits.shape
    address, words = (0, 0) if masks is None else (masks.data_ptr(), mask_words(size))
    out = drawn_into(out, logits)
    team = threads() if rows > 1 and rows * size > _PARALLEL else 1
    launch(
        _choose.address, team, 0, logits.data_ptr(), rows, size, out.data_ptr(), counts.data_ptr(),
        *(field.data_ptr() for field in fields), address, words,
    )  # fmt: skip
    return out


def count_tokens(tokens: torch.Tensor, count_rows: torch.Tensor, counts: torch.Tensor) -> None:
    check_counting(tokens, count_rows, counts)
    launch(
        _count.address, 1, 0, tokens.data_ptr(), count_rows.data_ptr(), tokens.numel(), counts.data_ptr(),
        counts.shape[1],
    )  # fmt: skip


def clear_counts(count_rows: torch.Tensor, counts: torch.Tensor) -> None:
    check_clearing(count_rows, counts)
    launch(
        _clear.address, 1, 0, count_rows.data_ptr(), count_rows.numel(), counts.data_ptr(), counts.shape[1]
    )
