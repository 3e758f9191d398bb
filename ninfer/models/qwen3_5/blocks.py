"""What text layers that attend and the MTP layer have in common."""

from __future__ import annotations

import torch

from ninfer import ops
from ninfer.models.model import Batch
from ninfer.models.qwen3_5.parameters import Attention, Layer


def attention(
    layer: Layer,
    mixer: Attention,
    x: torch.Tensor,
    batch: Batch,
    pages: ops.KvPages,
    eps: float,
    last: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> torch.Tensor:
    """x + W_o (attention(q, k, v) * sigmoid(gate)); keys and values join the cache first.

    With `last` = (number, position) of one column of each row only those go on, behind all keys."""
    q, gate = append(layer, mixer, x, batch, pages, eps)
    positions = batch.positions
    if last is not None:
        counts, positions = last
        x, q, gate = ops.last_columns((x, q, gate), counts)
    a = ops.gated_attention(
        q, gate, pages, batch.page_table, positions, mixer.config.head_dim**-0.5, batch.extent
    )
    return ops.linear(a, mixer.output, residual=x)


def append(
    layer: Layer, mixer: Attention, x: torch.Tensor, batch: Batch, pages: ops.KvPages, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of these columns join the cache; the prepared queries `[T, Hq, D]` and the gate."""
    c = mixer.config
    columns, queries, keys = x.shape[0], c.heads * c.head_dim, c.kv_heads * c.head_dim
    heads, _ = ops.norm_linear(x, layer.input_norm, eps, True, mixer.query_key_gate_value)
    q, k, gate, v = heads.split_with_sizes((queries, keys, queries, keys), 1)
    q = ops.qk_prepare(
        q.view(columns, c.heads, c.head_dim),
        k.view(columns, c.kv_heads, c.head_dim),
        v.view(columns, c.kv_heads, c.head_dim),
        batch.positions, c.rope, mixer.query_norm, mixer.key_norm, eps,
        pages, batch.page_table, batch.positions,
    )  # fmt: skip
    return q, gate


def feed_forward(layer: Layer, x: torch.Tensor, eps: float) -> torch.Tensor:
    """x + W_down (silu(gate) * up)."""
    inner = ops.norm_linear_swiglu(x, layer.post_attention_norm, eps, True, layer.gate_up)
    return ops.linear(inner, layer.down, residual=x)
