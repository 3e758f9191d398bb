"""Codes in 16 lanes: those of packed weights decoded to float32, those of the KV cache also encoded."""

from __future__ import annotations

from llvmlite import ir

from ninfer.ops.cpu.instructions import (
    F32,
    I32,
    INTEGER,
    LANES,
    NOTHING,
    call,
    has_feature,
    i8,
    i32,
    indices,
    lanes_of,
    load_value,
    operation,
    splat_value,
    store_value,
    vf16,
    vf32,
    vi8,
    vi16,
    vi32,
)

# --- integer lanes: codes


@operation(I32, I32)
def high_nibbles(builder, a):
    """Lanes shifted right by four."""
    return builder.lshr(a, lanes_of(vi32, 4))


@operation(I32, I32, INTEGER)
def shift_right(builder, a, bits):
    """Lanes shifted right by a scalar."""
    return builder.lshr(a, splat_value(builder, builder.trunc(bits, i32), vi32))


@operation(I32, I32, INTEGER)
def mask(builder, a, bits):
    return builder.and_(a, splat_value(builder, builder.trunc(bits, i32), vi32))


@operation(I32, I32, I32, INTEGER)
def insert_bits(builder, a, b, at):
    """`a | b << at`."""
    return builder.or_(a, builder.shl(b, splat_value(builder, builder.trunc(at, i32), vi32)))


@operation(F32, I32)
def to_f32(builder, a):
    """Exact for lanes below 2^24 in magnitude."""
    return builder.sitofp(a, vf32)


@operation(F32, I32, INTEGER)
def to_f32_minus(builder, a, bias):
    """`a - bias` as float32."""
    return builder.sitofp(builder.sub(a, splat_value(builder, builder.trunc(bias, i32), vi32)), vf32)


def _with_high_bits(builder, nibbles, shifted, low_bits):
    """Signed codes: the top bits of `shifted` above the four of `nibbles`."""
    top = builder.ashr(shifted, lanes_of(vi32, 32 - low_bits))
    merged = builder.or_(builder.and_(top, lanes_of(vi32, -16)), builder.and_(nibbles, lanes_of(vi32, 15)))
    return builder.sitofp(merged, vf32)


def _five(builder, nibbles, address, odd):
    word = splat_value(builder, load_value(builder, address, i32), vi32)
    lanes = lanes_of(vi32, [31 - (2 * lane + odd) for lane in range(LANES)])
    return _with_high_bits(builder, nibbles, builder.shl(word, lanes), 5)


def _six(builder, nibbles, address, odd):
    words = load_value(builder, address, ir.VectorType(i32, 2))
    both = builder.shuffle_vector(words, words, indices([0] * 8 + [1] * 8))
    lanes = lanes_of(vi32, [30 - 2 * ((2 * lane + odd) % 16) for lane in range(LANES)])
    return _with_high_bits(builder, nibbles, builder.shl(both, lanes), 6)


@operation(F32, I32, INTEGER)
def five_bits_even(builder, nibbles, address):
    """Signed 5-bit codes of lanes 0, 2, ..., 30 of a unit; `address` holds its 32 high bits."""
    return _five(builder, nibbles, address, 0)


@operation(F32, I32, INTEGER)
def five_bits_odd(builder, nibbles, address):
    return _five(builder, nibbles, address, 1)


@operation(F32, I32, INTEGER)
def six_bits_even(builder, nibbles, address):
    """Signed 6-bit codes of lanes 0, 2, ..., 30 of a unit; `address` holds its 32 pairs of high bits."""
    return _six(builder, nibbles, address, 0)


@operation(F32, I32, INTEGER)
def six_bits_odd(builder, nibbles, address):
    return _six(builder, nibbles, address, 1)


# A 4-bit code has 16 possible values, and AVX-512 looks 16 floats up in one instruction by the low four bits
# of each lane. So codes are decoded by a table made per scale; elsewhere the same value is computed lane by
# lane.


def _pick(builder, table, codes, otherwise):
    if has_feature("avx512f"):
        return call(builder, "llvm.x86.avx512.permvar.sf.512", vf32, table, codes)
    return otherwise(builder.and_(codes, lanes_of(vi32, 15)))


@operation(F32, I32, F32, F32, F32)
def pick_affine(builder, codes, table, d, m):
    """`code * d + m` for the low four bits of each lane; `table` is `fma(lane_numbers(), d, m)`."""
    return _pick(
        builder,
        table,
        codes,
        lambda code: call(builder, "llvm.fma.v16f32", vf32, builder.sitofp(code, vf32), d, m),
    )


@operation(F32)
def signed_nibbles(builder):
    """The values of the 16 two's complement nibbles."""
    return lanes_of(vf32, [float(n if n < 8 else n - 16) for n in range(16)])


@operation(F32, I32, F32, F32)
def pick_signed(builder, codes, table, scale):
    """`signed code * scale` for the low four bits of each lane; `table` is `signed_nibbles() * scale`."""

    def otherwise(code):
        signed = builder.sub(builder.xor(code, lanes_of(vi32, 8)), lanes_of(vi32, 8))
        return builder.fmul(builder.sitofp(signed, vf32), scale)

    return _pick(builder, table, codes, otherwise)


@operation(F32, I32)
def e2m1(builder, codes):
    """The E2M1 value of the low four bits of each lane."""
    magnitudes = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)

    def otherwise(code):
        # Sign and magnitude moved into the fields of a half give 2^-14 of the value.
        sign = builder.shl(builder.and_(code, lanes_of(vi32, 8)), lanes_of(vi32, 12))
        magnitude = builder.shl(builder.and_(code, lanes_of(vi32, 7)), lanes_of(vi32, 9))
        half = builder.bitcast(builder.trunc(builder.or_(sign, magnitude), vi16), vf16)
        return builder.fmul(builder.fpext(half, vf32), lanes_of(vf32, 16384.0))

    table = lanes_of(vf32, [*magnitudes, *(-m for m in magnitudes)])
    return _pick(builder, table, codes, otherwise)


# --- encoding: float32 to the nearest code, ties to even


@operation(I32, F32)
def int8_codes(builder, a):
    """The nearest integers, kept in [-127, 127]."""
    whole = call(builder, "llvm.rint.v16f32", vf32, a)
    low = call(builder, "llvm.maxnum.v16f32", vf32, whole, lanes_of(vf32, -127.0))
    return builder.fptosi(call(builder, "llvm.minnum.v16f32", vf32, low, lanes_of(vf32, 127.0)), vi32)


def _minifloat(builder, a, most, least, bits, sign):
    """Sign and magnitude codes with `bits` of mantissa: the largest value, the exponent at and below which
    codes are evenly spaced, the sign's place.

    The power of two of a magnitude's binade, times 2^(23 - bits), is added to it: the sum has one step of the
    code as its last place, and the number of steps in its lowest bits.
    """
    m = call(builder, "llvm.fabs.v16f32", vf32, a)
    m = call(builder, "llvm.minnum.v16f32", vf32, m, lanes_of(vf32, most))
    floor = call(builder, "llvm.maxnum.v16f32", vf32, m, lanes_of(vf32, 2.0**least))
    power = builder.and_(builder.bitcast(floor, vi32), lanes_of(vi32, 0x7F800000))
    shift = builder.fmul(builder.bitcast(power, vf32), lanes_of(vf32, 2.0 ** (23 - bits)))
    steps = builder.and_(builder.bitcast(builder.fadd(m, shift), vi32), lanes_of(vi32, (4 << bits) - 1))
    binade = builder.sub(builder.lshr(power, lanes_of(vi32, 23)), lanes_of(vi32, 127 + least))
    code = builder.add(builder.shl(binade, lanes_of(vi32, bits)), steps)
    negative = builder.lshr(builder.bitcast(a, vi32), lanes_of(vi32, 31))
    return builder.or_(code, builder.shl(negative, lanes_of(vi32, sign)))


@operation(I32, F32)
def e4m3_codes(builder, a):
    """E4M3 words, saturating at 448; a zero keeps its sign."""
    return _minifloat(builder, a, 448.0, -6, 3, 7)


@operation(I32, F32)
def e2m1_codes(builder, a):
    """E2M1 codes, saturating at 6; a zero keeps its sign."""
    return _minifloat(builder, a, 6.0, 0, 1, 3)


@operation(F32, I32)
def e4m3(builder, codes):
    """The values of E4M3 words."""
    sign = builder.shl(builder.and_(codes, lanes_of(vi32, 0x80)), lanes_of(vi32, 8))
    rest = builder.shl(builder.and_(codes, lanes_of(vi32, 0x7F)), lanes_of(vi32, 7))
    half = builder.bitcast(builder.trunc(builder.or_(sign, rest), vi16), vf16)
    return builder.fmul(builder.fpext(half, vf32), lanes_of(vf32, 256.0))


@operation(NOTHING, INTEGER, I32)
def put_first_byte(builder, address, codes):
    store_value(builder, address, builder.trunc(builder.extract_element(codes, i32(0)), i8))


@operation(NOTHING, INTEGER, I32)
def store_bytes(builder, address, codes):
    """The low bytes of 16 lanes."""
    store_value(builder, address, builder.trunc(codes, vi8))


@operation(NOTHING, INTEGER, I32)
def store_nibbles(builder, address, codes):
    """16 codes of four bits as 8 bytes, the even lanes in the low nibbles."""
    kind = ir.VectorType(i8, 8)
    words = builder.trunc(codes, vi8)
    low = builder.shuffle_vector(words, words, indices(range(0, 16, 2)))
    high = builder.shuffle_vector(words, words, indices(range(1, 16, 2)))
    store_value(builder, address, builder.or_(low, builder.shl(high, ir.Constant(kind, [4] * 8))))
