"""Neighbouring operators as one: what a backend may do in one pass, defined by its parts.

A backend that has a fused kernel offers it under the same name; elsewhere the parts run one after the other.
Both ways meet the same criterion; roundings may stand elsewhere (a GPU multiplies sums by a norm's factor).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ninfer.ops.delta import DeltaRecords
from ninfer.ops.dispatch import backend
from ninfer.ops.weights import Matrix


@dataclass(frozen=True, eq=False)
class GdnMixer:
    """What a Gated DeltaNet mixer is made of between its two large products.

    `a`, `b` `[Hv, hidden]`; `a_log`, `dt_bias` float32 `[Hv]`; `convolution [taps, channels]`; `norm [Dv]`;
    `head_order` int32 `[Hv]` or None, as in `gated_rms_norm`.
    """

    key_heads: int
    key_dim: int
    value_heads: int
    value_dim: int
    eps: float
    a: Matrix
    b: Matrix
    a_log: torch.Tensor
    dt_bias: torch.Tensor
    convolution: torch.Tensor
    norm: torch.Tensor
    head_order: torch.Tensor | None


def norm_linear(
    x: torch.Tensor, gain: torch.Tensor, eps: float, unit_offset: bool, w: Matrix
) -> tuple[torch.Tensor, torch.Tensor]:
    """`h = rms_norm(x)` and `linear(h, w)`: `([T, N], h [T, K])` for `x [T, K]`."""
    module = backend(x.device.type)
    fused = getattr(module, "norm_linear", None)
    if fused is not None:
        return fused(x, gain, eps, unit_offset, w)
    h = module.rms_norm(x, gain, eps, unit_offset)
    return module.linear(h, w, None), h


def norm_logits(
    x: torch.Tensor, gain: torch.Tensor, eps: float, unit_offset: bool, head: Matrix, public_rows: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """`h = rms_norm(x)` and `logits(h, head, public_rows)`: `(float32 [T, public_rows], h [T, K])`."""
    module = backend(x.device.type)
    fused = getattr(module, "norm_logits", None)
    if fused is not None:
        return fused(x, gain, eps, unit_offset, head, public_rows)
    h = module.rms_norm(x, gain, eps, unit_offset)
    return module.logits(h, head, public_rows), h


def embedding_pair(
    ids: torch.Tensor,
    table: Matrix,
    hidden: torch.Tensor,
    gain: torch.Tensor,
    hidden_gain: torch.Tensor,
    eps: float,
) -> torch.Tensor:
    """`norm_pair` of the embeddings of `ids [T]` and `hidden [T, H]`: `[T, 2 H]`."""
    module = backend(hidden.device.type)
    fused = getattr(module, "embedding_pair", None)
    if fused is not None:
        return fused(ids, table, hidden, gain, hidden_gain, eps)
    return module.norm_pair(module.embedding(ids, table, hidden.dtype), hidden, gain, hidden_gain, eps)


def norm_linear_swiglu(
    x: torch.Tensor, gain: torch.Tensor, eps: float, unit_offset: bool, gate_up: Matrix
) -> torch.Tensor:
    """`linear_swiglu(rms_norm(x), gate_up)`: `[T, I]` for `x [T, K]`."""
    module = backend(x.device.type)
    fused = getattr(module, "norm_linear_swiglu", None)
    if fused is not None:
        return fused(x, gain, eps, unit_offset, gate_up)
    return module.linear_swiglu(module.rms_norm(x, gain, eps, unit_offset), gate_up)


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
    """`gdn_gating`, `causal_conv`, `gated_delta_net` and `gated_rms_norm` of T columns: `[T, Hv * Dv]`.

    `qkv [T, channels]` and `z [T, Hv * Dv]` are raw projections (rows may be strided), `h [T, hidden]` is
    what they were projected from. Slots and records as in those operators; records come both or not at all.
    """
    module = backend(h.device.type)
    fused = getattr(module, "gdn_mix", None)
    if fused is not None:
        return fused(m, qkv, z, h, conv_states, states, source_slots, target_slots, conv_records, records)
    columns, keys = h.shape[0], m.key_heads * m.key_dim
    g, beta = module.gdn_gating(h, m.a, m.b, m.a_log, m.dt_bias)
    qkv = module.causal_conv(qkv, m.convolution, conv_states, source_slots, target_slots, conv_records)
    q, k, v = qkv.split_with_sizes((keys, keys, m.value_heads * m.value_dim), 1)
    o = module.gated_delta_net(
        q.view(columns, m.key_heads, m.key_dim),
        k.view(columns, m.key_heads, m.key_dim),
        v.view(columns, m.value_heads, m.value_dim),
        g, beta, states, source_slots, target_slots, records,
    )  # fmt: skip
    z = z.view(columns, m.value_heads, m.value_dim)
    return module.gated_rms_norm(o, z, m.norm, m.eps, m.head_order).view(columns, -1)


def fold_gdn(
    conv_records: Sequence[torch.Tensor],
    records: Sequence[DeltaRecords],
    counts: torch.Tensor,
    conv_states: Sequence[torch.Tensor],
    states: Sequence[torch.Tensor],
    source_slots: torch.Tensor,
    target_slots: torch.Tensor,
) -> None:
    """`fold_conv` and `fold_delta_net` of several layers of one geometry, an entry of each list for each."""
    module = backend(counts.device.type)
    fused = getattr(module, "fold_gdn", None)
    if fused is not None:
        fused(conv_records, records, counts, conv_states, states, source_slots, target_slots)
        return
    for columns, history in zip(conv_records, conv_states, strict=True):
        module.fold_conv(columns, counts, history, source_slots, target_slots)
    for kept, state in zip(records, states, strict=True):
        module.fold_delta_net(kept, counts, state, source_slots, target_slots)
