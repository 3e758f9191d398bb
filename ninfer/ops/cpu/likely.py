"""Log-probabilities of drawn tokens and of the likeliest ones.

Roofline: 4 bytes a score, read twice (from the caches: the draw has just read them), and an exponential for
every score: 248,077 take about 100 us. Only rows that ask cost anything. Sums of 1,024 exponentials are
float32, the sum of those is float64.
"""

from __future__ import annotations

import math

import numpy as np
import torch

from ninfer.ops.cpu.block import argument, next_shared
from ninfer.ops.cpu.choose import find_best
from ninfer.ops.cpu.functions import exp
from ninfer.ops.cpu.instructions import device
from ninfer.ops.cpu.kernel import Kernel, launch, threads
from ninfer.ops.cpu.simd import (
    add,
    copy_bytes,
    get_f32,
    get_i32,
    load_f32,
    put_f32,
    put_i32,
    splat,
    stack,
    store_f32,
    sub,
    total,
    zeros,
)
from ninfer.ops.sampling import CANDIDATES
from ninfer.ops.sampling_checks import check_reports

_PARALLEL = 1 << 14  # scores
_BLOCK = 1024
_LOWEST, _NAN = np.float32(-np.inf), np.float32(np.nan)


@device
def _normalizer(scores, size, best, rest):
    """log of the sum of e^(score - best)."""
    mass = 0.0
    for begin in range(0, size, _BLOCK):
        lanes = zeros()
        end = min(begin + _BLOCK, size)
        for start in range(begin, end, 16):
            at = scores + 4 * start
            if end - start < 16:
                store_f32(rest, splat(_LOWEST))
                copy_bytes(rest, at, 4 * (end - start))
                at = rest
            lanes = add(lanes, exp(sub(load_f32(at), splat(best))))
        mass += total(lanes) * 1.0
    return math.log(mass)


def likely_kernel(data):
    """An item is a row.

    Arguments: 0 scores, 1 rows, 2 scores of a row, 3 tokens, 4 wanted, 5 logprob, 6 ids and 7 logprobs of the
    likeliest.
    """
    rows, size = argument(data, 1), argument(data, 2)
    values, ids, rest = stack(4 * 32), stack(4 * 32), stack(64)
    while True:
        row = next_shared(data, 1)
        if row >= rows:
            break
        token, wanted = get_i32(argument(data, 3) + 4 * row), get_i32(argument(data, 4) + 4 * row)
        if token < 0 or wanted < 0:
            continue
        scores = argument(data, 0) + 4 * size * row
        n = min(min(wanted, CANDIDATES), size)
        found = find_best(scores, size, max(n, 1), 0, 0, 0.0, 0.0, values, ids)
        if found == 0:
            put_f32(values, _NAN)
        best = get_f32(values)
        normalizer = _normalizer(scores, size, best, rest)
        put_f32(argument(data, 5) + 4 * row, get_f32(scores + 4 * token) * 1.0 - best - normalizer)
        for i in range(n):
            at = 4 * (CANDIDATES * row + i)
            put_i32(argument(data, 6) + at, get_i32(ids + 4 * i) if i < found else -1)
            value = get_f32(values + 4 * i) * 1.0 - best - normalizer if i < found else -math.inf
            put_f32(argument(data, 7) + at, value)


_likely = Kernel(likely_kernel, "token_logprobs")


def token_logprobs(
    logits: torch.Tensor,
    tokens: torch.Tensor,
    wanted: torch.Tensor,
    logprob: torch.Tensor,
    top_ids: torch.Tensor,
    top_logprobs: torch.Tensor,
) -> None:
    check_reports(logits, tokens, wanted, logprob, top_ids, top_logprobs)
    rows, size = logits.shape
    team = threads() if rows > 1 and rows * size > _PARALLEL else 1
    launch(
        _likely.address, team, 0, logits.data_ptr(), rows, size, tokens.data_ptr(), wanted.data_ptr(),
        logprob.data_ptr(), top_ids.data_ptr(), top_logprobs.data_ptr(),
    )  # fmt: skip
