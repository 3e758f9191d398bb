"""The text config of a dense Qwen3.5 checkpoint, checked as a closed set."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ninfer.models.fields import Fields, float32
from ninfer.ops import Rope

FULL = "full_attention"
LINEAR = "linear_attention"


@dataclass(frozen=True)
class AttentionConfig:
    """Gated grouped-query attention; the first `rope.rotary_dim` of `head_dim` dimensions rotate."""

    heads: int
    kv_heads: int
    head_dim: int
    rope: Rope


@dataclass(frozen=True)
class DeltaNetConfig:
    """Gated DeltaNet; value head j reads key head j // (value_heads / key_heads)."""

    key_heads: int
    key_head_dim: int
    value_heads: int
    value_head_dim: int
    taps: int

    @property
    def key_width(self) -> int:
        return self.key_heads * self.key_head_dim

    @property
    def value_width(self) -> int:
        return self.value_heads * self.value_head_dim

    @property
    def channels(self) -> int:
        """Channels of the causal convolution: query, key, value."""
        return 2 * self.key_width + self.value_width


@dataclass(frozen=True)
class TextConfig:
    """Geometry of the text tower; `mixers` has one entry a layer, all of a kind equal."""

    hidden_size: int
    intermediate_size: int
    vocab_size: int
    max_position_embeddings: int
    tie_word_embeddings: bool
    rms_norm_eps: float
    mixers: tuple[AttentionConfig | DeltaNetConfig, ...]
    attention: AttentionConfig | None
    """Of any layer that attends, the MTP layer's too."""


def parse(config: Mapping[str, Any], *, has_mtp: bool) -> TextConfig:
    """Check the text config and return it typed; with an MTP layer the attention fields are required."""
    fields = Fields(config, "text config")
    fields.exactly("architectures", ["Qwen3_5ForCausalLM"])
    fields.exactly("model_type", "qwen3_5_text")
    layers = fields.integer("num_hidden_layers")
    layer_types = fields.strings("layer_types", (FULL, LINEAR))
    if len(layer_types) != layers:
        raise fields.error("layer_types", f"a list of num_hidden_layers = {layers} entries", len(layer_types))
    geometry: dict[str, AttentionConfig | DeltaNetConfig] = {}
    attention = None
    if FULL in layer_types or has_mtp or any(name in fields for name in _ATTENTION_FIELDS):
        geometry[FULL] = attention = _attention(fields)
    if LINEAR in layer_types or any(name in fields for name in _DELTA_NET_FIELDS):
        geometry[LINEAR] = _delta_net(fields)
    parsed = TextConfig(
        hidden_size=fields.integer("hidden_size"),
        intermediate_size=fields.integer("intermediate_size"),
        vocab_size=fields.integer("vocab_size"),
        max_position_embeddings=fields.integer("max_position_embeddings"),
        tie_word_embeddings=fields.boolean("tie_word_embeddings"),
        rms_norm_eps=fields.real("rms_norm_eps"),
        mixers=tuple(geometry[kind] for kind in layer_types),
        attention=attention,
    )
    fields.close()
    return parsed


_ATTENTION_FIELDS = ("num_attention_heads", "num_key_value_heads", "head_dim", "rope_parameters")
_DELTA_NET_FIELDS = (
    "linear_num_key_heads",
    "linear_key_head_dim",
    "linear_num_value_heads",
    "linear_value_head_dim",
    "linear_conv_kernel_dim",
)


def _attention(fields: Fields) -> AttentionConfig:
    heads, kv_heads = fields.integer("num_attention_heads"), fields.integer("num_key_value_heads")
    if heads % kv_heads:
        raise fields.error("num_key_value_heads", f"a divisor of num_attention_heads = {heads}", kv_heads)
    head_dim = fields.integer("head_dim")
    rope = fields.object("rope_parameters")
    theta, factor = rope.real("rope_theta"), rope.real("partial_rotary_factor")
    if factor > 1:
        raise rope.error("partial_rotary_factor", "at most 1", factor)
    rotary_dim = int(float32(head_dim * factor) or 0)
    if rotary_dim < 2 or rotary_dim % 2:
        raise rope.error(
            "partial_rotary_factor", f"such that an even number of {head_dim} dimensions rotate", factor
        )
    section = rope.integers("mrope_section", 3)
    if _interleaved_counts(section, rotary_dim // 2) != section:
        raise rope.error("mrope_section", f"an interleaved split of {rotary_dim // 2} pairs", list(section))
    rope.close()
    return AttentionConfig(
        heads, kv_heads, head_dim, Rope(rotary_dim, theta, (section[0], section[1], section[2]))
    )


def _interleaved_counts(section: tuple[int, ...], pairs: int) -> tuple[int, ...]:
    """How many pairs the interleaved map really gives to the axes (time, height, width)."""
    height = sum(1 for pair in range(pairs) if pair % 3 == 1 and pair < 3 * section[1])
    width = sum(1 for pair in range(pairs) if pair % 3 == 2 and pair < 3 * section[2])
    return pairs - height - width, height, width


def _delta_net(fields: Fields) -> DeltaNetConfig:
    key_heads, key_dim, value_heads, value_dim, taps = (fields.integer(name) for name in _DELTA_NET_FIELDS)
    if value_heads % key_heads:
        raise fields.error(
            "linear_num_value_heads", f"a multiple of linear_num_key_heads = {key_heads}", value_heads
        )
    return DeltaNetConfig(key_heads, key_dim, value_heads, value_dim, taps)
