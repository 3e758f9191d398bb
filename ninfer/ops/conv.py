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
) -> torch.Tensor:
    """`u [T, C]` (rows may be strided), `weight [taps, C]`, `conv_states [slots, taps - 1, C]` -> `[T, C]`.

    Slots are int32 `[B]`; source and target of a request may be equal, targets are distinct.
    """
    return backend(u.device.type).causal_conv(u, weight, conv_states, source_slots, target_slots)
