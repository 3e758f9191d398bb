"""How kernels read each weight format: 32 weights at a time, decoded exactly to float32.

A codec is three small functions that kernels inline:

`scale_row(base, stride, row)`   address of a row's scales `scales(codes, scale, sc, units)`   prepare the
row's scales in scratch `sc` (8 bytes for each unit) `values(codes, high, scale, sc, unit, odd)`   two
vectors: the 32 weights of a unit, `odd` = unit % 2 as a constant

`codes`, `high`, `scale` are the row's places in its planes. A codec with `pairs` yields the even weights
first, then the odd ones, as they are packed; whoever needs the natural order interleaves. The value is the
format's formula with its one rounding, so a decoded row is bit-exact (NVFP4's division by the object's
divisor is left to the caller).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ninfer.ops.cpu.codes import (
    e2m1,
    five_bits_even,
    five_bits_odd,
    high_nibbles,
    insert_bits,
    mask,
    pick_affine,
    pick_signed,
    shift_right,
    signed_nibbles,
    six_bits_even,
    six_bits_odd,
    to_f32,
    to_f32_minus,
)
from ninfer.ops.cpu.instructions import device
from ninfer.ops.cpu.simd import (
    fma,
    get_bf16,
    get_f16,
    get_f32,
    get_u8,
    half_and_half,
    lane_numbers,
    load_bf16,
    load_e4m3,
    load_f16,
    load_f32,
    load_i8,
    load_u8,
    mul,
    put_f32,
    splat,
    widen_four_e4m3,
    widen_two_f16,
)

UNIT = 32


@dataclass(frozen=True)
class Codec:
    """The three functions, the order of a unit's weights, and bytes per weight where rows may end inside a
    unit."""

    values: Callable
    scales: Callable
    scale_row: Callable
    pairs: bool = False
    ragged: int = 0
    divided: bool = False


@device
def _linear_rows(base, stride, row):
    return base + row * stride


@device
def _no_scales(codes, scale, sc, units):
    return None


# --- words


@device
def _bf16(codes, high, scale, sc, unit, odd):
    return load_bf16(codes + 64 * unit), load_bf16(codes + 64 * unit + 32)


@device
def _f16(codes, high, scale, sc, unit, odd):
    return load_f16(codes + 64 * unit), load_f16(codes + 64 * unit + 32)


@device
def _f32(codes, high, scale, sc, unit, odd):
    return load_f32(codes + 128 * unit), load_f32(codes + 128 * unit + 64)


# --- E4M3 codes with a scale for each row, or for each 128 columns of a 128-row tile


@device
def _fp8_row(codes, high, scale, sc, unit, odd):
    s = splat(get_bf16(scale))
    return mul(load_e4m3(codes + 32 * unit), s), mul(load_e4m3(codes + 32 * unit + 16), s)


@device
def _fp8_block(codes, high, scale, sc, unit, odd):
    s = splat(get_bf16(scale + 2 * (unit >> 2)))
    return mul(load_e4m3(codes + 32 * unit), s), mul(load_e4m3(codes + 32 * unit + 16), s)


@device
def _tile_rows(base, stride, row):
    return base + (row >> 7) * stride


# --- grouped integers: 32 bytes of base codes for each group, low nibble first


@device
def _q4(codes, high, scale, sc, unit, odd):
    q = load_u8(codes + 16 * unit)
    s = splat(get_f16(scale + 2 * (unit >> 1)))
    table = mul(signed_nibbles(), s)
    return pick_signed(q, table, s), pick_signed(high_nibbles(q), table, s)


@device
def _q5(codes, high, scale, sc, unit, odd):
    q = load_u8(codes + 16 * unit)
    s = splat(get_f16(scale + 2 * (unit >> 1)))
    place = high + 4 * unit
    return mul(five_bits_even(q, place), s), mul(five_bits_odd(high_nibbles(q), place), s)


@device
def _q6(codes, high, scale, sc, unit, odd):
    q = load_u8(codes + 16 * unit)
    s = splat(get_f16(scale + 2 * (unit >> 1)))
    place = high + 8 * unit
    return mul(six_bits_even(q, place), s), mul(six_bits_odd(high_nibbles(q), place), s)


@device
def _q8(codes, high, scale, sc, unit, odd):
    s = splat(get_f16(scale + 2 * unit))
    place = codes + 32 * unit
    return mul(to_f32(load_i8(place)), s), mul(to_f32(load_i8(place + 16)), s)


# --- NVFP4: E2M1 codes, low nibble first; E4M3 scales of 16 weights in 128-row tiles of 4 x 32 rows


@device
def _nvfp4_rows(base, stride, row):
    return base + (row >> 7) * stride + (row & 31) * 16 + ((row & 127) >> 5) * 4


@device
def _nvfp4_scales(codes, scale, sc, units):
    for tile in range(units >> 1):
        widen_four_e4m3(scale + 512 * tile, sc + 16 * tile)


@device
def _nvfp4(codes, high, scale, sc, unit, odd):
    q = load_u8(codes + 16 * unit)
    s = half_and_half(splat(get_f32(sc + 8 * unit)), splat(get_f32(sc + 8 * unit + 4)))
    return mul(e2m1(q), s), mul(e2m1(high_nibbles(q)), s)


# --- GGML blocks of 32: scales stand before the codes


@device
def _q4_0_scales(codes, scale, sc, units):
    for unit in range(units):
        d = get_f16(codes + 18 * unit)
        put_f32(sc + 8 * unit, d)
        put_f32(sc + 8 * unit + 4, d * -8)


@device
def _q4_1_scales(codes, scale, sc, units):
    for unit in range(units):
        widen_two_f16(codes + 20 * unit, sc + 8 * unit)


@device
def _affine(q, sc, unit):
    d, m = splat(get_f32(sc + 8 * unit)), splat(get_f32(sc + 8 * unit + 4))
    table = fma(lane_numbers(), d, m)
    return pick_affine(q, table, d, m), pick_affine(high_nibbles(q), table, d, m)


@device
def _q4_0(codes, high, scale, sc, unit, odd):
    return _affine(load_u8(codes + 18 * unit + 2), sc, unit)


@device
def _q4_1(codes, high, scale, sc, unit, odd):
    return _affine(load_u8(codes + 20 * unit + 4), sc, unit)


@device
def _q8_0(codes, high, scale, sc, unit, odd):
    place = codes + 34 * unit
    s = splat(get_f16(place))
    return mul(to_f32(load_i8(place + 2)), s), mul(to_f32(load_i8(place + 18)), s)


# --- GGML blocks of 256


@device
def _k_scales(block, packed, sc):
    d, least = get_f16(block), get_f16(block + 2)
    for j in range(4):
        a, b, c = get_u8(packed + j), get_u8(packed + j + 4), get_u8(packed + j + 8)
        put_f32(sc + 8 * j, d * (a & 63))
        put_f32(sc + 8 * j + 4, -least * (b & 63))
        put_f32(sc + 8 * j + 32, d * ((c & 15) | (a >> 6) << 4))
        put_f32(sc + 8 * j + 36, -least * ((c >> 4) | (b >> 6) << 4))


@device
def _q4_k_scales(codes, scale, sc, units):
    for block in range(units >> 3):
        _k_scales(codes + 144 * block, codes + 144 * block + 4, sc + 64 * block)


@device
def _q4_k(codes, high, scale, sc, unit, odd):
    place = codes + 144 * (unit >> 3) + 16 + 32 * ((unit & 7) >> 1)
    low, top = load_u8(place), load_u8(place + 16)
    if odd:
        low, top = high_nibbles(low), high_nibbles(top)
    d, m = splat(get_f32(sc + 8 * unit)), splat(get_f32(sc + 8 * unit + 4))
    table = fma(lane_numbers(), d, m)
    return pick_affine(low, table, d, m), pick_affine(top, table, d, m)


@device
def _q5_k_scales(codes, scale, sc, units):
    for block in range(units >> 3):
        _k_scales(codes + 176 * block, codes + 176 * block + 4, sc + 64 * block)


@device
def _q5_k(codes, high, scale, sc, unit, odd):
    block = codes + 176 * (unit >> 3)
    j = unit & 7
    place = block + 48 + 32 * (j >> 1)
    low, top = load_u8(place), load_u8(place + 16)
    if odd:
        low, top = high_nibbles(low), high_nibbles(top)
    low = insert_bits(mask(low, 15), mask(shift_right(load_u8(block + 16), j), 1), 4)
    top = insert_bits(mask(top, 15), mask(shift_right(load_u8(block + 32), j), 1), 4)
    d, m = splat(get_f32(sc + 8 * unit)), splat(get_f32(sc + 8 * unit + 4))
    return fma(to_f32(low), d, m), fma(to_f32(top), d, m)


@device
def _q6_k_scales(codes, scale, sc, units):
    for block in range(units >> 3):
        place = codes + 210 * block
        d = get_f16(place + 208)
        for i in range(16):
            code = get_u8(place + 192 + i)
            put_f32(sc + 64 * block + 4 * i, d * (code - ((code & 128) << 1)))


@device
def _q6_k(codes, high, scale, sc, unit, odd):
    block = codes + 210 * (unit >> 3)
    j = unit & 7
    half = j >> 2
    place = block + 64 * half + 32 * (j & 1)
    nibble, pair = 4 * ((j >> 1) & 1), 2 * (j & 3)
    tops = block + 128 + 32 * half
    a = mask(shift_right(load_u8(place), nibble), 15)
    b = mask(shift_right(load_u8(place + 16), nibble), 15)
    a = insert_bits(a, mask(shift_right(load_u8(tops), pair), 3), 4)
    b = insert_bits(b, mask(shift_right(load_u8(tops + 16), pair), 3), 4)
    s, t = splat(get_f32(sc + 8 * unit)), splat(get_f32(sc + 8 * unit + 4))
    return mul(to_f32_minus(a, 32), s), mul(to_f32_minus(b, 32), t)


CODECS: dict[str, Codec] = {
    "bf16": Codec(_bf16, _no_scales, _linear_rows, ragged=2),
    "fp16": Codec(_f16, _no_scales, _linear_rows, ragged=2),
    "fp32": Codec(_f32, _no_scales, _linear_rows, ragged=4),
    "fp8_row": Codec(_fp8_row, _no_scales, _linear_rows, ragged=1),
    "fp8_block": Codec(_fp8_block, _no_scales, _tile_rows),
    "q4_g64": Codec(_q4, _no_scales, _linear_rows, pairs=True),
    "q5_g64": Codec(_q5, _no_scales, _linear_rows, pairs=True),
    "q6_g64": Codec(_q6, _no_scales, _linear_rows, pairs=True),
    "q8_g32": Codec(_q8, _no_scales, _linear_rows),
    "nvfp4": Codec(_nvfp4, _nvfp4_scales, _nvfp4_rows, pairs=True, divided=True),
    "q4_0": Codec(_q4_0, _q4_0_scales, _linear_rows),
    "q4_1": Codec(_q4_1, _q4_1_scales, _linear_rows),
    "q8_0": Codec(_q8_0, _no_scales, _linear_rows),
    "q4_k": Codec(_q4_k, _q4_k_scales, _linear_rows),
    "q5_k": Codec(_q5_k, _q5_k_scales, _linear_rows),
    "q6_k": Codec(_q6_k, _q6_k_scales, _linear_rows),
}
