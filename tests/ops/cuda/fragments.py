"""Packed weights made from codes by the words of packed.py, sharing nothing with the packer under test."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ninfer.ops.cuda.packed import FP8_BYTES, NIBBLES, Order, Packed, Packing, Segment

NVFP4 = Packing("Nvfp4", Order.OWNED, 576, row_scaled=True)
FP8 = Packing("Fp8Row", Order.OWNED, 1024, row_scaled=True)
BF16 = Packing("Bf16", Order.OWNED, 2048)

E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])


@dataclass(frozen=True, eq=False)
class Made:
    """A packed matrix and its values, float64 `[N, K]`."""

    packed: Packed
    values: torch.Tensor


def _order(rows: int, interleaved: bool) -> torch.Tensor:
    """Which row of the matrix each packed row is, -1 for padding."""
    if not interleaved:
        return torch.cat((torch.arange(rows), torch.full((-rows % 16,), -1)))
    half = rows // 2
    gate = torch.cat((torch.arange(half), torch.full((-half % 8,), -1))).view(-1, 8)
    return torch.stack((gate, torch.where(gate < 0, gate, gate + half)), 1).reshape(-1)


def _tiles(codes: torch.Tensor, order: torch.Tensor, width: int) -> torch.Tensor:
    """`[N, K]` to `[tiles, 2, 8, units, width]`, with zeros where there is nothing."""
    order = order.to(codes.device)
    columns = -(-codes.shape[1] // width) * width
    padded = codes.new_zeros((len(order), columns))
    padded[:, : codes.shape[1]] = codes[order.clamp(min=0)] * (order >= 0).to(codes.dtype)[:, None]
    return padded.view(-1, 2, 8, columns // width, width)


def _bytes(words: torch.Tensor) -> torch.Tensor:
    return words.to(torch.int32).contiguous().view(torch.uint8)


def _packed(
    packing, format, rows, columns, data, scales, order, interleaved, first=0, row_map=None
) -> Packed:
    if scales is not None:
        order = order.to(scales.device)
        scales = torch.where(order >= 0, scales[order.clamp(min=0)], 0).float()
    segment = Segment(packing, format, first, rows, columns, data.reshape(-1), scales, row_map)
    return Packed(rows, columns, (segment,), interleaved)


def nvfp4(rows: int, columns: int, device, seed: int = 0, interleaved: bool = False) -> Made:
    g = torch.Generator(device).manual_seed(seed)
    codes = torch.randint(0, 16, (rows, columns), generator=g, device=device, dtype=torch.int64)
    groups = -(-columns // 16)
    e = torch.randint(-9, 9, (rows, groups), generator=g, device=device)
    m = torch.randint(0, 8, (rows, groups), generator=g, device=device)
    zero = torch.rand((rows, groups), generator=g, device=device) < 0.05
    m = torch.where((e == 8) & (m == 7), 0, m)  # 480 is no E4M3
    scale = torch.where(zero, 0.0, (1 + m / 8).double() * 2.0 ** e.double())
    wide = scale.repeat_interleave(16, 1)[:, :columns]
    divisor = 1234.5
    magnitude = E2M1.to(device).double()[codes & 7]
    values = torch.where(codes >= 8, -magnitude, magnitude) * wide / divisor
    codes = torch.where(wide == 0, 0, codes)
    order = _order(rows, interleaved)
    tiled = _tiles(codes, order, 64)  # [tiles, 2, 8, units, 64]
    lanes = tiled.view(*tiled.shape[:4], 4, 2, 8).permute(
        0, 3, 2, 4, 1, 5, 6
    )  # tile, unit, r, q, h, word, column
    word = torch.zeros(lanes.shape[:-1], dtype=torch.int64, device=device)
    for column in range(8):
        low, sign = NIBBLES[column // 2]
        code = lanes[..., column]
        word |= ((code & 7) << (low + 16 * (column & 1))) | ((code >> 3) << (sign + 16 * (column & 1)))
    word = torch.where(word >= 1 << 31, word - (1 << 32), word)
    units = word.shape[1]
    data = _bytes(word).view(-1, units, 512)
    scales = _tiles(torch.where(zero, 0, (e + 22) * 8 + m), order, 4).permute(0, 3, 2, 4, 1)
    data = torch.cat((data, scales.reshape(-1, units, 64).to(torch.uint8)), 2)
    row_scales = torch.full((rows,), 128 / divisor, device=device)
    return Made(_packed(NVFP4, "nvfp4", rows, columns, data, row_scales, order, interleaved), values)


def fp8(rows: int, columns: int, device, seed: int = 0, interleaved: bool = False) -> Made:
    g = torch.Generator(device).manual_seed(seed)
    codes = torch.randint(0, 256, (rows, columns), generator=g, device=device, dtype=torch.int64)
    codes = torch.where((codes & 127) == 127, codes ^ 1, codes)
    scales = (torch.rand(rows, generator=g, device=device) + 0.5) / 100
    e, m = ((codes >> 3) & 15).double(), (codes & 7).double()
    values = torch.where(e == 0, m * 2.0**-9, (1 + m / 8) * 2.0 ** (e - 7))
    values = torch.where(codes >= 128, -values, values) * scales.double()[:, None]
    order = _order(rows, interleaved)
    tiled = _tiles(codes.to(torch.uint8), order, 64).view(-1, 2, 8, -(-columns // 64), 16, 4)
    data = tiled[..., list(FP8_BYTES)].permute(0, 3, 1, 2, 4, 5)
    return Made(_packed(FP8, "fp8", rows, columns, data, scales, order, interleaved), values)


def bf16(rows: int, columns: int, device, seed: int = 0, interleaved: bool = False) -> Made:
    g = torch.Generator(device).manual_seed(seed)
    values = torch.randn((rows, columns), generator=g, device=device).bfloat16()
    order = _order(rows, interleaved)
    tiled = _tiles(values, order, 64).view(
        -1, 2, 8, -(-columns // 64), 4, 4, 2, 2
    )  # tile h r unit q j half pair
    data = tiled.permute(0, 3, 5, 2, 4, 6, 1, 7).contiguous().view(torch.uint8)
    return Made(_packed(BF16, "bf16", rows, columns, data, None, order, interleaved), values.double())


MAKERS = {"nvfp4": nvfp4, "fp8": fp8, "bf16": bf16}
