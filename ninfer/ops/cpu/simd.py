"""Memory and vectors of 16 float32. Loads and stores need no alignment."""

from __future__ import annotations

from llvmlite import ir

from ninfer.ops.cpu.instructions import (
    DOUBLE,
    F32,
    FLOAT,
    I32,
    INTEGER,
    LANES,
    NOTHING,
    call,
    device,
    f16,
    f32,
    f64,
    has_feature,
    i8,
    i16,
    i32,
    i64,
    indices,
    lanes_of,
    load_value,
    operation,
    pointer,
    splat_value,
    store_value,
    undefined,
    vf16,
    vf32,
    vi8,
    vi16,
    vi32,
)

# --- memory: vectors


@operation(F32, INTEGER)
def load_f32(builder, address):
    """16 float32."""
    return load_value(builder, address, vf32)


@operation(F32, INTEGER)
def load_bf16(builder, address):
    """16 bf16 words, widened exactly."""
    wide = builder.zext(load_value(builder, address, vi16), vi32)
    return builder.bitcast(builder.shl(wide, lanes_of(vi32, 16)), vf32)


@operation(F32, INTEGER)
def load_f16(builder, address):
    """16 binary16 words, widened exactly."""
    return builder.fpext(load_value(builder, address, vf16), vf32)


def _e4m3_values(builder, codes):
    """Codes moved into the fields of a half, which is 2^-8 of the value."""
    words = builder.shl(builder.sext(codes, vi16), lanes_of(vi16, 7))
    half = builder.bitcast(builder.and_(words, lanes_of(vi16, 0xBFFF)), vf16)
    return builder.fmul(builder.fpext(half, vf32), lanes_of(vf32, 256.0))


@operation(F32, INTEGER)
def load_e4m3(builder, address):
    """16 E4M3 codes, widened exactly."""
    return _e4m3_values(builder, load_value(builder, address, vi8))


@operation(F32, INTEGER)
def load_e4m3_pair(builder, address):
    """Two E4M3 codes: the first in lanes 0..7, the second in 8..15."""
    pair = load_value(builder, address, ir.VectorType(i8, 2))
    return _e4m3_values(builder, builder.shuffle_vector(pair, pair, indices([0] * 8 + [1] * 8)))


@operation(I32, INTEGER)
def load_u8(builder, address):
    """16 bytes as lanes 0..255."""
    return builder.zext(load_value(builder, address, vi8), vi32)


@operation(I32, INTEGER)
def load_i8(builder, address):
    """16 signed bytes."""
    return builder.sext(load_value(builder, address, vi8), vi32)


@operation(NOTHING, INTEGER, F32)
def store_f32(builder, address, value):
    store_value(builder, address, value)


def _round_bf16(builder, value, kind):
    """The words of float lanes rounded to bf16, in the low halves: nearest, ties to even, NaN stays NaN."""
    wide = ir.VectorType(i32, kind.count)
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
    store_value(builder, address, builder.trunc(_round_bf16(builder, value, vf32), vi16))


@operation(F32, F32)
def as_bf16(builder, value):
    """Each lane rounded to bf16, still as float32."""
    words = builder.shl(_round_bf16(builder, value, vf32), lanes_of(vi32, 16))
    return builder.bitcast(words, vf32)


# --- memory: scalars


@operation(INTEGER, INTEGER)
def get_i64(builder, address):
    return load_value(builder, address, i64)


@operation(INTEGER, INTEGER)
def get_i32(builder, address):
    return builder.sext(load_value(builder, address, i32), i64)


@operation(INTEGER, INTEGER)
def get_u8(builder, address):
    return builder.zext(load_value(builder, address, i8), i64)


@operation(FLOAT, INTEGER)
def get_f32(builder, address):
    return load_value(builder, address, f32)


@operation(DOUBLE, INTEGER)
def get_f64(builder, address):
    return load_value(builder, address, f64)


@operation(FLOAT, INTEGER)
def get_f16(builder, address):
    return builder.fpext(load_value(builder, address, f16), f32)


@operation(FLOAT, INTEGER)
def get_bf16(builder, address):
    wide = builder.shl(builder.zext(load_value(builder, address, i16), i32), i32(16))
    return builder.bitcast(wide, f32)


@operation(NOTHING, INTEGER, INTEGER)
def put_i64(builder, address, value):
    store_value(builder, address, value)


@operation(NOTHING, INTEGER, INTEGER)
def put_i32(builder, address, value):
    store_value(builder, address, builder.trunc(value, i32))


@operation(NOTHING, INTEGER, INTEGER)
def put_u8(builder, address, value):
    store_value(builder, address, builder.trunc(value, i8))


@operation(NOTHING, INTEGER, FLOAT)
def put_f32(builder, address, value):
    store_value(builder, address, value)


@operation(NOTHING, INTEGER, DOUBLE)
def put_f64(builder, address, value):
    store_value(builder, address, value)


@operation(NOTHING, INTEGER, FLOAT)
def put_bf16(builder, address, value):
    one = ir.VectorType(f32, 1)
    lane = builder.insert_element(undefined(one), value, i32(0))
    word = builder.extract_element(_round_bf16(builder, lane, one), i32(0))
    store_value(builder, address, builder.trunc(word, i16))


@operation(NOTHING, INTEGER, FLOAT)
def put_f16(builder, address, value):
    store_value(builder, address, builder.fptrunc(value, f16))


@operation(NOTHING, INTEGER, INTEGER)
def widen_two_f16(builder, source, target):
    """Two neighbouring binary16 words to two float32."""
    pair = load_value(builder, source, ir.VectorType(f16, 2))
    store_value(builder, target, builder.fpext(pair, ir.VectorType(f32, 2)))


@operation(NOTHING, INTEGER, INTEGER)
def widen_four_e4m3(builder, source, target):
    """Four neighbouring E4M3 codes to four float32."""
    words_of, halves_of, floats_of = (ir.VectorType(t, 4) for t in (i16, f16, f32))
    words = builder.sext(load_value(builder, source, ir.VectorType(i8, 4)), words_of)
    words = builder.shl(words, ir.Constant(words_of, [7] * 4))
    half = builder.bitcast(builder.and_(words, ir.Constant(words_of, [0xBFFF] * 4)), halves_of)
    scaled = builder.fmul(builder.fpext(half, floats_of), ir.Constant(floats_of, [256.0] * 4))
    store_value(builder, target, scaled)


@operation(NOTHING, INTEGER)
def split_pairs(builder, address):
    """Reorder 32 words of 16 bits in place: the even ones first, then the odd ones."""
    kind = ir.VectorType(i16, 32)
    words = load_value(builder, address, kind)
    order = indices([*range(0, 32, 2), *range(1, 32, 2)])
    store_value(builder, address, builder.shuffle_vector(words, words, order))


@operation(NOTHING, INTEGER)
def prefetch(builder, address):
    """Start fetching the cache line of an address; any address is allowed."""
    place = pointer(builder, address, i8)
    call(builder, "llvm.prefetch.p0", ir.VoidType(), place, i32(0), i32(3), i32(1))


@operation(INTEGER, INTEGER)
def stack(builder, size):
    """`size` bytes of this call's stack, at a multiple of 64; use at the top of a kernel, not in a loop."""
    memory = builder.alloca(i8, size=size)
    memory.align = 64
    return builder.ptrtoint(memory, i64)


@operation(INTEGER, INTEGER, INTEGER)
def fetch_add(builder, address, value):
    """Add to a shared counter and return what it was."""
    return builder.atomic_rmw("add", pointer(builder, address, i64), value, "seq_cst")


@operation(INTEGER, INTEGER)
def get_shared(builder, address):
    """A counter that other threads change."""
    return builder.load_atomic(pointer(builder, address, i64), "seq_cst", 8)


@operation(NOTHING, INTEGER, INTEGER)
def call_kernel(builder, kernel, data):
    """Run another kernel, given by its address, on a block."""
    kind = ir.FunctionType(ir.VoidType(), [i64])
    builder.call(pointer(builder, kernel, kind), [data])


@operation(INTEGER)
def members(builder):
    """How many threads the OpenMP team that runs this kernel really has."""
    return builder.sext(call(builder, "ninfer_members", i32), i64)


@operation(NOTHING)
def pause(builder):
    """Say that this thread is waiting for another one's store."""
    if has_feature("sse2"):
        call(builder, "llvm.x86.sse2.pause", ir.VoidType())


@operation(NOTHING)
def give_way(builder):
    """Let another thread have this core."""
    call(builder, "ninfer_give_way", i32)


# --- float lanes


@operation(F32, F32, F32, F32)
def fma(builder, a, b, c):
    """`a * b + c`, rounded once."""
    return call(builder, "llvm.fma.v16f32", vf32, a, b, c)


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
    return call(builder, "llvm.maxnum.v16f32", vf32, a, b)


@operation(F32, F32, F32)
def minimum(builder, a, b):
    """Lane by lane; a NaN is lost."""
    return call(builder, "llvm.minnum.v16f32", vf32, a, b)


@operation(F32, F32)
def magnitude(builder, a):
    return call(builder, "llvm.fabs.v16f32", vf32, a)


@operation(F32, F32)
def zero_if_nan(builder, a):
    return builder.select(builder.fcmp_unordered("uno", a, a), lanes_of(vf32, 0.0), a)


@operation(F32, F32)
def as_f16(builder, a):
    """Each lane rounded to binary16, still as float32."""
    return builder.fpext(builder.fptrunc(a, vf16), vf32)


@operation(F32, F32)
def butterflies(builder, a):
    """Sums and differences of lanes 1 apart, then 2, 4 and 8: a Hadamard transform of 16, not scaled."""
    for stride in (1, 2, 4, 8):
        other = builder.shuffle_vector(a, a, indices([lane ^ stride for lane in range(LANES)]))
        upper = ir.Constant(ir.VectorType(ir.IntType(1), LANES), [lane & stride > 0 for lane in range(LANES)])
        a = builder.select(upper, builder.fsub(other, a), builder.fadd(a, other))
    return a


@operation(DOUBLE, DOUBLE)
def square_root(builder, value):
    return call(builder, "llvm.sqrt.f64", f64, value)


@operation(F32, INTEGER)
def load_i32_as_f32(builder, address):
    """16 int32, converted."""
    return builder.sitofp(load_value(builder, address, vi32), vf32)


@operation(F32, F32)
def positive(builder, a):
    """1 where a lane is above zero, else 0."""
    above = builder.fcmp_ordered(">", a, lanes_of(vf32, 0.0))
    return builder.select(above, lanes_of(vf32, 1.0), lanes_of(vf32, 0.0))


@operation(INTEGER, F32, FLOAT)
def any_greater(builder, a, bound):
    """Nonzero if some lane is above the bound."""
    above = builder.fcmp_ordered(">", a, splat_value(builder, bound, vf32))
    return builder.zext(builder.bitcast(above, ir.IntType(LANES)), i64)


@operation(F32, F32, INTEGER)
def only(builder, a, bits):
    """The lanes whose bit is set (lane 0: the lowest); NaN in the others."""
    chosen = builder.bitcast(builder.trunc(bits, ir.IntType(LANES)), ir.VectorType(ir.IntType(1), LANES))
    return builder.select(chosen, a, lanes_of(vf32, float("nan")))


@operation(F32, FLOAT)
def splat(builder, value):
    """One float32 in all lanes."""
    return splat_value(builder, value, vf32)


@operation(F32)
def zeros(builder):
    return lanes_of(vf32, 0.0)


@operation(F32)
def lane_numbers(builder):
    return lanes_of(vf32, [float(lane) for lane in range(LANES)])


@operation(F32, F32, F32)
def half_and_half(builder, a, b):
    """Lanes 0..7 of `a`, then lanes 8..15 of `b`."""
    return builder.shuffle_vector(a, b, indices([*range(8), *range(24, 32)]))


@operation(F32, F32, F32)
def interleave_low(builder, a, b):
    """a0 b0 a1 b1 ... a7 b7."""
    return builder.shuffle_vector(a, b, indices([i // 2 + (i % 2) * 16 for i in range(16)]))


@operation(F32, F32, F32)
def interleave_high(builder, a, b):
    """a8 b8 ... a15 b15."""
    return builder.shuffle_vector(a, b, indices([8 + i // 2 + (i % 2) * 16 for i in range(16)]))


@operation(F32, F32, F32)
def take_even(builder, a, b):
    """a0 a2 ... a14 b0 b2 ... b14."""
    return builder.shuffle_vector(a, b, indices(range(0, 32, 2)))


@operation(F32, F32, F32)
def take_odd(builder, a, b):
    """a1 a3 ... a15 b1 b3 ... b15."""
    return builder.shuffle_vector(a, b, indices(range(1, 32, 2)))


@operation(F32, INTEGER)
def totals(builder, address):
    """The lane sums of 16 vectors that lie one after the other; each a binary tree, halves onto halves."""
    rows = [load_value(builder, builder.add(address, i64(64 * i)), vf32) for i in range(LANES)]
    width = LANES
    while len(rows) > 1:
        width //= 2
        groups = [16 * side + 2 * width * group for side in range(2) for group in range(8 // width)]
        low = [group + j for group in groups for j in range(width)]
        high = [index + width for index in low]
        rows = [
            builder.fadd(
                builder.shuffle_vector(a, b, indices(low)), builder.shuffle_vector(a, b, indices(high))
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
        low = builder.shuffle_vector(value, value, indices(range(lanes)))
        value = builder.fadd(low, builder.shuffle_vector(value, value, indices(range(lanes, 2 * lanes))))
    return builder.extract_element(value, i32(0))


@operation(FLOAT, F32)
def largest(builder, a):
    return call(builder, "llvm.vector.reduce.fmax.v16f32", f32, a)


@device
def copy_bytes(target, source, count):
    for i in range(count >> 6):
        store_f32(target + 64 * i, load_f32(source + 64 * i))
    for i in range(count & -64, count):
        put_u8(target + i, get_u8(source + i))
