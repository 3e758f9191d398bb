"""Every operator in plain torch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from ninfer.errors import OptionError
from ninfer.ops.cpu.decode import decode_matrix, decode_rows
from ninfer.ops.rope import Rope
from ninfer.ops.sampling import SamplingParams, uniform
from ninfer.ops.weights import Matrix

PAGE = 64


def embedding(ids: torch.Tensor, table: Matrix, dtype: torch.dtype) -> torch.Tensor:
    out = torch.empty(ids.numel(), table.columns, dtype=dtype)
    for t, wanted in enumerate(ids.tolist()):
        row = wanted
        for span in table.spans:
            if 0 <= row < span.end - span.begin:
                out[t] = decode_rows(span.parent, span.begin + row, span.begin + row + 1)[0].to(dtype)
                break
            row -= span.end - span.begin
        else:
            raise OptionError(f"token id {wanted} is outside the embedding of {table.rows} rows")
    return out


def _normalized(x: torch.Tensor, eps: float) -> torch.Tensor:
    wide = x.float()
    return wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, unit_offset: bool) -> torch.Tensor:
    return (_normalized(x, eps) * (weight.float() + (1.0 if unit_offset else 0.0))).to(x.dtype)


def gated_rms_norm(o: torch.Tensor, z: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return (_normalized(o, eps) * weight.float() * F.silu(z.float().reshape(o.shape))).to(o.dtype)


def linear(x: torch.Tensor, w: Matrix, residual: torch.Tensor | None) -> torch.Tensor:
    y = x.float() @ decode_matrix(w).T
    return (y if residual is None else y + residual.float()).to(x.dtype)


def linear_swiglu(x: torch.Tensor, gate_up: Matrix) -> torch.Tensor:
    gate, up = (x.float() @ decode_matrix(gate_up).T).chunk(2, -1)
    return (F.silu(gate) * up).to(x.dtype)


def logits(x: torch.Tensor, head: Matrix, public_rows: int) -> torch.Tensor:
    return linear(x, head, None)[:, :public_rows].float()


def qk_prepare(
    q, k, v, positions, rope: Rope, q_norm, k_norm, eps, k_pages, v_pages, page_table, cache_positions
):
    if q_norm is not None:
        q = rms_norm(q, q_norm, eps, True)
    if k_norm is not None:
        k = rms_norm(k, k_norm, eps, True)
    axis_positions = positions if positions.dim() == 2 else positions.expand(3, -1)
    angles = axis_positions[rope.axes.long()].T.double() * rope.inverse_frequencies
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    q, k = _rotate(q, cos, sin), _rotate(k, cos, sin)
    pages = _page_rows(page_table, cache_positions)
    k_pages.view(-1, *k.shape[1:])[pages] = k
    v_pages.view(-1, *v.shape[1:])[pages] = v
    return q


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    half = cos.shape[-1]
    first, second, rest = x[..., :half].double(), x[..., half : 2 * half].double(), x[..., 2 * half :]
    turned = torch.cat((first * cos - second * sin, second * cos + first * sin), -1)
    return torch.cat((turned.to(x.dtype), rest), -1)


def _page_rows(page_table: torch.Tensor, cache_positions: torch.Tensor) -> torch.Tensor:
    positions = cache_positions.long().view(page_table.shape[0], -1)
    return (page_table.long().gather(1, positions // PAGE) * PAGE + positions % PAGE).reshape(-1)


def paged_attention(q, k_pages, v_pages, page_table, cache_positions, scale):
    requests = page_table.shape[0]
    positions = cache_positions.view(requests, -1)
    columns = positions.shape[1]
    out = torch.empty(q.shape, dtype=q.dtype)
    for b in range(requests):
        visible = int(positions[b, -1]) + 1
        pages = page_table[b, : (visible + PAGE - 1) // PAGE].long()
        keys = k_pages[pages].flatten(0, 1)[:visible].transpose(0, 1).float()
        values = v_pages[pages].flatten(0, 1)[:visible].transpose(0, 1).float()
        queries = q[b * columns : (b + 1) * columns].transpose(0, 1).float()
        mask = torch.arange(visible) <= positions[b, :, None]
        result = F.scaled_dot_product_attention(
            queries[None], keys[None], values[None], attn_mask=mask, scale=scale, enable_gqa=True
        )
        out[b * columns : (b + 1) * columns] = result[0].transpose(0, 1).to(q.dtype)
    return out


def sigmoid_mul(a: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    return (a.float() * gate.reshape(a.shape).float().sigmoid()).to(a.dtype)


def causal_conv(u, weight, conv_states, source_slots, target_slots):
    taps, requests = weight.shape[0], source_slots.numel()
    columns = u.shape[0] // requests
    history = conv_states[source_slots.long()]
    full = torch.cat((history, u.view(requests, columns, -1)), 1)
    conv_states[target_slots.long()] = full[:, columns:]
    out = sum(full[:, j : j + columns].float() * weight[j].float() for j in range(taps))
    return F.silu(out).to(u.dtype).flatten(0, 1)


def gdn_gating(x: torch.Tensor, a: Matrix, b: Matrix, a_log: torch.Tensor, dt_bias: torch.Tensor):
    wide = x.float()
    decay = -torch.exp(a_log) * F.softplus(wide @ decode_matrix(a).T + dt_bias)
    return decay, torch.sigmoid(wide @ decode_matrix(b).T)


def gated_delta_net(q, k, v, g, beta, states, source_slots, target_slots):
    requests = source_slots.numel()
    columns, heads = v.shape[0] // requests, v.shape[1]
    group = heads // q.shape[1]
    q = _l2(q).repeat_interleave(group, 1) * q.shape[-1] ** -0.5
    k = _l2(k).repeat_interleave(group, 1)
    out = torch.empty(v.shape, dtype=v.dtype)
    for b in range(requests):
        state = states[int(source_slots[b])].clone()
        for t in range(b * columns, (b + 1) * columns):
            state *= g[t].exp()[:, None, None]
            error = beta[t][:, None] * (v[t].float() - (state @ k[t][:, :, None])[..., 0])
            state += error[:, :, None] * k[t][:, None, :]
            out[t] = (state @ q[t][:, :, None])[..., 0].to(v.dtype)
        states[int(target_slots[b])] = state
    return out


def _l2(x: torch.Tensor) -> torch.Tensor:
    wide = x.float()
    return wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + 1e-6)


def sample(
    logits: torch.Tensor,
    params: Sequence[SamplingParams],
    positions: Sequence[int],
    purpose: int,
    counts: torch.Tensor | None,
) -> list[int]:
    return [
        _sample_row(logits[b], params[b], positions[b], purpose, None if counts is None else counts[b])
        for b in range(logits.shape[0])
    ]


def _sample_row(scores, params: SamplingParams, position: int, purpose: int, counts) -> int:
    if counts is not None and (params.presence_penalty or params.frequency_penalty):
        scores = scores - params.presence_penalty * (counts > 0) - params.frequency_penalty * counts
    limit = 1 if params.temperature <= 0 else min(params.candidates, scores.numel())
    boundary = torch.topk(scores, limit).values[-1]
    ids = torch.nonzero(scores >= boundary)[:, 0]
    order = torch.argsort(scores[ids], descending=True, stable=True)[:limit]
    best, ids = scores[ids[order]].double(), ids[order].tolist()
    if not bool(torch.isfinite(best[0])):
        return -1
    if params.temperature <= 0:
        return ids[0]
    weights = torch.exp((best - best[0]) / params.temperature).tolist()
    total, mass, kept = sum(weights), 0.0, 0
    for weight in weights:
        if kept and params.min_p > 0 and weight < params.min_p * weights[0]:
            break
        mass += weight
        kept += 1
        if params.top_p < 1 and mass >= params.top_p * total:
            break
    goal = uniform(params.seed, position, purpose) * mass
    reached = 0.0
    for token, weight in zip(ids[:kept], weights, strict=False):
        reached += weight
        if reached > goal:
            return token
    return ids[kept - 1]
