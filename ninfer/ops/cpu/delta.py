"""The gated delta rule on the CPU: whole chunks of a call in chunked form, the rest column by column."""

from __future__ import annotations

import torch

from ninfer.errors import OptionError
from ninfer.ops.cpu.chunks import run_chunks
from ninfer.ops.cpu.recurrence import advance
from ninfer.ops.delta import CHUNK


def gated_delta_net(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    states: torch.Tensor,
    source_slots: torch.Tensor,
    target_slots: torch.Tensor,
) -> torch.Tensor:
    q, k, v = (_rows(x) for x in (q, k, v))
    _check(q, k, v, g, beta, states, source_slots, target_slots)
    requests = source_slots.numel()
    per_request = v.shape[0] // requests
    out = torch.empty(v.shape, dtype=v.dtype)
    whole = per_request // CHUNK * CHUNK
    sources = source_slots
    if whole:
        for b in range(requests):
            rows = slice(b * per_request, b * per_request + whole)
            result, state = run_chunks(
                q[rows], k[rows], v[rows], g[rows], beta[rows], states[int(source_slots[b])]
            )
            out[rows] = result
            states[int(target_slots[b])] = state
        sources = target_slots
    if whole < per_request:
        advance(q, k, v, g, beta, states, sources, target_slots, out, whole)
    return out


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
