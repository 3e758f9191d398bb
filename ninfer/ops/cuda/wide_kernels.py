"""Kernels of attention of many columns, in Triton: decoding pages, the attention, merging splits."""

# pyright: reportArgumentType=false, reportIndexIssue=false, reportAttributeAccessIssue=false
# pyright: reportCallIssue=false, reportOperatorIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

import triton
import triton.language as tl

from ninfer.ops.cuda.bf16 import INTERPRETED, to_bf16, to_f32
from ninfer.ops.cuda.kv_codes import e2m1_value, e4m3_value, hadamard


@triton.jit
def decode_kernel(
    codes, scales, out, table, last, first_page, PAGE_VECTORS: tl.constexpr, CODE: tl.constexpr,
    ROTATED: tl.constexpr, FACTOR: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
    ROWS: tl.constexpr, EACH: tl.constexpr, SCALES: tl.constexpr, IMAGES: tl.constexpr,
):  # fmt: skip
    """`ROWS` vectors of a page (of `PAGE_VECTORS`) to bf16; rows beyond the last position become zeros.

    `EACH` and `SCALES` are the entries of a vector in its planes, `last` the request's last position. With
    `IMAGES` a page's keys of one head stand together, as `csrc/attend_wide.cuh` says.
    """
    index = tl.program_id(1)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    token = (first_page + index) * 64 + row // (PAGE_VECTORS // 64)
    end = tl.load(last)
    if (first_page + index) * 64 <= end:
        page = tl.load(table + first_page + index).to(tl.int64)
        wanted = (row < PAGE_VECTORS) & (token <= end)
        vector = page * PAGE_VECTORS + row
        d = tl.arange(0, BLOCK)
        if CODE == 3:
            byte = tl.arange(0, BLOCK // 2)
            inside = wanted[:, None] & (byte < WIDTH // 2)[None, :]
            word = tl.load(codes + vector[:, None] * EACH + byte[None, :], mask=inside, other=0).to(tl.int32)
            at = scales + vector[:, None] * SCALES + (byte // 8)[None, :]
            scale = e4m3_value(tl.load(at, mask=inside, other=0).to(tl.int32))
            low, high = e2m1_value(word & 15) * scale, e2m1_value(word >> 4) * scale
            x = tl.reshape(tl.join(low, high), [ROWS, BLOCK])
        else:
            inside = wanted[:, None] & (d < WIDTH)[None, :]
            word = tl.load(codes + vector[:, None] * EACH + d[None, :], mask=inside, other=0)
            if CODE == 0:
                x = word
            else:
                word = word.to(tl.int32)
            if CODE == 1:
                at = scales + vector[:, None] * SCALES + (d // 64)[None, :]
                x = word.to(tl.float32) * tl.load(at, mask=inside, other=0.0).to(tl.float32)
            elif CODE == 2:
                scale = tl.load(scales + vector, mask=wanted, other=0.0).to(tl.float32)
                x = e4m3_value(word) * scale[:, None]
        if ROTATED:
            x = hadamard(x, ROWS, BLOCK, FACTOR)
        if CODE != 0:
            x = to_bf16(x)
        if IMAGES:
            HEADS: tl.constexpr = PAGE_VECTORS // 64
            n = row // HEADS
            chunk = tl.arange(0, BLOCK // 8)
            image = (index * HEADS + row % HEADS).to(tl.int64) * (64 * WIDTH) + n * 64
            target = image[:, None] + (chunk // 8 * 4096)[None, :]
            target += ((chunk % 8)[None, :] ^ (n % 8)[:, None]) * 8
            target = target[:, :, None] + tl.arange(0, 8)[None, None, :]
            x = tl.reshape(x, [ROWS, BLOCK // 8, 8])
            tl.store(out + target, x, mask=(row < PAGE_VECTORS)[:, None, None])
        else:
            target = (index.to(tl.int64) * PAGE_VECTORS + row)[:, None] * WIDTH + d[None, :]
            tl.store(out + target, x, mask=(row < PAGE_VECTORS)[:, None] & (d < WIDTH)[None, :])


@triton.jit
def _product(a, b):
    """`a b` of bf16 tiles in float32."""
    if INTERPRETED:
        return tl.dot(to_f32(a), to_f32(b), input_precision="ieee")
    else:
        return tl.dot(a, b)


@triton.jit
def _tile(
    plane, row, first, key_head, n, d, limit, HEADS: tl.constexpr, WIDTH: tl.constexpr,
    BULK: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Keys or values `[64, D]` from row `row` of a plane; with `MASKED` those from `limit` on are zeros."""
    if BULK and not MASKED:
        return plane.load([row, key_head * WIDTH])
    else:
        at = (row + n).to(tl.int64)[:, None] * (HEADS * WIDTH) + key_head * WIDTH + d[None, :]
        inside = (d < WIDTH)[None, :]
        if MASKED:
            inside = inside & (first + n < limit)[:, None]
        return tl.load(plane + at, mask=inside, other=0.0)


@triton.jit
def _attend(
    acc, top, mass, q, k, v, table, begin, end, base, positions, limit, key_head, scale, n, d,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, PAGED: tl.constexpr, BULK: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Fold the keys `begin .. end` (multiples of 64) into the state of a program's rows."""
    for first in range(begin, end, 64):
        row = tl.load(table + first // 64) * 64 if PAGED else first - base
        keys = _tile(k, row, first, key_head, n, d, limit, HEADS, WIDTH, BULK, MASKED)
        scores = _product(q, tl.trans(keys))
        if MASKED:
            scores = tl.where((first + n)[None, :] <= positions[:, None], scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, axis=1) * scale)
        weights = tl.exp2(scores * scale - new_top[:, None])
        shrink = tl.exp2(top - new_top)
        mass = mass * shrink + tl.sum(weights, axis=1)
        acc = acc * shrink[:, None]
        values = _tile(v, row, first, key_head, n, d, limit, HEADS, WIDTH, BULK, MASKED)
        acc += _product(to_bf16(weights), values)
        top = new_top
    return acc, top, mass


@triton.jit
def wide_kernel(
    q, k, v, k_bulk, v_bulk, table, cache_positions, out, state, tops, masses,
    columns, table_stride, base, end, scale,
    GROUP: tl.constexpr, HEADS: tl.constexpr, WIDTH: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr, PAGED: tl.constexpr, BULK: tl.constexpr, FIRST: tl.constexpr, LAST: tl.constexpr,
    SPLIT: tl.constexpr,
):  # fmt: skip
    """Rows are columns times `GROUP` query heads; keys `base .. end` of each request, which stand in k and v
    from `base` on unless `PAGED`.

    `scale` carries log2(e). Not `FIRST`: the state of the softmax is read; not `LAST`: it is written.
    `SPLIT`: programs have `SPLIT` keys each, and write the state of split `key // SPLIT`.
    """
    tile = tl.num_programs(0) - 1 - tl.program_id(0)  # the longest first
    key_head, request = tl.program_id(1) % HEADS, tl.program_id(1) // HEADS
    row = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    column = row // GROUP
    inside = column < columns
    positions = tl.load(cache_positions + request * columns + column, mask=inside, other=-1)
    latest = tl.max(positions, axis=0)
    d = tl.arange(0, BLOCK_D)
    n = tl.arange(0, 64)
    head = (request * columns + column).to(tl.int64) * (HEADS * GROUP) + key_head * GROUP + row % GROUP
    at = head[:, None] * WIDTH + d[None, :]
    mask = inside[:, None] & (d < WIDTH)[None, :]
    begin = base
    if SPLIT:
        part = base // SPLIT + tl.program_id(2)
        begin = part * SPLIT
        end = tl.minimum(end, begin + SPLIT)
        rows = (tl.num_programs(1) // HEADS * columns).to(tl.int64) * (HEADS * GROUP)
        state += part * rows * WIDTH
        tops += part * rows
        masses += part * rows
    if FIRST:
        acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
        top = tl.full([BLOCK_M], -1e30, tl.float32)
        mass = tl.zeros([BLOCK_M], tl.float32)
    else:
        acc = tl.load(state + at, mask=mask, other=0.0)
        top = tl.load(tops + head, mask=inside, other=0.0)
        mass = tl.load(masses + head, mask=inside, other=1.0)
    if latest >= begin:
        queries = tl.load(q + at, mask=mask, other=0.0)
        # Masked columns see everything here and become zeros in the end.
        earliest = tl.min(tl.where(positions < 0, latest, positions), axis=0)
        stop = tl.minimum(latest + 1, end)
        full = tl.maximum(tl.minimum((earliest + 1) // 64 * 64, end), begin)
        table += request * table_stride
        acc, top, mass = _attend(
            acc, top, mass, queries, k_bulk if BULK else k, v_bulk if BULK else v, table, begin, full, base,
            positions, stop, key_head, scale, n, d, HEADS, WIDTH, PAGED, BULK, False,
        )  # fmt: skip
        acc, top, mass = _attend(
            acc, top, mass, queries, k, v, table, full, stop, base, positions, stop, key_head, scale, n, d,
            HEADS, WIDTH, PAGED, BULK, True,
        )  # fmt: skip
    if LAST:
        seen = positions >= 0
        y = tl.where(seen[:, None], acc / tl.where(seen, mass, 1.0)[:, None], 0.0)
        tl.store(out + at, to_bf16(y), mask=mask)
    else:
        tl.store(state + at, acc, mask=mask)
        tl.store(tops + head, top, mask=inside)
        tl.store(masses + head, mass, mask=inside)


@triton.jit
def merge_kernel(
    state, tops, masses, cache_positions, out, rows,
    Q_HEADS: tl.constexpr, WIDTH: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr,
    SPLIT: tl.constexpr,
):  # fmt: skip
    """Fold the splits of `ROWS` rows (column, query head) in ascending order, each up to its position's."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = row < rows
    d = tl.arange(0, BLOCK_D)
    positions = tl.load(cache_positions + row // Q_HEADS, mask=inside, other=-1)
    at = row.to(tl.int64)[:, None] * WIDTH + d[None, :]
    mask = inside[:, None] & (d < WIDTH)[None, :]
    acc = tl.zeros([ROWS, BLOCK_D], tl.float32)
    top = tl.full([ROWS], -1e30, tl.float32)
    mass = tl.zeros([ROWS], tl.float32)
    for part in range(tl.max(positions, axis=0) // SPLIT + 1):
        wanted = (positions >= 0) & (part <= positions // SPLIT)
        offset = part * rows.to(tl.int64)
        its_top = tl.load(tops + offset + row, mask=wanted, other=-1e30)
        its_mass = tl.load(masses + offset + row, mask=wanted, other=0.0)
        its = tl.load(state + offset * WIDTH + at, mask=mask & wanted[:, None], other=0.0)
        new_top = tl.maximum(top, its_top)
        shrink, weight = tl.exp2(top - new_top), tl.exp2(its_top - new_top)
        weight = tl.where(wanted, weight, 0.0)
        acc = acc * shrink[:, None] + its * weight[:, None]
        mass = mass * shrink + its_mass * weight
        top = new_top
    seen = positions >= 0
    y = tl.where(seen[:, None], acc / tl.where(seen, mass, 1.0)[:, None], 0.0)
    tl.store(out + at, to_bf16(y), mask=mask)
