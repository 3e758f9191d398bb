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
_VALUES = (*_MAGNITUDES, *(-value for value in _MAGNITUDES))


def divisor(absmax: float, method: str) -> float:
    """The parent's divisor from the largest absolute value over all its rows, an exact float32."""
    if method not in _TARGETS:
        raise FormatError(f"format 'nvfp4' has no encoder '{method}' (it has: {', '.join(_TARGETS)})")
    if not math.isfinite(absmax) or absmax < 0:
        raise FormatError(f"'{method}' cannot encode a non-finite value (largest absolute value: {absmax})")
    if absmax == 0:
        return 1.0
    quotient = _SCALE_MAX * min(_TARGETS[method]) / absmax
    found = torch.tensor(quotient, dtype=torch.float64).float().item()
    if not math.isfinite(found) or found <= 0:
        raise FormatError(
            f"'{method}' needs a positive finite FP32 divisor, but the largest absolute value {absmax:g} "
            f"gives {quotient:g}"
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
    chunks = list(row_chunks(rows, columns, device))

    def grouped(begin: int, end: int) -> torch.Tensor:
        return values[begin:end].to(torch.float32).reshape(end - begin, -1, GROUP)

    largest = torch.cat([grouped(begin, end).abs().amax(-1) for begin, end in chunks])
    require_finite(largest, method)
    scales = [_scale_words(largest, target, d) for target in _TARGETS[method]]
    steps = [_steps(words, d) for words in scales]
    codes = torch.empty(rows, columns // 2, dtype=torch.uint8, device=device)
    for begin, end in chunks:
        x = grouped(begin, end)
        magnitude = x.abs()
        if len(steps) > 1:
            _choose(magnitude, [words[begin:end] for words in scales], [step[begin:end] for step in steps])
        code = _codes(x, _normalized(magnitude, steps[0][begin:end]))
        pairs = code.to(torch.uint8).reshape(end - begin, columns).view(torch.int16)
        codes[begin:end] = (pairs & 0x0F) | ((pairs >> 4) & 0xF0)
    return Planes(codes, scales[0], divisor)


def _scale_words(largest: torch.Tensor, target: float, d: torch.Tensor) -> torch.Tensor:
    """uint8 E4M3 words `[rows, groups]` that put the largest magnitude of a group near `target`."""
    raw = (largest * d / torch.full_like(d, target)).clamp_(max=_SCALE_MAX)
    return raw.to(torch.float8_e4m3fn).view(torch.uint8)


def _steps(scales: torch.Tensor, d: torch.Tensor) -> torch.Tensor:
    """float32 `[rows, groups]`, the value of magnitude 1; infinite where the scale is zero."""
    value = e4m3(scales)
    return torch.where(value == 0, math.inf, value / d)


def _choose(magnitude: torch.Tensor, scales: list[torch.Tensor], steps: list[torch.Tensor]) -> None:
    """Put into the first scales and steps those of the target with the least squared error; first wins."""
    least = _error(magnitude, steps[0])
    for words, step in zip(scales[1:], steps[1:], strict=True):
        error = _error(magnitude, step)
        better = error < least
        least = torch.where(better, error, least)
        scales[0].copy_(torch.where(better, words, scales[0]))
        steps[0].copy_(torch.where(better, step, steps[0]))


def _error(magnitude: torch.Tensor, step: torch.Tensor) -> torch.Tensor:
    """float32 `[rows, groups]`: squared reconstruction errors; a zero scale reconstructs zeros."""
    rounded, power = _binade(_normalized(magnitude, step))
    factor = torch.where(torch.isinf(step), 0.0, step).unsqueeze(-1)
    return rounded.sub_(power).mul_(factor).sub_(magnitude).square_().sum(-1)


def _normalized(magnitude: torch.Tensor, step: torch.Tensor) -> torch.Tensor:
    """min(|x| / step, 6); 0 where the scale is zero."""
    return (magnitude / step.unsqueeze(-1)).clamp_(max=6.0)


def _binade(m: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`(m + p * 2^22, p * 2^22)` for m in [0, 6]: the addition itself rounds to E2M1, ties to the even code.

    p = the power of two at or below max(m, 1), so that the sum's last place is one step of E2M1's binade. The
    difference of the two is the rounded magnitude; the sum's low bits count steps, its exponent the binade.
    """
    power = m.clamp(min=1.0).view(torch.int32).bitwise_and_(0x7F800000).view(torch.float32).mul_(2.0**22)
    return m.add_(power), power


def _codes(x: torch.Tensor, m: torch.Tensor) -> torch.Tensor:
    """int32 E2M1 codes of the magnitudes `m` with the signs of `x`; no code is a negative zero."""
    bits = _binade(m)[0].view(torch.int32)
    binade = (bits >> 22).sub_(2 * (127 + 22))
    code = bits.bitwise_and_(7).add_(binade)
    sign = (x.view(torch.int32) >> 28).bitwise_and_(code + 7).bitwise_and_(8)
    return code.bitwise_or_(sign)


def decode(planes: Planes) -> torch.Tensor:
    """float32 `[rows, K]`; the division by the divisor is the only rounding."""
    if planes.scales is None or planes.divisor is None:
        raise FormatError("nvfp4 needs a scale plane and a divisor")
    packed = planes.codes
    device = packed.device
    # One table entry per byte holds its two values as one 64-bit word.
    pairs = torch.tensor([(_VALUES[b & 15], _VALUES[b >> 4]) for b in range(256)], device=device)
    words = pairs.view(torch.int64).reshape(-1).index_select(0, packed.reshape(-1).to(torch.int32))
    scale = e4m3(planes.scales.view(torch.uint8)).unsqueeze(-1)
    values = words.view(torch.float32).reshape(len(packed), -1, GROUP).mul_(scale)
    d = torch.tensor(planes.divisor, dtype=torch.float32, device=device)
    return values.div_(d).reshape(len(packed), -1)
