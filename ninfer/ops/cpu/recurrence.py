"""The gated delta rule column by column: decoding, verification with records, their fold, and what a chunked
call leaves over.

Roofline: a head's state (64 KB for 128 x 128) is read and written once a call, 5 float operations an element
and column: about 2 us a column and head. Rows of a state are independent, so 16 of them (8 KB) stay in the
first cache for all columns of a call. With dk = S k and dq = S q of the old state, one pass over them yields
both the error `u = beta (v - alpha dk)` and the output `alpha dq + u (q.k)`; the second pass updates them.

One kernel does it all, so that a fold has the bits of the call whose columns it repeats.
"""

from __future__ import annotations

import math

import torch

from ninfer.ops.cpu.access import FLOAT32, kind_of, load_some, read_row, size_of, store_some, write_row
from ninfer.ops.cpu.block import argument, next_shared
from ninfer.ops.cpu.instructions import device
from ninfer.ops.cpu.kernel import Kernel, launch, threads
from ninfer.ops.cpu.simd import (
    copy_bytes,
    fma,
    get_f32,
    get_i32,
    load_f32,
    mul,
    put_f32,
    splat,
    square_root,
    stack,
    store_f32,
    sub,
    total,
    totals,
    zeros,
)
from ninfer.ops.delta import DeltaRecords

STEPS = 16
"""Columns whose keys and queries are prepared at a time."""


@device
def _normalized(source, kind, width, padded, factor, target, scratch):
    """`factor * x / sqrt(sum x^2 + 1e-6)` as float32, zero-padded."""
    size = size_of(kind)
    squares = zeros()
    for start in range(0, width, 16):
        value = load_some(source + size * start, kind, min(16, width - start), scratch)
        store_f32(target + 4 * start, value)
        squares = fma(value, value, squares)
    inverse = splat(factor / square_root(total(squares) + 1e-6))
    for start in range(0, padded, 16):
        store_f32(target + 4 * start, mul(load_f32(target + 4 * start), inverse))


@device
def _dot(a, b, padded):
    sums = zeros()
    for start in range(0, padded, 16):
        sums = fma(load_f32(a + 4 * start), load_f32(b + 4 * start), sums)
    return total(sums)


@device
def _start(target, source, bytes_):
    """The state before the call into the target; no source is the zero state. In one go, which streams:
    copying rows when they are needed takes a third more."""
    if source == 0:
        for i in range(bytes_ >> 2):
            put_f32(target + 4 * i, 0.0)
    elif source != target:
        copy_bytes(target, source, bytes_)


@device
def _load_rows(source, rows, width, padded, block):
    """Up to 16 rows of a state into the block, zero-padded; no source is the zero state."""
    for row in range(rows):
        if source:
            read_row(source + 4 * width * row, FLOAT32, width, block + 4 * padded * row)
        else:
            for start in range(0, padded, 16):
                store_f32(block + 4 * (padded * row + start), zeros())


@device
def _advance(state, rows, padded, k, q, kq, v, alpha, beta, sums_k, sums_q):
    """Up to 16 rows of a state by one column: v, beta and alpha in, the output's lanes out. The rows are
    `padded` float32 apart."""
    for row in range(rows):
        s = state + 4 * padded * row
        dk, dq = zeros(), zeros()
        for start in range(0, padded, 16):
            value = load_f32(s + 4 * start)
            dk = fma(value, load_f32(k + 4 * start), dk)
            dq = fma(value, load_f32(q + 4 * start), dq)
        store_f32(sums_k + 64 * row, dk)
        store_f32(sums_q + 64 * row, dq)
    decay = splat(alpha)
    u = mul(splat(beta), sub(v, mul(decay, totals(sums_k))))
    result = fma(u, splat(kq), mul(decay, totals(sums_q)))
    store_f32(sums_k, u)
    for row in range(rows):
        s = state + 4 * padded * row
        change = splat(get_f32(sums_k + 4 * row))
        for start in range(0, padded, 16):
            value = mul(load_f32(s + 4 * start), decay)
            store_f32(s + 4 * start, fma(change, load_f32(k + 4 * start), value))
    return result


def recurrence_kernel(data):
    """An item is one value head of one request.

    Arguments: 0..2 q (0 in a fold), k, v, 3..5 their row strides, 6 g, 7 beta, 8 states, 9 source slots, 10
    target slots or 0, 11 out or 0, 12 requests, 13 columns a request, 14 first column of a request, 15 counts
    (columns to do, from the first) or 0 for all, 16 key heads, 17 value heads, 18 width of keys, 19 width of
    values, 20 kind; 21..24 where k, v, g and beta are recorded, or 0, 25 record rows a request. Strides count
    elements.
    """
    q, k, v = argument(data, 0), argument(data, 1), argument(data, 2)
    q_stride, k_stride, v_stride = argument(data, 3), argument(data, 4), argument(data, 5)
    g, beta, states, sources, targets, out = (
        argument(data, 6),
        argument(data, 7),
        argument(data, 8),
        argument(data, 9),
        argument(data, 10),
        argument(data, 11),
    )
    requests, per_request, first, counts = (
        argument(data, 12),
        argument(data, 13),
        argument(data, 14),
        argument(data, 15),
    )
    k_heads, v_heads, width, v_width, kind = (
        argument(data, 16),
        argument(data, 17),
        argument(data, 18),
        argument(data, 19),
        argument(data, 20),
    )
    k_record, v_record, g_record, beta_record, record_rows = (
        argument(data, 21),
        argument(data, 22),
        argument(data, 23),
        argument(data, 24),
        argument(data, 25),
    )
    size = size_of(kind)
    group = v_heads // k_heads
    padded = (width + 15) & -16
    bytes_ = 4 * width * v_width
    scratch, sums_k, sums_q = stack(64), stack(1024), stack(1024)
    keys, queries, block = stack(64 * padded), stack(64 * padded), stack(64 * padded)
    products, decays, strengths = stack(64), stack(64), stack(64)
    while True:
        item = next_shared(data, 1)
        if item >= requests * v_heads:
            break
        request, head = item // v_heads, item % v_heads
        k_head = head // group
        slot = get_i32(sources + 4 * request)
        source = states + bytes_ * (slot * v_heads + head) if slot >= 0 else 0
        target = states + bytes_ * (get_i32(targets + 4 * request) * v_heads + head) if targets else 0
        todo = per_request - first
        if counts:
            todo = min(todo, get_i32(counts + 4 * request))
        in_place = target and width == padded
        if in_place and todo > 0:
            _start(target, source, bytes_)
        for begin in range(0, todo, STEPS):
            steps = min(STEPS, todo - begin)
            column = request * per_request + first + begin
            for step in range(steps):
                t = column + step
                key, query = keys + 4 * padded * step, queries + 4 * padded * step
                k_at = k + size * (t * k_stride + k_head * width)
                _normalized(k_at, kind, width, padded, 1.0, key, scratch)
                if q:
                    q_at = q + size * (t * q_stride + k_head * width)
                    _normalized(q_at, kind, width, padded, 1.0 / square_root(width), query, scratch)
                else:
                    copy_bytes(query, key, 4 * padded)  # nobody asks for the output
                put_f32(products + 4 * step, _dot(query, key, padded))
                put_f32(decays + 4 * step, math.exp(get_f32(g + 4 * (t * v_heads + head))))
                put_f32(strengths + 4 * step, get_f32(beta + 4 * (t * v_heads + head)))
                if k_record:
                    row = record_rows * request + begin + step
                    at = row * v_heads + head
                    put_f32(g_record + 4 * at, get_f32(g + 4 * (t * v_heads + head)))
                    put_f32(beta_record + 4 * at, get_f32(beta + 4 * (t * v_heads + head)))
                    v_at = v + size * (t * v_stride + head * v_width)
                    copy_bytes(v_record + size * v_width * at, v_at, size * v_width)
                    if head % group == 0:
                        copy_bytes(k_record + size * width * (row * k_heads + k_head), k_at, size * width)
            for row in range(0, v_width, 16):
                rows = min(16, v_width - row)
                here = target + 4 * width * row if in_place else block
                if not in_place:
                    _load_rows(source + 4 * width * row if source else 0, rows, width, padded, block)
                for step in range(steps):
                    t = column + step
                    value = load_some(v + size * (t * v_stride + head * v_width + row), kind, rows, scratch)
                    result = _advance(
                        here, rows, padded, keys + 4 * padded * step, queries + 4 * padded * step,
                        get_f32(products + 4 * step), value, get_f32(decays + 4 * step),
                        get_f32(strengths + 4 * step), sums_k, sums_q,
                    )  # fmt: skip
                    if out:
                        place = out + size * ((t * v_heads + head) * v_width + row)
                        store_some(place, kind, result, rows, scratch)
                if target and not in_place:
                    for i in range(rows):
                        write_row(block + 4 * padded * i, target + 4 * width * (row + i), FLOAT32, width)
            source = target


_recurrence = Kernel(recurrence_kernel)


def advance(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    states: torch.Tensor,
    source_slots: torch.Tensor,
    target_slots: torch.Tensor,
    out: torch.Tensor,
    first: int,
    records: DeltaRecords | None,
) -> None:
    """Columns `first` and up of every request, from the source slots to the target slots or into records."""
    requests = source_slots.numel()
    columns, v_heads, v_width = v.shape
    per_request = columns // requests
    team = threads() if requests * v_heads * (per_request - first) > 1 else 1
    kept = (0, 0, 0, 0, 0)
    if records is not None:
        kept = (
            records.k.data_ptr(), records.v.data_ptr(), records.g.data_ptr(), records.beta.data_ptr(),
            records.g.shape[0] // requests,
        )  # fmt: skip
    launch(
        _recurrence.address, team, 0, q.data_ptr(), k.data_ptr(), v.data_ptr(), q.stride(0), k.stride(0),
        v.stride(0), g.data_ptr(), beta.data_ptr(), states.data_ptr(), source_slots.data_ptr(),
        0 if records is not None else target_slots.data_ptr(), out.data_ptr(), requests, per_request, first,
        0, k.shape[1], v_heads, k.shape[2], v_width, kind_of(q), *kept,
    )  # fmt: skip


def fold(
    records: DeltaRecords,
    counts: torch.Tensor,
    states: torch.Tensor,
    source_slots: torch.Tensor,
    target_slots: torch.Tensor,
) -> None:
    """The first `counts[b]` recorded columns of every request, from the source slots to the target slots."""
    requests = source_slots.numel()
    rows, v_heads, v_width = records.v.shape
    _, k_heads, width = records.k.shape
    launch(
        _recurrence.address, threads(), 0, 0, records.k.data_ptr(), records.v.data_ptr(), 0, k_heads * width,
        v_heads * v_width, records.g.data_ptr(), records.beta.data_ptr(), states.data_ptr(),
        source_slots.data_ptr(), target_slots.data_ptr(), 0, requests, rows // requests, 0, counts.data_ptr(),
        k_heads, v_heads, width, v_width, kind_of(records.k),
    )  # fmt: skip
