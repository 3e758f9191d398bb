"""Vectors of the KV cache inside kernels: the Hadamard rotation, and `formats.kv_codec`'s codes bit by bit.

A `Side` says how kernels write and read keys or values. `encode(row, kind, width, codes, scales)` takes a
float32 row that it may change; `decode(codes, scales, kind, width, row)` makes one, exactly. `kind` is the
activation type (`access.py`), which matters to plain vectors only. Rows are padded to whole vectors.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from ninfer.formats import KvCode, KvFormat
from ninfer.formats.kv_codec import rotation_factor
from ninfer.ops.attention import KvPages
from ninfer.ops.cpu.access import read_row, write_row
from ninfer.ops.cpu.codes import (
    e2m1,
    e2m1_codes,
    e4m3,
    e4m3_codes,
    high_nibbles,
    int8_codes,
    put_first_byte,
    store_bytes,
    store_nibbles,
    to_f32,
)
from ninfer.ops.cpu.instructions import device
from ninfer.ops.cpu.simd import (
    add,
    as_f16,
    butterflies,
    div,
    get_f16,
    interleave_high,
    interleave_low,
    largest,
    load_e4m3,
    load_e4m3_pair,
    load_f32,
    load_i8,
    load_u8,
    magnitude,
    maximum,
    minimum,
    mul,
    put_f16,
    put_u8,
    splat,
    store_f32,
    sub,
    zero_if_nan,
    zeros,
)


def _float(value: float) -> np.float32:
    return np.float32(value)


_ONE, _FINITE = _float(1.0), np.finfo(np.float32).max
_INT8_MAX, _E4M3_MAX, _E2M1_MAX, _F16_MAX = _float(127.0), _float(448.0), _float(6.0), _float(65504.0)
_F16_LEAST, _E4M3_LEAST = _float(2.0**-24), _float(2.0**-9)


@device
def hadamard(row, width, factor):
    """`kv_codec.rotate` of a row in place; `width` is a power of two of at least 16, factor 1/sqrt(width)."""
    for start in range(0, width, 16):
        store_f32(row + 4 * start, butterflies(load_f32(row + 4 * start)))
    stride = 16
    while stride < width:
        for start in range(0, width, 2 * stride):
            for at in range(start, start + stride, 16):
                a, b = load_f32(row + 4 * at), load_f32(row + 4 * (at + stride))
                store_f32(row + 4 * at, add(a, b))
                store_f32(row + 4 * (at + stride), sub(a, b))
        stride *= 2
    for start in range(0, width, 16):
        store_f32(row + 4 * start, mul(load_f32(row + 4 * start), splat(factor)))


@device
def _finite(row, begin, end):
    """Make numbers finite as `kv_codec` says; the largest magnitude."""
    top = zeros()
    for start in range(begin, end, 16):
        x = maximum(minimum(zero_if_nan(load_f32(row + 4 * start)), splat(_FINITE)), splat(-_FINITE))
        store_f32(row + 4 * start, x)
        top = maximum(top, magnitude(x))
    return largest(top)


@device
def _plain(row, kind, width, codes, scales):
    write_row(row, codes, kind, width)


@device
def _int8(row, kind, width, codes, scales):
    for begin in range(0, width, 64):
        end = min(width, begin + 64)
        a = _finite(row, begin, end)
        scale = largest(as_f16(minimum(div(splat(a), splat(_INT8_MAX)), splat(_F16_MAX))))
        inverse = zeros()
        if scale > 0.0:
            inverse = div(splat(_ONE), splat(scale))
        for start in range(begin, end, 16):
            store_bytes(codes + start, int8_codes(mul(load_f32(row + 4 * start), inverse)))
        put_f16(scales + (begin >> 5), scale)


@device
def _fp8(row, kind, width, codes, scales):
    a = _finite(row, 0, width)
    scale = minimum(maximum(div(splat(a), splat(_E4M3_MAX)), splat(_F16_LEAST)), splat(_F16_MAX))
    scale = as_f16(scale)
    inverse = div(splat(_ONE), scale)
    if a == 0.0:
        scale = zeros()
        for start in range(0, width, 16):
            store_f32(row + 4 * start, zeros())
    for start in range(0, width, 16):
        store_bytes(codes + start, e4m3_codes(mul(load_f32(row + 4 * start), inverse)))
    put_f16(scales, largest(scale))


@device
def _nvfp4(row, kind, width, codes, scales):
    for start in range(0, width, 16):
        a = _finite(row, start, start + 16)
        if a == 0.0:
            for byte in range(8):
                put_u8(codes + (start >> 1) + byte, 0)
            put_u8(scales + (start >> 4), 0)
        else:
            scale = minimum(maximum(div(splat(a), splat(_E2M1_MAX)), splat(_E4M3_LEAST)), splat(_E4M3_MAX))
            words = e4m3_codes(scale)
            x = div(load_f32(row + 4 * start), e4m3(words))
            store_nibbles(codes + (start >> 1), e2m1_codes(x))
            put_first_byte(scales + (start >> 4), words)


@device
def _read_plain(codes, scales, kind, width, row):
    read_row(codes, kind, width, row)


@device
def _read_int8(codes, scales, kind, width, row):
    for begin in range(0, width, 64):
        scale = splat(get_f16(scales + (begin >> 5)))
        for start in range(begin, min(width, begin + 64), 16):
            store_f32(row + 4 * start, mul(to_f32(load_i8(codes + start)), scale))


@device
def _read_fp8(codes, scales, kind, width, row):
    scale = splat(get_f16(scales))
    for start in range(0, width, 16):
        store_f32(row + 4 * start, mul(load_e4m3(codes + start), scale))


@device
def _read_nvfp4(codes, scales, kind, width, row):
    for start in range(0, width, 32):
        q = load_u8(codes + (start >> 1))
        scale = load_e4m3_pair(scales + (start >> 4))
        low, high = mul(e2m1(q), scale), mul(e2m1(high_nibbles(q)), scale)
        store_f32(row + 4 * start, interleave_low(low, high))
        store_f32(row + 4 * start + 64, interleave_high(low, high))


@dataclass(frozen=True)
class Side:
    """How kernels write and read vectors of a code; a vector has `width * bits / 8` bytes of codes (plain:
    those of the activation type) and `scale` bytes for each started `group`."""

    encode: Callable
    decode: Callable
    bits: int
    group: int
    scale: int


_WHOLE = 1 << 30
SIDES = {
    KvCode.PLAIN: Side(_plain, _read_plain, 0, _WHOLE, 0),
    KvCode.INT8: Side(_int8, _read_int8, 8, 64, 2),
    KvCode.FP8: Side(_fp8, _read_fp8, 8, _WHOLE, 2),
    KvCode.NVFP4: Side(_nvfp4, _read_nvfp4, 4, 16, 1),
}
PLAIN = SIDES[KvCode.PLAIN]


@device
def code_bytes(bits, width, size):
    return (width * bits) >> 3 if bits else width * size


@device
def scale_bytes(group, scale, width):
    return (width + group - 1) // group * scale


def bindings(format: KvFormat) -> dict[str, Any]:
    """The names by which a kernel is specialized for a format."""
    k, v = SIDES[format.keys.code], SIDES[format.values.code]
    return {
        "encode_key": k.encode, "decode_key": k.decode,
        "K_BITS": k.bits, "K_GROUP": k.group, "K_SCALE": k.scale, "K_ROTATED": format.keys.rotated,
        "encode_value": v.encode, "decode_value": v.decode,
        "V_BITS": v.bits, "V_GROUP": v.group, "V_SCALE": v.scale, "V_ROTATED": format.values.rotated,
        "QUANTIZED": format is not KvFormat.BF16,
    }  # fmt: skip


@functools.cache
def rotation(width: int) -> float:
    """The factor of `hadamard`, 0 where vectors of this width are not rotated."""
    return 0.0 if width & (width - 1) else rotation_factor(width)


def scale_addresses(pages: KvPages) -> tuple[int, int]:
    """Of the key and value scales; 0 without."""
    k, v = pages.k_scales, pages.v_scales
    return 0 if k is None else k.data_ptr(), 0 if v is None else v.data_ptr()
