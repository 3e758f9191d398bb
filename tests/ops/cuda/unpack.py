"""What a packed segment says, element by element, by the definition of its layout; nothing of it is shared
with the code that packs or with the kernels."""

from __future__ import annotations

import numpy as np
import torch

from ninfer.ops.cuda.packed import Packed, Segment

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])


def unpacked(packed: Packed) -> torch.Tensor:
    """float64 `[rows, columns]` in the matrix's order."""
    out = torch.full((packed.rows, packed.columns), torch.nan, dtype=torch.float64)
    for segment in packed.segments:
        values = torch.from_numpy(_values(segment, packed.interleaved))
        if segment.row_map is not None:
            out[segment.row_map.long().cpu()] = values
        else:
            out[segment.first : segment.first + segment.rows] = values
    return out


def _values(segment: Segment, interleaved: bool) -> np.ndarray:
    kernel, columns, wide = segment.packing.kernel, segment.columns, segment.packing.unit_columns
    data = segment.data.cpu().numpy()
    if kernel == "Dense":
        return data.view(np.float32).reshape(segment.rows, columns).astype(np.float64)
    n, k = np.meshgrid(np.arange(segment.rows), np.arange(columns), indexing="ij")
    if interleaved:
        half = segment.rows // 2
        i = n % half
        place = i // 8 * 16 + n // half * 8 + i % 8
    else:
        place = n
    units = -(-columns // wide)
    base = (place // 16 * units + k // wide) * segment.packing.unit_bytes
    h, r, inside = place % 16 // 8, place % 8, k % 64
    if segment.packing.order == 0:
        q, j, c = inside // 16, inside % 16 // 4, inside % 4
    else:
        j, q, c = inside // 16, inside % 16 // 4, inside % 4
    lane = 4 * r + q

    def byte(offset):
        return data[base + offset].astype(np.int64)

    def word(offset):
        return sum(byte(offset + b) << (8 * b) for b in range(4))

    def half_float(offset):
        return (byte(offset) | byte(offset + 1) << 8).astype(np.uint16).view(np.float16).astype(np.float64)

    def low():
        w = word(16 * lane + 8 * h + 4 * (j // 2))
        return w >> (16 * (c % 2) + 8 * (j % 2) + 4 * (c // 2)) & 15

    def five():
        pair, e = 2 * j + c // 2, 2 * (c % 2)  # e: the byte of the pair's member
        own, other = 16 * lane + 8 * h, 512 + 4 * lane + h + e
        direct = byte(np.where(pair < 4, own + 4 * (pair // 2) + pair % 2 + e, other)) & 31
        late = byte(own + pair % 2 + e) >> 5 << 2 | byte(own + 4 + pair % 2 + e) >> 6
        ends = byte(16 * lane + 4 + h + e) >> 5 & 1, byte(16 * lane + 12 + h + e) >> 5 & 1
        fifth = byte(other) >> 5 << 2 | ends[0] << 1 | ends[1]
        return np.where(pair < 5, direct, np.where(pair == 5, fifth, late))

    def six():
        pair, e = 2 * j + c // 2, 2 * (c % 2)
        places = [16 * lane + 8 * h, 16 * lane + 8 * h + 4, 512 + 8 * lane + 4 * h]
        words = [byte(place + pair % 2 + e) for place in places]
        late = words[0] >> 6 << 4 | words[1] >> 6 << 2 | words[2] >> 6
        return np.where(j == 3, late, np.choose(j % 3, words) & 63)

    def eight():
        order = np.array([0, 2, 1, 3])
        return byte(512 * h + 16 * lane + 4 * j + order[c])

    at = 2 * r + h  # where scales of a row stand
    if kernel == "Bf16":
        offset = 512 * j + 16 * lane + 8 * (c // 2) + 4 * h + 2 * (c % 2)
        bits = (byte(offset) | byte(offset + 1) << 8) << 16
        return bits.astype(np.uint32).view(np.float32).astype(np.float64)
    if kernel == "Nvfp4":
        pair = 2 * (j % 2) + c // 2
        bits = word(16 * lane + 8 * h + 4 * (j // 2)) >> (16 * (c % 2))
        codes = bits >> np.array([6, 3, 0, 9])[pair] & 7 | (bits >> np.array([15, 12, 13, 14])[pair] & 1) << 3
        scale = byte(512 + 2 * lane + h)
        scales = 2.0 ** (scale // 8 - 22.0) * (1 + scale % 8 / 8)
        return E2M1[codes] * scales * _factors(segment, place) / 128
    if kernel in ("Fp8Row", "Fp8Tile"):
        codes = byte(512 * h + 16 * lane + 4 * j + np.array([1, 3, 0, 2])[c])
        if kernel == "Fp8Row":
            return _e4m3(codes) * _factors(segment, place)
        bits = (byte(1024 + 2 * at) | byte(1024 + 2 * at + 1) << 8) << 16
        return _e4m3(codes) * bits.astype(np.uint32).view(np.float32)
    if kernel == "Q4G64":
        return (low() - 8) * half_float(512 + 2 * at)
    if kernel == "Q5G64":
        return (five() - 16) * half_float(640 + 2 * at)
    if kernel == "Q6G64":
        return (six() - 32) * half_float(768 + 2 * at)
    if kernel == "Q8G32":
        return (eight() - 128) * half_float(1024 + 4 * at + 2 * (j // 2))
    if kernel == "Q4G32":
        return (low() - 8) * half_float(512 + 4 * at + 2 * (j // 2))
    if kernel == "Q41":
        return low() * half_float(512 + 8 * at + 2 * (j // 2)) + half_float(512 + 8 * at + 4 + 2 * (j // 2))
    if kernel in ("Q4K", "Q5K"):
        codes = five() if kernel == "Q5K" else low()
        at = (640 if kernel == "Q5K" else 512) + 8 * at
        numbers = byte(at) | byte(at + 1) << 8 | byte(at + 2) << 16
        factor, offset = numbers >> (6 + 6 * (j // 2)) & 63, numbers >> (18 * (j // 2)) & 63
        return half_float(at + 4) * factor * codes - half_float(at + 6) * offset
    assert kernel == "Q6K"
    return half_float(832 + 2 * at) * (byte(768 + 4 * at + j) - 128) * (six() - 32)


def _factors(segment: Segment, place: np.ndarray) -> np.ndarray:
    assert segment.row_scales is not None
    return segment.row_scales.cpu().numpy()[place].astype(np.float64)


def _e4m3(codes: np.ndarray) -> np.ndarray:
    exponent, mantissa = codes >> 3 & 15, codes & 7
    size = np.where(exponent == 0, mantissa * 2.0**-9, (1 + mantissa / 8) * 2.0 ** (exponent - 7.0))
    return np.where(codes & 128, -size, size)
