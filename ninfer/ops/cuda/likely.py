"""Log-probabilities on the GPU (`csrc/sampling.cuh`): tiles, then rows, as draws in `choose.py`.

Sums of the exponentials of a tile of 2,048 are float32, in a tree; those of all tiles are float64. Rows that
ask for nothing leave at once, and those that ask for no alternatives sort nothing.
"""

from __future__ import annotations

import ctypes

import torch

from ninfer.ops.cuda import choose
from ninfer.ops.cuda.choose import TILE
from ninfer.ops.sampling import CANDIDATES
from ninfer.ops.sampling_checks import check_reports


class _Reports(ctypes.Structure):
    """`struct Reports` of sampling.cuh."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("scores", "tokens", "wanted", "lists", "tops", "sums")),
        *((name, ctypes.c_void_p) for name in ("logprob", "top_ids", "top_logprobs")),
        *((name, ctypes.c_int32) for name in ("size", "tiles")),
    ]


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
    device, tiles = logits.device, -(-size // TILE)
    lists = torch.empty((rows, tiles, CANDIDATES), dtype=torch.int64, device=device)
    tops = torch.empty((rows, tiles), dtype=torch.int32, device=device)
    sums = torch.empty((rows, tiles), dtype=torch.float32, device=device)
    params = _Reports(
        scores=logits.data_ptr(), tokens=tokens.data_ptr(), wanted=wanted.data_ptr(), lists=lists.data_ptr(),
        tops=tops.data_ptr(), sums=sums.data_ptr(), logprob=logprob.data_ptr(), top_ids=top_ids.data_ptr(),
        top_logprobs=top_logprobs.data_ptr(), size=size, tiles=tiles,
    )  # fmt: skip
    choose.launch("report_tiles", (tiles, rows), (params,), device)
    choose.launch("report_rows", (rows,), (params,), device, choose.list_bytes(tiles))
