"""Draws, counts and log-probabilities on the GPU (`csrc/sampling.cuh`).

Roofline: 4 bytes a score, which the head has just written, so that they come from the L2 cache: 1 MB of
248,077 scores is 0.3 us there. What counts is the latency of two launches: each tile of a row finds its best
20 scores, then one block a row draws among those of all tiles, or says how likely they are. Sums of the
exponentials of a tile are float32, of those of all tiles float64. All that rows ask for is data: one recorded
launch serves greedy, sampled, masked and penalized rows and those that ask for nothing, whose blocks leave at
once. Penalties are float32 without fused multiply-add, and weights are float64 added up in order, so that the
same scores give the token that the CPU draws.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from functools import cache

import torch

from ninfer.ops.cuda.compile import Function, Module
from ninfer.ops.sampling import CANDIDATES, Draws, mask_words
from ninfer.ops.sampling_checks import check_clearing, check_counting, check_draws, check_reports

_TILE, _THREADS = 2048, 128


class _Draws(ctypes.Structure):
    """`struct Draws` of sampling.cuh."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("scores", "counts", "masks", "temperature", "top_p", "min_p")),
        *((name, ctypes.c_void_p) for name in ("presence", "frequency", "top_k", "seed", "position")),
        *((name, ctypes.c_void_p) for name in ("purpose", "count_rows", "mask_row", "lists", "out")),
        *((name, ctypes.c_int32) for name in ("size", "tiles", "words", "masks_given")),
    ]


class _Reports(ctypes.Structure):
    """`struct Reports` of sampling.cuh."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("scores", "tokens", "wanted", "lists", "tops", "sums")),
        *((name, ctypes.c_void_p) for name in ("logprob", "top_ids", "top_logprobs")),
        *((name, ctypes.c_int32) for name in ("size", "tiles")),
    ]


@cache
def _module() -> Module:
    return Module("sampling.cuh")


def programs() -> Iterable[Module]:
    yield _module()


def _launch(name: str, grid: tuple[int, ...], values: tuple, device: torch.device, shared: int = 0) -> None:
    function: Function = _module().function(name, device, shared)
    function.launch(grid, (_THREADS,), values, pdl=_may_overlap(device))


@cache
def _may_overlap(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device)[0] >= 9


def draw(
    logits: torch.Tensor, draws: Draws, counts: torch.Tensor, masks: torch.Tensor | None = None
) -> torch.Tensor:
    check_draws(logits, draws, counts, masks)
    rows, size = logits.shape
    device, tiles = logits.device, -(-size // _TILE)
    out = torch.empty(rows, dtype=torch.int32, device=device)
    if rows == 0:
        return out
    lists = torch.empty((rows, tiles, CANDIDATES), dtype=torch.int64, device=device)
    params = _Draws(
        scores=logits.data_ptr(), counts=counts.data_ptr(), masks=0 if masks is None else masks.data_ptr(),
        temperature=draws.temperature.data_ptr(), top_p=draws.top_p.data_ptr(), min_p=draws.min_p.data_ptr(),
        presence=draws.presence.data_ptr(), frequency=draws.frequency.data_ptr(),
        top_k=draws.top_k.data_ptr(), seed=draws.seed.data_ptr(), position=draws.position.data_ptr(),
        purpose=draws.purpose.data_ptr(), count_rows=draws.count_rows.data_ptr(),
        mask_row=draws.mask_row.data_ptr(), lists=lists.data_ptr(), out=out.data_ptr(), size=size,
        tiles=tiles, words=mask_words(size), masks_given=0 if masks is None else masks.shape[0],
    )  # fmt: skip
    _launch("draw_tiles", (tiles, rows), (params,), device)
    _launch("draw_rows", (rows,), (params,), device, 8 * CANDIDATES * tiles)
    return out


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
    if rows == 0:
        return
    device, tiles = logits.device, -(-size // _TILE)
    lists = torch.empty((rows, tiles, CANDIDATES), dtype=torch.int64, device=device)
    tops = torch.empty((rows, tiles), dtype=torch.int32, device=device)
    sums = torch.empty((rows, tiles), dtype=torch.float32, device=device)
    params = _Reports(
        scores=logits.data_ptr(), tokens=tokens.data_ptr(), wanted=wanted.data_ptr(), lists=lists.data_ptr(),
        tops=tops.data_ptr(), sums=sums.data_ptr(), logprob=logprob.data_ptr(), top_ids=top_ids.data_ptr(),
        top_logprobs=top_logprobs.data_ptr(), size=size, tiles=tiles,
    )  # fmt: skip
    _launch("report_tiles", (tiles, rows), (params,), device)
    _launch("report_rows", (rows,), (params,), device, 8 * CANDIDATES * tiles)


def count_tokens(tokens: torch.Tensor, count_rows: torch.Tensor, counts: torch.Tensor) -> None:
    check_counting(tokens, count_rows, counts)
    total = tokens.numel()
    if total:
        values = (tokens, count_rows, counts, total, counts.shape[1])
        _launch("count", (-(-total // _THREADS),), values, counts.device)


def clear_counts(count_rows: torch.Tensor, counts: torch.Tensor) -> None:
    check_clearing(count_rows, counts)
    size = counts.shape[1]
    if count_rows.numel() and size:
        grid = -(-size // _TILE), count_rows.numel()
        _launch("clear", grid, (count_rows, counts, size), counts.device)
