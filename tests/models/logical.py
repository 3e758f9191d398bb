"""From a transformers state dict to the artifact's logical parameters, written from the spec's tables."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from .tiny import FULL, Geometry, LlamaGeometry, Qwen35Geometry


@dataclass(frozen=True)
class Logical:
    """Logical parameters of a text tower.

    `tensors`: name -> float32 values; `inputs`: projection -> its mathematical input; `direct_fp32`: names
    whose format is fp32; `groups`: projections that a converter would pack into one parent, in order.
    """

    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    inputs: dict[str, str] = field(default_factory=dict)
    direct_fp32: set[str] = field(default_factory=set)
    groups: list[tuple[str, ...]] = field(default_factory=list)

    def add(self, name: str, tensor: torch.Tensor, input: str | None = None) -> None:
        self.tensors[name] = tensor.detach().contiguous()
        if input is not None:
            self.inputs[name] = input


def logical_parameters(geometry: Geometry, model: Any) -> Logical:
    """Every text parameter of the model."""
    state = model.state_dict()
    out = Logical()
    out.add("text/token_embedding", state["model.embed_tokens.weight"])
    out.add("text/output_head", state["lm_head.weight"], "text/final_hidden")
    out.add("text/final_norm", state["model.norm.weight"])
    layers = geometry.layers if isinstance(geometry, LlamaGeometry) else len(geometry.layer_types)
    for i in range(layers):
        source = {
            name.removeprefix(f"model.layers.{i}."): tensor
            for name, tensor in state.items()
            if name.startswith(f"model.layers.{i}.")
        }
        p = f"text/layers/{i}/"
        out.add(f"{p}input_norm", source["input_layernorm.weight"])
        if isinstance(geometry, LlamaGeometry):
            _llama_attention(out, p, source)
        elif geometry.layer_types[i] == FULL:
            _gated_attention(out, p, source, geometry)
        else:
            _delta_net(out, p, source, geometry)
        out.add(f"{p}post_attention_norm", source["post_attention_layernorm.weight"])
        for name in ("gate", "up"):
            out.add(f"{p}mlp/{name}", source[f"mlp.{name}_proj.weight"], f"{p}ffn_input")
        out.groups.append((f"{p}mlp/gate", f"{p}mlp/up"))
        out.add(f"{p}mlp/down", source["mlp.down_proj.weight"], f"{p}mlp/product")
    return out


def _llama_attention(out: Logical, p: str, source: dict[str, torch.Tensor]) -> None:
    names = []
    for name, short in (("query", "q"), ("key", "k"), ("value", "v")):
        names.append(f"{p}attention/{name}")
        out.add(names[-1], source[f"self_attn.{short}_proj.weight"], f"{p}mixer_input")
    out.groups.append(tuple(names))
    out.add(f"{p}attention/output", source["self_attn.o_proj.weight"], f"{p}attention_output")


def _gated_attention(out: Logical, p: str, source: dict[str, torch.Tensor], g: Qwen35Geometry) -> None:
    halves = source["self_attn.q_proj.weight"].view(g.heads, 2, g.head_dim, g.hidden_size)
    mixer = f"{p}mixer_input"
    out.add(f"{p}attention/query", halves[:, 0].reshape(-1, g.hidden_size), mixer)
    out.add(f"{p}attention/gate", halves[:, 1].reshape(-1, g.hidden_size), mixer)
    out.add(f"{p}attention/key", source["self_attn.k_proj.weight"], mixer)
    out.add(f"{p}attention/value", source["self_attn.v_proj.weight"], mixer)
    out.add(f"{p}attention/query_norm", source["self_attn.q_norm.weight"])
    out.add(f"{p}attention/key_norm", source["self_attn.k_norm.weight"])
    out.add(f"{p}attention/output", source["self_attn.o_proj.weight"], f"{p}attention/gated_output")
    out.groups.append(tuple(f"{p}attention/{name}" for name in ("query", "key", "gate", "value")))


def _delta_net(out: Logical, p: str, source: dict[str, torch.Tensor], g: Qwen35Geometry) -> None:
    mixer = f"{p}mixer_input"
    for name in ("a_log", "dt_bias"):
        out.add(f"{p}gdn/{name}", source[f"linear_attn.{name.replace('a_log', 'A_log')}"])
        out.direct_fp32.add(f"{p}gdn/{name}")
    out.add(f"{p}gdn/convolution", source["linear_attn.conv1d.weight"][:, 0].T)
    out.add(f"{p}gdn/a_projection", source["linear_attn.in_proj_a.weight"], mixer)
    out.add(f"{p}gdn/b_projection", source["linear_attn.in_proj_b.weight"], mixer)
    keys, values = g.key_heads * g.key_head_dim, g.value_heads * g.value_head_dim
    rows = source["linear_attn.in_proj_qkv.weight"].split((keys, keys, values))
    for name, tensor in zip(("query", "key", "value"), rows, strict=True):
        out.add(f"{p}gdn/{name}", tensor, mixer)
    out.add(f"{p}gdn/z", source["linear_attn.in_proj_z.weight"], mixer)
    out.add(f"{p}gdn/norm", source["linear_attn.norm.weight"])
    out.add(f"{p}gdn/output", source["linear_attn.out_proj.weight"], f"{p}gdn/gated_output")
    out.groups.append(tuple(f"{p}gdn/{name}" for name in ("query", "key", "value", "z")))
    out.groups.append((f"{p}gdn/a_projection", f"{p}gdn/b_projection"))
