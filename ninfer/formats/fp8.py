"""FP8 E4M3FN codes with a BF16 multiplier per row, or per 128x128 tile."""

from __future__ import annotations

import torch

from ninfer.errors import FormatError
from ninfer.formats.chunks import absolute_maximum, require_finite, row_chunks
from ninfer.formats.planes import Planes

TILE = 128
_MAX = 448.0


def encode_rows(values: torch.Tensor) -> Planes:
    """`fp8_row_maxabs`, bit-exact: inputs to BF16 first, then one BF16 scale per row."""
    rows, columns = values.shape
    chunks = list(row_chunks(rows, columns, values.device))

    def rounded(begin: int, end: int) -> torch.Tensor:
        return values[begin:end].to(torch.float32).to(torch.bfloat16).to(torch.float32)

    largest = torch.cat([absolute_maximum(rounded(begin, end)) for begin, end in chunks])
    require_finite(largest, "fp8_row_maxabs")
    scales, inverse = _row_scales(largest)
    codes = torch.empty(rows, columns, dtype=torch.uint8, device=values.device)
    for begin, end in chunks:
        y = rounded(begin, end).mul_(inverse[begin:end].unsqueeze(-1)).clamp_(-_MAX, _MAX)
        codes[begin:end] = y.to(torch.float8_e4m3fn).view(torch.uint8)
    empty = largest == 0
    if bool(empty.any()):
        codes[empty] = 0
    return Planes(codes, scales)


def _row_scales(largest: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    zero = largest == 0
    scale = (largest.double() / _MAX).float().to(torch.bfloat16)
    smallest = torch.tensor(1, dtype=torch.int16, device=largest.device).view(torch.bfloat16)
    scale = torch.where((scale == 0) & ~zero, smallest, scale)
    inverse = torch.where(zero, 0.0, 1.0 / scale.double()).float()
    bad = ~(torch.isfinite(inverse) & torch.isfinite(scale))
    if bool(bad.any()):
        row = int(bad.nonzero()[0, 0])
        raise FormatError(
            f"'fp8_row_maxabs' cannot scale row {row}: its largest value is "
            f"{float(largest[row]):g}, and the reciprocal of its BF16 scale is not finite"
        )
    return scale, inverse


def e4m3(words: torch.Tensor) -> torch.Tensor:
    """float32 values of uint8 E4M3FN words, by table: PyTorch's own conversion is seven times slower."""
    every = torch.arange(256, dtype=torch.uint8, device=words.device)
    table = every.view(torch.float8_e4m3fn).to(torch.float32)
    return table.index_select(0, words.reshape(-1).to(torch.int32)).reshape(words.shape)


def decode_rows(planes: Planes) -> torch.Tensor:
    """float32 `[rows, K]` = e4m3(code) * bf16(scale of the row)."""
    if planes.scales is None:
        raise FormatError("fp8_e4m3fn_row_bf16 needs a scale plane")
    return e4m3(planes.codes) * planes.scales.float().unsqueeze(-1)


def decode_tiles(planes: Planes) -> torch.Tensor:
    """float32 `[rows, K]` = e4m3(code) * bf16(scale of the 128x128 tile)."""
    if planes.scales is None:
        raise FormatError("fp8_e4m3fn_block128_bf16 needs a scale plane")
    rows, columns = planes.codes.shape
    tiles = e4m3(planes.codes).reshape(rows // TILE, TILE, columns // TILE, TILE)
    return (tiles * planes.scales.float()[:, None, :, None]).reshape(rows, columns)
