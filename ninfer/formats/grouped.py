"""Grouped signed integers with one FP16 scale per group of K: w = f32(f32(scale) * code)."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from ninfer.errors import FormatError
from ninfer.formats.chunks import absolute_maximum, require_finite, row_chunks
from ninfer.formats.planes import Planes
from ninfer.formats.registry import Format


def encode(format: Format, values: torch.Tensor) -> Planes:
    """`grouped_absmax`, bit-exact; a partial last group uses only its real values."""
    rows, columns = values.shape
    groups = -(-columns // format.group)
    padding = groups * format.group - columns
    chunks = list(row_chunks(rows, columns, values.device))

    def grouped(begin: int, end: int) -> torch.Tensor:
        x = values[begin:end].to(torch.float32)
        return (F.pad(x, (0, padding)) if padding else x).reshape(end - begin, groups, format.group)

    largest = torch.cat([absolute_maximum(grouped(begin, end)) for begin, end in chunks])
    require_finite(largest, "grouped_absmax")
    scales, inverse = _scales(largest, format.code_max)
    codes = torch.empty(rows, columns, dtype=torch.int8, device=values.device)
    for begin, end in chunks:
        y = grouped(begin, end) * inverse[begin:end].unsqueeze(-1)
        y.round_().clamp_(format.code_min, format.code_max)
        codes[begin:end] = y.reshape(end - begin, -1)[:, :columns]
    return Planes(codes, scales)


def _scales(largest: torch.Tensor, code_max: int) -> tuple[torch.Tensor, torch.Tensor]:
    """FP16 scales and the float32 reciprocals by which values are multiplied (0 for an all-zero group)."""
    zero = largest == 0
    raw = (largest.double() / code_max).float()
    scale = raw.to(torch.float16)
    smallest = torch.tensor(2.0**-24, dtype=torch.float16, device=largest.device)
    scale = torch.where((scale == 0) & ~zero, smallest, scale)
    if not bool(torch.isfinite(scale).all()):
        raise FormatError(
            f"'grouped_absmax' needs a scale above the FP16 maximum: the largest value is "
            f"{float(largest.max()):g}, the limit about {65504 * code_max:g}"
        )
    return scale, torch.where(zero, 0.0, 1.0 / scale.double()).float()


def decode(format: Format, planes: Planes) -> torch.Tensor:
    """float32 `[rows, K]`."""
    codes, scales = planes.codes, planes.scales
    if scales is None:
        raise FormatError(f"{format.name} needs a scale plane")
    rows, columns = codes.shape
    groups = scales.shape[1]
    padding = groups * format.group - columns
    x = (F.pad(codes, (0, padding)) if padding else codes).reshape(rows, groups, format.group).float()
    return (x * scales.float().unsqueeze(-1)).reshape(rows, -1)[:, :columns].contiguous()
