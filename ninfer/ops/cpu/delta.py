"""The gated delta rule on the CPU: whole chunks of a call in chunked form, the rest column by column."""

from __future__ import annotations

import torch

from ninfer.errors import OptionError
from ninfer.ops.checks import (
    check_delta,
    check_delta_records,
    check_fold,
    check_recorded_keys,
    side_by_side,
)
from ninfer.ops.cpu.chunks import run_chunks
from ninfer.ops.cpu.recurrence import advance, fold
from ninfer.ops.delta import CHUNK, DeltaRecords


def gated_delta_net(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    states: torch.Tensor,
    source_slots: torch.Tensor,
    target_slots: torch.Tensor,
    records: DeltaRecords | None,
) -> torch.Tensor:
    q, k, v = (side_by_side(x) for x in (q, k, v))
    requests = source_slots.numel()
    check_delta(q, k, v, g, beta, states, requests)
    if (
        not source_slots.dtype == target_slots.dtype == torch.int32
        or not g.is_contiguous() & beta.is_contiguous()
    ):
        raise OptionError("slots must be int32, and g and beta contiguous")
    per_request = v.shape[0] // requests
    if records is not None:
        check_delta_records(records, states, requests, per_request)
        check_recorded_keys(records, k)
    out = torch.empty(v.shape, dtype=v.dtype)
    whole = per_request // CHUNK * CHUNK
    sources = source_slots
    if whole:
        for b in range(requests):
            rows = slice(b * per_request, b * per_request + whole)
            slot = int(source_slots[b])
            before = states[slot] if slot >= 0 else torch.zeros(states.shape[1:])
            result, state = run_chunks(q[rows], k[rows], v[rows], g[rows], beta[rows], before)
            out[rows] = result
            states[int(target_slots[b])] = state
        sources = target_slots
    if whole < per_request:
        advance(q, k, v, g, beta, states, sources, target_slots, out, whole, records)
    return out


def fold_delta_net(
    records: DeltaRecords,
    counts: torch.Tensor,
    states: torch.Tensor,
    source_slots: torch.Tensor,
    target_slots: torch.Tensor,
) -> None:
    check_delta_records(records, states, source_slots.numel(), 1)
    check_fold(counts, source_slots, target_slots)
    fold(records, counts, states, source_slots, target_slots)
