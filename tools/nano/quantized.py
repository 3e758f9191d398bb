"""NVFP4 weights during training, with a straight-through gradient.

Grid and scales are those of the format (16 weights share an E4M3 scale; E2M1 codes), scales by the largest
magnitude.
"""

from __future__ import annotations

import torch

from tools.nano.model import MATRICES, Parameters

_GROUP = 16
_LARGEST, _SCALE = 6.0, 448.0


def nvfp4(weight: torch.Tensor) -> torch.Tensor:
    """The nearest NVFP4 values of a stack `[n, rows, columns]`; the gradient passes unchanged."""
    groups = weight.detach().unflatten(-1, (-1, _GROUP))
    divisor = _SCALE * _LARGEST / groups.abs().amax((1, 2, 3), keepdim=True).clamp(min=1e-12)
    scale = (groups.abs().amax(-1, keepdim=True) * divisor / _LARGEST).to(
        torch.float8_e4m3fn
    ).float() / divisor
    magnitude = (groups.abs() / scale.clamp(min=1e-20)).clamp(max=_LARGEST)
    step = torch.where(magnitude < 2, 0.5, torch.where(magnitude < 4, 1.0, 2.0))
    rounded = (magnitude / step).round() * step * scale * groups.sign()
    return weight + (rounded.flatten(-2) - weight).detach()


def with_nvfp4(parameters: Parameters) -> Parameters:
    """The parameters with all matrices in NVFP4 but the MTP layer's stem, which no recipe quantizes so."""
    return {
        name: nvfp4(value) if name in MATRICES and name != "mtp.fc" else value
        for name, value in parameters.items()
    }
