"""Elementary functions of 16 lanes, angles, and the random numbers of sampling."""

from __future__ import annotations

import struct

import numpy as np
from llvmlite import ir

from ninfer.ops.cpu.instructions import (
    DOUBLE,
    F32,
    I32,
    INTEGER,
    LANES,
    call,
    device,
    f64,
    i64,
    lanes_of,
    load_value,
    operation,
    vf32,
    vi32,
)
from ninfer.ops.cpu.simd import add, div, fma, mul, splat, sub, zeros


@operation(F32, F32)
def _nearest(builder, a):
    return call(builder, "llvm.rint.v16f32", vf32, a)


@operation(F32, F32)
def _power_of_two(builder, a):
    """2^a for integral lanes -126..127."""
    exponent = builder.add(builder.fptosi(a, vi32), lanes_of(vi32, 127))
    return builder.bitcast(builder.shl(exponent, lanes_of(vi32, 23)), vf32)


@operation(F32, F32)
def _clamp_exponent(builder, a):
    low = call(builder, "llvm.maxnum.v16f32", vf32, a, lanes_of(vf32, -87.0))
    return call(builder, "llvm.minnum.v16f32", vf32, low, lanes_of(vf32, 88.0))


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


# --- random numbers


def _mix(builder, x):
    """SplitMix64."""
    x = builder.add(x, i64(0x9E3779B97F4A7C15))
    x = builder.mul(builder.xor(x, builder.lshr(x, i64(30))), i64(0xBF58476D1CE4E5B9))
    x = builder.mul(builder.xor(x, builder.lshr(x, i64(27))), i64(0x94D049BB133111EB))
    return builder.xor(x, builder.lshr(x, i64(31)))


@operation(DOUBLE, INTEGER, INTEGER, INTEGER)
def draw(builder, seed, position, purpose):
    """`ninfer.ops.uniform`, sub-draw 0."""
    low = builder.and_(position, i64(0xFFFFFFFF))
    key = _mix(builder, builder.xor(seed, builder.mul(low, i64(0xD1B54A32D192ED03))))
    key = _mix(builder, builder.xor(key, builder.shl(purpose, i64(21))))
    top = builder.uitofp(builder.lshr(key, i64(40)), f64)
    return builder.fmul(top, ir.Constant(f64, 2.0**-24))


# --- angles


def _turn(builder, turns, frequencies):
    """(whole quarter turns, the rest of the angle in radians) of 16 float64 positions and frequencies."""
    kind = ir.VectorType(f64, LANES)
    quarters = builder.fmul(load_value(builder, turns, kind), load_value(builder, frequencies, kind))
    whole = call(builder, "llvm.rint.v16f64", kind, quarters)
    rest = builder.fmul(builder.fsub(quarters, whole), lanes_of(kind, 1.5707963267948966))
    return whole, builder.fptrunc(rest, vf32)


@operation(F32, INTEGER, INTEGER)
def angle_rest(builder, turns, frequencies):
    """What remains of the angles beyond whole quarter turns, in [-pi/4, pi/4]."""
    return _turn(builder, turns, frequencies)[1]


@operation(I32, INTEGER, INTEGER)
def angle_quadrant(builder, turns, frequencies):
    """Whole quarter turns modulo 4. Both arguments are addresses of 16 float64."""
    whole, _ = _turn(builder, turns, frequencies)
    wide = builder.fptosi(whole, ir.VectorType(i64, LANES))
    return builder.and_(builder.trunc(wide, vi32), lanes_of(vi32, 3))


@operation(F32, I32, F32, F32, F32, F32)
def choose(builder, index, a, b, c, d):
    """a, b, c or d where the lane of `index` is 0, 1, 2 or 3."""
    low = builder.icmp_signed("==", builder.and_(index, lanes_of(vi32, 1)), lanes_of(vi32, 0))
    high = builder.icmp_signed("==", builder.and_(index, lanes_of(vi32, 2)), lanes_of(vi32, 0))
    return builder.select(high, builder.select(low, a, b), builder.select(low, c, d))
