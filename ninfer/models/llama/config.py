"""The text config of a Llama checkpoint, checked as a closed set."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ninfer.models.fields import Fields
from ninfer.ops import Rope


@dataclass(frozen=True)
class LlamaConfig:
    """Geometry; the whole head rotates, `heads * head_dim` need not equal `hidden_size`."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    heads: int
    kv_heads: int
    head_dim: int
    rope: Rope
    rms_norm_eps: float
    vocab_size: int
    max_position_embeddings: int
    tie_word_embeddings: bool


def parse(config: Mapping[str, Any]) -> LlamaConfig:
    """Check the text config and return it typed."""
    fields = Fields(config, "text config")
    fields.exactly("architectures", ["LlamaForCausalLM"])
    fields.exactly("model_type", "llama")
    head_dim = fields.integer("head_dim")
    if head_dim % 2:
        raise fields.error("head_dim", "even", head_dim)
    parsed = LlamaConfig(
        hidden_size=fields.integer("hidden_size"),
        intermediate_size=fields.integer("intermediate_size"),
        num_hidden_layers=fields.integer("num_hidden_layers"),
        heads=fields.integer("num_attention_heads"),
        kv_heads=fields.integer("num_key_value_heads"),
        head_dim=head_dim,
        rope=Rope(head_dim, fields.real("rope_theta")),
        rms_norm_eps=fields.real("rms_norm_eps"),
        vocab_size=fields.integer("vocab_size"),
        max_position_embeddings=fields.integer("max_position_embeddings"),
        tie_word_embeddings=fields.boolean("tie_word_embeddings"),
    )
    fields.close()
    if parsed.heads % parsed.kv_heads:
        raise fields.error(
            "num_key_value_heads", f"a divisor of num_attention_heads = {parsed.heads}", parsed.kv_heads
        )
    return parsed
