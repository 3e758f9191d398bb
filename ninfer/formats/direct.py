"""Direct formats: a word is the value."""

from __future__ import annotations

import torch

from ninfer.errors import FormatError
from ninfer.formats.planes import Planes
from ninfer.formats.registry import Format


def dtype(format: Format) -> torch.dtype:
    """The PyTorch dtype of a direct format's word."""
    return getattr(torch, format.dtype)


def encode(format: Format, values: torch.Tensor) -> Planes:
    """`cast_direct`: words of the target dtype, round to nearest even; equal dtypes pass bit for bit.

    To int32, values must be whole numbers in range. To fp16, a finite value must stay finite.
    """
    target = dtype(format)
    if values.dtype == target:
        return Planes(values)
    if target == torch.int32:
        return Planes(_integers(values))
    if not values.is_floating_point():
        raise FormatError(f"'cast_direct' to {format.name} needs floating-point values, got {values.dtype}")
    narrow = values.to(torch.float32)
    words = narrow.to(target)
    if target == torch.float16 and bool((torch.isinf(words) & torch.isfinite(narrow)).any()):
        raise FormatError(
            f"'cast_direct' to fp16: the value {float(narrow.abs().max()):g} is above 65504; use bf16 or fp32"
        )
    return Planes(words)


def _integers(values: torch.Tensor) -> torch.Tensor:
    if values.is_complex() or values.dtype == torch.bool:
        raise FormatError(f"'cast_direct' to int32 needs numbers, got {values.dtype}")
    wide = values.to(torch.float64) if values.is_floating_point() else values.to(torch.int64)
    outside = (wide < -(2**31)) | (wide >= 2**31)
    if values.is_floating_point():
        outside |= wide != wide.trunc()
    if bool(outside.any()):
        worst = wide[outside].reshape(-1)[0].item()
        raise FormatError(f"'cast_direct' to int32: {worst} is not a whole number in [-2^31, 2^31)")
    return wide.to(torch.int32)
