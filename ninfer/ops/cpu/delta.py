"""The gated delta rule on the CPU: whole chunks of a call in chunked form, the rest column by column."""

from __future__ import annotations

import torch

from ninfer.errors import OptionError
from ninfer.ops.cpu.chunks import run_chunks
from ninfer.ops.cpu.recurrence import advance, fold
from ninfer.ops.delta import CHUNK, RECORD_COLUMNS, DeltaRecords


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
    q, k, v = (_rows(x) for x in (q, k, v))
    _check(q, k, v, g, beta, states, source_slots, target_slots)
    requests = source_slots.numel()
    per_request = v.shape[0] // requests
    if records is not None:
        _check_records(records, states, requests, per_request)
        if records.k.dtype != k.dtype or records.k.shape[1:] != k.shape[1:]:
            raise OptionError(
                f"records of {tuple(records.k.shape)} {records.k.dtype} do not fit "
                f"keys {tuple(k.shape)} {k.dtype}"
            )
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
    _check_records(records, states, source_slots.numel(), 1)
    check_fold(counts, source_slots, target_slots)
    fold(records, counts, states, source_slots, target_slots)


def check_fold(counts: torch.Tensor, source_slots: torch.Tensor, target_slots: torch.Tensor) -> None:
    """Counts and slots must be int32 of one length."""
    if not counts.shape == source_slots.shape == target_slots.shape:
        raise OptionError(
            f"{counts.numel()} counts, {source_slots.numel()} source and {target_slots.numel()} target slots "
            "do not match"
        )
    if not counts.dtype == source_slots.dtype == target_slots.dtype == torch.int32:
        raise OptionError(f"counts and slots must be int32, got {counts.dtype}, {source_slots.dtype}")


def _rows(x: torch.Tensor) -> torch.Tensor:
    """`x` with the heads of a row side by side; rows may be anywhere."""
    return x if x.stride(2) == 1 and x.stride(1) == x.shape[2] else x.contiguous()


def _check(q, k, v, g, beta, states, source_slots, target_slots) -> None:
    columns, v_heads, v_width = v.shape
    requests = source_slots.numel()
    if q.shape != k.shape or q.shape[0] != columns or v_heads % q.shape[1] or columns % requests:
        raise OptionError(
            f"{requests} requests with q {tuple(q.shape)}, k {tuple(k.shape)} and v {tuple(v.shape)} "
            "do not match"
        )
    if g.shape != (columns, v_heads) or beta.shape != g.shape or not g.dtype == beta.dtype == torch.float32:
        raise OptionError(f"g and beta must be float32 {(columns, v_heads)}, got {tuple(g.shape)} {g.dtype}")
    if states.shape[1:] != (v_heads, v_width, q.shape[2]) or states.dtype != torch.float32:
        raise OptionError(
            f"states must be float32 [slots, {v_heads}, {v_width}, {q.shape[2]}], got {tuple(states.shape)}"
        )
    if (
        not source_slots.dtype == target_slots.dtype == torch.int32
        or not g.is_contiguous() & beta.is_contiguous()
    ):
        raise OptionError("slots must be int32, and g and beta contiguous")


def _check_records(records: DeltaRecords, states: torch.Tensor, requests: int, columns: int) -> None:
    """Do the records fit the states, and have room for as many columns of each request?"""
    rows, v_heads = records.g.shape
    k, v = records.k, records.v
    if (
        v.shape != (rows, v_heads, states.shape[2])
        or k.shape[0] != rows
        or states.shape[1:] != (v_heads, v.shape[2], k.shape[2])
        or v_heads % k.shape[1]
        or records.beta.shape != records.g.shape
        or k.dtype != v.dtype
        or not records.g.dtype == records.beta.dtype == states.dtype == torch.float32
    ):
        raise OptionError(
            f"records of k {tuple(k.shape)} {k.dtype}, v {tuple(v.shape)} {v.dtype} and g {(rows, v_heads)} "
            f"{records.g.dtype} do not fit states {tuple(states.shape)}"
        )
    if not all(x.is_contiguous() for x in (k, v, records.g, records.beta)):
        raise OptionError("records must be contiguous")
    if columns > min(RECORD_COLUMNS, rows // requests):
        raise OptionError(
            f"records of {rows} columns hold up to {min(RECORD_COLUMNS, rows // requests)} of each of "
            f"{requests} requests, got {columns}"
        )
