"""Gated delta rule: the recurrence of linear attention, and its control values.

Per value head, key head `j // (Hv / Hk)`, state `S [Dv, Dk]` float32, columns in order:
    k, q = l2norm(k), l2norm(q);  S *= exp(g);  u = beta (v - S k);  S += u k^T;  o = S q / sqrt(Dk)
The first `64 * (W // 64)` columns of a request go through the chunked form, the rest through the recurrence.
"""

from __future__ import annotations

import torch

from ninfer.ops.dispatch import backend
from ninfer.ops.weights import Matrix

CHUNK = 64
L2_EPS = 1e-6


def gdn_gating(
    x: torch.Tensor, a: Matrix, b: Matrix, a_log: torch.Tensor, dt_bias: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """`g = -exp(a_log) softplus(x A^T + dt_bias)` and `beta = sigmoid(x B^T)`: float32 `[T, Hv]`,
    unrounded."""
    return backend(x.device.type).gdn_gating(x, a, b, a_log, dt_bias)


def gated_delta_net(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    states: torch.Tensor,
    source_slots: torch.Tensor,
    target_slots: torch.Tensor,
) -> torch.Tensor:
    """The outputs `[T, Hv, Dv]` of T columns, and the advanced states.

    `q`, `k` `[T, Hk, Dk]` and `v [T, Hv, Dv]` are raw (rows may be strided), `g`, `beta` float32 `[T, Hv]`,
    `states` float32 `[slots, Hv, Dv, Dk]`; request b starts from `source_slots[b]` and leaves its state in
    `target_slots[b]` (int32 `[B]`, may be equal; targets are distinct).
    """
    return backend(q.device.type).gated_delta_net(q, k, v, g, beta, states, source_slots, target_slots)
