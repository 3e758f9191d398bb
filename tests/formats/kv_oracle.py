"""Scalar codecs of quantized keys and values, from the formulas of the specification: one number at a time.

A Python float is a binary64, in which one operation on binary32 numbers followed by one rounding to binary32
is that operation of binary32.
"""

from __future__ import annotations

import math
from fractions import Fraction

from . import oracles
from .oracles import e2m1_code, e4m3, e4m3_word, f16, f16_word, f32

FLOAT_MAX = float.fromhex("0x1.fffffep127")


def hadamard(x: list[float]) -> list[float]:
    """Butterflies of stride 1, 2, 4, ... in binary32, then one product with 1/sqrt(D) as a binary32."""
    y, width, stride = list(x), len(x), 1
    while stride < width:
        y = [f32(y[i] + y[i + stride]) if not i & stride else f32(y[i - stride] - y[i]) for i in range(width)]
        stride *= 2
    factor = inverse_root(width)
    return [f32(value * factor) for value in y]


def inverse_root(width: int) -> float:
    """1/sqrt(width) rounded once, checked by integers."""
    guess = f32(1 / math.sqrt(width))
    step = 2.0 ** (math.frexp(guess)[1] - 24)
    low, high = Fraction(guess) - Fraction(step) / 2, Fraction(guess) + Fraction(step) / 2
    assert low**2 <= Fraction(1, width) <= high**2
    return guess


def finite(y: list[float]) -> list[float]:
    return [0.0 if math.isnan(v) else min(max(v, -FLOAT_MAX), FLOAT_MAX) for v in y]


def int8(y: list[float]) -> tuple[list[int], list[int], list[float]]:
    """(codes, binary16 words of the scales, decoded)."""
    codes, words, decoded = [], [], []
    for begin in range(0, len(y), 64):
        group = y[begin : begin + 64]
        word = min(f16_word(f32(max(abs(v) for v in group) / 127)), 0x7BFF)
        s = f16(word)
        inverse = f32(1 / s) if s else 0.0
        found = [min(max(round(f32(v * inverse)), -127), 127) for v in group]
        codes += found
        words.append(word)
        decoded += [code * s for code in found]
    return codes, words, decoded


def fp8(y: list[float]) -> tuple[list[int], list[int], list[float]]:
    a = max(abs(v) for v in y)
    if a == 0:
        return [0] * len(y), [0], [0.0] * len(y)
    word = f16_word(min(max(f32(a / 448), 2.0**-24), 65504.0))
    inverse = f32(1 / f16(word))
    codes = [e4m3_word(min(max(f32(v * inverse), -448.0), 448.0)) for v in y]
    return codes, [word], [e4m3(code) * f16(word) for code in codes]


def nvfp4(y: list[float]) -> tuple[list[int], list[int], list[float]]:
    """Packed bytes, E4M3 words of the scales, decoded."""
    nibbles, words, decoded = [], [], []
    for begin in range(0, len(y), 16):
        group = y[begin : begin + 16]
        a = max(abs(v) for v in group)
        if a == 0:
            nibbles += [0] * 16
            words.append(0)
            decoded += [0.0] * 16
            continue
        words.append(e4m3_word(min(max(f32(a / 6), 2.0**-9), 448.0)))
        s = e4m3(words[-1])
        quotients = [f32(v / s) for v in group]
        found = [e2m1_code(min(abs(v), 6.0)) | (8 if math.copysign(1, v) < 0 else 0) for v in quotients]
        nibbles += found
        decoded += [oracles.e2m1(code) * s for code in found]
    return [low | high << 4 for low, high in zip(nibbles[::2], nibbles[1::2], strict=True)], words, decoded
