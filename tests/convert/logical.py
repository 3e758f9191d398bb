"""Logical parameters of an artifact as numbers, and what they have to be, computed from the checkpoint."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from ninfer.artifact import Artifact
from ninfer.artifact.layouts import decode_direct, decode_rows
from ninfer.formats import get

from .tiny import Size


def read(artifact: Artifact, name: str) -> torch.Tensor:
    """FP32 elements of a parameter, flat, in logical order of what is stored."""
    pieces = []
    for part in artifact.parameter(name):
        tensor = artifact.tensor(part.object)
        data = artifact.object_bytes(part.object)
        if get(tensor.format).kind == "direct":
            values = decode_direct(tensor.format, tensor.shape, data).float()
        else:
            values = decode_rows(tensor.format, tensor.shape, data, 0, tensor.shape[0])
        pieces.append(values.reshape(-1)[part.begin : part.end])
    return torch.cat(pieces)


def everything(artifact: Artifact) -> dict[str, torch.Tensor]:
    """All parameters by name."""
    return {name: read(artifact, name) for name in artifact.bindings}


def expected_qwen(
    tensors: Mapping[str, torch.Tensor], size: Size, has_mtp: bool = False
) -> dict[str, torch.Tensor]:
    """Logical parameters of a Qwen3.5 checkpoint, FP32 in logical shape."""
    found = {
        "text/token_embedding": tensors["model.embed_tokens.weight"],
        "text/output_head": tensors.get("lm_head.weight", tensors["model.embed_tokens.weight"]),
        "text/final_norm": tensors["model.norm.weight"],
    }
    for index, kind in enumerate(size.layer_types):
        found |= _block(tensors, f"model.layers.{index}.", f"text/layers/{index}/", kind, size)
    if has_mtp:
        names = {
            "input_projection": "fc",
            "embedding_norm": "pre_fc_norm_embedding",
            "hidden_norm": "pre_fc_norm_hidden",
            "final_norm": "norm",
        }
        found |= {f"mtp/{logical}": tensors[f"mtp.{name}.weight"] for logical, name in names.items()}
        found |= _block(tensors, "mtp.layers.0.", "mtp/layers/0/", "full", size)
    return {name: value.float() for name, value in found.items()}


def _block(
    tensors: Mapping[str, torch.Tensor], stored: str, logical: str, kind: str, size: Size
) -> dict[str, torch.Tensor]:
    def get_(name: str) -> torch.Tensor:
        return tensors[stored + name]

    found = {
        "input_norm": get_("input_layernorm.weight"),
        "post_attention_norm": get_("post_attention_layernorm.weight"),
        "mlp/gate": get_("mlp.gate_proj.weight"),
        "mlp/up": get_("mlp.up_proj.weight"),
        "mlp/down": get_("mlp.down_proj.weight"),
    }
    if kind == "full":
        both = get_("self_attn.q_proj.weight").reshape(size.heads, 2, size.head_dim, size.hidden)
        found |= {
            "attention/query": both[:, 0].reshape(-1, size.hidden),
            "attention/gate": both[:, 1].reshape(-1, size.hidden),
            "attention/key": get_("self_attn.k_proj.weight"),
            "attention/value": get_("self_attn.v_proj.weight"),
            "attention/output": get_("self_attn.o_proj.weight"),
            "attention/query_norm": get_("self_attn.q_norm.weight"),
            "attention/key_norm": get_("self_attn.k_norm.weight"),
        }
    else:
        keys = size.key_heads * size.key_dim
        query, key, value = get_("linear_attn.in_proj_qkv.weight").split(
            (keys, keys, size.value_heads * size.value_dim)
        )
        found |= {
            "gdn/query": query,
            "gdn/key": key,
            "gdn/value": value,
            "gdn/z": get_("linear_attn.in_proj_z.weight"),
            "gdn/a_projection": get_("linear_attn.in_proj_a.weight"),
            "gdn/b_projection": get_("linear_attn.in_proj_b.weight"),
            "gdn/a_log": get_("linear_attn.A_log"),
            "gdn/dt_bias": get_("linear_attn.dt_bias"),
            "gdn/convolution": get_("linear_attn.conv1d.weight").squeeze(1).t(),
            "gdn/norm": get_("linear_attn.norm.weight"),
            "gdn/output": get_("linear_attn.out_proj.weight"),
        }
    return {logical + name: value for name, value in found.items()}
