"""The logical parameters of Llama, bound to weights."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ninfer.models.binding import Binder
from ninfer.models.llama.config import LlamaConfig
from ninfer.ops import Matrix, Role


@dataclass(frozen=True, eq=False)
class Layer:
    """One block; `query_key_value` and `gate_up` stack their members' rows in this order."""

    input_norm: torch.Tensor
    query_key_value: Matrix
    output: Matrix
    post_attention_norm: torch.Tensor
    gate_up: Matrix
    down: Matrix


@dataclass(frozen=True, eq=False)
class Parameters:
    token_embedding: Matrix
    layers: tuple[Layer, ...]
    final_norm: torch.Tensor
    output_head: Matrix


def bind(binder: Binder, config: LlamaConfig) -> Parameters:
    """Bind everything that the text model needs."""
    table = (config.vocab_size, config.hidden_size)
    return Parameters(
        token_embedding=binder.table("text/token_embedding", table),
        layers=tuple(_layer(binder, config, f"text/layers/{i}/") for i in range(config.num_hidden_layers)),
        final_norm=binder.vector("text/final_norm", (config.hidden_size,)),
        output_head=binder.matrix("text/output_head", table, "text/final_hidden"),
    )


def _layer(binder: Binder, config: LlamaConfig, p: str) -> Layer:
    hidden, inner = config.hidden_size, config.intermediate_size
    queries, keys = config.heads * config.head_dim, config.kv_heads * config.head_dim
    return Layer(
        input_norm=binder.vector(f"{p}input_norm", (hidden,)),
        query_key_value=binder.stack(
            [
                (f"{p}attention/query", (queries, hidden)),
                (f"{p}attention/key", (keys, hidden)),
                (f"{p}attention/value", (keys, hidden)),
            ],
            f"{p}mixer_input",
        ),
        output=binder.matrix(f"{p}attention/output", (hidden, queries), f"{p}attention_output"),
        post_attention_norm=binder.vector(f"{p}post_attention_norm", (hidden,)),
        gate_up=binder.stack(
            [(f"{p}mlp/gate", (inner, hidden)), (f"{p}mlp/up", (inner, hidden))],
            f"{p}ffn_input",
            Role.SWIGLU,
        ),
        down=binder.matrix(f"{p}mlp/down", (hidden, inner), f"{p}mlp/product"),
    )
