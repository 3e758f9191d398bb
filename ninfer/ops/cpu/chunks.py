"""The gated delta rule in chunks of 64 columns, as matrix products (float32 throughout).

Inside a chunk, with `G` the running sum of g, the recurrence is the unit lower triangular system `(I + A) X =
rhs`, `A[i, j] = beta_i (k_i.k_j) exp(G_i - G_j)` for j < i; chunks then follow one another through the state.
All chunks' systems are solved at once, only the state's path is sequential. Roofline: about 0.2 MFLOP a
column and head of width 128.
"""

from __future__ import annotations

import torch

from ninfer.ops.delta import CHUNK, L2_EPS


def run_chunks(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One request's whole chunks: raw `q`, `k` `[T, Hk, Dk]`, `v [T, Hv, Dv]`, `g`, `beta` `[T, Hv]` with T a
    multiple of 64, `state [Hv, Dv, Dk]`. Returns float32 outputs `[T, Hv, Dv]` and the new state."""
    columns, k_heads, width = q.shape
    v_heads, v_width = v.shape[1:]
    count, group = columns // CHUNK, v_heads // k_heads
    q, k = (_chunks(_unit(x)) for x in (q, k))  # [Hk, n, C, Dk]
    q = q * width**-0.5
    k_dot_k, q_dot_k = k @ k.mT, q @ k.mT
    q, k, k_dot_k, q_dot_k = (x.repeat_interleave(group, 0) for x in (q, k, k_dot_k, q_dot_k))
    values = _chunks(v.float())  # [Hv, n, C, Dv]
    decay = g.view(count, CHUNK, v_heads).permute(2, 0, 1).cumsum(-1)  # [Hv, n, C]
    strength = beta.view(count, CHUNK, v_heads).permute(2, 0, 1)[..., None]
    # exp(G_i - G_j) for j <= i; the difference is masked first, since it grows the other way.
    lower = torch.ones(CHUNK, CHUNK, dtype=torch.bool).tril()
    ratio = (decay[..., :, None] - decay[..., None, :]).masked_fill(~lower, -torch.inf).exp()
    system = (k_dot_k * ratio * strength).tril(-1)
    grown = decay.exp()[..., None]
    right = torch.cat((values * strength, k * (strength * grown)), -1)
    solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    own, carried = solved.split((v_width, width), -1)
    scores = q_dot_k * ratio
    queries = q * grown
    last = decay[..., -1:]
    keys = k * (last - decay).exp()[..., None]
    shrink = last.exp()[..., None]
    out = torch.empty(v_heads, count, CHUNK, v_width)
    memory = state.mT.contiguous()  # [Hv, Dk, Dv]
    for n in range(count):
        fresh = torch.baddbmm(own[:, n], carried[:, n], memory, alpha=-1)
        torch.baddbmm(queries[:, n] @ memory, scores[:, n], fresh, out=out[:, n])
        memory = torch.baddbmm(memory * shrink[:, n], keys[:, n].mT, fresh)
    return out.permute(1, 2, 0, 3).reshape(columns, v_heads, v_width), memory.mT


def _unit(x: torch.Tensor) -> torch.Tensor:
    wide = x.float()
    return wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + L2_EPS)


def _chunks(x: torch.Tensor) -> torch.Tensor:
    """`[T, H, D]` as contiguous `[H, n, C, D]`."""
    return x.view(-1, CHUNK, *x.shape[1:]).permute(2, 0, 1, 3).contiguous()
