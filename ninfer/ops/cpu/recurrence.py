"""The gated delta rule column by column, for decoding and for what a chunked call leaves over.

Roofline: a head's state (64 KB for 128 x 128) is read and written once a column from the cache, 5 float
operations an element: about 2 us a column and head. With dk = S k and dq = S q of the old state, one pass
over the state yields both the error `u = beta (v - alpha dk)` and the output `alpha dq + u (q.k)`; the second
pass updates it.
"""

from __future__ import annotations

import math

import torch

from ninfer.ops.cpu.access import kind_of, load_some, size_of, store_some
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
    splat,
    square_root,
    stack,
    store_f32,
    sub,
    total,
    totals,
    zeros,
)


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
def _advance(state, rows, width, k, q, kq, v, alpha, beta, tails, sums_k, sums_q):
    """Up to 16 rows of a state by one column: v, beta and alpha in, the output's lanes out. State rows are
    `width` float32 apart; `tails` takes a row's last partial vector."""
    for row in range(rows):
        s = state + 4 * width * row
        dk, dq = zeros(), zeros()
        for start in range(0, width & -16, 16):
            value = load_f32(s + 4 * start)
            dk = fma(value, load_f32(k + 4 * start), dk)
            dq = fma(value, load_f32(q + 4 * start), dq)
        if width & 15:
            start = width & -16
            value = load_some(s + 4 * start, 0, width - start, tails)
            dk = fma(value, load_f32(k + 4 * start), dk)
            dq = fma(value, load_f32(q + 4 * start), dq)
        store_f32(sums_k + 64 * row, dk)
        store_f32(sums_q + 64 * row, dq)
    decay = splat(alpha)
    u = mul(splat(beta), sub(v, mul(decay, totals(sums_k))))
    result = fma(u, splat(kq), mul(decay, totals(sums_q)))
    store_f32(sums_k, u)
    for row in range(rows):
        s = state + 4 * width * row
        change = splat(get_f32(sums_k + 4 * row))
        for start in range(0, width & -16, 16):
            value = mul(load_f32(s + 4 * start), decay)
            store_f32(s + 4 * start, fma(change, load_f32(k + 4 * start), value))
        if width & 15:
            start = width & -16
            value = mul(load_some(s + 4 * start, 0, width - start, tails), decay)
            value = fma(change, load_f32(k + 4 * start), value)
            store_some(s + 4 * start, 0, value, width - start, tails)
    return result


def recurrence_kernel(data):
    """An item is one value head of one request.

    Arguments: 0..2 q, k, v, 3..5 their row strides, 6 g, 7 beta, 8 states, 9 source slots, 10 target slots,
    11 out, 12 requests, 13 columns a request, 14 first column of a request, 15 columns to do, 16 key heads,
    17 value heads, 18 width of keys, 19 width of values, 20 kind. Strides count elements.
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
    requests, per_request, first, todo = (
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
    size = size_of(kind)
    padded = (width + 15) & -16
    bytes_ = 4 * width * v_width
    scratch, tails, sums_k, sums_q = stack(64), stack(64), stack(1024), stack(1024)
    key, query = stack(4 * padded), stack(4 * padded)
    while True:
        item = next_shared(data, 1)
        if item >= requests * v_heads:
            break
        request, head = item // v_heads, item % v_heads
        k_head = head // (v_heads // k_heads)
        source = states + bytes_ * (get_i32(sources + 4 * request) * v_heads + head)
        state = states + bytes_ * (get_i32(targets + 4 * request) * v_heads + head)
        if source != state:
            copy_bytes(state, source, bytes_)
        for step in range(todo):
            t = request * per_request + first + step
            _normalized(
                q + size * (t * q_stride + k_head * width),
                kind,
                width,
                padded,
                1.0 / square_root(width),
                query,
                scratch,
            )
            _normalized(k + size * (t * k_stride + k_head * width), kind, width, padded, 1.0, key, scratch)
            both = zeros()
            for start in range(0, padded, 16):
                both = fma(load_f32(query + 4 * start), load_f32(key + 4 * start), both)
            kq = total(both)
            alpha = math.exp(get_f32(g + 4 * (t * v_heads + head)))
            strength = get_f32(beta + 4 * (t * v_heads + head))
            for row in range(0, v_width, 16):
                rows = min(16, v_width - row)
                value = load_some(v + size * (t * v_stride + head * v_width + row), kind, rows, scratch)
                result = _advance(
                    state + 4 * width * row, rows, width, key, query, kq, value, alpha, strength, tails,
                    sums_k, sums_q,
                )  # fmt: skip
                store_some(out + size * ((t * v_heads + head) * v_width + row), kind, result, rows, scratch)


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
) -> None:
    """Columns `first` and up of every request, from the source slots to the target slots."""
    requests = source_slots.numel()
    columns, v_heads, v_width = v.shape
    per_request = columns // requests
    todo = per_request - first
    team = threads() if requests * v_heads * todo > 1 else 1
    launch(
        _recurrence.address, team, 0, q.data_ptr(), k.data_ptr(), v.data_ptr(), q.stride(0), k.stride(0),
        v.stride(0), g.data_ptr(), beta.data_ptr(), states.data_ptr(), source_slots.data_ptr(),
        target_slots.data_ptr(), out.data_ptr(), requests, per_request, first, todo, k.shape[1], v_heads,
        k.shape[2], v_width, kind_of(q),
    )  # fmt: skip
