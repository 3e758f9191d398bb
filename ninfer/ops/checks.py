"""What tensors of attention heads, norms, the convolution and the delta rule must be like, for every backend.

A backend adds what only its kernels ask for. All raise `OptionError`.
"""

from __future__ import annotations

import torch

from ninfer.errors import OptionError
from ninfer.ops.delta import RECORD_COLUMNS, DeltaRecords
from ninfer.ops.rope import Rope
from ninfer.ops.weights import Matrix


def side_by_side(x: torch.Tensor) -> torch.Tensor:
    """`x [T, heads, D]` with the heads of a row side by side; rows may be anywhere."""
    return x if x.stride(2) == 1 and x.stride(1) == x.shape[2] else x.contiguous()


def check_heads(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    rope: Rope,
    positions: torch.Tensor,
    page_table: torch.Tensor,
    cache_positions: torch.Tensor,
) -> None:
    """Those of `qk_prepare`."""
    columns, _, width = q.shape
    if k.shape != v.shape or k.shape[0] != columns or k.shape[2] != width:
        raise OptionError(f"heads do not match: q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}")
    if not q.dtype == k.dtype == v.dtype:
        raise OptionError(f"q, k and v must have one type, got {q.dtype}, {k.dtype}, {v.dtype}")
    if rope.rotary_dim > width:
        raise OptionError(f"a rotation of {rope.rotary_dim} dimensions exceeds the head's {width}")
    if not positions.dtype == page_table.dtype == cache_positions.dtype == torch.int32:
        raise OptionError("positions and page tables must be int32")
    if columns % page_table.shape[0] or positions.shape[-1] != columns:
        raise OptionError(f"{columns} columns do not divide among {page_table.shape[0]} page tables")


def check_gate(o: torch.Tensor, z: torch.Tensor, head_order: torch.Tensor | None) -> int:
    """Those of `gated_rms_norm`; how many heads a row has."""
    if z.numel() != o.numel() or z.dtype != o.dtype:
        raise OptionError(f"a gate {tuple(z.shape)} {z.dtype} does not fit {tuple(o.shape)} {o.dtype}")
    heads = o.numel() // (z.shape[0] * o.shape[-1])
    if head_order is not None and (head_order.shape != (heads,) or head_order.dtype != torch.int32):
        raise OptionError(
            f"an order of {heads} heads must be int32 [{heads}], got {head_order.dtype} "
            f"{tuple(head_order.shape)}"
        )
    return heads


def check_controls(a: Matrix, b: Matrix, a_log: torch.Tensor, dt_bias: torch.Tensor) -> None:
    """Those of `gdn_gating`."""
    heads = a.rows
    if b.rows != heads or a_log.numel() != heads or dt_bias.numel() != heads:
        raise OptionError(
            f"gating of {heads} heads got {b.rows} rows of b, {a_log.numel()} decays "
            f"and {dt_bias.numel()} biases"
        )
    if a_log.dtype != torch.float32 or dt_bias.dtype != torch.float32:
        raise OptionError(f"a_log and dt_bias must be float32, got {a_log.dtype} and {dt_bias.dtype}")


def check_convolution(
    u: torch.Tensor,
    weight: torch.Tensor,
    conv_states: torch.Tensor,
    source_slots: torch.Tensor,
    target_slots: torch.Tensor,
    records: torch.Tensor | None,
) -> None:
    """Those of `causal_conv`."""
    requests, (columns, channels), taps = source_slots.numel(), u.shape, weight.shape[0]
    if weight.shape[1] != channels or conv_states.shape[1:] != (taps - 1, channels) or columns % requests:
        raise OptionError(
            f"convolution of {tuple(u.shape)} for {requests} requests does not fit "
            f"weights {tuple(weight.shape)} and states {tuple(conv_states.shape)}"
        )
    if conv_states.dtype != u.dtype or not source_slots.dtype == target_slots.dtype == torch.int32:
        raise OptionError(
            f"states must be {u.dtype} and slots int32, got {conv_states.dtype}, {source_slots.dtype}"
        )
    if records is not None:
        check_conv_records(records, conv_states, requests, columns // requests)


def check_conv_records(records: torch.Tensor, states: torch.Tensor, requests: int, columns: int) -> None:
    """Do the records fit the histories, and have room for as many columns of each request?"""
    if records.shape[1:] != states.shape[2:] or records.dtype != states.dtype or not records.is_contiguous():
        raise OptionError(
            f"records {tuple(records.shape)} {records.dtype} do not fit histories {tuple(states.shape)} "
            f"{states.dtype}"
        )
    _check_room(records.shape[0], requests, columns)


def check_delta(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    states: torch.Tensor,
    requests: int,
) -> None:
    """Those of `gated_delta_net`, but the slots."""
    columns, v_heads, v_width = v.shape
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


def check_delta_records(records: DeltaRecords, states: torch.Tensor, requests: int, columns: int) -> None:
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
    _check_room(rows, requests, columns)


def check_recorded_keys(records: DeltaRecords, k: torch.Tensor) -> None:
    """Can these keys be recorded?"""
    if records.k.dtype != k.dtype or records.k.shape[1:] != k.shape[1:]:
        raise OptionError(
            f"records of {tuple(records.k.shape)} {records.k.dtype} do not fit "
            f"keys {tuple(k.shape)} {k.dtype}"
        )


def check_fold(counts: torch.Tensor, source_slots: torch.Tensor, target_slots: torch.Tensor) -> None:
    """Counts and slots must be int32 of one length."""
    if not counts.shape == source_slots.shape == target_slots.shape:
        raise OptionError(
            f"{counts.numel()} counts, {source_slots.numel()} source and {target_slots.numel()} target slots "
            "do not match"
        )
    if not counts.dtype == source_slots.dtype == target_slots.dtype == torch.int32:
        raise OptionError(f"counts and slots must be int32, got {counts.dtype}, {source_slots.dtype}")


def _check_room(rows: int, requests: int, columns: int) -> None:
    room = min(RECORD_COLUMNS, rows // requests)
    if columns > room:
        raise OptionError(
            f"records of {rows} columns hold up to {room} of each of {requests} requests, got {columns}"
        )
