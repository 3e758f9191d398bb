"""The instruction set of our kernels: 16-lane vectors, memory by address, codes of weights.

Kernels are Python functions that Numba compiles (`compiler.py`). Numba has no vector values, and LLVM's own
vectorizer does not see through packed weight codes. So this file defines two types, 16 float32 lanes (`F32`)
and 16 int32 lanes (`I32`), and the operations that kernels need, each a line or two of portable LLVM IR: the
code generator splits the vectors on machines with shorter registers. Addresses are plain integers
(`tensor.data_ptr()`), so that a call converts nothing. Loads and stores need no alignment.

An `operation` describes code and is called inside kernels only; a `device` function is inlined into them.
Nothing here imports Numba: it is needed only when a kernel is not in the cache yet.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from enum import Enum
from typing import Any

import numpy as np
from llvmlite import ir

LANES = 16

_I8, _I16, _I32, _I64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))
_HALF, _FLOAT, _DOUBLE = ir.HalfType(), ir.FloatType(), ir.DoubleType()
_VI8, _VI16, _VI32, _VF32, _VF16 = (ir.VectorType(t, LANES) for t in (_I8, _I16, _I32, _FLOAT, _HALF))


class Kind(Enum):
    """Types of values that operations take and give."""

    F32 = "16 float32 lanes"
    I32 = "16 int32 lanes"
    INTEGER = "int64, also an address"
    FLOAT = "float32"
    DOUBLE = "float64"
    NOTHING = "no value"


F32, I32 = Kind.F32, Kind.I32
INTEGER, FLOAT, DOUBLE, NOTHING = Kind.INTEGER, Kind.FLOAT, Kind.DOUBLE, Kind.NOTHING


class Operation:
    """An instruction of kernels: `emit(builder, *values)` writes its LLVM IR and returns the resulting
    value."""

    def __init__(self, emit: Callable, result: Kind, parameters: tuple[Kind, ...]) -> None:
        self.emit, self.result, self.parameters = emit, result, parameters
        self.__name__, self.__doc__ = emit.__name__, emit.__doc__

    def __call__(self, *args: Any) -> Any:
        raise TypeError(
            f"{self.__name__} is an instruction of compiled kernels and cannot be called from Python"
        )


def operation(result: Kind, *parameters: Kind) -> Callable[[Callable], Operation]:
    """Decorator that makes an `Operation` of this signature from its `emit` function."""
    return lambda emit: Operation(emit, result, parameters)


def device(function: Callable) -> Callable:
    """Decorator of functions that kernels inline; from Python they stay ordinary functions."""
    function.__device__ = True  # type: ignore[attr-defined]
    return function


def call(builder, name, result, *args):
    """Call an LLVM intrinsic or an external function by name."""
    function = builder.module.globals.get(name)
    if function is None:
        kind = ir.FunctionType(result, [a.type for a in args])
        function = ir.Function(builder.module, kind, name)
    return builder.call(function, args)


def has_feature(feature: str) -> bool:
    """Does the machine that kernels are compiled for have this LLVM feature?"""
    from ninfer.ops.cpu.native import target_features

    return f"+{feature}" in target_features().split(",")


def pointer(builder, address, pointee):
    return builder.inttoptr(address, ir.PointerType(pointee))


def _load(builder, address, kind):
    return builder.load(pointer(builder, address, kind), align=1)


def _store(builder, address, value):
    builder.store(value, pointer(builder, address, value.type), align=1)


def _lanes(kind, values):
    return ir.Constant(kind, [values] * LANES if np.isscalar(values) else list(values))


def _undefined(kind):
    return ir.Constant(kind, ir.Undefined)


def _indices(values):
    values = list(values)
    return ir.Constant(ir.VectorType(_I32, len(values)), values)


def _splat(builder, scalar, kind):
    first = builder.insert_element(_undefined(kind), scalar, _I32(0))
    return builder.shuffle_vector(first, _undefined(kind), _indices([0] * LANES))


# --- memory: vectors


@operation(F32, INTEGER)
def load_f32(builder, address):
    """16 float32."""
    return _load(builder, address, _VF32)


@operation(F32, INTEGER)
def load_bf16(builder, address):
    """16 bf16 words, widened exactly."""
    wide = builder.zext(_load(builder, address, _VI16), _VI32)
    return builder.bitcast(builder.shl(wide, _lanes(_VI32, 16)), _VF32)


@operation(F32, INTEGER)
def load_f16(builder, address):
    """16 binary16 words, widened exactly."""
    return builder.fpext(_load(builder, address, _VF16), _VF32)


@operation(F32, INTEGER)
def load_e4m3(builder, address):
    """16 E4M3 codes, widened exactly: moved into the fields of a half, which is 2^-8 of the value."""
    words = builder.shl(builder.sext(_load(builder, address, _VI8), _VI16), _lanes(_VI16, 7))
    half = builder.bitcast(builder.and_(words, _lanes(_VI16, 0xBFFF)), _VF16)
    return builder.fmul(builder.fpext(half, _VF32), _lanes(_VF32, 256.0))


@operation(I32, INTEGER)
def load_u8(builder, address):
    """16 bytes as lanes 0..255."""
    return builder.zext(_load(builder, address, _VI8), _VI32)


@operation(I32, INTEGER)
def load_i8(builder, address):
    """16 signed bytes."""
    return builder.sext(_load(builder, address, _VI8), _VI32)


@operation(NOTHING, INTEGER, F32)
def store_f32(builder, address, value):
    _store(builder, address, value)


def _round_bf16(builder, value, kind):
    """The words of float lanes rounded to bf16, in the low halves: nearest, ties to even, NaN stays NaN."""
    wide = ir.VectorType(_I32, kind.count)
    bits = builder.bitcast(value, wide)

    def lanes(word):
        return ir.Constant(wide, [word] * kind.count)

    odd = builder.and_(builder.lshr(bits, lanes(16)), lanes(1))
    rounded = builder.add(builder.add(bits, lanes(0x7FFF)), odd)
    nan = builder.fcmp_unordered("uno", value, value)
    return builder.lshr(builder.select(nan, builder.or_(bits, lanes(0x400000)), rounded), lanes(16))


@operation(NOTHING, INTEGER, F32)
def store_bf16(builder, address, value):
    """Round each lane to bf16 and store the words."""
    _store(builder, address, builder.trunc(_round_bf16(builder, value, _VF32), _VI16))


@operation(F32, F32)
def as_bf16(builder, value):
    """Each lane rounded to bf16, still as float32."""
    words = builder.shl(_round_bf16(builder, value, _VF32), _lanes(_VI32, 16))
    return builder.bitcast(words, _VF32)


# --- memory: scalars


@operation(INTEGER, INTEGER)
def get_i64(builder, address):
    return _load(builder, address, _I64)


@operation(INTEGER, INTEGER)
def get_i32(builder, address):
    return builder.sext(_load(builder, address, _I32), _I64)


@operation(INTEGER, INTEGER)
def get_u8(builder, address):
    return builder.zext(_load(builder, address, _I8), _I64)


@operation(FLOAT, INTEGER)
def get_f32(builder, address):
    return _load(builder, address, _FLOAT)


@operation(DOUBLE, INTEGER)
def get_f64(builder, address):
    return _load(builder, address, _DOUBLE)


@operation(FLOAT, INTEGER)
def get_f16(builder, address):
    return builder.fpext(_load(builder, address, _HALF), _FLOAT)


@operation(FLOAT, INTEGER)
def get_bf16(builder, address):
    wide = builder.shl(builder.zext(_load(builder, address, _I16), _I32), _I32(16))
    return builder.bitcast(wide, _FLOAT)


@operation(NOTHING, INTEGER, INTEGER)
def put_i64(builder, address, value):
    _store(builder, address, value)


@operation(NOTHING, INTEGER, INTEGER)
def put_i32(builder, address, value):
    _store(builder, address, builder.trunc(value, _I32))


@operation(NOTHING, INTEGER, INTEGER)
def put_u8(builder, address, value):
    _store(builder, address, builder.trunc(value, _I8))


@operation(NOTHING, INTEGER, FLOAT)
def put_f32(builder, address, value):
    _store(builder, address, value)


@operation(NOTHING, INTEGER, DOUBLE)
def put_f64(builder, address, value):
    _store(builder, address, value)


@operation(NOTHING, INTEGER, FLOAT)
def put_bf16(builder, address, value):
    one = ir.VectorType(_FLOAT, 1)
    lane = builder.insert_element(_undefined(one), value, _I32(0))
    word = builder.extract_element(_round_bf16(builder, lane, one), _I32(0))
    _store(builder, address, builder.trunc(word, _I16))


@operation(NOTHING, INTEGER, INTEGER)
def widen_two_f16(builder, source, target):
    """Two neighbouring binary16 words to two float32."""
    pair = _load(builder, source, ir.VectorType(_HALF, 2))
    _store(builder, target, builder.fpext(pair, ir.VectorType(_FLOAT, 2)))


@operation(NOTHING, INTEGER, INTEGER)
def widen_four_e4m3(builder, source, target):
    """Four neighbouring E4M3 codes to four float32."""
    i16, f16, f32 = (ir.VectorType(t, 4) for t in (_I16, _HALF, _FLOAT))
    words = builder.sext(_load(builder, source, ir.VectorType(_I8, 4)), i16)
    words = builder.shl(words, ir.Constant(i16, [7] * 4))
    half = builder.bitcast(builder.and_(words, ir.Constant(i16, [0xBFFF] * 4)), f16)
    _store(builder, target, builder.fmul(builder.fpext(half, f32), ir.Constant(f32, [256.0] * 4)))


@operation(NOTHING, INTEGER)
def split_pairs(builder, address):
    """Reorder 32 words of 16 bits in place: the even ones first, then the odd ones."""
    kind = ir.VectorType(_I16, 32)
    words = _load(builder, address, kind)
    order = _indices([*range(0, 32, 2), *range(1, 32, 2)])
    _store(builder, address, builder.shuffle_vector(words, words, order))


@operation(NOTHING, INTEGER)
def prefetch(builder, address):
    """Start fetching the cache line of an address; any address is allowed."""
    place = pointer(builder, address, _I8)
    call(builder, "llvm.prefetch.p0", ir.VoidType(), place, _I32(0), _I32(3), _I32(1))


@operation(INTEGER, INTEGER)
def stack(builder, size):
    """`size` bytes of this call's stack, at a multiple of 64; use at the top of a kernel, not in a loop."""
    memory = builder.alloca(_I8, size=size)
    memory.align = 64
    return builder.ptrtoint(memory, _I64)


@operation(INTEGER, INTEGER, INTEGER)
def fetch_add(builder, address, value):
    """Add to a shared counter and return what it was."""
    return builder.atomic_rmw("add", pointer(builder, address, _I64), value, "seq_cst")


@operation(INTEGER, INTEGER)
def get_shared(builder, address):
    """A counter that other threads change."""
    return builder.load_atomic(pointer(builder, address, _I64), "seq_cst", 8)


@operation(NOTHING, INTEGER, INTEGER)
def call_kernel(builder, kernel, data):
    """Run another kernel, given by its address, on a block."""
    kind = ir.FunctionType(ir.VoidType(), [_I64])
    builder.call(pointer(builder, kernel, kind), [data])


@operation(INTEGER)
def members(builder):
    """How many threads the OpenMP team that runs this kernel really has."""
    return builder.sext(call(builder, "ninfer_members", _I32), _I64)


@operation(NOTHING)
def pause(builder):
    """Say that this thread is waiting for another one's store."""
    if has_feature("sse2"):
        call(builder, "llvm.x86.sse2.pause", ir.VoidType())


@operation(NOTHING)
def give_way(builder):
    """Let another thread have this core."""
    call(builder, "ninfer_give_way", _I32)


# --- float lanes


@operation(F32, F32, F32, F32)
def fma(builder, a, b, c):
    """`a * b + c`, rounded once."""
    return call(builder, "llvm.fma.v16f32", _VF32, a, b, c)


@operation(F32, F32, F32)
def mul(builder, a, b):
    return builder.fmul(a, b)


@operation(F32, F32, F32)
def add(builder, a, b):
    return builder.fadd(a, b)


@operation(F32, F32, F32)
def sub(builder, a, b):
    return builder.fsub(a, b)


@operation(F32, F32, F32)
def div(builder, a, b):
    return builder.fdiv(a, b)


@operation(F32, F32, F32)
def maximum(builder, a, b):
    """Lane by lane; a NaN is lost."""
    return call(builder, "llvm.maxnum.v16f32", _VF32, a, b)


@operation(DOUBLE, DOUBLE)
def square_root(builder, value):
    return call(builder, "llvm.sqrt.f64", _DOUBLE, value)


@operation(F32, INTEGER)
def load_i32_as_f32(builder, address):
    """16 int32, converted."""
    return builder.sitofp(_load(builder, address, _VI32), _VF32)


@operation(F32, F32)
def positive(builder, a):
    """1 where a lane is above zero, else 0."""
    above = builder.fcmp_ordered(">", a, _lanes(_VF32, 0.0))
    return builder.select(above, _lanes(_VF32, 1.0), _lanes(_VF32, 0.0))


@operation(INTEGER, F32, FLOAT)
def any_greater(builder, a, bound):
    """Nonzero if some lane is above the bound."""
    above = builder.fcmp_ordered(">", a, _splat(builder, bound, _VF32))
    return builder.zext(builder.bitcast(above, ir.IntType(LANES)), _I64)


@operation(F32, FLOAT)
def splat(builder, value):
    """One float32 in all lanes."""
    return _splat(builder, value, _VF32)


@operation(F32)
def zeros(builder):
    return _lanes(_VF32, 0.0)


@operation(F32)
def lane_numbers(builder):
    return _lanes(_VF32, [float(lane) for lane in range(LANES)])


@operation(F32, F32, F32)
def half_and_half(builder, a, b):
    """Lanes 0..7 of `a`, then lanes 8..15 of `b`."""
    return builder.shuffle_vector(a, b, _indices([*range(8), *range(24, 32)]))


@operation(F32, F32, F32)
def interleave_low(builder, a, b):
    """a0 b0 a1 b1 ... a7 b7."""
    return builder.shuffle_vector(a, b, _indices([i // 2 + (i % 2) * 16 for i in range(16)]))


@operation(F32, F32, F32)
def interleave_high(builder, a, b):
    """a8 b8 ... a15 b15."""
    return builder.shuffle_vector(a, b, _indices([8 + i // 2 + (i % 2) * 16 for i in range(16)]))


@operation(F32, F32, F32)
def take_even(builder, a, b):
    """a0 a2 ... a14 b0 b2 ... b14."""
    return builder.shuffle_vector(a, b, _indices(range(0, 32, 2)))


@operation(F32, F32, F32)
def take_odd(builder, a, b):
    """a1 a3 ... a15 b1 b3 ... b15."""
    return builder.shuffle_vector(a, b, _indices(range(1, 32, 2)))


@operation(F32, INTEGER)
def totals(builder, address):
    """The lane sums of 16 vectors that lie one after the other; each a binary tree, halves onto halves."""
    rows = [_load(builder, builder.add(address, _I64(64 * i)), _VF32) for i in range(LANES)]
    width = LANES
    while len(rows) > 1:
        width //= 2
        groups = [16 * side + 2 * width * group for side in range(2) for group in range(8 // width)]
        low = [group + j for group in groups for j in range(width)]
        high = [index + width for index in low]
        rows = [
            builder.fadd(
                builder.shuffle_vector(a, b, _indices(low)), builder.shuffle_vector(a, b, _indices(high))
            )
            for a, b in zip(rows[::2], rows[1::2], strict=True)
        ]
    return rows[0]


@operation(FLOAT, F32)
def total(builder, a):
    """Sum of the lanes as a binary tree, halves onto halves."""
    lanes, value = LANES, a
    while lanes > 1:
        lanes //= 2
        low = builder.shuffle_vector(value, value, _indices(range(lanes)))
        value = builder.fadd(low, builder.shuffle_vector(value, value, _indices(range(lanes, 2 * lanes))))
    return builder.extract_element(value, _I32(0))


@operation(FLOAT, F32)
def largest(builder, a):
    return call(builder, "llvm.vector.reduce.fmax.v16f32", _FLOAT, a)


@operation(F32, F32)
def _nearest(builder, a):
    return call(builder, "llvm.rint.v16f32", _VF32, a)


@operation(F32, F32)
def _power_of_two(builder, a):
    """2^a for integral lanes -126..127."""
    exponent = builder.add(builder.fptosi(a, _VI32), _lanes(_VI32, 127))
    return builder.bitcast(builder.shl(exponent, _lanes(_VI32, 23)), _VF32)


@operation(F32, F32)
def _clamp_exponent(builder, a):
    low = call(builder, "llvm.maxnum.v16f32", _VF32, a, _lanes(_VF32, -87.0))
    return call(builder, "llvm.minnum.v16f32", _VF32, low, _lanes(_VF32, 88.0))


def _f32(value: float) -> np.float32:
    return np.float32(struct.unpack("<f", struct.pack("<f", value))[0])


_LOG2_E, _LN2_HIGH, _LN2_LOW = _f32(1.44269504), _f32(0.693359375), _f32(-2.12194440e-4)
_E6, _E5, _E4 = _f32(1.9875691500e-4), _f32(1.3981999507e-3), _f32(8.3334519073e-3)
_E3, _E2, _E1 = _f32(4.1665795894e-2), _f32(1.6666665459e-1), _f32(5.0000001201e-1)
_ONE = _f32(1.0)


@device
def exp(x):
    """e^x within 2 units in the last place; the argument is clamped to [-87, 88]."""
    x = _clamp_exponent(x)
    n = _nearest(mul(x, splat(_LOG2_E)))
    r = fma(n, splat(-_LN2_LOW), fma(n, splat(-_LN2_HIGH), x))
    p = fma(fma(splat(_E6), r, splat(_E5)), r, splat(_E4))
    p = fma(fma(fma(p, r, splat(_E3)), r, splat(_E2)), r, splat(_E1))
    return mul(fma(mul(r, r), p, add(r, splat(_ONE))), _power_of_two(n))


@device
def sigmoid(x):
    return div(splat(_ONE), add(splat(_ONE), exp(sub(zeros(), x))))


@device
def silu(x):
    return div(x, add(splat(_ONE), exp(sub(zeros(), x))))


# --- integer lanes: codes


@operation(I32, I32)
def high_nibbles(builder, a):
    """Lanes shifted right by four."""
    return builder.lshr(a, _lanes(_VI32, 4))


@operation(I32, I32, INTEGER)
def shift_right(builder, a, bits):
    """Lanes shifted right by a scalar."""
    return builder.lshr(a, _splat(builder, builder.trunc(bits, _I32), _VI32))


@operation(I32, I32, INTEGER)
def mask(builder, a, bits):
    return builder.and_(a, _splat(builder, builder.trunc(bits, _I32), _VI32))


@operation(I32, I32, I32, INTEGER)
def insert_bits(builder, a, b, at):
    """`a | b << at`."""
    return builder.or_(a, builder.shl(b, _splat(builder, builder.trunc(at, _I32), _VI32)))


@operation(F32, I32)
def to_f32(builder, a):
    """Exact for lanes below 2^24 in magnitude."""
    return builder.sitofp(a, _VF32)


@operation(F32, I32, INTEGER)
def to_f32_minus(builder, a, bias):
    """`a - bias` as float32."""
    return builder.sitofp(builder.sub(a, _splat(builder, builder.trunc(bias, _I32), _VI32)), _VF32)


def _with_high_bits(builder, nibbles, shifted, low_bits):
    """Signed codes: the top bits of `shifted` above the four of `nibbles`."""
    top = builder.ashr(shifted, _lanes(_VI32, 32 - low_bits))
    merged = builder.or_(builder.and_(top, _lanes(_VI32, -16)), builder.and_(nibbles, _lanes(_VI32, 15)))
    return builder.sitofp(merged, _VF32)


def _five(builder, nibbles, address, odd):
    word = _splat(builder, _load(builder, address, _I32), _VI32)
    lanes = _lanes(_VI32, [31 - (2 * lane + odd) for lane in range(LANES)])
    return _with_high_bits(builder, nibbles, builder.shl(word, lanes), 5)


def _six(builder, nibbles, address, odd):
    words = _load(builder, address, ir.VectorType(_I32, 2))
    both = builder.shuffle_vector(words, words, _indices([0] * 8 + [1] * 8))
    lanes = _lanes(_VI32, [30 - 2 * ((2 * lane + odd) % 16) for lane in range(LANES)])
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
        return call(builder, "llvm.x86.avx512.permvar.sf.512", _VF32, table, codes)
    return otherwise(builder.and_(codes, _lanes(_VI32, 15)))


@operation(F32, I32, F32, F32, F32)
def pick_affine(builder, codes, table, d, m):
    """`code * d + m` for the low four bits of each lane; `table` is `fma(lane_numbers(), d, m)`."""
    return _pick(
        builder,
        table,
        codes,
        lambda code: call(builder, "llvm.fma.v16f32", _VF32, builder.sitofp(code, _VF32), d, m),
    )


@operation(F32)
def signed_nibbles(builder):
    """The values of the 16 two's complement nibbles."""
    return _lanes(_VF32, [float(n if n < 8 else n - 16) for n in range(16)])


@operation(F32, I32, F32, F32)
def pick_signed(builder, codes, table, scale):
    """`signed code * scale` for the low four bits of each lane; `table` is `signed_nibbles() * scale`."""

    def otherwise(code):
        signed = builder.sub(builder.xor(code, _lanes(_VI32, 8)), _lanes(_VI32, 8))
        return builder.fmul(builder.sitofp(signed, _VF32), scale)

    return _pick(builder, table, codes, otherwise)


@operation(F32, I32)
def e2m1(builder, codes):
    """The E2M1 value of the low four bits of each lane."""
    magnitudes = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)

    def otherwise(code):
        # Sign and magnitude moved into the fields of a half give 2^-14 of the value.
        sign = builder.shl(builder.and_(code, _lanes(_VI32, 8)), _lanes(_VI32, 12))
        magnitude = builder.shl(builder.and_(code, _lanes(_VI32, 7)), _lanes(_VI32, 9))
        half = builder.bitcast(builder.trunc(builder.or_(sign, magnitude), _VI16), _VF16)
        return builder.fmul(builder.fpext(half, _VF32), _lanes(_VF32, 16384.0))

    table = _lanes(_VF32, [*magnitudes, *(-m for m in magnitudes)])
    return _pick(builder, table, codes, otherwise)


# --- random numbers


def _mix(builder, x):
    """SplitMix64."""
    x = builder.add(x, _I64(0x9E3779B97F4A7C15))
    x = builder.mul(builder.xor(x, builder.lshr(x, _I64(30))), _I64(0xBF58476D1CE4E5B9))
    x = builder.mul(builder.xor(x, builder.lshr(x, _I64(27))), _I64(0x94D049BB133111EB))
    return builder.xor(x, builder.lshr(x, _I64(31)))


@operation(DOUBLE, INTEGER, INTEGER, INTEGER)
def draw(builder, seed, position, purpose):
    """`ninfer.ops.uniform`, sub-draw 0."""
    low = builder.and_(position, _I64(0xFFFFFFFF))
    key = _mix(builder, builder.xor(seed, builder.mul(low, _I64(0xD1B54A32D192ED03))))
    key = _mix(builder, builder.xor(key, builder.shl(purpose, _I64(21))))
    top = builder.uitofp(builder.lshr(key, _I64(40)), _DOUBLE)
    return builder.fmul(top, ir.Constant(_DOUBLE, 2.0**-24))


# --- angles


def _turn(builder, turns, frequencies):
    """(whole quarter turns, the rest of the angle in radians) of 16 float64 positions and frequencies."""
    kind = ir.VectorType(_DOUBLE, LANES)
    quarters = builder.fmul(_load(builder, turns, kind), _load(builder, frequencies, kind))
    whole = call(builder, "llvm.rint.v16f64", kind, quarters)
    rest = builder.fmul(builder.fsub(quarters, whole), _lanes(kind, 1.5707963267948966))
    return whole, builder.fptrunc(rest, _VF32)


@operation(F32, INTEGER, INTEGER)
def angle_rest(builder, turns, frequencies):
    """What remains of the angles beyond whole quarter turns, in [-pi/4, pi/4]."""
    return _turn(builder, turns, frequencies)[1]


@operation(I32, INTEGER, INTEGER)
def angle_quadrant(builder, turns, frequencies):
    """Whole quarter turns modulo 4. Both arguments are addresses of 16 float64."""
    whole, _ = _turn(builder, turns, frequencies)
    wide = builder.fptosi(whole, ir.VectorType(_I64, LANES))
    return builder.and_(builder.trunc(wide, _VI32), _lanes(_VI32, 3))


@operation(F32, I32, F32, F32, F32, F32)
def choose(builder, index, a, b, c, d):
    """a, b, c or d where the lane of `index` is 0, 1, 2 or 3."""
    low = builder.icmp_signed("==", builder.and_(index, _lanes(_VI32, 1)), _lanes(_VI32, 0))
    high = builder.icmp_signed("==", builder.and_(index, _lanes(_VI32, 2)), _lanes(_VI32, 0))
    return builder.select(high, builder.select(low, a, b), builder.select(low, c, d))


@device
def copy_bytes(target, source, count):
    for i in range(count >> 6):
        store_f32(target + 64 * i, load_f32(source + 64 * i))
    for i in range(count & -64, count):
        put_u8(target + i, get_u8(source + i))
