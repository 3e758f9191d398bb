"""Tiny random checkpoints as transformers models: the oracle of the models room, and sources for other rooms.

All weights are BF16 values held in float32 (A_log and dt_bias are float32 values), so an artifact in BF16 has
exactly the reference's numbers. Weights are scaled for logits of about unit size and for states that matter.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

FULL, LINEAR = "full_attention", "linear_attention"


@dataclass(frozen=True)
class Qwen35Geometry:
    """Geometry of a tiny dense Qwen3.5; the defaults are odd on purpose."""

    layer_types: tuple[str, ...] = (LINEAR, FULL, LINEAR, LINEAR, FULL)
    hidden_size: int = 96
    intermediate_size: int = 160
    vocab_size: int = 199
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    partial_rotary_factor: float = 0.25
    mrope_section: tuple[int, int, int] = (2, 1, 1)
    rope_theta: float = 10000.0
    key_heads: int = 2
    key_head_dim: int = 16
    value_heads: int = 4
    value_head_dim: int = 24
    taps: int = 4
    tied: bool = False
    eps: float = 1e-6
    max_positions: int = 512

    def text_config(self) -> dict[str, Any]:
        """The artifact's text config (spec names; reals as FP32)."""
        return {
            "architectures": ["Qwen3_5ForCausalLM"],
            "model_type": "qwen3_5_text",
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "vocab_size": self.vocab_size,
            "num_hidden_layers": len(self.layer_types),
            "max_position_embeddings": self.max_positions,
            "tie_word_embeddings": self.tied,
            "rms_norm_eps": _fp32(self.eps),
            "layer_types": list(self.layer_types),
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "rope_parameters": {
                "rope_theta": _fp32(self.rope_theta),
                "partial_rotary_factor": _fp32(self.partial_rotary_factor),
                "mrope_section": list(self.mrope_section),
            },
            "linear_num_key_heads": self.key_heads,
            "linear_key_head_dim": self.key_head_dim,
            "linear_num_value_heads": self.value_heads,
            "linear_value_head_dim": self.value_head_dim,
            "linear_conv_kernel_dim": self.taps,
        }


@dataclass(frozen=True)
class LlamaGeometry:
    """Geometry of a tiny Llama; heads * head_dim differs from the hidden size on purpose."""

    layers: int = 3
    hidden_size: int = 96
    intermediate_size: int = 160
    vocab_size: int = 199
    heads: int = 6
    kv_heads: int = 2
    head_dim: int = 32
    rope_theta: float = 10000.0
    tied: bool = False
    eps: float = 1e-5
    max_positions: int = 512

    def text_config(self) -> dict[str, Any]:
        """The artifact's text config (spec names; reals as FP32)."""
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "rope_theta": _fp32(self.rope_theta),
            "rms_norm_eps": _fp32(self.eps),
            "vocab_size": self.vocab_size,
            "max_position_embeddings": self.max_positions,
            "tie_word_embeddings": self.tied,
        }


Geometry = Qwen35Geometry | LlamaGeometry


def build(geometry: Geometry, seed: int = 0) -> torch.nn.Module:
    """A transformers model of this geometry with random weights, in float32 and eager attention."""
    model = _qwen35(geometry) if isinstance(geometry, Qwen35Geometry) else _llama(geometry)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(
                _random(name, parameter, zero_centred=isinstance(geometry, Qwen35Geometry), g=generator)
            )
    return model.eval()


def reference_logits(model: Callable[..., Any], tokens: Sequence[int]) -> torch.Tensor:
    """Teacher-forced logits `[T, V]` in float32."""
    with torch.no_grad():
        return model(torch.tensor([list(tokens)]), use_cache=False).logits[0].float()


def save_folder(model: Any, path: Path) -> Path:
    """A Hugging Face folder of the model: BF16, A_log and dt_bias FP32; config.json but no tokenizer."""
    copy = deepcopy(model)
    for name, parameter in copy.named_parameters():
        if not name.endswith(("A_log", "dt_bias")):
            parameter.data = parameter.data.to(torch.bfloat16)
    copy.save_pretrained(path)
    return path


def _qwen35(g: Qwen35Geometry) -> Any:
    from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

    return Qwen3_5ForCausalLM._from_config(
        Qwen3_5TextConfig(
            vocab_size=g.vocab_size,
            hidden_size=g.hidden_size,
            intermediate_size=g.intermediate_size,
            num_hidden_layers=len(g.layer_types),
            num_attention_heads=g.heads,
            num_key_value_heads=g.kv_heads,
            head_dim=g.head_dim,
            max_position_embeddings=g.max_positions,
            tie_word_embeddings=g.tied,
            rms_norm_eps=g.eps,
            layer_types=list(g.layer_types),
            rope_parameters={
                "rope_type": "default",
                "rope_theta": g.rope_theta,
                "partial_rotary_factor": g.partial_rotary_factor,
                "mrope_section": list(g.mrope_section),
                "mrope_interleaved": True,
            },
            linear_num_key_heads=g.key_heads,
            linear_key_head_dim=g.key_head_dim,
            linear_num_value_heads=g.value_heads,
            linear_value_head_dim=g.value_head_dim,
            linear_conv_kernel_dim=g.taps,
        ),
        attn_implementation="eager",
    )


def _llama(g: LlamaGeometry) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM._from_config(
        LlamaConfig(
            vocab_size=g.vocab_size,
            hidden_size=g.hidden_size,
            intermediate_size=g.intermediate_size,
            num_hidden_layers=g.layers,
            num_attention_heads=g.heads,
            num_key_value_heads=g.kv_heads,
            head_dim=g.head_dim,
            max_position_embeddings=g.max_positions,
            tie_word_embeddings=g.tied,
            rms_norm_eps=g.eps,
            rope_parameters={"rope_type": "default", "rope_theta": g.rope_theta},
        ),
        attn_implementation="eager",
    )


def _random(name: str, like: torch.Tensor, *, zero_centred: bool, g: torch.Generator) -> torch.Tensor:
    normal = torch.randn(like.shape, generator=g)
    if name.endswith("A_log"):
        return torch.rand(like.shape, generator=g).mul(2).add(0.02).log()
    if name.endswith("dt_bias"):
        return normal
    if name.endswith("linear_attn.norm.weight"):
        value = 1 + 0.3 * normal
    elif "norm" in name:
        value = 0.3 * normal + (0 if zero_centred else 1)
    elif "conv1d" in name:
        value = 0.6 * normal
    elif "embed_tokens" in name:
        value = normal
    else:
        value = normal * like.shape[-1] ** -0.5
    return value.to(torch.bfloat16).float()


def _fp32(value: float) -> float:
    return float(torch.tensor(value, dtype=torch.float32))
