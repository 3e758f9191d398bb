"""Geometry of ninfer-nano: Qwen3.5's layer kinds and head sizes in 23 million parameters."""

from __future__ import annotations

from typing import Any

HIDDEN = 512
LAYERS = 8
INTERVAL = 4  # every fourth layer attends
INTERMEDIATE = 640
HEADS, KV_HEADS, HEAD_DIM = 2, 1, 256
KEY_HEADS, VALUE_HEADS, DELTA_DIM = 2, 4, 128
TAPS = 4
ROTARY_FACTOR = 0.25
THETA = 1_000_000.0
SECTIONS = (11, 11, 10)
EPS = 1e-6
CONTEXT = 16_384
VOCAB_ROWS = 8_192  # rows of the embedding; a multiple of 128
BPE_TOKENS = 8_000  # ids 0..7999; the added tokens follow, the remaining rows are padding

NAME = "ninfer-nano"


def layer_types() -> list[str]:
    """One of `linear_attention` and `full_attention` per layer."""
    return [
        "full_attention" if (index + 1) % INTERVAL == 0 else "linear_attention" for index in range(LAYERS)
    ]


def config() -> dict[str, Any]:
    """`config.json` of the Hugging Face folder: a text-only Qwen3.5 with one MTP layer and a tied head."""
    return {
        "architectures": ["Qwen3_5ForCausalLM"],
        "model_type": "qwen3_5_text",
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "vocab_size": VOCAB_ROWS,
        "num_hidden_layers": LAYERS,
        "max_position_embeddings": CONTEXT,
        "tie_word_embeddings": True,
        "rms_norm_eps": EPS,
        "hidden_act": "silu",
        "layer_types": layer_types(),
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "attention_bias": False,
        "attn_output_gate": True,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": THETA,
            "partial_rotary_factor": ROTARY_FACTOR,
            "mrope_section": list(SECTIONS),
            "mrope_interleaved": True,
        },
        "linear_num_key_heads": KEY_HEADS,
        "linear_key_head_dim": DELTA_DIM,
        "linear_num_value_heads": VALUE_HEADS,
        "linear_value_head_dim": DELTA_DIM,
        "linear_conv_kernel_dim": TAPS,
        "mtp_num_hidden_layers": 1,
        "dtype": "bfloat16",
    }
