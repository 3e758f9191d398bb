"""Causal depthwise convolution with SiLU, carrying its history in slots.

`out[t, c] = round(silu(sum_j weight[j, c] * u[t - taps + 1 + j, c]))`, where columns before the call come
from the request's source slot (oldest first). The target slot receives the last `taps - 1` raw columns, bit
for bit.
"""

from __future__ import annotations

import torch

from ninfer.ops.dispatch import backend


def causal_conv(
    u: torch.Tensor,
    weight: torch.Tensor,
    conv_states: torch.Tensor,
    source_slots: torch.Tensor,
    target_slots: torch.Tensor,
    records: torch.Tensor | None = None,
) -> torch.Tensor:
    """`u [T, C]` (rows may be strided), `weight [taps, C]`, `conv_states [slots, taps - 1, C]` -> `[T, C]`.

    Slots are int32 `[B]`; source -1 is a history of zeros; source and target of a request may be equal,
    targets are distinct. With `records [N, C]` the columns are recorded (column t of request b in row
    `b * (N // B) + t`) and no slot is written.
    """
    return backend(u.device.type).causal_conv(u, weight, conv_states, source_slots, target_slots, records)


def fold_conv(
    records: torch.Tensor,
    counts: torch.Tensor,
    conv_states: torch.Tensor,
    source_slots: torch.Tensor,
    target_slots: torch.Tensor,
) -> None:
    """Advance histories by the first `counts[b]` (int32 `[B]`) recorded columns; see `fold_delta_net`."""
    backend(conv_states.device.type).fold_conv(records, counts, conv_states, source_slots, target_slots)
