"""Tiny random checkpoints, written by transformers as Hugging Face folders."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

RESOURCES = {
    "tokenizer.json": json.dumps(
        {"version": "1.0", "added_tokens": [], "model": {"type": "BPE", "vocab": {"a": 0}}}
    ),
    "tokenizer_config.json": json.dumps({"add_bos_token": False, "chat_template": "{{ messages }}"}),
    "generation_config.json": json.dumps({"eos_token_id": 0}),
}


@dataclass(frozen=True)
class Size:
    """Geometry of a tiny Qwen3.5: key heads 2, value heads 6, irregular layers."""

    hidden: int = 64
    intermediate: int = 96
    vocab: int = 80
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    sections: tuple[int, int, int] = (2, 1, 1)
    key_heads: int = 2
    key_dim: int = 32
    value_heads: int = 6
    value_dim: int = 32
    layer_types: tuple[str, ...] = ("linear", "linear", "full", "linear", "full")
    is_tied: bool = False


SMALL = Size()
# Every width is a multiple of 256, so that K-quants fit; value heads of 128 share 256-value blocks.
WIDE = Size(256, 512, 96, 4, 2, 64, (3, 3, 2), 2, 64, 6, 128, ("linear", "full"))
# Everything that NVFP4 and 128x128 blocks need.
TILED = Size(256, 384, 128, 2, 1, 128, (6, 5, 5), 1, 128, 2, 128, ("linear", "full"))


def text_settings(size: Size) -> dict[str, Any]:
    """Settings of the transformers text config."""
    return {
        "hidden_size": size.hidden,
        "intermediate_size": size.intermediate,
        "vocab_size": size.vocab,
        "num_hidden_layers": len(size.layer_types),
        "num_attention_heads": size.heads,
        "num_key_value_heads": size.kv_heads,
        "head_dim": size.head_dim,
        "linear_num_key_heads": size.key_heads,
        "linear_key_head_dim": size.key_dim,
        "linear_num_value_heads": size.value_heads,
        "linear_value_head_dim": size.value_dim,
        "layer_types": [f"{kind}_attention" for kind in size.layer_types],
        "max_position_embeddings": 512,
        "tie_word_embeddings": size.is_tied,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1e6,
            "partial_rotary_factor": 0.25,
            "mrope_section": list(size.sections),
            "mrope_interleaved": True,
        },
    }


def randomize(model: torch.nn.Module, seed: int) -> None:
    """BF16 random parameters; A_log in its usual range."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            values = torch.randn(parameter.shape, generator=generator) * 0.1
            if name.endswith("A_log"):
                values = torch.rand(parameter.shape, generator=generator) * 4 - 1
            parameter.copy_(values)
    model.to(torch.bfloat16)


def mtp_tensors(size: Size, seed: int = 7) -> dict[str, torch.Tensor]:
    """An MTP layer as official checkpoints have it; transformers has no module for it."""
    generator = torch.Generator().manual_seed(seed)
    hidden, queries, keys = size.hidden, size.heads * size.head_dim, size.kv_heads * size.head_dim
    shapes = {
        "fc.weight": (hidden, 2 * hidden),
        "pre_fc_norm_embedding.weight": (hidden,),
        "pre_fc_norm_hidden.weight": (hidden,),
        "norm.weight": (hidden,),
        "layers.0.input_layernorm.weight": (hidden,),
        "layers.0.post_attention_layernorm.weight": (hidden,),
        "layers.0.self_attn.q_proj.weight": (2 * queries, hidden),
        "layers.0.self_attn.k_proj.weight": (keys, hidden),
        "layers.0.self_attn.v_proj.weight": (keys, hidden),
        "layers.0.self_attn.o_proj.weight": (hidden, queries),
        "layers.0.self_attn.q_norm.weight": (size.head_dim,),
        "layers.0.self_attn.k_norm.weight": (size.head_dim,),
        "layers.0.mlp.gate_proj.weight": (size.intermediate, hidden),
        "layers.0.mlp.up_proj.weight": (size.intermediate, hidden),
        "layers.0.mlp.down_proj.weight": (hidden, size.intermediate),
    }
    return {
        f"mtp.{name}": (torch.randn(shape, generator=generator) * 0.1).bfloat16()
        for name, shape in shapes.items()
    }


def write_resources(folder: Path) -> None:
    """The text resources, the template inside tokenizer_config.json."""
    for name, text in RESOURCES.items():
        (folder / name).write_text(text)


def write_qwen(
    folder: Path, size: Size = SMALL, *, is_sharded: bool = False, has_mtp: bool = False, seed: int = 1
) -> dict[str, torch.Tensor]:
    """A text checkpoint; returns its tensors by name."""
    from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

    model = Qwen3_5ForCausalLM(Qwen3_5TextConfig(**text_settings(size)))
    randomize(model, seed)
    model.save_pretrained(folder, max_shard_size="60KB" if is_sharded else "1GB")
    tensors = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    if size.is_tied:
        tensors.pop("lm_head.weight", None)
    if has_mtp:
        extra = mtp_tensors(size)
        tensors |= extra
        if is_sharded:
            save_file(extra, folder / "mtp.safetensors")
            index = json.loads((folder / "model.safetensors.index.json").read_text())
            index["weight_map"] |= dict.fromkeys(extra, "mtp.safetensors")
            (folder / "model.safetensors.index.json").write_text(json.dumps(index))
        else:
            save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    write_resources(folder)
    return tensors


def write_multimodal(folder: Path, size: Size = SMALL) -> dict[str, torch.Tensor]:
    """A checkpoint with a vision tower; returns the text tensors under the names of a text checkpoint."""
    from transformers import Qwen3_5Config, Qwen3_5ForConditionalGeneration

    vision = {
        "depth": 1,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_heads": 2,
        "out_hidden_size": size.hidden,
    }
    config = Qwen3_5Config(
        text_config=text_settings(size),
        vision_config={**vision, "patch_size": 4, "num_position_embeddings": 16},
        tie_word_embeddings=size.is_tied,
    )
    model = Qwen3_5ForConditionalGeneration(config)
    randomize(model, 3)
    model.save_pretrained(folder)
    write_resources(folder)
    prefix = "model.language_model."
    return {
        name.replace(prefix, "model."): tensor.detach().clone()
        for name, tensor in model.state_dict().items()
        if name.startswith(prefix) or name == "lm_head.weight"
    }


def write_llama(
    folder: Path, *, is_tied: bool = True, head_dim: int = 32, seed: int = 5
) -> dict[str, torch.Tensor]:
    """A Llama checkpoint of hidden size 96, 3 heads, 1 key/value head."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=96,
        intermediate_size=160,
        vocab_size=72,
        num_hidden_layers=2,
        num_attention_heads=3,
        num_key_value_heads=1,
        head_dim=head_dim,
        max_position_embeddings=256,
        tie_word_embeddings=is_tied,
        rope_parameters={"rope_type": "default", "rope_theta": 5e5},
    )
    model = LlamaForCausalLM(config)
    randomize(model, seed)
    model.save_pretrained(folder)
    write_resources(folder)
    tensors = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    if is_tied:
        tensors.pop("lm_head.weight", None)
    return tensors
