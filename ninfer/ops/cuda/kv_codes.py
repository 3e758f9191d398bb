"""Vectors of the KV cache inside kernels: the Hadamard rotation, and `formats.kv_codec`'s codes bit by bit.

All arithmetic is float32 with one rounding an operation, so kernels that encode are launched with
`enable_fp_fusion=False`. E4M3 and E2M1 are made and read with integer operations, which every GPU has.

A vector of `WIDTH` numbers stands in a block of `BLOCK`, the power of two at or above, padded with zeros.
"""

# pyright: reportArgumentType=false, reportIndexIssue=false, reportAttributeAccessIssue=false
# pyright: reportCallIssue=false, reportOperatorIssue=false, reportGeneralTypeIssues=false
# pyright: reportAssignmentType=false

from __future__ import annotations

import triton
import triton.language as tl

from ninfer.formats import KvCode
from ninfer.ops.cuda.bf16 import to_f32

CODES = {KvCode.PLAIN: 0, KvCode.INT8: 1, KvCode.FP8: 2, KvCode.NVFP4: 3}
"""Numbers of the codes, as constants of kernels."""

_FINITE: tl.constexpr = tl.constexpr(3.4028234663852886e38)
_LOWEST: tl.constexpr = tl.constexpr(-3.4028234663852886e38)


@triton.jit
def hadamard(x, ROWS: tl.constexpr, BLOCK: tl.constexpr, FACTOR: tl.constexpr):
    """`kv_codec.rotate` of the rows of `x`: butterflies of stride 1, 2, 4, ..., then `FACTOR`."""
    for stage in tl.static_range(16):
        if (1 << stage) < BLOCK:
            pairs = tl.reshape(x, [ROWS, BLOCK >> (stage + 1), 2, 1 << stage])
            a, b = tl.split(tl.permute(pairs, (0, 1, 3, 2)))
            x = tl.reshape(tl.permute(tl.join(a + b, a - b), (0, 1, 3, 2)), [ROWS, BLOCK])
    return x * FACTOR


@triton.jit
def finite(x):
    """NaN becomes 0, an infinity the largest finite number."""
    x = tl.where(x == x, x, 0.0)
    return tl.minimum(tl.maximum(x, _LOWEST), _FINITE)


@triton.jit
def _rounded(m, LEAST: tl.constexpr, BITS: tl.constexpr):
    """Word `(binade << BITS) + steps` of `m >= 0`, to nearest even: `kv_codec._round`, without the sign."""
    low: tl.constexpr = tl.constexpr(2.0**LEAST)
    shift: tl.constexpr = tl.constexpr(2.0 ** (23 - BITS))
    power = tl.maximum(m, low).to(tl.int32, bitcast=True) & 0x7F800000
    whole = m + power.to(tl.float32, bitcast=True) * shift
    steps = whole.to(tl.int32, bitcast=True) & ((4 << BITS) - 1)
    return (((power >> 23) - (127 + LEAST)) << BITS) + steps


@triton.jit
def e4m3_word(x):
    """int32 E4M3 words of finite float32, saturating; a zero keeps its sign."""
    sign = (x.to(tl.int32, bitcast=True) >> 24) & 0x80
    return _rounded(tl.minimum(tl.abs(x), 448.0), -6, 3) | sign


@triton.jit
def e4m3_value(word):
    """float32 of E4M3 words (int32, no NaN), exactly."""
    magnitude = ((word & 0x7F) << 20).to(tl.float32, bitcast=True) * 1.329227995784916e36  # 2^120
    return tl.where((word & 0x80) != 0, -magnitude, magnitude)


@triton.jit
def e2m1_value(word):
    """float32 of E2M1 words (int32, 0..15), exactly."""
    magnitude = ((word & 7) << 22).to(tl.float32, bitcast=True) * 8.507059173023462e37  # 2^126
    return tl.where((word & 8) != 0, -magnitude, magnitude)


@triton.jit
def _put_int8(y, codes, scales, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    GROUP: tl.constexpr = 64 if BLOCK > 64 else BLOCK
    GROUPS: tl.constexpr = BLOCK // GROUP
    x = tl.reshape(y, [GROUPS, GROUP])
    a = tl.max(tl.abs(x), axis=1)
    scale = tl.minimum(tl.div_rn(a, tl.full([GROUPS], 127.0, tl.float32)), 65504.0).to(tl.float16)
    s = scale.to(tl.float32)
    nothing = s == 0.0
    inverse = tl.where(nothing, 0.0, tl.div_rn(tl.full([GROUPS], 1.0, tl.float32), tl.where(nothing, 1.0, s)))
    t = tl.minimum(tl.maximum(x * inverse[:, None], -127.0), 127.0)
    code = (t + 12582912.0).to(tl.int32, bitcast=True) - 0x4B400000
    group = tl.arange(0, GROUPS)
    at = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    tl.store(codes + at, code.to(tl.int8), mask=at < WIDTH)
    tl.store(scales + group, scale, mask=group * GROUP < WIDTH)


@triton.jit
def _put_fp8(y, codes, scales, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    x = tl.reshape(y, [1, BLOCK])
    a = tl.max(tl.abs(x), axis=1)
    scale = tl.maximum(tl.div_rn(a, tl.full([1], 448.0, tl.float32)), 5.960464477539063e-08)
    scale = tl.minimum(scale, 65504.0).to(tl.float16)
    inverse = tl.div_rn(tl.full([1], 1.0, tl.float32), scale.to(tl.float32))
    nothing = a == 0.0
    code = tl.where(nothing[:, None], 0, e4m3_word(x * inverse[:, None]))
    at = tl.arange(0, BLOCK)[None, :]
    tl.store(codes + at, code.to(tl.uint8), mask=at < WIDTH)
    tl.store(scales + tl.arange(0, 1), tl.where(nothing, 0.0, scale.to(tl.float32)).to(tl.float16))


@triton.jit
def _put_nvfp4(y, codes, scales, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    GROUPS: tl.constexpr = BLOCK // 16
    x = tl.reshape(y, [GROUPS, 16])
    a = tl.max(tl.abs(x), axis=1)
    nothing = a == 0.0
    scale = tl.maximum(tl.div_rn(a, tl.full([GROUPS], 6.0, tl.float32)), 0.001953125)
    word = e4m3_word(tl.minimum(scale, 448.0))
    x = tl.div_rn(x, tl.broadcast_to(e4m3_value(word)[:, None], [GROUPS, 16]))
    sign = (x.to(tl.int32, bitcast=True) >> 28) & 8
    code = tl.where(nothing[:, None], 0, _rounded(tl.minimum(tl.abs(x), 6.0), 0, 1) | sign)
    low, high = tl.split(tl.reshape(code, [GROUPS, 8, 2]))
    group = tl.arange(0, GROUPS)
    at = group[:, None] * 8 + tl.arange(0, 8)[None, :]
    tl.store(codes + at, (low | (high << 4)).to(tl.uint8), mask=at < WIDTH // 2)
    tl.store(scales + group, tl.where(nothing, 0, word).to(tl.uint8), mask=group < WIDTH // 16)


@triton.jit
def put_vector(
    y, codes, scales, CODE: tl.constexpr, ROTATED: tl.constexpr, FACTOR: tl.constexpr,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write bf16 `y [BLOCK]` as a vector: codes and scales begin at the pointers; `CODES` numbers them."""
    if CODE == 0:
        at = tl.arange(0, BLOCK)
        tl.store(codes + at, y, mask=at < WIDTH)
    else:
        y = to_f32(y)
        if ROTATED:
            y = tl.reshape(hadamard(tl.reshape(y, [1, BLOCK]), 1, BLOCK, FACTOR), [BLOCK])
        y = finite(y)
        if CODE == 1:
            _put_int8(y, codes, scales, WIDTH, BLOCK)
        elif CODE == 2:
            _put_fp8(y, codes, scales, WIDTH, BLOCK)
        else:
            _put_nvfp4(y, codes, scales, WIDTH, BLOCK)
