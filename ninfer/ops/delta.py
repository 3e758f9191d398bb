"""Gated delta rule: the recurrence of linear attention, and its control values.

Per value head, key head `j // (Hv / Hk)`, state `S [Dv, Dk]` float32, columns in order:
    k, q = l2norm(k), l2norm(q);  S *= exp(g);  u = beta (v - S k);  S += u k^T;  o = S q / sqrt(Dk)
The first `64 * (W // 64)` columns of a request go through the chunked form, the rest through the recurrence.

A state cannot be rolled back. Columns that may be rejected are therefore run with records: the outputs are
those of a direct call, no slot is written, and `fold_delta_net` later advances the state by as many of the
columns as were accepted, bit for bit as if only they had been run.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ninfer.ops.dispatch import backend
from ninfer.ops.weights import Matrix

CHUNK = 64
L2_EPS = 1e-6
RECORD_COLUMNS = 16
"""The most columns of a request that can be recorded."""


@dataclass(frozen=True, eq=False)
class DeltaRecords:
    """What columns advance a state by, with room for N columns; contiguous.

    `k [N, Hk, Dk]`, `v [N, Hv, Dv]` raw in the activation type, `g`, `beta` float32 `[N, Hv]`. Column t of
    request b of B stands in row `b * (N // B) + t`.
    """

    k: torch.Tensor
    v: torch.Tensor
    g: torch.Tensor
    beta: torch.Tensor


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
    records: DeltaRecords | None = None,
) -> torch.Tensor:
    """The outputs `[T, Hv, Dv]` of T columns, and the advanced states.

    `q`, `k` `[T, Hk, Dk]` and `v [T, Hv, Dv]` are raw (rows may be strided), `g`, `beta` float32 `[T, Hv]`,
    `states` float32 `[slots, Hv, Dv, Dk]`; request b starts from `source_slots[b]` (-1: from zeros) and
    leaves its state in `target_slots[b]` (int32 `[B]`, may be equal; targets are distinct).

    With `records` up to 16 columns a request are recorded instead, and no slot is written.
    """
    return backend(q.device.type).gated_delta_net(
        q, k, v, g, beta, states, source_slots, target_slots, records
    )


def fold_delta_net(
    records: DeltaRecords,
    counts: torch.Tensor,
    states: torch.Tensor,
    source_slots: torch.Tensor,
    target_slots: torch.Tensor,
) -> None:
    """Advance states by the first `counts[b]` (int32 `[B]`) recorded columns of each request.

    The requests are those of the recording call, in its order; slots as in `gated_delta_net`. Where a count
    is 0 the target stays as it is. Records past a count are not read.
    """
    backend(states.device.type).fold_delta_net(records, counts, states, source_slots, target_slots)
