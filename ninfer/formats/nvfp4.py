"""NVFP4: E2M1 codes, an E4M3FN scale per 16 of K, one FP32 divisor per parent: W = e2m1 * e4m3 / divisor."""

from __future__ import annotations

import math

import torch

from ninfer.errors import FormatError
from ninfer.formats.chunks import require_finite, row_chunks
from ninfer.formats.fp8 import e4m3
from ninfer.formats.planes import Planes

GROUP = 16
_TARGETS = {"nvfp4_absmax": (6.0,), "nvfp4_mse": (6.0, 5.5, 5.0, 4.5, 4.0)}
_SCALE_MAX = 448.0
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def divisor(absmax: float, method: str) -> float:
    """The parent's divisor from the largest absolute value over all its rows, an exact float32."""
    if method not in _TARGETS:
        raise FormatError(f"format 'nvfp4' has no encoder '{method}' (it has: {', '.join(_TARGETS)})")
    if not math.isfinite(absmax) or absmax < 0:
        raise FormatError(f"'{method}' cannot encode a non-finite value (largest absolute value: {absmax})")
    if absmax == 0:
        return 1.0
    found = torch.tensor(_SCALE_MAX * min(_TARGETS[method]) / absmax, dtype=torch.float64).float().item()
    if not math.isfinite(found) or found <= 0:
        raise FormatError(
            f"'{method}' needs a positive finite FP32 divisor, but the largest absolute value {absmax:g} "
            f"gives {found:g}"
        )
    return found


def encode(method: str, values: torch.Tensor, divisor: float) -> Planes:
    """Rows of a parent whose divisor is known; K must be a multiple of 16."""
    rows, columns = values.shape
    if columns % GROUP:
        raise FormatError(f"'{method}' needs K to be a multiple of {GROUP}, got {columns}")
    device = values.device
    d = torch.tensor(divisor, dtype=torch.float32, device=device)
    if not (math.isfinite(divisor) and divisor > 0 and d.item() == divisor):
        raise FormatError(f"the NVFP4 divisor must be a positive finite FP32 number, got {divisor}")
    codes = torch.empty(rows, columns // 2, dtype=torch.uint8, device=device)
    scales = torch.empty(rows, columns // GROUP, dtype=torch.uint8, device=device)
    for begin, end in row_chunks(rows, columns, device):
        x = values[begin:end].to(torch.float32).reshape(end - begin, -1, GROUP)
        magnitude = x.abs()
        largest = magnitude.amax(-1)
        require_finite(largest, method, begin)
        scale = _scale(method, magnitude, largest, d)
        m = _normalized(magnitude, scale, d)
        code = _code(m)
        code |= (x < 0).logical_and_(code != 0).to(torch.uint8) << 3
        pairs = code.reshape(end - begin, columns).view(torch.int16)
        codes[begin:end] = (pairs & 0x0F) | ((pairs >> 4) & 0xF0)
        scales[begin:end] = scale
    return Planes(codes, scales, divisor)


def _scale(method: str, magnitude: torch.Tensor, largest: torch.Tensor, d: torch.Tensor) -> torch.Tensor:
    """E4M3 scale words of all groups: of the targets, the one with the least squared error, first wins."""
    best: torch.Tensor | None = None
    least = largest
    for target in _TARGETS[method]:
        raw = (largest * d / torch.tensor(target, device=d.device)).clamp_(max=_SCALE_MAX)
        scale = raw.to(torch.float8_e4m3fn).view(torch.uint8)
        if len(_TARGETS[method]) == 1:
            return scale
        step = (e4m3(scale) / d).unsqueeze(-1)
        m = _normalized(magnitude, scale, d)
        error = (_round(m)[0].mul_(step).sub_(magnitude)).square_().sum(-1)
        if best is None:
            best, least = scale, error
        else:
            better = error < least
            best, least = torch.where(better, scale, best), torch.where(better, error, least)
    assert best is not None
    return best


def _normalized(magnitude: torch.Tensor, scale: torch.Tensor, d: torch.Tensor) -> torch.Tensor:
    """min(|x| / step, 6), 0 where the scale is zero."""
    step = e4m3(scale) / d
    step = torch.where(scale == 0, math.inf, step)
    return (magnitude / step.unsqueeze(-1)).clamp_(max=6.0)


def _round(m: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """E2M1 magnitude nearest to m in [0, 6], ties to the even code, and `m + p * 2^22`.

    p = the power of two at or below max(m, 1), so that the sum's last place is one step of E2M1's binade
    and the addition itself rounds: its low bits count steps, its exponent says which binade.
    """
    power = m.clamp(min=1.0).view(torch.int32).bitwise_and_(0x7F800000).view(torch.float32).mul_(2.0**22)
    shifted = m + power
    return shifted - power, shifted


def _code(m: torch.Tensor) -> torch.Tensor:
    """E2M1 magnitude codes 0..7 as uint8: steps + 2 * binade."""
    bits = _round(m)[1].view(torch.int32)
    return (bits & 7).add_((bits >> 22).sub_(2 * (127 + 22))).to(torch.uint8)


def decode(planes: Planes) -> torch.Tensor:
    """float32 `[rows, K]`; the division by the divisor is the only rounding."""
    if planes.scales is None or planes.divisor is None:
        raise FormatError("nvfp4 needs a scale plane and a divisor")
    packed = planes.codes
    table = torch.tensor(
        (*_MAGNITUDES, *(-value for value in _MAGNITUDES)), dtype=torch.float32, device=packed.device
    )
    codes = torch.stack((packed & 15, packed >> 4), -1).reshape(len(packed), -1, GROUP)
    values = table[codes.to(torch.int64)] * e4m3(planes.scales.view(torch.uint8)).unsqueeze(-1)
    d = torch.tensor(planes.divisor, dtype=torch.float32, device=packed.device)
    return (values / d).reshape(len(packed), -1)
