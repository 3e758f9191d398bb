"""Matrix products of few columns: one pass over the encoded weights, decoded in registers.

Roofline (T = 1): the encoded bytes over the memory bandwidth. Two cores of a Xeon of 2024 read 20 to 24 GB/s;
a core decodes and multiplies Q4_1 at 13 GB/s from its cache, so both limits are near and have to overlap.
What that took: weights are read in two streams far apart (a thread's rows, or gate and up), because one
stream stalls at the start of every memory page; lines are requested a few kilobytes ahead; a thread keeps to
one run of rows and takes others' rows only when its own are done. Reached for SmolLM2's shapes: see
`bench/ops_cpu.py`.

For T > 1 a panel of the two rows is decoded once into the cache and multiplied with two columns at a time.
Every column's sum has the same order for every T, so its bits depend on nothing but its own input.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

from ninfer.ops.cpu.access import load_some, size_of, store_some, widen, write_row
from ninfer.ops.cpu.block import DYNAMIC, argument, arrive, next_of, next_shared, team_size
from ninfer.ops.cpu.codecs import CODECS
from ninfer.ops.cpu.functions import silu
from ninfer.ops.cpu.instructions import device
from ninfer.ops.cpu.kernel import Kernel
from ninfer.ops.cpu.simd import (
    add,
    div,
    fma,
    get_f64,
    get_i32,
    get_i64,
    get_u8,
    interleave_high,
    interleave_low,
    load_f32,
    mul,
    prefetch,
    put_u8,
    splat,
    stack,
    store_f32,
    totals,
    zeros,
)

ROWS = 16
PANEL = 64  # units of 32 columns that are decoded at a time for T > 1
AHEAD = 3072  # bytes
MAX_COLUMNS = 16

# What the templates below are specialized for; see `CODECS`.
values = CODECS["bf16"].values
scales = CODECS["bf16"].scales
scale_row = CODECS["bf16"].scale_row
PAIRS, RAGGED, DIVIDED = False, 0, False


@device
def _tail(codes, columns, target):
    """Copy the weights of a row's last, partial unit to zeroed scratch of 128 bytes."""
    start = (columns >> 5) * 32 * RAGGED
    store_f32(target, zeros())
    store_f32(target + 64, zeros())
    for i in range((columns & 31) * RAGGED):
        put_u8(target + i, get_u8(codes + start + i))


@device
def _dot_pair(a, ah, asc, ascale, b, bh, bsc, bscale, x, columns, whole, bytes_, tail):
    a0, a1, b0, b1 = zeros(), zeros(), zeros(), zeros()
    for two in range(whole >> 1):
        unit = 2 * two
        prefetch(a + bytes_ * unit + AHEAD)
        prefetch(b + bytes_ * unit + AHEAD)
        x0, x1 = load_f32(x + 128 * unit), load_f32(x + 128 * unit + 64)
        v0, v1 = values(a, ah, ascale, asc, unit, 0)
        w0, w1 = values(b, bh, bscale, bsc, unit, 0)
        a0, a1, b0, b1 = fma(v0, x0, a0), fma(v1, x1, a1), fma(w0, x0, b0), fma(w1, x1, b1)
        prefetch(a + bytes_ * unit + bytes_ + AHEAD)
        prefetch(b + bytes_ * unit + bytes_ + AHEAD)
        x0, x1 = load_f32(x + 128 * unit + 128), load_f32(x + 128 * unit + 192)
        v0, v1 = values(a, ah, ascale, asc, unit + 1, 1)
        w0, w1 = values(b, bh, bscale, bsc, unit + 1, 1)
        a0, a1, b0, b1 = fma(v0, x0, a0), fma(v1, x1, a1), fma(w0, x0, b0), fma(w1, x1, b1)
    if whole & 1:
        unit = whole - 1
        x0, x1 = load_f32(x + 128 * unit), load_f32(x + 128 * unit + 64)
        v0, v1 = values(a, ah, ascale, asc, unit, 0)
        w0, w1 = values(b, bh, bscale, bsc, unit, 0)
        a0, a1, b0, b1 = fma(v0, x0, a0), fma(v1, x1, a1), fma(w0, x0, b0), fma(w1, x1, b1)
    if RAGGED and columns & 31:
        x0, x1 = load_f32(x + 128 * whole), load_f32(x + 128 * whole + 64)
        _tail(a, columns, tail)
        v0, v1 = values(tail, ah, ascale, asc, 0, 0)
        _tail(b, columns, tail)
        w0, w1 = values(tail, bh, bscale, bsc, 0, 0)
        a0, a1, b0, b1 = fma(v0, x0, a0), fma(v1, x1, a1), fma(w0, x0, b0), fma(w1, x1, b1)
    return add(a0, a1), add(b0, b1)


@device
def _decode_units(codes, high, sc, scale, begin, end, columns, whole, bytes_, target, tail):
    """Units `[begin, end)` of a row as float32, in the codec's order."""
    for two in range((min(end, whole) - begin) >> 1):
        unit = begin + 2 * two
        place = target + 256 * two
        prefetch(codes + bytes_ * unit + AHEAD)
        v0, v1 = values(codes, high, scale, sc, unit, 0)
        store_f32(place, v0)
        store_f32(place + 64, v1)
        prefetch(codes + bytes_ * unit + bytes_ + AHEAD)
        v0, v1 = values(codes, high, scale, sc, unit + 1, 1)
        store_f32(place + 128, v0)
        store_f32(place + 192, v1)
    if (min(end, whole) - begin) & 1:
        unit = min(end, whole) - 1
        v0, v1 = values(codes, high, scale, sc, unit, 0)
        store_f32(target + 128 * (unit - begin), v0)
        store_f32(target + 128 * (unit - begin) + 64, v1)
    if RAGGED and end > whole:
        _tail(codes, columns, tail)
        v0, v1 = values(tail, high, scale, sc, 0, 0)
        store_f32(target + 128 * (whole - begin), v0)
        store_f32(target + 128 * (whole - begin) + 64, v1)


@device
def _multiply(left, right, x, x_stride, units, count, sums):
    """Add a decoded panel of two rows times `count` columns to their sums (256 bytes a column)."""
    for pair in range(count >> 1):
        xs = x + 2 * pair * x_stride
        s = sums + 512 * pair
        a0, a1, b0, b1 = load_f32(s), load_f32(s + 64), load_f32(s + 128), load_f32(s + 192)
        c0, c1, d0, d1 = load_f32(s + 256), load_f32(s + 320), load_f32(s + 384), load_f32(s + 448)
        for unit in range(units):
            at = 128 * unit
            v0, v1, w0, w1 = (
                load_f32(left + at),
                load_f32(left + at + 64),
                load_f32(right + at),
                load_f32(right + at + 64),
            )
            x0, x1 = load_f32(xs + at), load_f32(xs + at + 64)
            a0, a1, b0, b1 = fma(v0, x0, a0), fma(v1, x1, a1), fma(w0, x0, b0), fma(w1, x1, b1)
            x0, x1 = load_f32(xs + x_stride + at), load_f32(xs + x_stride + at + 64)
            c0, c1, d0, d1 = fma(v0, x0, c0), fma(v1, x1, c1), fma(w0, x0, d0), fma(w1, x1, d1)
        store_f32(s, a0)
        store_f32(s + 64, a1)
        store_f32(s + 128, b0)
        store_f32(s + 192, b1)
        store_f32(s + 256, c0)
        store_f32(s + 320, c1)
        store_f32(s + 384, d0)
        store_f32(s + 448, d1)
    if count & 1:
        xs = x + (count - 1) * x_stride
        s = sums + 256 * (count - 1)
        a0, a1, b0, b1 = load_f32(s), load_f32(s + 64), load_f32(s + 128), load_f32(s + 192)
        for unit in range(units):
            at = 128 * unit
            x0, x1 = load_f32(xs + at), load_f32(xs + at + 64)
            a0, a1 = fma(load_f32(left + at), x0, a0), fma(load_f32(left + at + 64), x1, a1)
            b0, b1 = fma(load_f32(right + at), x0, b0), fma(load_f32(right + at + 64), x1, b1)
        store_f32(s, a0)
        store_f32(s + 64, a1)
        store_f32(s + 128, b0)
        store_f32(s + 192, b1)


@device
def _finish(value, count, out, out_kind, residual, residual_kind, scratch):
    """16 sums of one column, of which `count` are real: add the residual, round, store."""
    if residual:
        value = add(value, load_some(residual, residual_kind, count, scratch))
    store_some(out, out_kind, value, count, scratch)


def linear_kernel(data):
    """`out[t, first + r] = round(residual + W[r] . x[t])`, or `silu(gate[r] . x[t]) * (up[r] . x[t])`.

    Arguments: 0 x (activations if T is 1, else float32 scratch made by `widen`), 1 out, 2 residual or 0, 3 T,
    4 kind of x, 5 kind of out, 6 row stride of out and residual, 7 first, 8 rows (pairs if gated), 9 gated,
    10 kind of the residual; the constants of `plan.constants_of`.
    """
    x, out, residual, count = argument(data, 0), argument(data, 1), argument(data, 2), argument(data, 3)
    x_kind, out_kind, stride, first = (
        argument(data, 4),
        argument(data, 5),
        argument(data, 6),
        argument(data, 7),
    )
    rows, gated, residual_kind = argument(data, 8), argument(data, 9), argument(data, 10)
    units, columns = argument(data, DYNAMIC), argument(data, DYNAMIC + 1)
    a, a_stride, ah, ah_stride = (
        argument(data, DYNAMIC + 2),
        argument(data, DYNAMIC + 3),
        argument(data, DYNAMIC + 4),
        argument(data, DYNAMIC + 5),
    )
    ascale, ascale_stride, a_begin = (
        argument(data, DYNAMIC + 6),
        argument(data, DYNAMIC + 7),
        argument(data, DYNAMIC + 8),
    )
    b, b_stride, bh, bh_stride = (
        argument(data, DYNAMIC + 9),
        argument(data, DYNAMIC + 10),
        argument(data, DYNAMIC + 11),
        argument(data, DYNAMIC + 12),
    )
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

    scratch = stack(64)
    tail = stack(128)
    asc = stack(8 * units + 64)
    bsc = stack(8 * units + 64)
    results = stack(2048 * count)  # for each side and column the 16 sums, not yet added up
    other_results = results + 1024 * count
    wide = 128 * units
    panel = min(units, PANEL)
    left = stack(128 * panel if count > 1 else 64)
    right = stack(128 * panel if count > 1 else 64)
    sums = stack(256 * MAX_COLUMNS if count > 1 else 64)
    xs = stack(wide if count == 1 else 64)
    if count == 1:
        widen(x, x_kind, columns, xs, PAIRS, scratch)
    else:
        xs = x

    team = team_size(data)
    me = arrive(data)
    for turn in range(team):
        owner = (me + turn) % team
        low, high = rows * owner // team, rows * (owner + 1) // team
        # Two streams: the halves of the owner's rows, or the gate and up rows of the owner's pairs.
        items = high - low if gated else (high - low + 1) >> 1
        shift = 0 if gated else items
        while True:
            item = next_of(data, owner, ROWS)
            if item >= items:
                break
            chunk = min(ROWS, items - item)
            for i in range(chunk):
                row_a = a_begin + low + item + i
                row_b = b_begin + low + item + i + shift
                if not gated and low + item + i + shift >= high:
                    row_b = row_a
                pa, pb = a + a_stride * row_a, b + b_stride * row_b
                pah, pbh = ah + ah_stride * row_a, bh + bh_stride * row_b
                pas, pbs = (
                    scale_row(ascale, ascale_stride, row_a),
                    scale_row(bscale, bscale_stride, row_b),
                )
                scales(pa, pas, asc, units)
                scales(pb, pbs, bsc, units)
                if count == 1:
                    u, v = _dot_pair(pa, pah, asc, pas, pb, pbh, bsc, pbs, xs, columns, whole, bytes_, tail)
                    store_f32(results + 64 * i, u)
                    store_f32(other_results + 64 * i, v)
                else:
                    for t in range(4 * count):
                        store_f32(sums + 64 * t, zeros())
                    for begin in range(0, units, PANEL):
                        end = min(units, begin + PANEL)
                        for side in range(2):
                            _decode_units(
                                pb if side else pa,
                                pbh if side else pah,
                                bsc if side else asc,
                                pbs if side else pas,
                                begin,
                                end,
                                columns,
                                whole,
                                bytes_,
                                right if side else left,
                                tail,
                            )
                        _multiply(left, right, xs + 128 * begin, wide, end - begin, count, sums)
                    for t in range(count):
                        s = sums + 256 * t
                        u = add(load_f32(s), load_f32(s + 64))
                        v = add(load_f32(s + 128), load_f32(s + 192))
                        store_f32(results + 1024 * t + 64 * i, u)
                        store_f32(other_results + 1024 * t + 64 * i, v)
            for t in range(count):
                ra, rb = totals(results + 1024 * t), totals(other_results + 1024 * t)
                if DIVIDED:
                    ra, rb = div(ra, a_divisor), div(rb, b_divisor)
                at = t * stride + first + low + item
                if gated:
                    value = mul(silu(ra), rb)
                    store_some(out + out_size * at, out_kind, value, chunk, scratch)
                else:
                    other = min(chunk, high - low - shift - item)
                    add_a = residual + residual_size * at if residual else 0
                    add_b = residual + residual_size * (at + shift) if residual else 0
                    _finish(ra, chunk, out + out_size * at, out_kind, add_a, residual_kind, scratch)
                    _finish(rb, other, out + out_size * (at + shift), out_kind, add_b, residual_kind, scratch)


def widen_kernel(data):
    """Columns of activations as float32 scratch. Arguments: 0 x, 1 out, 2 T, 3 kind, 4 K, 5 units."""
    x, out, count, kind = argument(data, 0), argument(data, 1), argument(data, 2), argument(data, 3)
    columns, units = argument(data, 4), argument(data, 5)
    scratch = stack(64)
    while True:
        t = next_shared(data, 1)
        if t >= count:
            break
        widen(x + t * columns * size_of(kind), kind, columns, out + 128 * units * t, PAIRS, scratch)


def decode_kernel(data):
    """Whole rows in natural order, rounded to the kind of `out`.

    Arguments: 0 row numbers or 0 for consecutive rows, 1 out, 2 how many rows, 3 kind of out, 4 row stride of
    out in elements, 5 first row, 6 rows of the segment, 7 bytes of a row number; the constants of
    `plan.constants_of`. Given numbers count from the matrix's start: `first` is subtracted, and those outside
    the segment are passed over.
    """
    ids, out, count, kind = argument(data, 0), argument(data, 1), argument(data, 2), argument(data, 3)
    stride, first, rows, id_bytes = argument(data, 4), argument(data, 5), argument(data, 6), argument(data, 7)
    units, columns = argument(data, DYNAMIC), argument(data, DYNAMIC + 1)
    codes, codes_stride = argument(data, DYNAMIC + 2), argument(data, DYNAMIC + 3)
    high, high_stride = argument(data, DYNAMIC + 4), argument(data, DYNAMIC + 5)
    scale, scale_stride = argument(data, DYNAMIC + 6), argument(data, DYNAMIC + 7)
    begin = argument(data, DYNAMIC + 8)
    divisor = splat(get_f64(data + 8 * (DYNAMIC + 16)))
    whole = columns >> 5 if RAGGED else units
    bytes_ = codes_stride // units
    sc, tail, decoded = stack(8 * units + 64), stack(128), stack(128 * units)
    while True:
        index = next_shared(data, 8)
        if index >= count:
            break
        for i in range(index, min(count, index + 8)):
            row = i + first
            if ids:
                row = (get_i64(ids + 8 * i) if id_bytes == 8 else get_i32(ids + 4 * i)) - first
            if row < 0 or row >= rows:
                continue
            row += begin
            c, h = codes + codes_stride * row, high + high_stride * row
            s = scale_row(scale, scale_stride, row)
            scales(c, s, sc, units)
            _decode_units(c, h, sc, s, 0, units, columns, whole, bytes_, decoded, tail)
            if PAIRS or DIVIDED:
                for unit in range(units):
                    place = decoded + 128 * unit
                    v0, v1 = load_f32(place), load_f32(place + 64)
                    if PAIRS:
                        v0, v1 = interleave_low(v0, v1), interleave_high(v0, v1)
                    if DIVIDED:
                        v0, v1 = div(v0, divisor), div(v1, divisor)
                    store_f32(place, v0)
                    store_f32(place + 64, v1)
            write_row(decoded, out + size_of(kind) * stride * i, kind, columns)


def specialize(function: Callable, name: str, codec: str) -> Kernel:
    """A template, bound to a codec."""
    kind = CODECS[codec]
    return Kernel(
        function,
        f"{name}_{codec}",
        values=kind.values,
        scales=kind.scales,
        scale_row=kind.scale_row,
        PAIRS=kind.pairs,
        RAGGED=kind.ragged,
        DIVIDED=kind.divided,
    )


@functools.cache
def linear_of(codec: str) -> Kernel:
    return specialize(linear_kernel, "linear", codec)


@functools.cache
def decode_of(codec: str) -> Kernel:
    return specialize(decode_kernel, "decode", codec)


@functools.cache
def widen_of(pairs: bool) -> Kernel:
    return Kernel(widen_kernel, f"widen_{'pairs' if pairs else 'natural'}", PAIRS=pairs)
