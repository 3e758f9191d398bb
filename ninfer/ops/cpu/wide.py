"""Matrix products of many columns on AMX: weights are decoded to bf16 tiles in the cache and multiplied
there.

Roofline: a core's tile unit does 512 multiply-adds a cycle (3.4 TFLOP/s at 3.3 GHz), and decoding costs about
0.15 cycles a weight once per call, nothing next to 512 columns. Of the eight tiles four hold sums (32 rows x
32 columns), so each step of four products needs four tile loads. The output comes out as [rows, columns] and
is transposed on its way out. Compared with decoding to memory and calling oneDNN this reads weights once,
keeps sums in float32 until the residual or the gate is applied, and needs no reordering of the weights.

Weights are rounded to bf16 here (activations are bf16 already); sums are float32. A column's bits do not
depend on the other columns.
"""

from __future__ import annotations

import functools

from ninfer.ops.cpu import small
from ninfer.ops.cpu.access import load_some, size_of, store_some
from ninfer.ops.cpu.amx import (
    clear_sums,
    configure,
    multiply_one,
    multiply_two,
    pack_columns,
    release,
    store_bf16_unit,
    store_sums,
    transpose,
)
from ninfer.ops.cpu.block import DYNAMIC, argument, arrive, next_shared
from ninfer.ops.cpu.functions import silu
from ninfer.ops.cpu.instructions import device
from ninfer.ops.cpu.kernel import Kernel
from ninfer.ops.cpu.simd import (
    add,
    div,
    get_f64,
    get_u8,
    load_f32,
    mul,
    prefetch,
    put_u8,
    splat,
    split_pairs,
    stack,
    store_f32,
    zeros,
)

values, scales, scale_row = small.values, small.scales, small.scale_row
PAIRS, RAGGED, DIVIDED = small.PAIRS, small.RAGGED, small.DIVIDED
ROWS = 32
_tail = small._tail


def pack_kernel(data):
    """bf16 columns as tiles of 16 columns and one unit. Arguments: 0 x, 1 out, 2 T, 3 K, 4 units.

    Tile (block, unit) is 1024 bytes at `out + 1024 * (block * units + unit)`. Columns and units are
    zero-padded.
    """
    x, out, count, columns, units = (
        argument(data, 0),
        argument(data, 1),
        argument(data, 2),
        argument(data, 3),
        argument(data, 4),
    )
    scratch = stack(1024)
    while True:
        block = next_shared(data, 1)
        if 16 * block >= count:
            break
        for unit in range(units):
            source = x + 2 * (16 * block * columns + 32 * unit)
            stride = 2 * columns
            if 16 * block + 16 > count or 32 * unit + 32 > columns or PAIRS:
                for i in range(16):
                    store_f32(scratch + 64 * i, zeros())
                for i in range(min(16, count - 16 * block)):
                    for j in range(2 * min(32, columns - 32 * unit)):
                        put_u8(scratch + 64 * i + j, get_u8(source + stride * i + j))
                if PAIRS:
                    for i in range(16):
                        split_pairs(scratch + 64 * i)
                source, stride = scratch, 64
            pack_columns(source, stride, out + 1024 * (block * units + unit))


@device
def _decode_rows(
    codes, stride, high, high_stride, scale, scale_stride, row, count, units, columns, sc, tail, out
):
    """16 rows as tiles of 16 rows and one unit; rows beyond `count` repeat the last one."""
    whole = columns >> 5 if RAGGED else units
    bytes_ = stride // units
    for i in range(16):
        r = row + min(i, count - 1)
        c, h, s = codes + stride * r, high + high_stride * r, scale_row(scale, scale_stride, r)
        scales(c, s, sc, units)
        target = out + 64 * i
        for two in range(whole >> 1):
            unit = 2 * two
            prefetch(c + bytes_ * unit + 3072)
            v0, v1 = values(c, h, s, sc, unit, 0)
            store_bf16_unit(target + 1024 * unit, v0, v1)
            prefetch(c + bytes_ * unit + bytes_ + 3072)
            v0, v1 = values(c, h, s, sc, unit + 1, 1)
            store_bf16_unit(target + 1024 * unit + 1024, v0, v1)
        if whole & 1:
            v0, v1 = values(c, h, s, sc, whole - 1, 0)
            store_bf16_unit(target + 1024 * (whole - 1), v0, v1)
        if RAGGED and columns & 31:
            _tail(c, columns, tail)
            v0, v1 = values(tail, h, s, sc, 0, 0)
            store_bf16_unit(target + 1024 * whole, v0, v1)


@device
def _finish(
    sums,
    divided,
    divisor,
    count,
    column,
    columns,
    out,
    out_kind,
    stride,
    at,
    residual,
    residual_kind,
    scratch,
):
    """Write 16 columns x `count` rows of one sum tile, from row `at` of the output."""
    transpose(sums)
    for t in range(min(16, columns - column)):
        value = load_f32(sums + 64 * t)
        if DIVIDED and divided:
            value = div(value, divisor)
        place = (column + t) * stride + at
        if residual:
            value = add(
                value,
                load_some(residual + size_of(residual_kind) * place, residual_kind, count, scratch),
            )
        store_some(out + size_of(out_kind) * place, out_kind, value, count, scratch)


def tiles_kernel(data):
    """The operator of `small.linear_kernel` for many columns.

    Arguments: 0 x packed by `pack_kernel`, 1 out, 2 residual or 0, 3 T, 4 scratch of `1024 * 2 * units` bytes
    a thread, 5 kind of out, 6 row stride of out and residual, 7 first, 8 rows (pairs if gated), 9 gated, 10
    kind of the residual, 11 tile configuration; the constants of `plan.constants_of`.
    """
    x, out, residual, count = argument(data, 0), argument(data, 1), argument(data, 2), argument(data, 3)
    memory, out_kind, stride, first = (
        argument(data, 4),
        argument(data, 5),
        argument(data, 6),
        argument(data, 7),
    )
    rows, gated, residual_kind = argument(data, 8), argument(data, 9), argument(data, 10)
    units, columns = argument(data, DYNAMIC), argument(data, DYNAMIC + 1)
    a_divisor = splat(get_f64(data + 8 * (DYNAMIC + 16)))
    b_divisor = splat(get_f64(data + 8 * (DYNAMIC + 17)))
    sc, tail, scratch, sums = stack(8 * units + 64), stack(128), stack(64), stack(4096)
    decoded = memory + arrive(data) * 2048 * units
    step = 16 if gated else ROWS
    configure(argument(data, 11))
    while True:
        item = next_shared(data, step)
        if item >= rows:
            break
        # 32 rows in two tiles: 16 gate rows and their 16 up rows, or 32 consecutive rows.
        left = min(16, rows - item)
        right = left if gated else min(16, rows - item - 16)
        for side in range(2 if right > 0 else 1):
            k = DYNAMIC + 2 + 7 * side
            row = argument(data, k + 6) + item + (16 if side and not gated else 0)
            _decode_rows(
                argument(data, k),
                argument(data, k + 1),
                argument(data, k + 2),
                argument(data, k + 3),
                argument(data, k + 4),
                argument(data, k + 5),
                row,
                right if side else left,
                units,
                columns,
                sc,
                tail,
                decoded + 1024 * units * side,
            )
        other = decoded + 1024 * units
        for column in range(0, count, 32):
            block = x + 1024 * units * (column >> 4)
            clear_sums()
            if column + 16 < count:
                for unit in range(units):
                    at = 1024 * unit
                    multiply_two(decoded + at, other + at, block + at, block + 1024 * units + at)
            else:
                for unit in range(units):
                    multiply_one(decoded + 1024 * unit, other + 1024 * unit, block + 1024 * unit)
            store_sums(sums)
            for half in range(2 if column + 16 < count else 1):
                start = column + 16 * half
                top, bottom = sums + 1024 * half, sums + 2048 + 1024 * half
                at = first + item
                if gated:
                    for i in range(16):
                        g, u = load_f32(top + 64 * i), load_f32(bottom + 64 * i)
                        if DIVIDED:
                            g, u = div(g, a_divisor), div(u, b_divisor)
                        store_f32(top + 64 * i, mul(silu(g), u))
                _finish(
                    top,
                    gated == 0,
                    a_divisor,
                    left,
                    start,
                    count,
                    out,
                    out_kind,
                    stride,
                    at,
                    residual,
                    residual_kind,
                    scratch,
                )
                if not gated and right > 0:
                    _finish(
                        bottom,
                        True,
                        b_divisor,
                        right,
                        start,
                        count,
                        out,
                        out_kind,
                        stride,
                        at + 16,
                        residual,
                        residual_kind,
                        scratch,
                    )
    release()


@functools.cache
def pack_of(pairs: bool) -> Kernel:
    return Kernel(pack_kernel, f"pack_{'pairs' if pairs else 'natural'}", PAIRS=pairs)


@functools.cache
def tiles_of(codec: str) -> Kernel:
    """The kernel of many columns, specialized for a codec."""
    return small.specialize(tiles_kernel, "tiles", codec)
