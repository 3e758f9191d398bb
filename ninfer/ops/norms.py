"""Root-mean-square norms, evaluated in float32 and rounded once to the type of the input.

`rms_norm`: `y = x / sqrt(mean(x^2) + eps) * w`, or `* (1 + w)` with `unit_offset`.
`gated_rms_norm`: `y = o / sqrt(mean(o^2) + eps) * w * silu(z)`, per head.
"""

from __future__ import annotations

import torch

from ninfer.ops.dispatch import backend


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, unit_offset: bool) -> torch.Tensor:
    """Norm over the last axis of `x [..., D]` (bf16 or float32, contiguous); `weight [D]` bf16 or float32."""
    return backend(x.device.type).rms_norm(x, weight, eps, unit_offset)


def gated_rms_norm(
    o: torch.Tensor,
    z: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    head_order: torch.Tensor | None = None,
) -> torch.Tensor:
    """Plain norm of `o [T, Hv, Dv]` over `Dv`, times `weight [Dv]` and `silu(z)`; `z` has o's elements.

    With `head_order` (int32 `[Hv]`) head j of the result is that of head `head_order[j]`.
    """
    return backend(o.device.type).gated_rms_norm(o, z, weight, eps, head_order)
