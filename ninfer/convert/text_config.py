"""Component configs as the artifact stores them: one builder per architecture, whatever the source format."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ninfer.convert.members import float32
from ninfer.errors import ConversionError

FULL = "full_attention"
LINEAR = "linear_attention"


@dataclass(frozen=True)
class Attention:
    """Full attention and its rotary embedding."""

    heads: int
    kv_heads: int
    head_dim: int
    theta: float
    factor: float
    sections: Sequence[int]


@dataclass(frozen=True)
class Recurrence:
    """Gated delta net."""

    key_heads: int
    key_dim: int
    value_heads: int
    value_dim: int
    taps: int


def qwen(
    *,
    hidden: int,
    vocab: int,
    layer_types: Sequence[str],
    positions: int,
    eps: float,
    is_tied: bool,
    intermediate: int,
    attention: Attention | None,
    recurrence: Recurrence | None,
    owner: str,
) -> dict[str, Any]:
    """Text config of a dense Qwen3.5 model, stating attention and recurrence only where a layer uses them."""
    for kind in layer_types:
        if kind not in (FULL, LINEAR):
            raise ConversionError(f"{owner} has the layer type {kind!r}; known are {FULL} and {LINEAR}")
    config: dict[str, Any] = {
        "architectures": ["Qwen3_5ForCausalLM"],
        "model_type": "qwen3_5_text",
        "hidden_size": hidden,
        "vocab_size": vocab,
        "num_hidden_layers": len(layer_types),
        "max_position_embeddings": positions,
        "tie_word_embeddings": is_tied,
        "rms_norm_eps": eps,
        "layer_types": list(layer_types),
    }
    if attention is not None:
        _check_attention(attention, owner)
        config |= {
            "num_attention_heads": attention.heads,
            "num_key_value_heads": attention.kv_heads,
            "head_dim": attention.head_dim,
            "rope_parameters": {
                "rope_theta": attention.theta,
                "partial_rotary_factor": attention.factor,
                "mrope_section": list(attention.sections),
            },
        }
    if recurrence is not None:
        if recurrence.value_heads % recurrence.key_heads:
            raise ConversionError(
                f"{owner} has {recurrence.value_heads} linear value heads, not a multiple of "
                f"{recurrence.key_heads} key heads"
            )
        config |= {
            "linear_num_key_heads": recurrence.key_heads,
            "linear_key_head_dim": recurrence.key_dim,
            "linear_num_value_heads": recurrence.value_heads,
            "linear_value_head_dim": recurrence.value_dim,
            "linear_conv_kernel_dim": recurrence.taps,
        }
    return config | {"intermediate_size": intermediate}


def llama(
    *,
    hidden: int,
    intermediate: int,
    layers: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    theta: float,
    eps: float,
    vocab: int,
    positions: int,
    is_tied: bool,
    owner: str,
) -> dict[str, Any]:
    """Text config of a Llama model."""
    _check_heads(heads, kv_heads, owner)
    if head_dim % 2:
        raise ConversionError(f"{owner} has an odd head dimension {head_dim}; rotary pairs need an even one")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "rope_theta": theta,
        "rms_norm_eps": eps,
        "vocab_size": vocab,
        "max_position_embeddings": positions,
        "tie_word_embeddings": is_tied,
    }


def mtp() -> dict[str, Any]:
    """Config of the draft layer; its geometry is the text model's."""
    return {"architectures": ["Qwen3_5MTP"]}


def head_dim_of(hidden: int, heads: int, owner: str) -> int:
    """The default head dimension hidden / heads."""
    if hidden % heads:
        raise ConversionError(
            f"{owner} states no head dimension, and hidden size {hidden} is no multiple of {heads} heads"
        )
    return hidden // heads


def _check_heads(heads: int, kv_heads: int, owner: str) -> None:
    if heads % kv_heads:
        raise ConversionError(
            f"{owner} has {heads} attention heads, not a multiple of {kv_heads} key/value heads"
        )


def _check_attention(attention: Attention, owner: str) -> None:
    _check_heads(attention.heads, attention.kv_heads, owner)
    if attention.factor > 1:
        raise ConversionError(f"{owner} has partial_rotary_factor {attention.factor}; it can be at most 1")
    rotary = int(float32(attention.head_dim * attention.factor))
    if rotary < 2 or rotary % 2:
        raise ConversionError(
            f"{owner} rotates {rotary} of {attention.head_dim} head dimensions; the number must be "
            "positive and even"
        )
    sections = list(attention.sections)
    valid = len(sections) == 3 and all(type(part) is int and part >= 0 for part in sections)
    if not valid or sum(sections) != rotary // 2:
        raise ConversionError(
            f"{owner} has mrope_section {sections}; three integers with the sum {rotary // 2} (half the "
            "rotary size) are needed"
        )
    interleaved = [0, 0, 0]
    for pair in range(rotary // 2):
        axis = pair % 3
        interleaved[axis if axis and pair < 3 * sections[axis] else 0] += 1
    if interleaved != sections:
        raise ConversionError(
            f"{owner} has mrope_section {sections}, which cannot be interleaved: the axes would get "
            f"{interleaved} pairs"
        )
