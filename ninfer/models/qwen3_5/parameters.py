"""The logical parameters of a dense Qwen3.5 text tower, bound to weights."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ninfer.errors import ModelError
from ninfer.models.binding import Binder
from ninfer.models.qwen3_5.config import AttentionConfig, DeltaNetConfig, TextConfig
from ninfer.ops import GdnMixer, Matrix, Role


@dataclass(frozen=True, eq=False)
class Attention:
    """Gated attention; the stack's rows are query, key, gate, value (the converter's packing order)."""

    config: AttentionConfig
    query_key_gate_value: Matrix
    query_norm: torch.Tensor
    key_norm: torch.Tensor
    output: Matrix


@dataclass(frozen=True, eq=False)
class DeltaNet:
    """Gated DeltaNet; the stack's rows are query, key, value, z.

    `between.head_order` is int32 `[value_heads]` where the columns of `output` were stored in another order
    of heads: column block j multiplies head `head_order[j]`. None means the natural order.
    """

    config: DeltaNetConfig
    query_key_value_z: Matrix
    between: GdnMixer
    output: Matrix


@dataclass(frozen=True, eq=False)
class Layer:
    """One block: a norm, a mixer, a norm, a SwiGLU."""

    input_norm: torch.Tensor
    mixer: Attention | DeltaNet
    post_attention_norm: torch.Tensor
    gate_up: Matrix
    down: Matrix


@dataclass(frozen=True, eq=False)
class Parameters:
    token_embedding: Matrix
    layers: tuple[Layer, ...]
    final_norm: torch.Tensor
    output_head: Matrix


@dataclass(frozen=True, eq=False)
class PredictorParameters:
    """The MTP layer; the columns of `input_projection` are those of the embedding, then of the hidden
    state."""

    embedding_norm: torch.Tensor
    hidden_norm: torch.Tensor
    input_projection: Matrix
    layer: Layer
    final_norm: torch.Tensor


@dataclass(frozen=True, eq=False)
class Proposal:
    """The output head that drafts are scored with: `rows` of `head`, of the tokens `token_ids` (int32
    `[rows]`; None: token r stands in row r)."""

    head: Matrix
    rows: int
    token_ids: torch.Tensor | None = None


def bind(binder: Binder, config: TextConfig) -> Parameters:
    """Bind everything that the text tower needs; other components' parameters are not touched."""
    table = (config.vocab_size, config.hidden_size)
    return Parameters(
        token_embedding=binder.table("text/token_embedding", table),
        layers=tuple(
            _layer(binder, config, mixer, f"text/layers/{i}/") for i, mixer in enumerate(config.mixers)
        ),
        final_norm=binder.vector("text/final_norm", (config.hidden_size,)),
        output_head=binder.matrix("text/output_head", table, "text/final_hidden"),
    )


def bind_predictor(binder: Binder, config: TextConfig) -> PredictorParameters:
    """Bind the MTP layer."""
    assert config.attention is not None, "with an MTP layer the config has the attention fields"
    hidden = config.hidden_size
    return PredictorParameters(
        embedding_norm=binder.vector("mtp/embedding_norm", (hidden,)),
        hidden_norm=binder.vector("mtp/hidden_norm", (hidden,)),
        input_projection=binder.matrix("mtp/input_projection", (hidden, 2 * hidden), "mtp/stem_input"),
        layer=_layer(binder, config, config.attention, "mtp/layers/0/"),
        final_norm=binder.vector("mtp/final_norm", (hidden,)),
    )


def bind_proposal(binder: Binder, config: TextConfig, rows: int | None, public: int) -> Proposal:
    """Bind the head that only drafts: of `rows` tokens, or (None) of all of them."""
    if rows is not None and rows > public:
        raise ModelError(f"the proposal head has {rows} rows, but the tokenizer only {public} tokens")
    shape = (config.vocab_size if rows is None else rows, config.hidden_size)
    head = binder.matrix("proposal/head", shape, "mtp/final_hidden")
    if rows is None:
        return Proposal(head, public)
    ids = binder.vector("proposal/token_ids", (rows,), "int32")
    found = torch.unique(ids)
    if len(found) != rows or int(found[0]) < 0 or int(found[-1]) >= public:
        raise ModelError(f"the proposal head's token ids must be different ones below {public}")
    return Proposal(head, rows, ids)


def _layer(binder: Binder, config: TextConfig, mixer: AttentionConfig | DeltaNetConfig, p: str) -> Layer:
    hidden, inner = config.hidden_size, config.intermediate_size
    return Layer(
        input_norm=binder.vector(f"{p}input_norm", (hidden,)),
        mixer=(
            _attention(binder, mixer, hidden, p)
            if isinstance(mixer, AttentionConfig)
            else _delta_net(binder, mixer, hidden, config.rms_norm_eps, p)
        ),
        post_attention_norm=binder.vector(f"{p}post_attention_norm", (hidden,)),
        gate_up=binder.stack(
            [(f"{p}mlp/gate", (inner, hidden)), (f"{p}mlp/up", (inner, hidden))],
            f"{p}ffn_input",
            Role.SWIGLU,
        ),
        down=binder.matrix(f"{p}mlp/down", (hidden, inner), f"{p}mlp/product"),
    )


def _attention(binder: Binder, config: AttentionConfig, hidden: int, p: str) -> Attention:
    queries, keys = config.heads * config.head_dim, config.kv_heads * config.head_dim
    return Attention(
        config=config,
        query_key_gate_value=binder.stack(
            [
                (f"{p}attention/query", (queries, hidden)),
                (f"{p}attention/key", (keys, hidden)),
                (f"{p}attention/gate", (queries, hidden)),
                (f"{p}attention/value", (keys, hidden)),
            ],
            f"{p}mixer_input",
        ),
        query_norm=binder.vector(f"{p}attention/query_norm", (config.head_dim,)),
        key_norm=binder.vector(f"{p}attention/key_norm", (config.head_dim,)),
        output=binder.matrix(f"{p}attention/output", (hidden, queries), f"{p}attention/gated_output"),
    )


def _delta_net(binder: Binder, config: DeltaNetConfig, hidden: int, eps: float, p: str) -> DeltaNet:
    gates = (config.value_heads, hidden)
    output, head_order = binder.permuted(
        f"{p}gdn/output",
        (hidden, config.value_width),
        f"{p}gdn/gated_output",
        "input_head_order",
        config.value_heads,
    )
    return DeltaNet(
        config=config,
        query_key_value_z=binder.stack(
            [
                (f"{p}gdn/query", (config.key_width, hidden)),
                (f"{p}gdn/key", (config.key_width, hidden)),
                (f"{p}gdn/value", (config.value_width, hidden)),
                (f"{p}gdn/z", (config.value_width, hidden)),
            ],
            f"{p}mixer_input",
        ),
        between=GdnMixer(
            key_heads=config.key_heads,
            key_dim=config.key_head_dim,
            value_heads=config.value_heads,
            value_dim=config.value_head_dim,
            eps=eps,
            a=binder.matrix(f"{p}gdn/a_projection", gates, f"{p}mixer_input", Role.GATING),
            b=binder.matrix(f"{p}gdn/b_projection", gates, f"{p}mixer_input", Role.GATING),
            a_log=binder.vector(f"{p}gdn/a_log", (config.value_heads,), "fp32"),
            dt_bias=binder.vector(f"{p}gdn/dt_bias", (config.value_heads,), "fp32"),
            convolution=binder.vector(f"{p}gdn/convolution", (config.taps, config.channels)),
            norm=binder.vector(f"{p}gdn/norm", (config.value_head_dim,)),
            head_order=head_order,
        ),
        output=output,
    )
