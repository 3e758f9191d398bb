"""The eight tile registers of AMX as operations inside kernels, and whether this process may use them."""

from __future__ import annotations

import functools
import platform

import numpy as np
import torch
from llvmlite import ir

from ninfer.ops.cpu.instructions import F32, INTEGER, LANES, NOTHING, call, has_feature, operation, pointer

_I8, _I32, _I64, _FLOAT = ir.IntType(8), ir.IntType(32), ir.IntType(64), ir.FloatType()
_VOID = ir.VoidType()


class _BFloat(ir.Type):
    def _to_string(self) -> str:
        return "bfloat"


@functools.cache
def available() -> bool:
    """Does the processor have bf16 tiles, does LLVM know, and does the kernel grant their state to this
    process?"""
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        return False
    if not all(has_feature(name) for name in ("amx-tile", "amx-bf16", "avx512bf16")):
        return False
    init = getattr(torch.cpu, "_init_amx", None)
    return bool(init is not None and init())


CONFIGURATION = np.zeros(64, dtype=np.uint8)
"""All eight tiles 16 rows of 64 bytes (palette 1)."""
CONFIGURATION[0] = 1
CONFIGURATION[16:32:2] = 64
CONFIGURATION[48:56] = 16


@operation(NOTHING, INTEGER)
def configure(builder, address):
    """Load the tile configuration of this thread."""
    call(builder, "llvm.x86.ldtilecfg", _VOID, pointer(builder, address, _I8))


@operation(NOTHING)
def release(builder):
    call(builder, "llvm.x86.tilerelease", _VOID)


@operation(NOTHING)
def clear_sums(builder):
    """Tiles 0..3 become zero."""
    for tile in range(4):
        call(builder, "llvm.x86.tilezero", _VOID, _I8(tile))


def _load(builder, tile, address):
    call(builder, "llvm.x86.tileloadd64", _VOID, _I8(tile), pointer(builder, address, _I8), _I64(64))


def _dot(builder, target, left, right):
    call(builder, "llvm.x86.tdpbf16ps", _VOID, _I8(target), _I8(left), _I8(right))


@operation(NOTHING, INTEGER, INTEGER, INTEGER, INTEGER)
def multiply_two(builder, a, b, x, y):
    """Add the products of two row tiles and two column tiles to the four sums: 0 = a x, 1 = a y, 2 = b x, 3 =
    b y."""
    for tile, address in zip((4, 5, 6, 7), (a, b, x, y), strict=True):
        _load(builder, tile, address)
    for target, left, right in ((0, 4, 6), (1, 4, 7), (2, 5, 6), (3, 5, 7)):
        _dot(builder, target, left, right)


@operation(NOTHING, INTEGER, INTEGER, INTEGER)
def multiply_one(builder, a, b, x):
    """The same for a single column tile: 0 = a x, 2 = b x."""
    for tile, address in zip((4, 5, 6), (a, b, x), strict=True):
        _load(builder, tile, address)
    _dot(builder, 0, 4, 6)
    _dot(builder, 2, 5, 6)


@operation(NOTHING, INTEGER)
def store_sums(builder, address):
    """The four sums, 1024 bytes each."""
    for tile in range(4):
        place = pointer(builder, builder.add(address, _I64(1024 * tile)), _I8)
        call(builder, "llvm.x86.tilestored64", _VOID, _I8(tile), place, _I64(64))


@operation(NOTHING, INTEGER)
def load_sums(builder, address):
    """What `store_sums` stored."""
    for tile in range(4):
        _load(builder, tile, builder.add(address, _I64(1024 * tile)))


@operation(NOTHING, INTEGER, F32, F32)
def store_bf16_unit(builder, address, a, b):
    """Two vectors as 32 neighbouring bf16 words (nearest, ties to even; subnormal words become zero)."""
    kind = ir.VectorType(_BFloat(), LANES)
    for offset, value in ((0, a), (32, b)):
        words = builder.fptrunc(value, kind)
        place = pointer(builder, builder.add(address, _I64(offset)), kind)
        builder.store(words, place, align=1)


def _transposed(builder, rows, element):
    """16 vectors of 16 lanes, rows and columns exchanged."""
    kind = ir.VectorType(_I32, LANES)
    width = 1
    while width < LANES:
        low = [i if not i & width else 16 + i - width for i in range(LANES)]
        high = [i + width if not i & width else 16 + i for i in range(LANES)]
        result = list(rows)
        for i in range(LANES):
            if not i & width:
                a, b = rows[i], rows[i + width]
                result[i] = builder.shuffle_vector(a, b, ir.Constant(kind, low))
                result[i + width] = builder.shuffle_vector(a, b, ir.Constant(kind, high))
        rows = result
        width *= 2
    return rows


def _rows_at(builder, address, kind):
    return [
        builder.load(pointer(builder, builder.add(address, _I64(64 * i)), kind), align=1)
        for i in range(LANES)
    ]


def _put_rows(builder, address, rows):
    for i, row in enumerate(rows):
        place = pointer(builder, builder.add(address, _I64(64 * i)), row.type)
        builder.store(row, place, align=1)


@operation(NOTHING, INTEGER)
def transpose(builder, address):
    """Exchange rows and columns of 16 x 16 float32 in place."""
    kind = ir.VectorType(_FLOAT, LANES)
    _put_rows(builder, address, _transposed(builder, _rows_at(builder, address, kind), _FLOAT))


def _columns_of(builder, address):
    return _transposed(builder, _rows_at(builder, address, ir.VectorType(_FLOAT, LANES)), _FLOAT)


def _put_bf16(builder, value, address, stride, index):
    kind = ir.VectorType(_BFloat(), LANES)
    place = builder.add(address, builder.mul(stride, _I64(index)))
    builder.store(builder.fptrunc(value, kind), pointer(builder, place, kind), align=1)


@operation(NOTHING, INTEGER, INTEGER, INTEGER)
def store_columns(builder, sums, target, stride):
    """The 16 columns of a sum tile as bf16 rows, `stride` bytes apart."""
    for i, column in enumerate(_columns_of(builder, sums)):
        _put_bf16(builder, column, target, stride, i)


@operation(NOTHING, INTEGER, INTEGER, INTEGER, INTEGER)
def store_columns_added(builder, sums, residual, target, stride):
    """The same plus bf16 rows of a residual, as far apart."""
    words, wide = ir.VectorType(ir.IntType(16), LANES), ir.VectorType(_I32, LANES)
    for i, column in enumerate(_columns_of(builder, sums)):
        place = builder.add(residual, builder.mul(stride, _I64(i)))
        old = builder.zext(builder.load(pointer(builder, place, words), align=1), wide)
        old = builder.bitcast(builder.shl(old, ir.Constant(wide, [16] * LANES)), column.type)
        _put_bf16(builder, builder.fadd(column, old), target, stride, i)


@operation(NOTHING, INTEGER, INTEGER, INTEGER)
def pack_columns(builder, source, stride, target):
    """16 columns' unit of 32 bf16 each, `stride` bytes apart, as a tile: row i holds the i-th pair of every
    column."""
    kind = ir.VectorType(_I32, LANES)
    rows = [
        builder.load(pointer(builder, builder.add(source, builder.mul(stride, _I64(i))), kind), align=1)
        for i in range(LANES)
    ]
    _put_rows(builder, target, _transposed(builder, rows, _I32))
