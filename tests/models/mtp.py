"""A random MTP layer for a tiny checkpoint, and what it computes, written from the formula in float64."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from ninfer import models
from ninfer.artifact import Artifact, Binding, Component, Use
from ninfer.artifact.records import Proposal
from ninfer.models import Model

from .draft import Draft, draft
from .tiny import FULL, LINEAR, Qwen35Geometry, build

GEOMETRIES = {
    "mixed": Qwen35Geometry(layer_types=(LINEAR, FULL, LINEAR), max_positions=4096),
    "all-full": Qwen35Geometry(layer_types=(FULL,), max_positions=4096, tied=True),
    "all-linear": Qwen35Geometry(layer_types=(LINEAR,), max_positions=4096),
    "few-words": Qwen35Geometry(layer_types=(LINEAR, FULL), max_positions=1024, vocab_size=7),
}
Tensors = Mapping[str, torch.Tensor]


def mtp_tensors(g: Qwen35Geometry, seed: int = 5) -> dict[str, torch.Tensor]:
    """Logical parameters (BF16 values in float32); attention weights large enough that keys matter."""
    generator = torch.Generator().manual_seed(seed)
    hidden, queries, keys = g.hidden_size, g.heads * g.head_dim, g.kv_heads * g.head_dim
    matrices = {
        "input_projection": (hidden, 2 * hidden),
        "layers/0/attention/query": (queries, hidden),
        "layers/0/attention/key": (keys, hidden),
        "layers/0/attention/gate": (queries, hidden),
        "layers/0/attention/value": (keys, hidden),
        "layers/0/attention/output": (hidden, queries),
        "layers/0/mlp/gate": (g.intermediate_size, hidden),
        "layers/0/mlp/up": (g.intermediate_size, hidden),
        "layers/0/mlp/down": (hidden, g.intermediate_size),
    }
    norms = {
        "embedding_norm": hidden,
        "hidden_norm": hidden,
        "final_norm": hidden,
        "layers/0/input_norm": hidden,
        "layers/0/post_attention_norm": hidden,
        "layers/0/attention/query_norm": g.head_dim,
        "layers/0/attention/key_norm": g.head_dim,
    }
    found = {}
    for name, shape in matrices.items():
        found[name] = torch.randn(shape, generator=generator) * shape[1] ** -0.5
    for name, size in norms.items():
        found[name] = 0.3 * torch.randn(size, generator=generator)
    return {f"mtp/{name}": value.bfloat16().float() for name, value in found.items()}


_INPUTS = {
    "input_projection": "stem_input",
    "attention/output": "layers/0/attention/gated_output",
    "mlp/gate": "layers/0/ffn_input",
    "mlp/up": "layers/0/ffn_input",
    "mlp/down": "layers/0/mlp/product",
}


def draft_with_mtp(g: Qwen35Geometry, model: Any = None, tensors: Tensors | None = None) -> Draft:
    """The artifact of a checkpoint with an MTP layer."""
    out = draft(g, build(g) if model is None else model)
    for name, values in (mtp_tensors(g) if tensors is None else tensors).items():
        out.bindings[name] = Binding.to(out.add(name, values))
        short = name.removeprefix("mtp/").removeprefix("layers/0/")
        if values.dim() == 2:
            input_ = f"mtp/{_INPUTS.get(short, 'layers/0/mixer_input')}"
            out.uses[name, input_] = Use(name, input_, "A16Only")
    out.components["mtp"] = Component({"architectures": ["Qwen3_5MTP"]}, target="text")
    return out


def add_proposal(out: Draft, ids: Sequence[int]) -> Draft:
    """The rows `ids` of the output head as the head that drafts."""
    head = build(GEOMETRIES["mixed"]).state_dict()["lm_head.weight"]
    out.bindings["proposal/head"] = Binding.to(out.add("proposal/head", head[list(ids)]))
    out.bindings["proposal/token_ids"] = Binding.to(out.add("proposal/ids", torch.tensor(list(ids)), "int32"))
    out.uses["proposal/head", "mtp/final_hidden"] = Use("proposal/head", "mtp/final_hidden", "A16Only")
    out.components["text"] = Component(out.config, proposal=Proposal("indexed", len(ids)))
    return out


@cache
def loaded(name: str, *, predictor: bool = True, dtype: torch.dtype = torch.bfloat16) -> Model:
    """The model of a geometry, with its MTP layer."""
    with TemporaryDirectory() as folder:
        path = draft_with_mtp(GEOMETRIES[name]).write(Path(folder) / "tiny.ninfer")
        with Artifact.open(path) as artifact:
            return models.load(artifact, activation_dtype=dtype, predictor=predictor)


def reference(
    g: Qwen35Geometry, tensors: Tensors, embedding: torch.Tensor, tokens: Sequence[int], hidden: torch.Tensor
) -> torch.Tensor:
    """float64 `[T, H]`: outputs at positions 0, 1, … of the tokens there, one later than the hidden
    states."""
    p = {name.removeprefix("mtp/"): value.double() for name, value in tensors.items()}
    block = {name.removeprefix("layers/0/"): value for name, value in p.items()}
    count, half = len(tokens), g.head_dim * g.partial_rotary_factor / 2

    def norm(x: torch.Tensor, gain: torch.Tensor) -> torch.Tensor:
        return x / (x.square().mean(-1, keepdim=True) + g.eps).sqrt() * (1 + gain)

    def rotated(x: torch.Tensor) -> torch.Tensor:
        pairs = int(half)
        angle = torch.arange(count).double()[:, None] * g.rope_theta ** (
            -torch.arange(pairs).double() / pairs
        )
        cos, sin = angle.cos()[:, None], angle.sin()[:, None]
        low, high = x[..., :pairs], x[..., pairs : 2 * pairs]
        return torch.cat([low * cos - high * sin, high * cos + low * sin, x[..., 2 * pairs :]], -1)

    e = norm(embedding.double()[list(tokens)], p["embedding_norm"])
    x = torch.cat([e, norm(hidden.double(), p["hidden_norm"])], 1) @ p["input_projection"].T
    h = norm(x, block["input_norm"])
    q = norm((h @ block["attention/query"].T).view(count, g.heads, -1), block["attention/query_norm"])
    k = norm((h @ block["attention/key"].T).view(count, g.kv_heads, -1), block["attention/key_norm"])
    v = (h @ block["attention/value"].T).view(count, g.kv_heads, -1)
    q, k = rotated(q), rotated(k)
    k, v = (y.repeat_interleave(g.heads // g.kv_heads, 1) for y in (k, v))
    scores = torch.einsum("thd,shd->hts", q, k) * g.head_dim**-0.5
    scores = scores.masked_fill(~torch.ones(count, count, dtype=torch.bool).tril(), -torch.inf)
    a = torch.einsum("hts,shd->thd", scores.softmax(-1), v).reshape(count, -1)
    x = x + (a * torch.sigmoid(h @ block["attention/gate"].T)) @ block["attention/output"].T
    h = norm(x, block["post_attention_norm"])
    inner = torch.nn.functional.silu(h @ block["mlp/gate"].T) * (h @ block["mlp/up"].T)
    return norm(x + inner @ block["mlp/down"].T, p["final_norm"])
