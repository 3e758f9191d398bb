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
    load_sums,
    multiply_one,
    multiply_two,
    pack_columns,
    release,
    store_bf16_unit,
    store_columns,
    store_columns_added,
    store_sums,
    transpose,
)
from ninfer.ops.cpu.block import DYNAMIC, argument, arrive, next_of, next_shared, team_size
from ninfer.ops.cpu.functions import silu
from ninfer.ops.cpu.instructions import device
from ninfer.ops.cpu.kernel import Kernel
from ninfer.ops.cpu.simd import (
    add,
    copy_bytes,
    div,
    get_f64,
    load_f32,
    mul,
    prefetch,
    splat,
    split_pairs,
    stack,
    store_f32,
    zeros,
)

values, scales, scale_row = small.values, small.scales, small.scale_row
PAIRS, RAGGED, DIVIDED = small.PAIRS, small.RAGGED, small.DIVIDED
PANEL = 24  # units of 32 columns that are decoded at a time: two tiles of rows stay in the first cache
AHEAD = small.AHEAD
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
                    copy_bytes(scratch + 64 * i, source + stride * i, 2 * min(32, columns - 32 * unit))
                if PAIRS:
                    for i in range(16):
                        split_pairs(scratch + 64 * i)
                source, stride = scratch, 64
            pack_columns(source, stride, out + 1024 * (block * units + unit))


@device
def _decode_pair(
    a, ah, ascale, asc, b, bh, bscale, bsc, begin, end, columns, whole, bytes_, left, right, tail
):
    """Units `[begin, end)` of two rows as rows of tiles, 1024 bytes from unit to unit; `begin` is even."""
    for two in range((min(end, whole) - begin) >> 1):
        unit, at = begin + 2 * two, 2048 * two
        prefetch(a + bytes_ * unit + AHEAD)
        prefetch(b + bytes_ * unit + AHEAD)
        v0, v1 = values(a, ah, ascale, asc, unit, 0)
        store_bf16_unit(left + at, v0, v1)
        v0, v1 = values(b, bh, bscale, bsc, unit, 0)
        store_bf16_unit(right + at, v0, v1)
        prefetch(a + bytes_ * unit + bytes_ + AHEAD)
        prefetch(b + bytes_ * unit + bytes_ + AHEAD)
        v0, v1 = values(a, ah, ascale, asc, unit + 1, 1)
        store_bf16_unit(left + at + 1024, v0, v1)
        v0, v1 = values(b, bh, bscale, bsc, unit + 1, 1)
        store_bf16_unit(right + at + 1024, v0, v1)
    if (min(end, whole) - begin) & 1:
        unit = min(end, whole) - 1
        at = 1024 * (unit - begin)
        v0, v1 = values(a, ah, ascale, asc, unit, 0)
        store_bf16_unit(left + at, v0, v1)
        v0, v1 = values(b, bh, bscale, bsc, unit, 0)
        store_bf16_unit(right + at, v0, v1)
    if RAGGED and end > whole:
        at = 1024 * (whole - begin)
        _tail(a, columns, tail)
        v0, v1 = values(tail, ah, ascale, asc, 0, 0)
        store_bf16_unit(left + at, v0, v1)
        _tail(b, columns, tail)
        v0, v1 = values(tail, bh, bscale, bsc, 0, 0)
        store_bf16_unit(right + at, v0, v1)


@device
def _finish(sums, rows, columns, out, out_kind, residual, residual_kind, stride, scratch):
    """Write up to 16 x 16 sums of one tile where row 0 of column 0 belongs; strides count elements."""
    if out_kind == 1 and rows == 16 and columns == 16 and (residual == 0 or residual_kind == 1):
        if residual:
            store_columns_added(sums, residual, out, 2 * stride)
        else:
            store_columns(sums, out, 2 * stride)
        return
    transpose(sums)
    for t in range(columns):
        value, at = load_f32(sums + 64 * t), t * stride
        if residual:
            place = residual + size_of(residual_kind) * at
            value = add(value, load_some(place, residual_kind, rows, scratch))
        store_some(out + size_of(out_kind) * at, out_kind, value, rows, scratch)


@device
def _divide(sums, divisor):
    for i in range(16):
        store_f32(sums + 64 * i, div(load_f32(sums + 64 * i), divisor))


def tiles_kernel(data):
    """The operator of `small.linear_kernel` for many columns; work is divided as there.

    Arguments: 0 x packed by `pack_kernel`, 1 out, 2 residual or 0, 3 T, 4 memory of `scratch_bytes` for each
    thread, 5 kind of out, 6 row stride of out and residual, 7 first, 8 rows (pairs if gated), 9 gated, 10
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
    a, a_stride = argument(data, DYNAMIC + 2), argument(data, DYNAMIC + 3)
    ah, ah_stride = argument(data, DYNAMIC + 4), argument(data, DYNAMIC + 5)
    ascale, ascale_stride, a_begin = (
        argument(data, DYNAMIC + 6),
        argument(data, DYNAMIC + 7),
        argument(data, DYNAMIC + 8),
    )
    b, b_stride = argument(data, DYNAMIC + 9), argument(data, DYNAMIC + 10)
    bh, bh_stride = argument(data, DYNAMIC + 11), argument(data, DYNAMIC + 12)
    bscale, bscale_stride, b_begin = (
        argument(data, DYNAMIC + 13),
        argument(data, DYNAMIC + 14),
        argument(data, DYNAMIC + 15),
    )
    a_divisor = splat(get_f64(data + 8 * (DYNAMIC + 16)))
    b_divisor = splat(get_f64(data + 8 * (DYNAMIC + 17)))
    whole = columns >> 5 if RAGGED else units
    bytes_ = a_stride // units
    out_size, residual_size = size_of(out_kind), size_of(residual_kind)
    asc, bsc = stack(8 * units + 64), stack(8 * units + 64)
    tail, scratch, sums = stack(128), stack(64), stack(4096)
    team = team_size(data)
    me = arrive(data)
    left = memory + me * (2048 * PANEL + 4096 * ((count + 31) >> 5))
    right, kept = left + 1024 * PANEL, left + 2048 * PANEL
    configure(argument(data, 11))
    for turn in range(team):
        owner = (me + turn) % team
        low, high = rows * owner // team, rows * (owner + 1) // team
        items = high - low if gated else (high - low + 1) >> 1
        shift = 0 if gated else items
        while True:
            item = next_of(data, owner, 16)
            if item >= items:
                break
            # Two tiles of up to 16 rows; missing rows repeat the last one, a missing second tile the first.
            a_rows = min(16, items - item)
            b_rows = min(16, high - low - shift - item)
            for begin in range(0, units, PANEL):
                end = min(units, begin + PANEL)
                for i in range(16):
                    row_a = low + item + min(i, a_rows - 1)
                    row_b = low + item + shift + min(i, b_rows - 1) if b_rows > 0 else row_a
                    row_a, row_b = a_begin + row_a, b_begin + row_b
                    pa, pb = a + a_stride * row_a, b + b_stride * row_b
                    pas = scale_row(ascale, ascale_stride, row_a)
                    pbs = scale_row(bscale, bscale_stride, row_b)
                    scales(pa, pas, asc, units)
                    scales(pb, pbs, bsc, units)
                    pah, pbh = ah + ah_stride * row_a, bh + bh_stride * row_b
                    _decode_pair(
                        pa, pah, pas, asc, pb, pbh, pbs, bsc, begin, end, columns, whole, bytes_,
                        left + 64 * i, right + 64 * i, tail,
                    )  # fmt: skip
                for column in range(0, count, 32):
                    block = x + 1024 * (units * (column >> 4) + begin)
                    two = column + 16 < count
                    if begin:
                        load_sums(kept + 128 * column)
                    else:
                        clear_sums()
                    if two:
                        for unit in range(end - begin):
                            at = 1024 * unit
                            multiply_two(left + at, right + at, block + at, block + 1024 * units + at)
                    else:
                        for unit in range(end - begin):
                            multiply_one(left + 1024 * unit, right + 1024 * unit, block + 1024 * unit)
                    if end < units:
                        store_sums(kept + 128 * column)
                        continue
                    store_sums(sums)
                    for half in range(2 if two else 1):
                        top, bottom = sums + 1024 * half, sums + 2048 + 1024 * half
                        if DIVIDED:
                            _divide(top, a_divisor)
                            _divide(bottom, b_divisor)
                        if gated:
                            for i in range(16):
                                value = silu(load_f32(top + 64 * i))
                                store_f32(top + 64 * i, mul(value, load_f32(bottom + 64 * i)))
                        for side in range(1 if gated or b_rows <= 0 else 2):
                            start = column + 16 * half
                            at = start * stride + first + low + item + shift * side
                            _finish(
                                bottom if side else top,
                                b_rows if side else a_rows,
                                min(16, count - start),
                                out + out_size * at,
                                out_kind,
                                residual + residual_size * at if residual else 0,
                                residual_kind,
                                stride,
                                scratch,
                            )
    release()


def scratch_bytes(columns: int) -> int:
    """Memory that a thread of `tiles_kernel` needs: two decoded panels, and sums between panels."""
    return 2048 * PANEL + 4096 * -(-columns // 32)


@functools.cache
def pack_of(pairs: bool) -> Kernel:
    return Kernel(pack_kernel, f"pack_{'pairs' if pairs else 'natural'}", PAIRS=pairs)


@functools.cache
def tiles_of(codec: str) -> Kernel:
    """The kernel of many columns, specialized for a codec."""
    return small.specialize(tiles_kernel, "tiles", codec)
