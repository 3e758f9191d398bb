"""Exact codes of quantized keys and values: the definition that every kernel reproduces bit by bit.

Float32 arithmetic, each operation rounded to nearest even: divisions are divisions, and no product is fused
with a sum. A vector is rotated (where its side says so), then cut into groups; `a` is a group's largest
magnitude.

int8   s = f16(a / 127); code = clamp(rne(x * f32(1 / s)), -127, 127)
fp8    s = f16(clamp(a / 448, 2^-24, 65504)); code = e4m3(x * f32(1 / s)), saturating at 448
nvfp4  s = e4m3(clamp(a / 6, 2^-9, 448)); code = e2m1(x / s), saturating at 6

A group of zeros has zero scale and zero codes, and so has an int8 group whose scale rounds to zero; elsewhere
a zero code of FP8 and NVFP4 keeps the sign of its number. Decoding multiplies code and scale, exactly.

A cache never holds a NaN or an infinity: what is to be coded counts as 0 where it is NaN and as the largest
finite float32 where it is infinite, and an int8 scale saturates at 65504.
"""

from __future__ import annotations

import math

import torch

from ninfer.errors import FormatError
from ninfer.formats.fp8 import e4m3
from ninfer.formats.kv import INT8_GROUP, NVFP4_GROUP, KvCode, KvSide

_F16_MAX, _F16_LEAST = 65504.0, 2.0**-24
_E4M3_MAX, _E4M3_LEAST, _E2M1_MAX = 448.0, 2.0**-9, 6.0
_FINITE = float(torch.finfo(torch.float32).max)
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def plane_types(code: KvCode, activations: torch.dtype) -> tuple[torch.dtype, torch.dtype | None]:
    """Types of the code plane and of the scale plane."""
    if code is KvCode.PLAIN:
        return activations, None
    if code is KvCode.INT8:
        return torch.int8, torch.float16
    return torch.uint8, torch.float16 if code is KvCode.FP8 else torch.uint8


def rotation_factor(width: int) -> float:
    """f32(1 / sqrt(width)), for powers of two."""
    return float(torch.tensor(1.0 / math.sqrt(width), dtype=torch.float64).float())


def rotate(x: torch.Tensor) -> torch.Tensor:
    """The orthonormal Hadamard transform of the last dimension, float32; its own inverse up to rounding.

    Butterflies of stride 1, 2, 4, ..., then one multiplication by f32(1 / sqrt(D)).
    """
    width = x.shape[-1]
    if width & (width - 1):
        raise FormatError(f"only vectors of a power of two can be rotated, got {width}")
    y = x.float()
    stride = 1
    while stride < width:
        pairs = y.reshape(*x.shape[:-1], width // (2 * stride), 2, stride)
        a, b = pairs[..., 0, :], pairs[..., 1, :]
        y = torch.stack((a + b, a - b), -2).reshape(x.shape)
        stride *= 2
    return y * rotation_factor(width)


def encode(x: torch.Tensor, side: KvSide) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Vectors `[..., D]` as their planes `(codes [..., C], scales [..., S] or None)` of `KvCode`."""
    if side.code is KvCode.PLAIN:
        return x, None
    y = x.float()
    if side.rotation(x.shape[-1]):
        y = rotate(y)
    y = torch.nan_to_num(y, nan=0.0, posinf=_FINITE, neginf=-_FINITE)
    return {KvCode.INT8: _int8, KvCode.FP8: _fp8, KvCode.NVFP4: _nvfp4}[side.code](y)


def decode(codes: torch.Tensor, scales: torch.Tensor | None, side: KvSide) -> torch.Tensor:
    """float32 `[..., D]` of planes as `encode` makes them; a rotated side stays rotated."""
    if scales is None:
        return codes.float()
    if side.code is KvCode.INT8:
        return codes.float() * _each(scales.float(), INT8_GROUP, codes.shape[-1])
    if side.code is KvCode.FP8:
        return e4m3(codes) * scales.float()
    table = torch.tensor([*_E2M1, *(-m for m in _E2M1)], device=codes.device)
    nibbles = torch.stack((codes & 15, codes >> 4), -1).flatten(-2)
    return table[nibbles.int()] * _each(e4m3(scales), NVFP4_GROUP, nibbles.shape[-1])


def _each(per_group: torch.Tensor, group: int, width: int) -> torch.Tensor:
    return per_group.repeat_interleave(group, -1)[..., :width]


def _over(a: torch.Tensor, divisor: float) -> torch.Tensor:
    """`a / divisor` as a true division: by a Python number CUDA would multiply with the reciprocal."""
    return a / torch.full_like(a, divisor)


def _inverse(scales: torch.Tensor) -> torch.Tensor:
    s = scales.float()
    return torch.ones_like(s) / s


def _int8(y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    width = y.shape[-1]
    a = torch.stack([part.abs().amax(-1) for part in y.split(INT8_GROUP, -1)], -1)
    scales = _over(a, 127.0).clamp(max=_F16_MAX).half()
    inverse = torch.where(scales == 0, 0.0, _inverse(scales))
    codes = (y * _each(inverse, INT8_GROUP, width)).round().clamp(-127, 127)
    return codes.to(torch.int8), scales


def _fp8(y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    a = y.abs().amax(-1, keepdim=True)
    scales = _over(a, _E4M3_MAX).clamp(_F16_LEAST, _F16_MAX).half()
    codes = _e4m3_codes(y * _inverse(scales))
    return torch.where(a == 0, 0, codes), torch.where(a == 0, 0.0, scales)


def _nvfp4(y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    groups = y.unflatten(-1, (-1, NVFP4_GROUP))
    a = groups.abs().amax(-1)
    zero = a == 0
    scales = _e4m3_codes(_over(a, _E2M1_MAX).clamp(_E4M3_LEAST, _E4M3_MAX))
    x = groups / e4m3(scales)[..., None]
    low = x.abs().clamp(max=_E2M1_MAX)
    binade, steps = _round(low, 0, 1)
    sign = torch.where(x.view(torch.int32) < 0, 8, 0)
    codes = torch.where(zero[..., None], 0, (2 * binade + steps) | sign).to(torch.uint8).flatten(-2)
    packed = codes[..., 0::2] | codes[..., 1::2] << 4
    return packed, torch.where(zero, 0, scales)


def _e4m3_codes(x: torch.Tensor) -> torch.Tensor:
    """uint8 E4M3 words of float32, to nearest even, saturating; a zero keeps its sign."""
    binade, steps = _round(x.abs().clamp(max=_E4M3_MAX), -6, 3)
    sign = torch.where(x.view(torch.int32) < 0, 128, 0)
    return ((8 * binade + steps) | sign).to(torch.uint8)


def _round(m: torch.Tensor, least: int, bits: int) -> tuple[torch.Tensor, torch.Tensor]:
    """`(e - least, n)` with m close to `n 2^(e - bits)`, 2^e the power of two at or below max(m, 2^least).

    Adding `2^(e - bits + 23)` rounds m to a multiple of `2^(e - bits)`, ties to even, and leaves n in the
    sum's lowest places.
    """
    power = m.clamp(min=2.0**least).view(torch.int32) & 0x7F800000
    whole = m + power.view(torch.float32) * 2.0 ** (23 - bits)
    return (power >> 23) - (127 + least), whole.view(torch.int32) & (4 << bits) - 1
