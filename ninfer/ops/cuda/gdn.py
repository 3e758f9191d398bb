"""The mixer of a Gated DeltaNet on the GPU: which kernels run for how many columns of a request.

Up to 16 columns: one kernel, where blocks form clusters. Else operator after operator, whole chunks of 64 in
chunked form, the rest column by column. Only a request's own number of columns decides.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ninfer.errors import OptionError
from ninfer.ops.checks import (
    check_conv_records,
    check_convolution,
    check_delta,
    check_fold,
    check_recorded_keys,
    side_by_side,
)
from ninfer.ops.cuda import gdn_native
from ninfer.ops.cuda.convolve import (
    causal_conv,
    check_kernel,
    fold_conv,
)
from ninfer.ops.cuda.gating import check_gating, gating
from ninfer.ops.cuda.gdn_chunked import run_chunks
from ninfer.ops.cuda.gdn_step import check_records, fold_delta_net, run_columns
from ninfer.ops.cuda.norms import gated_rms_norm
from ninfer.ops.delta import CHUNK, RECORD_COLUMNS, DeltaRecords
from ninfer.ops.fused import GdnMixer


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
    _check(q, k, v, g, beta, states, source_slots, target_slots)
    requests = source_slots.numel()
    columns = v.shape[0] // requests
    if records is not None:
        check_records(records, states, requests, columns)
        check_recorded_keys(records, k)
    out = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    whole = columns // CHUNK * CHUNK
    sources = source_slots
    if whole:
        run_chunks(q, k, v, g, beta, states, source_slots, target_slots, out)
        sources = target_slots
    if whole < columns:
        run_columns(q, k, v, g, beta, states, sources, target_slots, out, whole, records)
    return out


def gdn_mix(
    m: GdnMixer,
    qkv: torch.Tensor,
    z: torch.Tensor,
    h: torch.Tensor,
    conv_states: torch.Tensor,
    states: torch.Tensor,
    source_slots: torch.Tensor,
    target_slots: torch.Tensor,
    conv_records: torch.Tensor | None = None,
    records: DeltaRecords | None = None,
) -> torch.Tensor:
    requests = source_slots.numel()
    columns = h.shape[0] // requests
    a, b = check_gating(h, m.a, m.b, m.a_log, m.dt_bias)
    check_convolution(qkv, m.convolution, conv_states, source_slots, target_slots, conv_records)
    check_kernel(qkv, m.convolution, conv_states)
    _check_mixer(m, qkv, z, states)
    if records is not None:
        check_records(records, states, requests, columns)
    if (records is None) != (conv_records is None) or (
        records is not None
        and conv_records is not None
        and conv_records.shape[0] // requests != records.g.shape[0] // requests
    ):
        raise OptionError("records of a mixer come both and with the same rows, or not at all")
    rest = conv_states, states, source_slots, target_slots, conv_records, records
    if columns <= RECORD_COLUMNS and _has_fused(m, h):
        return gdn_native.mix(m, a, b, qkv, z, h, *rest)
    return _mix_parts(m, qkv, z, h, *rest)


def fold_gdn(
    conv_records: Sequence[torch.Tensor],
    records: Sequence[DeltaRecords],
    counts: torch.Tensor,
    conv_states: Sequence[torch.Tensor],
    states: Sequence[torch.Tensor],
    source_slots: torch.Tensor,
    target_slots: torch.Tensor,
) -> None:
    if not records:
        return
    check_fold(counts, source_slots, target_slots)
    requests = source_slots.numel()
    layers = list(zip(conv_records, records, conv_states, states, strict=True))
    shapes = set()
    for raw, record, history, state in layers:
        check_conv_records(raw, history, requests, 1)
        check_records(record, state, requests, 1)
        shapes.add((raw.shape, record.k.shape, record.v.shape, history.shape, state.shape))
    if len(shapes) > 1:
        raise OptionError(f"layers that are folded together must have one geometry, got {len(shapes)}")
    taps, (key_heads, width) = conv_states[0].shape[1] + 1, records[0].k.shape[1:]
    rows, heads, width_v = records[0].v.shape
    if (
        gdn_native.runs(states[0].device, heads, key_heads, width, width_v)
        and 2 <= taps <= 4
        and conv_records[0].shape == (rows, 2 * key_heads * width + heads * width_v)
        and all(history.is_contiguous() for history in conv_states)
    ):
        gdn_native.fold(conv_records, records, counts, conv_states, states, source_slots, target_slots)
        return
    for raw, record, history, state in layers:
        fold_conv(raw, counts, history, source_slots, target_slots)
        fold_delta_net(record, counts, state, source_slots, target_slots)


def _has_fused(m: GdnMixer, h: torch.Tensor) -> bool:
    return (
        gdn_native.runs(h.device, m.value_heads, m.key_heads, m.key_dim, m.value_dim)
        and 1 <= m.convolution.shape[0] <= 4
        and h.shape[1] % 4 == 0
        and h.shape[1] <= 1 << 14
        and m.norm.dtype == torch.bfloat16
    )


def _mix_parts(
    m: GdnMixer,
    qkv: torch.Tensor,
    z: torch.Tensor,
    h: torch.Tensor,
    conv_states: torch.Tensor,
    states: torch.Tensor,
    source_slots: torch.Tensor,
    target_slots: torch.Tensor,
    conv_records: torch.Tensor | None,
    records: DeltaRecords | None,
) -> torch.Tensor:
    """Operator after operator."""
    columns, keys = h.shape[0], m.key_heads * m.key_dim
    g, beta = gating(h, m.a, m.b, m.a_log, m.dt_bias, columns // source_slots.numel() <= RECORD_COLUMNS)
    qkv = causal_conv(qkv, m.convolution, conv_states, source_slots, target_slots, conv_records)
    q, k, v = qkv.split_with_sizes((keys, keys, m.value_heads * m.value_dim), 1)
    o = gated_delta_net(
        q.view(columns, m.key_heads, m.key_dim),
        k.view(columns, m.key_heads, m.key_dim),
        v.view(columns, m.value_heads, m.value_dim),
        g, beta, states, source_slots, target_slots, records,
    )  # fmt: skip
    z = z.view(columns, m.value_heads, m.value_dim)
    return gated_rms_norm(o, z, m.norm, m.eps, m.head_order).view(columns, -1)


def _check_mixer(m: GdnMixer, qkv: torch.Tensor, z: torch.Tensor, states: torch.Tensor) -> None:
    heads, width = m.value_heads, m.value_heads * m.value_dim
    if qkv.shape[1] != 2 * m.key_heads * m.key_dim + width or z.shape != (qkv.shape[0], width):
        raise OptionError(f"projections {tuple(qkv.shape)} and {tuple(z.shape)} do not fit the mixer")
    if states.shape[1:] != (heads, m.value_dim, m.key_dim) or states.dtype != torch.float32:
        raise OptionError(
            f"states must be float32 [slots, {heads}, {m.value_dim}, {m.key_dim}], got {tuple(states.shape)}"
        )
    if not states.is_contiguous() or z.dtype != qkv.dtype:
        raise OptionError("states must be contiguous and gates of the type of the projections")


def _check(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    states: torch.Tensor,
    source_slots: torch.Tensor,
    target_slots: torch.Tensor,
) -> None:
    check_delta(q, k, v, g, beta, states, source_slots.numel())
    if not all(x.is_contiguous() for x in (g, beta, states)):
        raise OptionError("states, g and beta must be contiguous")
    if not source_slots.dtype == target_slots.dtype == torch.int32:
        raise OptionError("slots must be int32")
    if not q.dtype == k.dtype == v.dtype == torch.bfloat16:
        raise OptionError(f"activations on the GPU are bfloat16, got {q.dtype}")
