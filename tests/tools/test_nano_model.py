"""The training model against transformers' Qwen3.5, and the packed delta rule against its recurrence."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tools.nano import geometry
from tools.nano.delta import plain
from tools.nano.model import (
    Model,
    Parameters,
    attend_plain,
    from_huggingface,
    initialize,
    to_huggingface,
    unbind,
)
from tools.nano.packing import CHUNK, Packing, cut, packing


def _random_parameters(seed: int) -> Parameters:
    """Like a trained model's: no projection is zero, no norm is trivial."""
    parameters = initialize(seed, "cpu")
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for value in parameters.values():
            if value.std() < 1e-6:
                value.add_(torch.randn(value.shape, generator=generator) * 0.04)
    return parameters


def _packed(lengths: list[int]) -> Packing:
    return packing(np.cumsum([0, *lengths]), "cpu")


def _model() -> Model:
    return Model(plain, attend_plain, device="cpu", compiled=False)


def _recurrence(q, k, v, g, beta):
    """The gated delta rule of one document, token by token, in float64."""
    q, k, v, g, beta = (x.double() for x in (q, k, v, g, beta))
    repeat = v.shape[1] // q.shape[1]
    q, k = (x.repeat_interleave(repeat, dim=1) for x in (q, k))
    state = torch.zeros(v.shape[1], v.shape[2], k.shape[2], dtype=torch.float64)
    outputs = []
    for t in range(len(v)):
        state = state * g[t].exp()[:, None, None]
        change = beta[t][:, None] * (v[t] - (state @ k[t].unsqueeze(-1)).squeeze(-1))
        state = state + change.unsqueeze(-1) * k[t].unsqueeze(-2)
        outputs.append((state @ q[t].unsqueeze(-1)).squeeze(-1) * v.shape[2] ** -0.5)
    return torch.stack(outputs)


def test_packed_delta_rule_equals_the_recurrence_of_each_document() -> None:
    lengths = [3 * CHUNK, CHUNK, 2 * CHUNK]
    generator = torch.Generator().manual_seed(3)
    q, k = (
        torch.nn.functional.normalize(torch.randn(sum(lengths), 2, 16, generator=generator), dim=-1)
        for _ in "qk"
    )
    v = torch.randn(sum(lengths), 4, 16, generator=generator)
    g = -torch.rand(sum(lengths), 4, generator=generator) * 0.3
    beta = torch.rand(sum(lengths), 4, generator=generator)
    ours = plain(q, k, v, g, beta, _packed(lengths))
    begin = 0
    for length in lengths:
        part = slice(begin, begin + length)
        expected = _recurrence(q[part], k[part], v[part], g[part], beta[part])
        torch.testing.assert_close(ours[part].double(), expected, rtol=1e-4, atol=1e-5)
        begin += length


def test_trunk_equals_transformers_and_documents_do_not_see_each_other() -> None:
    from transformers import Qwen3_5TextConfig
    from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5ForCausalLM

    parameters = _random_parameters(5)
    config = Qwen3_5TextConfig(
        **{k: v for k, v in geometry.config().items() if k not in ("architectures", "dtype")}
    )
    oracle = Qwen3_5ForCausalLM(config).eval()
    tensors = {name: value for name, value in to_huggingface(parameters) if not name.startswith("mtp.")}
    missing, unexpected = oracle.load_state_dict(tensors, strict=False)
    assert missing == ["lm_head.weight"]
    assert unexpected == []
    oracle.tie_weights()

    lengths = [2 * CHUNK, CHUNK]
    tokens = torch.randint(
        0, geometry.VOCAB_ROWS, (sum(lengths),), generator=torch.Generator().manual_seed(7)
    )
    with torch.no_grad():
        ours = (
            _model().hidden(unbind(parameters, torch.float32), tokens, _packed(lengths))
            @ parameters["embedding"].T
        )
        begin = 0
        for length in lengths:
            expected = oracle(tokens[None, begin : begin + length]).logits[0]
            part = ours[begin : begin + length]
            assert (part - expected).norm() <= 1e-4 * expected.norm()
            begin += length


def test_checkpoint_names_round_trip() -> None:
    parameters, others = _random_parameters(1), initialize(2, "cpu")
    tensors = dict(to_huggingface(parameters))
    from_huggingface(tensors, others)
    for name, value in parameters.items():
        assert torch.equal(value, others[name]), name
    assert sum(value.numel() for value in tensors.values()) <= 24_000_000


@pytest.mark.parametrize("tokens", [CHUNK, 2 * CHUNK, 3 * CHUNK])
def test_a_packing_cut_short_keeps_what_is_left(tokens: int) -> None:
    ends = np.array([0, 2 * CHUNK, 4 * CHUNK])
    generator = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(4 * CHUNK, 2, 32, generator=generator) for _ in "qkv")
    expected = attend_plain(q, k, v, packing(ends, "cpu"))[:tokens]
    part = packing(cut(ends, tokens), "cpu")
    torch.testing.assert_close(attend_plain(q[:tokens], k[:tokens], v[:tokens], part), expected)


def test_a_packing_knows_positions_and_chunks() -> None:
    where = _packed([2 * CHUNK, CHUNK])
    assert where.positions.tolist() == [*range(2 * CHUNK), *range(CHUNK)]
    assert where.chunks.tolist() == [[0, 0], [0, 1], [1, 0]]
    assert where.longest == 2 * CHUNK


def test_mtp_layer_is_transformers_attention_block_between_its_stem_and_norm() -> None:
    from transformers import Qwen3_5TextConfig
    from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5DecoderLayer, Qwen3_5TextRotaryEmbedding

    parameters = _random_parameters(11)
    tensors = dict(to_huggingface(parameters))
    config = Qwen3_5TextConfig(
        **{k: v for k, v in geometry.config().items() if k not in ("architectures", "dtype")}
    )
    config._attn_implementation = "eager"
    layer = Qwen3_5DecoderLayer(config, geometry.INTERVAL - 1).eval()
    prefix = "mtp.layers.0."
    layer.load_state_dict(
        {name.removeprefix(prefix): v for name, v in tensors.items() if name.startswith(prefix)}
    )

    tokens = 2 * CHUNK
    generator = torch.Generator().manual_seed(2)
    hidden = torch.randn(tokens, geometry.HIDDEN, generator=generator)
    following = torch.randint(0, geometry.VOCAB_ROWS, (tokens,), generator=generator)

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + geometry.EPS) * (1 + tensors[name])

    with torch.no_grad():
        e = norm(parameters["embedding"][following], "mtp.pre_fc_norm_embedding.weight")
        h = norm(hidden, "mtp.pre_fc_norm_hidden.weight")
        u = torch.cat([e, h], dim=-1) @ tensors["mtp.fc.weight"].T
        positions = torch.arange(tokens)
        rotary = Qwen3_5TextRotaryEmbedding(config)(u[None], positions[None, None].expand(3, 1, -1))
        mask = torch.full((tokens, tokens), float("-inf")).triu(1)[None, None]
        u = layer(u[None], position_embeddings=rotary, attention_mask=mask)
        u = (u[0] if isinstance(u, tuple) else u).reshape(tokens, -1)
        expected = norm(u, "mtp.norm.weight")
        ours = _model().draft(unbind(parameters, torch.float32), hidden, following, _packed([tokens]))
    assert (ours - expected).norm() <= 1e-4 * expected.norm()
