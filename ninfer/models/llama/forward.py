"""The Llama forward pass."""

from __future__ import annotations

import torch

from ninfer import ops
from ninfer.models.llama.config import LlamaConfig
from ninfer.models.llama.parameters import Layer, Parameters
from ninfer.models.model import Batch, Cache, KvLayout, Predictor, Records, StateLayout


class Llama:
    """Pre-norm decoder with grouped-query attention and SwiGLU; implements `ninfer.models.Model`."""

    def __init__(
        self,
        config: LlamaConfig,
        parameters: Parameters,
        device: torch.device,
        dtype: torch.dtype,
        public_tokens: int,
    ) -> None:
        self.config = config
        self.parameters = parameters
        self.device = device
        self.dtype = dtype
        self.public_tokens = public_tokens
        self.hidden_size = config.hidden_size
        self.max_position_embeddings = config.max_position_embeddings
        self.predictor: Predictor | None = None
        self.scale = config.head_dim**-0.5

    def kv_layout(self) -> KvLayout:
        c = self.config
        return KvLayout(c.num_hidden_layers, c.kv_heads, c.head_dim, self.dtype)

    def state_layout(self) -> StateLayout:
        return StateLayout.none(self.dtype)

    def workspace_bytes(self, columns: int, context: int) -> int:
        c, size, w = self.config, self.dtype.itemsize, ops.workspace(self.device)
        hidden, inner = c.hidden_size, c.intermediate_size
        queries = c.heads * c.head_dim
        heads = queries + 2 * c.kv_heads * c.head_dim
        stages = (
            w.linear_bytes(columns, hidden, heads, size),
            columns * heads * size
            + w.attention_bytes(columns, context, c.heads, c.kv_heads, c.head_dim, size),
            columns * (heads + 2 * queries) * size + w.linear_bytes(columns, queries, hidden, size),
            w.swiglu_bytes(columns, hidden, inner, size),
            columns * inner * size + w.linear_bytes(columns, inner, hidden, size),
        )
        return 2 * columns * hidden * size + max(stages)

    def round_bytes(self, columns: int, context: int) -> int:
        c, size, w = self.config, self.dtype.itemsize, ops.workspace(self.device)
        if w.reuses():
            return self.workspace_bytes(columns, context)
        hidden, inner, queries = c.hidden_size, c.intermediate_size, c.heads * c.head_dim
        layer = (
            2 * columns * hidden * size
            + w.recorded_linear(columns, hidden, queries + 2 * c.kv_heads * c.head_dim, size)
            + w.recorded_attention(columns, context, c.heads, c.head_dim, size)
            + w.recorded_linear(columns, queries, hidden, size)
            + w.recorded_linear(columns, hidden, inner, size)
            + w.recorded_linear(columns, inner, hidden, size)
        )
        return c.num_hidden_layers * layer + w.recorded_linear(columns, hidden, 2 * hidden, size)

    def forward(self, batch: Batch, cache: Cache, records: Records | None = None) -> torch.Tensor:
        eps = self.config.rms_norm_eps
        x = ops.embedding(batch.tokens, self.parameters.token_embedding, self.dtype)
        for layer, pages in zip(self.parameters.layers, cache.kv, strict=True):
            x = self._attention(layer, x, batch, pages)
            inner = ops.norm_linear_swiglu(x, layer.post_attention_norm, eps, False, layer.gate_up)
            x = ops.linear(inner, layer.down, residual=x)
        return ops.rms_norm(x, self.parameters.final_norm, eps, unit_offset=False)

    def fold(
        self,
        cache: Cache,
        records: Records,
        counts: torch.Tensor,
        source_slots: torch.Tensor,
        target_slots: torch.Tensor,
    ) -> None:
        """Nothing to do: keys and values behind a sequence's end are simply not read."""

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return ops.logits(hidden, self.parameters.output_head, self.public_tokens)

    def _attention(self, layer: Layer, x: torch.Tensor, batch: Batch, pages: ops.KvPages) -> torch.Tensor:
        """x + W_o attention(W_q h, W_k h, W_v h), h = norm(x); keys and values join the cache first."""
        c = self.config
        columns = x.shape[0]
        heads, _ = ops.norm_linear(x, layer.input_norm, c.rms_norm_eps, False, layer.query_key_value)
        heads = heads.view(columns, c.heads + 2 * c.kv_heads, c.head_dim)
        q, k, v = heads.split_with_sizes((c.heads, c.kv_heads, c.kv_heads), 1)
        q = ops.qk_prepare(
            q, k, v, batch.positions, c.rope, None, None, c.rms_norm_eps,
            pages, batch.page_table, batch.positions,
        )  # fmt: skip
        a = ops.paged_attention(q, pages, batch.page_table, batch.positions, self.scale, batch.extent)
        return ops.linear(a.view(columns, -1), layer.output, residual=x)
