"""Slow layouts, written from the formulas: every word of natural planes is put into its byte one by one."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from ninfer.formats import Planes


def _up(x: int, a: int) -> int:
    return (x + a - 1) // a * a


def _u16(plane: torch.Tensor | None) -> list:
    return [] if plane is None else plane.view(torch.int16).tolist()


def row_split(bits: int, group: int, planes: Planes, rows: int, columns: int) -> bytes:
    """`row_split_k128_v1`."""
    high = {4: 0, 5: 8, 6: 16, 8: 0}[bits]
    groups = _up(columns, 128) // group
    high_at = _up(rows * groups * 32, 256)
    scale_at = high_at + _up(rows * groups * high, 256)
    out = bytearray(scale_at + rows * groups * 2)
    codes, scales = planes.codes.tolist(), _u16(planes.scales)
    for n in range(rows):
        for k in range(columns):
            g, lane, u = n * groups + k // group, k % group, codes[n][k] % 2**bits
            if bits == 8:
                out[g * 32 + lane] = u
                continue
            out[g * 32 + lane // 2] |= (u & 15) << (4 * (lane % 2))
            for bit in range(4, bits):
                t = lane * (bits - 4) + bit - 4
                out[high_at + g * high + t // 8] |= ((u >> bit) & 1) << (t % 8)
        for g, word in enumerate(scales[n]):
            at = scale_at + 2 * (n * groups + g)
            out[at : at + 2] = (word & 0xFFFF).to_bytes(2, "little")
    return bytes(out)


def block_scale(planes: Planes, rows: int, columns: int) -> bytes:
    """`block_scale_k16_m128x4_v1`."""
    start = _up(rows * columns // 2, 256)
    out = bytearray(start + rows * columns // 16 + 4)
    out[: rows * columns // 2] = planes.codes.numpy().tobytes()
    scales = planes.scales.tolist()  # type: ignore[union-attr]
    for n in range(rows):
        for g in range(columns // 16):
            out[start + scale_place(n, g, columns)] = scales[n][g]
    out[-4:] = np.float32(planes.divisor).tobytes()
    return bytes(out)


def scale_place(n: int, g: int, columns: int) -> int:
    """Where the scale of row n, group g lies in the swizzled plane."""
    return ((n // 128) * (columns // 64) + g // 4) * 512 + (n % 32) * 16 + ((n % 128) // 32) * 4 + g % 4


def codes_then_bf16(planes: Planes) -> bytes:
    """`row_scale_v1` and `block_scale_m128_k128_v1`."""
    codes = planes.codes.numpy().tobytes()
    words = np.array(_u16(planes.scales)).astype("<i2").tobytes()
    return codes + bytes(_up(len(codes), 256) - len(codes)) + words


def k_rows(rows: list[bytes], is_q6: Callable[[int], bool]) -> bytes:
    """`ggml_k256_v1` from the rows' own bytes."""
    table, at = b"", 0
    for n, row in enumerate(rows):
        table += ((at << 1) | is_q6(n)).to_bytes(8, "little")
        at += len(row)
    return table + bytes(_up(len(table), 256) - len(table)) + b"".join(rows)
