"""Qwen3.5's text model with its MTP layer, as functions of stacked parameters, over packed documents.

The mathematics is that of transformers' `Qwen3_5ForCausalLM` (tests compare the two). What differs: equal
matrices of all layers are one stacked parameter, documents are packed on the token axis and kept apart, and
everything between two sequence operators is one compiled function.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

import torch
import torch.nn.functional as F

from tools.nano import geometry as G
from tools.nano.delta import Delta
from tools.nano.packing import Packing

Parameters = dict[str, torch.Tensor]
Rows = Mapping[str, Sequence[torch.Tensor]]  # every stack taken apart
Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, Packing], torch.Tensor]
Chained = Callable[[torch.Tensor, list[torch.Tensor], list[torch.Tensor], Packing], torch.Tensor]

_LINEAR = [i for i, kind in enumerate(G.layer_types()) if kind == "linear_attention"]
_FULL = [i for i, kind in enumerate(G.layer_types()) if kind == "full_attention"]
MTP = G.LAYERS  # the MTP layer is the last row of every stack that it has a part in
_KEYS, _VALUES, _QUERIES = G.KEY_HEADS * G.DELTA_DIM, G.VALUE_HEADS * G.DELTA_DIM, G.HEADS * G.HEAD_DIM
_KV = G.KV_HEADS * G.HEAD_DIM
_ZERO = ("delta.out", "attention.out", "mlp.down")
AHEAD = 8  # positions beyond the context that a chain of drafts may reach
_STEPS = 1e-3, 1e-1  # range of the initial time steps, as in Mamba2

# Stacked matrices, `name: (count, rows, columns)`. Muon trains these; all of them may become NVFP4.
MATRICES: dict[str, tuple[int, int, int]] = {
    "delta.q": (len(_LINEAR), _KEYS, G.HIDDEN),
    "delta.k": (len(_LINEAR), _KEYS, G.HIDDEN),
    "delta.v": (len(_LINEAR), _VALUES, G.HIDDEN),
    "delta.z": (len(_LINEAR), _VALUES, G.HIDDEN),
    "delta.out": (len(_LINEAR), G.HIDDEN, _VALUES),
    "attention.q": (len(_FULL) + 1, _QUERIES, G.HIDDEN),
    "attention.gate": (len(_FULL) + 1, _QUERIES, G.HIDDEN),
    "attention.k": (len(_FULL) + 1, _KV, G.HIDDEN),
    "attention.v": (len(_FULL) + 1, _KV, G.HIDDEN),
    "attention.out": (len(_FULL) + 1, G.HIDDEN, _QUERIES),
    "mlp.gate": (G.LAYERS + 1, G.INTERMEDIATE, G.HIDDEN),
    "mlp.up": (G.LAYERS + 1, G.INTERMEDIATE, G.HIDDEN),
    "mlp.down": (G.LAYERS + 1, G.HIDDEN, G.INTERMEDIATE),
    "mtp.fc": (2, G.HIDDEN, G.HIDDEN),  # of the embedding, of the hidden state
}
_OTHERS: dict[str, tuple[int, ...]] = {
    "embedding": (G.VOCAB_ROWS, G.HIDDEN),
    "norm.input": (G.LAYERS + 1, G.HIDDEN),
    "norm.post": (G.LAYERS + 1, G.HIDDEN),
    "norm.final": (2, G.HIDDEN),  # of the text model, of the MTP layer
    "norm.mtp": (2, G.HIDDEN),  # of the embedding, of the hidden state
    "delta.a": (len(_LINEAR), G.VALUE_HEADS, G.HIDDEN),
    "delta.b": (len(_LINEAR), G.VALUE_HEADS, G.HIDDEN),
    "delta.conv": (len(_LINEAR), 2 * _KEYS + _VALUES, G.TAPS),
    "delta.A_log": (len(_LINEAR), G.VALUE_HEADS),
    "delta.dt_bias": (len(_LINEAR), G.VALUE_HEADS),
    "delta.norm": (len(_LINEAR), G.DELTA_DIM),
    "attention.q_norm": (len(_FULL) + 1, G.HEAD_DIM),
    "attention.k_norm": (len(_FULL) + 1, G.HEAD_DIM),
}


def initialize(seed: int, device: str) -> Parameters:
    """Float32 leaf parameters. Output projections start at zero: every block starts as the identity."""
    generator = torch.Generator().manual_seed(seed)
    found: Parameters = {}
    for name, shape in (MATRICES | _OTHERS).items():
        if name in _ZERO or name.startswith("norm") or name.endswith("_norm"):
            value = torch.zeros(shape)
        elif name == "delta.norm":
            value = torch.ones(shape)
        elif name == "delta.A_log":
            value = torch.empty(shape).uniform_(1, 16, generator=generator).log()
        elif name == "delta.dt_bias":
            low, high = (math.log(x) for x in _STEPS)
            step = torch.empty(shape).uniform_(low, high, generator=generator).exp()
            value = step + torch.log(-torch.expm1(-step))  # inverse of softplus
        else:
            spread = 0.02 if name == "embedding" else 0.5 * shape[-1] ** -0.5
            value = torch.randn(shape, generator=generator) * spread
        found[name] = value.to(device).requires_grad_()
    return found


def to_huggingface(parameters: Parameters) -> Iterator[tuple[str, torch.Tensor]]:
    """The parameters under the names and in the shapes of a Hugging Face checkpoint, MTP layer included."""
    for name, parts in _members(parameters):
        if name.endswith("q_proj.weight"):  # per head: query rows, then gate rows
            heads = [part.reshape(G.HEADS, G.HEAD_DIM, G.HIDDEN) for part in parts]
            yield name, torch.cat(heads, dim=1).reshape(2 * _QUERIES, G.HIDDEN)
        elif name.endswith("conv1d.weight"):
            yield name, parts[0].unsqueeze(1)
        else:
            yield name, torch.cat(parts, dim=1 if name == "mtp.fc.weight" else 0)


def from_huggingface(tensors: Mapping[str, torch.Tensor], parameters: Parameters) -> None:
    """Copy a checkpoint's tensors into `parameters`; the inverse of `to_huggingface`."""
    for name, parts in _members(parameters):
        source = tensors[name].to(parts[0].device, torch.float32)
        if name.endswith("q_proj.weight"):
            heads = source.reshape(G.HEADS, 2, G.HEAD_DIM, G.HIDDEN).transpose(0, 1)
            values = list(heads.reshape(2, _QUERIES, G.HIDDEN))
        elif name == "mtp.fc.weight":
            values = list(source.split(G.HIDDEN, dim=1))
        else:
            values = list(source.reshape(-1, *parts[0].shape[1:]).split([len(part) for part in parts]))
        for part, value in zip(parts, values, strict=True):
            part.copy_(value)


def _members(parameters: Parameters) -> Iterator[tuple[str, list[torch.Tensor]]]:
    """Every name of a checkpoint with the rows of our stacks that it consists of, as views."""
    p = {name: value.detach() for name, value in parameters.items()}
    yield "model.embed_tokens.weight", [p["embedding"]]
    for layer in (*range(G.LAYERS), MTP):
        block = "mtp.layers.0" if layer == MTP else f"model.layers.{layer}"
        yield f"{block}.input_layernorm.weight", [p["norm.input"][layer]]
        yield f"{block}.post_attention_layernorm.weight", [p["norm.post"][layer]]
        for name in ("gate", "up", "down"):
            yield f"{block}.mlp.{name}_proj.weight", [p[f"mlp.{name}"][layer]]
        if layer in _LINEAR:
            i = _LINEAR.index(layer)
            yield f"{block}.linear_attn.in_proj_qkv.weight", [p[f"delta.{x}"][i] for x in "qkv"]
            for name, ours in _DELTA_NAMES.items():
                yield f"{block}.linear_attn.{name}", [p[f"delta.{ours}"][i]]
        else:
            i = _attention_row(layer)
            yield f"{block}.self_attn.q_proj.weight", [p["attention.q"][i], p["attention.gate"][i]]
            for name, ours in _ATTENTION_NAMES.items():
                yield f"{block}.self_attn.{name}.weight", [p[f"attention.{ours}"][i]]
    yield "model.norm.weight", [p["norm.final"][0]]
    yield "mtp.norm.weight", [p["norm.final"][1]]
    yield "mtp.pre_fc_norm_embedding.weight", [p["norm.mtp"][0]]
    yield "mtp.pre_fc_norm_hidden.weight", [p["norm.mtp"][1]]
    yield "mtp.fc.weight", list(p["mtp.fc"])


_DELTA_NAMES = {
    "in_proj_z.weight": "z",
    "in_proj_a.weight": "a",
    "in_proj_b.weight": "b",
    "conv1d.weight": "conv",
    "A_log": "A_log",
    "dt_bias": "dt_bias",
    "norm.weight": "norm",
    "out_proj.weight": "out",
}
_ATTENTION_NAMES = {"k_proj": "k", "v_proj": "v", "o_proj": "out", "q_norm": "q_norm", "k_norm": "k_norm"}


def _attention_row(layer: int) -> int:
    return len(_FULL) if layer == MTP else _FULL.index(layer)


def unbind(parameters: Parameters, dtype: torch.dtype) -> dict[str, Sequence[torch.Tensor]]:
    """The stacks taken apart, matrices and embedding in `dtype`; a stack's gradient comes in one piece."""
    found: dict[str, Sequence[torch.Tensor]] = {}
    for name, value in parameters.items():
        if name == "embedding":
            found[name] = [value.to(dtype)]
        else:
            found[name] = (value.to(dtype) if name in MATRICES else value).unbind(0)
    return found


class Model:
    """The forward pass over packed documents, of parameters that were taken apart by `unbind`.

    delta, attend: the two sequence operators. compiled: whether the functions between them are compiled
    (for CUDA).
    """

    def __init__(self, delta: Delta, attend: Attend, *, device: str, compiled: bool) -> None:
        self._delta, self._attend = delta, attend
        build = partial(torch.compile, dynamic=False) if compiled else (lambda function: function)
        self._delta_in, self._delta_out = build(_delta_in), build(_delta_out)
        self._attention_in, self._attention_out = build(_attention_in), build(_attention_out)
        self._join, self._norm = build(_join), build(_norm)
        angles = torch.arange(G.CONTEXT + AHEAD, dtype=torch.float64).unsqueeze(1) * _frequencies()
        self._cos, self._sin = (x.float().to(device) for x in (angles.cos(), angles.sin()))

    def hidden(self, p: Rows, tokens: torch.Tensor, packing: Packing) -> torch.Tensor:
        """`[T, HIDDEN]` after the final norm, of int64 tokens `[T]`."""
        x = F.embedding(tokens, p["embedding"][0])
        for layer, kind in enumerate(G.layer_types()):
            x = (
                self._recur(p, layer, x, packing)
                if kind == "linear_attention"
                else self._look(p, layer, x, packing)
            )
        return self._norm(x, p["norm.final"][0])

    def draft(self, p: Rows, hidden: torch.Tensor, following: torch.Tensor, packing: Packing) -> torch.Tensor:
        """`[T, HIDDEN]` of the MTP layer after its norm.

        hidden: the text model's. following: int64 `[T]`, the token after each position. The row of position
        t predicts the token at t + 2.
        """
        embedded = F.embedding(following, p["embedding"][0])
        x = self._join(embedded, hidden, *p["norm.mtp"], *p["mtp.fc"])
        return self._norm(self._look(p, MTP, x, packing), p["norm.final"][1])

    def chains(
        self, p: Rows, hidden: torch.Tensor, tokens: torch.Tensor, packing: Packing, steps: int,
        attend: Chained,
    ) -> Iterator[torch.Tensor]:  # fmt: skip
        """What `draft` gives, then the MTP layer's further steps from its own output: `[T, HIDDEN]` of each.

        hidden: the text model's, of `tokens`. In step n row t stands at position t + n - 1, takes the token
        t + n and row t of step n - 1 (of `hidden` at first), and predicts the token at t + n + 1. It sees the
        keys of the first step at positions up to t, which hold the text model's states, and those that its
        own row made since: what a round of speculative decoding has that starts at t.
        """
        keys: list[torch.Tensor] = []
        values: list[torch.Tensor] = []
        for step in range(1, steps + 1):
            embedded = F.embedding(tokens.roll(-step), p["embedding"][0])
            x = self._join(embedded, hidden, *p["norm.mtp"], *p["mtp.fc"])
            q, k, v, gate = self._project(p, MTP, x, packing.positions + (step - 1))
            keys.append(k)
            values.append(v)
            hidden = self._norm(
                self._finish(p, MTP, x, attend(q, keys, values, packing), gate), p["norm.final"][1]
            )
            yield hidden

    def _recur(self, p: Rows, layer: int, x: torch.Tensor, packing: Packing) -> torch.Tensor:
        i = _LINEAR.index(layer)
        names = ("q", "k", "v", "z", "a", "b", "conv", "A_log", "dt_bias")
        weights = [p[f"delta.{name}"][i] for name in names]
        q, k, v, z, g, beta = self._delta_in(x, packing.positions, p["norm.input"][layer], *weights)
        o = self._delta(q, k, v, g, beta, packing)
        return self._delta_out(
            x, o, z, p["delta.norm"][i], p["delta.out"][i], p["norm.post"][layer], *_mlp_of(p, layer)
        )

    def _look(self, p: Rows, layer: int, x: torch.Tensor, packing: Packing) -> torch.Tensor:
        q, k, v, gate = self._project(p, layer, x, packing.positions)
        return self._finish(p, layer, x, self._attend(q, k, v, packing), gate)

    def _project(
        self, p: Rows, layer: int, x: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        i = _attention_row(layer)
        names = ("q", "gate", "k", "v", "q_norm", "k_norm")
        weights = [p[f"attention.{name}"][i] for name in names]
        return self._attention_in(
            x, self._cos[positions], self._sin[positions], p["norm.input"][layer], *weights
        )

    def _finish(
        self, p: Rows, layer: int, x: torch.Tensor, a: torch.Tensor, gate: torch.Tensor
    ) -> torch.Tensor:
        out = p["attention.out"][_attention_row(layer)]
        return self._attention_out(x, a, gate, out, p["norm.post"][layer], *_mlp_of(p, layer))


def _mlp_of(p: Rows, layer: int) -> list[torch.Tensor]:
    return [p[f"mlp.{name}"][layer] for name in ("gate", "up", "down")]


def _frequencies() -> torch.Tensor:
    width = int(G.HEAD_DIM * G.ROTARY_FACTOR)
    return G.THETA ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)


def _norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """RMS norm whose weight is an offset from one."""
    y = x.float()
    y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + G.EPS)
    return (y * (1 + weight.float())).to(x.dtype)


def _product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x @ weight.to(x.dtype).mT


def _unit(x: torch.Tensor) -> torch.Tensor:
    y = x.float()
    return (y * torch.rsqrt(y.square().sum(-1, keepdim=True) + 1e-6)).to(x.dtype)


def _mlp(
    x: torch.Tensor, norm: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, down: torch.Tensor
) -> torch.Tensor:
    h = _norm(x, norm)
    return x + _product(F.silu(_product(h, gate)) * _product(h, up), down)


def _delta_in(
    x: torch.Tensor, positions: torch.Tensor, norm: torch.Tensor, q: torch.Tensor, k: torch.Tensor,
    v: torch.Tensor, z: torch.Tensor, a: torch.Tensor, b: torch.Tensor, conv: torch.Tensor,
    a_log: torch.Tensor, dt_bias: torch.Tensor,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    """q, k, v, z `[T, heads, 128]`; g, beta `[T, heads]` float32."""
    h = _norm(x, norm)
    u = _product(h, torch.cat([q, k, v]))
    mixed = u.float() * conv[:, -1]
    for back in range(1, G.TAPS):
        earlier = F.pad(u[:-back], (0, 0, back, 0)).float() * (positions >= back).unsqueeze(1)
        mixed = mixed + earlier * conv[:, -1 - back]
    mixed = F.silu(mixed).to(x.dtype)
    heads = [part.unflatten(-1, (-1, G.DELTA_DIM)) for part in mixed.split([_KEYS, _KEYS, _VALUES], dim=-1)]
    step = F.softplus(_product(h, a).float() + dt_bias)
    g = -a_log.float().exp() * step
    beta = torch.sigmoid(_product(h, b).float())
    return (
        _unit(heads[0]),
        _unit(heads[1]),
        heads[2],
        _product(h, z).unflatten(-1, (-1, G.DELTA_DIM)),
        g,
        beta,
    )


def _delta_out(
    x: torch.Tensor, o: torch.Tensor, z: torch.Tensor, norm: torch.Tensor, out: torch.Tensor,
    post: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, down: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    y = o.float()
    y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + G.EPS) * norm.float() * F.silu(z.float())
    return _mlp(x + _product(y.to(x.dtype).flatten(1), out), post, gate, up, down)


def _attention_in(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, norm: torch.Tensor, q: torch.Tensor,
    gate: torch.Tensor, k: torch.Tensor, v: torch.Tensor, q_norm: torch.Tensor, k_norm: torch.Tensor,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    """q, k, v `[T, HEADS, 256]` (key and value heads repeated), gate `[T, HEADS * 256]`."""
    h = _norm(x, norm)

    def head(weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return _rotate(_norm(_product(h, weight).unflatten(-1, (-1, G.HEAD_DIM)), scale), cos, sin)

    values = _product(h, v).unflatten(-1, (-1, G.HEAD_DIM))
    shared = [y.repeat_interleave(G.HEADS // G.KV_HEADS, dim=1) for y in (head(k, k_norm), values)]
    return head(q, q_norm), *shared, _product(h, gate)


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    half = cos.shape[-1]
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    low, high = x[..., :half].float(), x[..., half : 2 * half].float()
    turned = torch.cat([low * cos - high * sin, high * cos + low * sin], dim=-1)
    return torch.cat([turned.to(x.dtype), x[..., 2 * half :]], dim=-1)


def _attention_out(
    x: torch.Tensor, a: torch.Tensor, gate: torch.Tensor, out: torch.Tensor, post: torch.Tensor,
    mlp_gate: torch.Tensor, up: torch.Tensor, down: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    return _mlp(x + _product(a.flatten(1) * torch.sigmoid(gate), out), post, mlp_gate, up, down)


def _join(
    embedded: torch.Tensor, hidden: torch.Tensor, embedded_norm: torch.Tensor, hidden_norm: torch.Tensor,
    embedded_fc: torch.Tensor, hidden_fc: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    return _product(_norm(embedded, embedded_norm), embedded_fc) + _product(
        _norm(hidden, hidden_norm), hidden_fc
    )


def losses(
    hidden: torch.Tensor, embedding: torch.Tensor, targets: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cross-entropy float32 `[T]` of each target under the tied head, and the best token `[T]`."""
    logits = hidden @ embedding.mT
    wanted = logits.gather(1, targets.unsqueeze(1)).squeeze(1).float()
    return torch.logsumexp(logits.float(), dim=-1) - wanted, logits.detach().argmax(-1)


def attend_plain(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, packing: Packing) -> torch.Tensor:
    """Causal attention inside each document, `[T, heads, 256]`, document by document."""
    outputs = []
    for begin, end in zip(packing.ends[:-1].tolist(), packing.ends[1:].tolist(), strict=True):
        a, b, c = (x[begin:end].transpose(0, 1) for x in (q, k, v))
        outputs.append(F.scaled_dot_product_attention(a, b, c, is_causal=True).transpose(0, 1))
    return torch.cat(outputs)


def attend_fused() -> Attend:
    """The same through PyTorch's variable-length flash attention."""
    from torch.nn.attention.varlen import varlen_attn

    causal = (
        {"is_causal": True}
        if "is_causal" in inspect.signature(varlen_attn).parameters
        else {"window_size": (-1, 0)}
    )

    def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, packing: Packing) -> torch.Tensor:
        ends, longest = packing.ends, packing.longest
        output = varlen_attn(q, k, v, ends, ends, longest, longest, **causal)  # type: ignore[arg-type]
        assert isinstance(output, torch.Tensor)
        return output

    return run
