"""The mixer of a Gated DeltaNet on the GPU: which kernels run for how many columns of a request.

Up to 16 columns: one kernel, and one more for histories that are advanced. More columns: operator after
operator, whole chunks of 64 in chunked form, the rest column by column. Only a request's own number of columns
decides.
"""

from __future__ import annotations

import torch

from ninfer.errors import OptionError
from ninfer.ops.cuda.convolve import advance_histories, causal_conv, check_convolution
from ninfer.ops.cuda.gating import STEPS, check_gating, gating, part_of
from ninfer.ops.cuda.gdn_chunked import run_chunks
from ninfer.ops.cuda.gdn_norm import gated_rms_norm
from ninfer.ops.cuda.gdn_step import TAPS, check_records, mix_kernel, run_columns, tiles, warps
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
    q, k, v = (_rows(x) for x in (q, k, v))
    _check(q, k, v, g, beta, states, source_slots, target_slots)
    requests = source_slots.numel()
    columns = v.shape[0] // requests
    if records is not None:
        check_records(records, states, requests, columns)
        if records.k.dtype != k.dtype or records.k.shape[1:] != k.shape[1:]:
            raise OptionError(
                f"records of {tuple(records.k.shape)} {records.k.dtype} do not fit "
                f"keys {tuple(k.shape)} {k.dtype}"
            )
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
    requests, count = source_slots.numel(), h.shape[0]
    columns = count // requests
    if columns > RECORD_COLUMNS or not 1 <= m.convolution.shape[0] <= TAPS:
        return _mix_wide(
            m, qkv, z, h, conv_states, states, source_slots, target_slots, conv_records, records
        )
    a, b = check_gating(h, m.a, m.b, m.a_log, m.dt_bias)
    check_convolution(qkv, m.convolution, conv_states, source_slots, target_slots, conv_records)
    _check_mixer(m, qkv, z, states, records)
    qkv, z, h = (x if x.stride(1) == 1 else x.contiguous() for x in (qkv, z, h))
    heads, width, width_v = m.value_heads, m.key_dim, m.value_dim
    out = torch.empty((count, heads * width_v), dtype=h.dtype, device=h.device)
    kept, room = (None,) * 4, 0
    if records is not None:
        check_records(records, states, requests, columns)
        kept, room = (records.k, records.v, records.g, records.beta), records.g.shape[0] // requests
        if conv_records is None or conv_records.shape[0] // requests != room:
            raise OptionError("records of a mixer come both and with the same rows, or not at all")
    mix_kernel[(heads, requests)](
        qkv, qkv.stride(0), z, z.stride(0), h, h.stride(0), a, b, m.a_log, m.dt_bias, m.convolution, m.norm,
        m.head_order, conv_states, states, source_slots, target_slots, out, conv_records, *kept, columns,
        room, m.eps,
        HEADS=heads, GROUP=heads // m.key_heads, DK=width, DV=width_v, HIDDEN=h.shape[1],
        TAPS=m.convolution.shape[0], **tiles(width, width_v), PART=part_of(h.shape[1]), STEPS=STEPS,
        ORDER=m.head_order is not None, RECORD=records is not None, num_warps=warps(width, width_v),
    )  # fmt: skip
    if records is None:
        advance_histories(qkv, columns, None, conv_states, source_slots, target_slots)
    return out


def _mix_wide(
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


def _rows(x: torch.Tensor) -> torch.Tensor:
    """`x` with the heads of a row side by side; rows may be anywhere."""
    return x if x.stride(2) == 1 and x.stride(1) == x.shape[2] else x.contiguous()


def _check_mixer(
    m: GdnMixer, qkv: torch.Tensor, z: torch.Tensor, states: torch.Tensor, records: DeltaRecords | None
) -> None:
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
    if not all(x.is_contiguous() for x in (g, beta, states)):
        raise OptionError("states, g and beta must be contiguous")
    if not source_slots.dtype == target_slots.dtype == torch.int32:
        raise OptionError("slots must be int32")
    if not q.dtype == k.dtype == v.dtype == torch.bfloat16:
        raise OptionError(f"activations on the GPU are bfloat16, got {q.dtype}")
