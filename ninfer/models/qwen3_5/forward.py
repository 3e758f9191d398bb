"""The dense Qwen3.5 text forward pass."""

from __future__ import annotations

from itertools import repeat

import torch

from ninfer import ops
from ninfer.models.model import Batch, Cache, KvLayout, Predictor, Records, StateLayout
from ninfer.models.qwen3_5.blocks import attention, feed_forward
from ninfer.models.qwen3_5.config import AttentionConfig, DeltaNetConfig, TextConfig
from ninfer.models.qwen3_5.parameters import Attention, DeltaNet, Layer, Parameters
from ninfer.models.qwen3_5.predictor import MtpPredictor


class Qwen35:
    """Blocks of gated attention or Gated DeltaNet, each followed by SwiGLU; implements `ninfer.models.Model`.

    All norms but the GDN output norm have zero-centred gains (1 + w).
    """

    def __init__(
        self,
        config: TextConfig,
        parameters: Parameters,
        device: torch.device,
        dtype: torch.dtype,
        public_tokens: int,
        predictor: MtpPredictor | None = None,
    ) -> None:
        self.config = config
        self.parameters = parameters
        self.device = device
        self.dtype = dtype
        self.public_tokens = public_tokens
        self.hidden_size = config.hidden_size
        self.max_position_embeddings = config.max_position_embeddings
        self.predictor: Predictor | None = predictor

    def kv_layout(self) -> KvLayout:
        layers = sum(isinstance(mixer, AttentionConfig) for mixer in self.config.mixers)
        layers += self.predictor is not None
        c = self.config.attention
        if not layers or c is None:
            return KvLayout.none(self.dtype)
        return KvLayout(layers, c.kv_heads, c.head_dim, self.dtype)

    def state_layout(self) -> StateLayout:
        hidden = 0 if self.predictor is None else self.hidden_size
        mixers = [mixer for mixer in self.config.mixers if isinstance(mixer, DeltaNetConfig)]
        if not mixers:
            return StateLayout.none(self.dtype, hidden)
        c = mixers[0]
        return StateLayout(
            layers=len(mixers),
            history=c.taps - 1,
            channels=c.channels,
            key_heads=c.key_heads,
            value_heads=c.value_heads,
            value_dim=c.value_head_dim,
            key_dim=c.key_head_dim,
            dtype=self.dtype,
            hidden=hidden,
        )

    def workspace_bytes(self, columns: int, context: int) -> int:
        c, size, w = self.config, self.dtype.itemsize, ops.workspace(self.device)
        hidden, inner = c.hidden_size, c.intermediate_size
        stages = [
            w.swiglu_bytes(columns, hidden, inner, size),
            columns * inner * size + w.linear_bytes(columns, inner, hidden, size),
        ]
        for m in c.mixers:
            inputs, outputs = _widths(m)
            held = columns * inputs * size
            stages.append(w.linear_bytes(columns, hidden, inputs, size))
            stages.append(
                held + columns * 3 * outputs * size + w.linear_bytes(columns, outputs, hidden, size)
            )
            if isinstance(m, AttentionConfig):
                held += w.attention_bytes(columns, context, m.heads, m.kv_heads, m.head_dim, size)
            else:
                held += columns * 8 * m.value_heads + w.delta_net_bytes(
                    columns, m.key_heads, m.value_heads, m.key_head_dim, m.value_head_dim, size
                )
            stages.append(held)
        return 2 * columns * hidden * size + max(stages)

    def round_bytes(self, columns: int, context: int) -> int:
        c, size, w = self.config, self.dtype.itemsize, ops.workspace(self.device)
        if w.reuses():
            return self.workspace_bytes(columns, context)
        hidden, inner = c.hidden_size, c.intermediate_size
        total = w.recorded_linear(columns, hidden, 2 * hidden, size)
        for m in c.mixers:
            inputs, outputs = _widths(m)
            total += (
                2 * columns * hidden * size
                + w.recorded_linear(columns, hidden, inputs, size)
                + w.recorded_linear(columns, outputs, hidden, size)
                + w.recorded_linear(columns, hidden, inner, size)
                + w.recorded_linear(columns, inner, hidden, size)
                + columns * outputs * size
            )
            if isinstance(m, AttentionConfig):
                total += w.recorded_attention(columns, context, m.heads, m.head_dim, size)
            else:
                total += columns * (m.channels + outputs) * size
                total += w.recorded_linear(columns, hidden, 4 * m.value_heads, 4)
        return total

    def forward(self, batch: Batch, cache: Cache, records: Records | None = None) -> torch.Tensor:
        eps = self.config.rms_norm_eps
        kept = repeat((None, None)) if records is None else zip(records.conv, records.delta, strict=True)
        x = ops.embedding(batch.tokens, self.parameters.token_embedding, self.dtype)
        attention_cache, delta_net_cache = iter(cache.kv), zip(cache.conv, cache.recurrent, strict=True)
        for layer in self.parameters.layers:
            if isinstance(layer.mixer, Attention):
                x = attention(layer, layer.mixer, x, batch, next(attention_cache), eps)
            else:
                x = self._delta_net(layer, layer.mixer, x, batch, *next(delta_net_cache), *next(kept))
            x = feed_forward(layer, x, eps)
        return ops.rms_norm(x, self.parameters.final_norm, eps, unit_offset=True)

    def fold(
        self,
        cache: Cache,
        records: Records,
        counts: torch.Tensor,
        source_slots: torch.Tensor,
        target_slots: torch.Tensor,
    ) -> None:
        ops.fold_gdn(
            records.conv, records.delta, counts, cache.conv, cache.recurrent, source_slots, target_slots
        )

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return ops.logits(hidden, self.parameters.output_head, self.public_tokens)

    def _delta_net(
        self,
        layer: Layer,
        mixer: DeltaNet,
        x: torch.Tensor,
        batch: Batch,
        conv_states: torch.Tensor,
        states: torch.Tensor,
        conv_records: torch.Tensor | None,
        records: ops.DeltaRecords | None,
    ) -> torch.Tensor:
        """x + W_out (norm(delta_net(conv(q, k, v), g, beta)) * silu(z)); only q, k, v are convolved."""
        c, eps = mixer.config, self.config.rms_norm_eps
        heads, h = ops.norm_linear(x, layer.input_norm, eps, True, mixer.query_key_value_z)
        qkv, z = heads.split_with_sizes((c.channels, c.value_width), 1)
        y = ops.gdn_mix(
            mixer.between, qkv, z, h, conv_states, states, batch.source_slots, batch.target_slots,
            conv_records, records,
        )  # fmt: skip
        return ops.linear(y, mixer.output, residual=x)


def _widths(mixer: AttentionConfig | DeltaNetConfig) -> tuple[int, int]:
    """Outputs of a mixer's first product, inputs of its last one."""
    if isinstance(mixer, AttentionConfig):
        return 2 * (mixer.heads + mixer.kv_heads) * mixer.head_dim, mixer.heads * mixer.head_dim
    return mixer.channels + mixer.value_width, mixer.value_width
