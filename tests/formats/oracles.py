"""Slow scalar codecs, written from the formulas: one Python number at a time.

A Python float is a binary64; `f32`, `f16` and `bf16` round it once, to nearest, ties to even.
"""

from __future__ import annotations

import math
import struct


def f32(x: float) -> float:
    """The nearest binary32 value."""
    try:
        return struct.unpack("<f", struct.pack("<f", x))[0]
    except OverflowError:
        return math.copysign(math.inf, x)


def f16_word(x: float) -> int:
    """The nearest binary16 word; 0x7C00 on overflow."""
    try:
        return struct.unpack("<H", struct.pack("<e", x))[0]
    except OverflowError:
        return 0x7C00


def f16(word: int) -> float:
    return struct.unpack("<e", struct.pack("<H", word))[0]


def bf16(word: int) -> float:
    return struct.unpack("<f", struct.pack("<I", word << 16))[0]


def bf16_word(x: float) -> int:
    """The nearest bfloat16 word of a binary32 value."""
    bits = struct.unpack("<I", struct.pack("<f", x))[0]
    low, word = bits & 0xFFFF, bits >> 16
    return word + (low > 0x8000 or (low == 0x8000 and word & 1 == 1))


def e4m3(word: int) -> float:
    """The value of an E4M3FN word."""
    sign = -1.0 if word & 0x80 else 1.0
    exponent, mantissa = (word >> 3) & 15, word & 7
    if exponent == 15 and mantissa == 7:
        return math.nan
    if exponent == 0:
        return sign * mantissa * 2.0**-9
    return sign * (1 + mantissa / 8) * 2.0 ** (exponent - 7)


def e4m3_word(x: float) -> int:
    """The nearest E4M3FN word of |x| <= 448: of two equally near ones the even word; the sign is x's own."""
    sign = 0x80 if math.copysign(1.0, x) < 0 else 0
    return sign | min(range(0x7F), key=lambda word: (abs(e4m3(word) - abs(x)), word & 1))


E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def e2m1_code(m: float) -> int:
    """The nearest E2M1 magnitude code, ties to the even code."""
    return min(range(8), key=lambda code: (abs(E2M1[code] - m), code & 1))


def e2m1(code: int) -> float:
    return -E2M1[code & 7] if code & 8 else E2M1[code]


def grouped_absmax(row: list[float], bits: int, group: int) -> tuple[list[int], list[int]]:
    """Codes and FP16 scale words of one row."""
    low, high = (-127, 127) if bits == 8 else (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
    codes, scales = [], []
    for begin in range(0, len(row), group):
        values = row[begin : begin + group]
        a = max(abs(x) for x in values)
        if a == 0:
            codes += [0] * len(values)
            scales.append(0)
            continue
        word = f16_word(f32(a / high)) or 1
        if word >= 0x7C00:
            raise ValueError("scale overflows")
        inverse = f32(1 / f16(word))
        codes += [min(max(round(f32(x * inverse)), low), high) for x in values]
        scales.append(word)
    return codes, scales


def grouped_value(code: int, word: int) -> float:
    return f32(f16(word) * code)


def fp8_row(row: list[float]) -> tuple[list[int], int]:
    """Codes and the BF16 scale word of one row."""
    values = [bf16(bf16_word(x)) for x in row]
    a = max(abs(x) for x in values)
    if a == 0:
        return [0] * len(values), 0
    word = bf16_word(f32(a / 448)) or 1
    inverse = f32(1 / bf16(word))
    if math.isinf(inverse):
        raise ValueError("scale too small")
    return [e4m3_word(min(max(f32(x * inverse), -448.0), 448.0)) for x in values], word


NVFP4_TARGETS = {"nvfp4_absmax": (6.0,), "nvfp4_mse": (6.0, 5.5, 5.0, 4.5, 4.0)}


def nvfp4_divisor(absmax: float, method: str) -> float:
    return f32(448 * min(NVFP4_TARGETS[method]) / absmax) if absmax else 1.0


def nvfp4_candidates(group: list[float], method: str, d: float) -> list[tuple[int, list[int], float]]:
    """(scale word, codes, squared error) of a 16-group for every target in order; the error in binary64."""
    a = max(abs(x) for x in group)
    found = []
    for target in NVFP4_TARGETS[method]:
        raw = min(f32(f32(a * d) / target), 448.0)
        word = e4m3_word(raw)
        if e4m3(word) == 0:
            found.append((word, [0] * len(group), sum(x * x for x in group)))
            continue
        step = f32(e4m3(word) / d)
        codes = [e2m1_code(min(f32(abs(x) / step), 6.0)) for x in group]
        error = sum((f32(E2M1[code] * step) - abs(x)) ** 2 for code, x in zip(codes, group, strict=True))
        signed = [code | 8 if x < 0 and code else code for code, x in zip(codes, group, strict=True)]
        found.append((word, signed, error))
    return found


def nvfp4_value(code: int, word: int, d: float) -> float:
    return f32(e2m1(code) * e4m3(word) / d)


def q4_0(block: bytes) -> list[float]:
    d, data = f16(int.from_bytes(block[:2], "little")), block[2:]
    return [d * ((data[i] & 15 if i < 16 else data[i - 16] >> 4) - 8) for i in range(32)]


def q4_1(block: bytes) -> list[float]:
    d, m = (f16(int.from_bytes(block[at : at + 2], "little")) for at in (0, 2))
    data = block[4:]
    return [f32(d * (data[i] & 15 if i < 16 else data[i - 16] >> 4) + m) for i in range(32)]


def q8_0(block: bytes) -> list[float]:
    d = f16(int.from_bytes(block[:2], "little"))
    return [d * (byte - 256 if byte > 127 else byte) for byte in block[2:]]


def _six_bit(s: bytes, j: int) -> tuple[int, int]:
    """Scale and minimum of sub-block j."""
    if j < 4:
        return s[j] & 63, s[j + 4] & 63
    return (s[j + 4] & 15) | ((s[j - 4] >> 6) << 4), (s[j + 4] >> 4) | ((s[j] >> 6) << 4)


def q4_k(block: bytes) -> list[float]:
    return _q45_k(block, 16, None)


def q5_k(block: bytes) -> list[float]:
    return _q45_k(block, 48, block[16:48])


def _q45_k(block: bytes, at: int, high: bytes | None) -> list[float]:
    d, dmin = (f16(int.from_bytes(block[k : k + 2], "little")) for k in (0, 2))
    values = []
    for j in range(8):
        scale, minimum = _six_bit(block[4:16], j)
        for i in range(32):
            byte = block[at + 32 * (j // 2) + i]
            code = byte & 15 if j % 2 == 0 else byte >> 4
            if high is not None:
                code += 16 * ((high[i] >> j) & 1)
            values.append(f32(d * scale * code - dmin * minimum))
    return values


def q6_k(block: bytes) -> list[float]:
    d = f16(int.from_bytes(block[208:210], "little"))
    values = [0.0] * 256
    for h in range(2):
        for t in range(4):
            for i in range(32):
                byte = block[64 * h + 32 * (t & 1) + i]
                low = byte >> 4 if t >= 2 else byte & 15
                high = (block[128 + 32 * h + i] >> (2 * t)) & 3
                scale = block[192 + 8 * h + 2 * t + i // 16]
                scale = scale - 256 if scale > 127 else scale
                values[128 * h + 32 * t + i] = d * scale * ((low | (high << 4)) - 32)
    return values
