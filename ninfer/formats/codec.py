"""Encode and decode by format: one entry for every kind."""

from __future__ import annotations

import torch

from ninfer.errors import FormatError
from ninfer.formats import direct, fp8, ggml, grouped, nvfp4
from ninfer.formats.planes import Planes
from ninfer.formats.registry import Format, get


def encode(
    format: str | Format, method: str, values: torch.Tensor, *, divisor: float | None = None
) -> Planes:
    """Encode a matrix, or a chunk of its rows.

    values: floating `[rows, K]`, rounded to float32 first (`cast_direct`: any shape; words already in the
    target dtype pass bit for bit). divisor: nvfp4 only, from `nvfp4_divisor` over the whole parent.
    Raises FormatError on a method that the format doesn't have, a non-finite value or an impossible shape.
    """
    format = get(format) if isinstance(format, str) else format
    if method not in format.methods:
        known = ", ".join(format.methods) or "none, it can only be imported"
        raise FormatError(f"format '{format.name}' has no encoder '{method}' (it has: {known})")
    if format.kind == "direct":
        return direct.encode(format, values)
    if values.dim() != 2 or 0 in values.shape:
        raise FormatError(f"'{method}' encodes a matrix [rows, K], got shape {list(values.shape)}")
    if not values.is_floating_point():
        raise FormatError(f"'{method}' encodes floating-point values, got {values.dtype}")
    if format.kind == "grouped":
        return grouped.encode(format, values)
    if format.kind == "row_float":
        return fp8.encode_rows(values)
    if divisor is None:
        raise FormatError(f"'{method}' needs the divisor of the whole parent (formats.nvfp4_divisor)")
    return nvfp4.encode(method, values, divisor)


def decode(format: str | Format, planes: Planes) -> torch.Tensor:
    """The values of the planes: float32 `[rows, K]` (direct formats: float32 of the codes' shape)."""
    format = get(format) if isinstance(format, str) else format
    if format.kind == "direct":
        return planes.codes.to(torch.float32)
    if format.kind == "grouped":
        return grouped.decode(format, planes)
    if format.kind == "block_float":
        return nvfp4.decode(planes)
    if format.kind == "row_float":
        return fp8.decode_rows(planes)
    if format.kind == "tile_float":
        return fp8.decode_tiles(planes)
    return ggml.decode(format, planes.codes)
