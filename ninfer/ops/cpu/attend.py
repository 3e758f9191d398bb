"""Softmax attention over pages.

Few columns: one kernel. Keys are taken in runs of 128; a run yields, for the query heads of one key head, the
maximum, the sum and the weighted values (float32), and whoever finishes a column's last run merges them in
ascending order. So a column's result depends on its own keys only. Roofline: the bytes of K and V; a run
of 128 keys of width 64 takes about 1 us for three query heads.

Many columns: the pages are gathered and PyTorch's fused attention does the rest.
"""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F

from ninfer.errors import OptionError
from ninfer.ops.attention import KvPages
from ninfer.ops.cpu.access import kind_of, load_some, read_row, size_of, write_row
from ninfer.ops.cpu.block import argument, next_shared
from ninfer.ops.cpu.functions import exp
from ninfer.ops.cpu.instructions import device
from ninfer.ops.cpu.kernel import Kernel, bits, launch, threads
from ninfer.ops.cpu.simd import (
    add,
    copy_bytes,
    div,
    fetch_add,
    fma,
    get_f32,
    get_f64,
    get_i32,
    largest,
    load_bf16,
    load_f32,
    maximum,
    mul,
    put_f32,
    put_i64,
    splat,
    stack,
    store_f32,
    sub,
    total,
    totals,
    zeros,
)

PAGE = 64
RUN = 128
SMALL_COLUMNS = 16
_LOWEST = np.float32(-3.0e38)


@device
def _widen_keys(keys, kind, row_bytes, width, padded, count, wide):
    """Up to 16 neighbouring keys of one page as float32, `padded` apart."""
    if kind == 1 and width == padded:
        for start in range(0, width, 16):
            for key in range(count):
                value = load_bf16(keys + row_bytes * key + 2 * start)
                store_f32(wide + 4 * (padded * key + start), value)
    else:
        for key in range(count):
            read_row(keys + row_bytes * key, kind, width, wide + 4 * padded * key)


@device
def _scores(query, padded, wide, count, sums):
    """A head's scores of up to 16 keys. The loops over keys are the inner ones: their bodies are straight."""
    for key in range(count):
        store_f32(sums + 64 * key, zeros())
    for start in range(0, padded & -64, 64):
        q, k = query + 4 * start, wide + 4 * start
        q0, q1, q2, q3 = load_f32(q), load_f32(q + 64), load_f32(q + 128), load_f32(q + 192)
        for key in range(count):
            a = fma(q0, load_f32(k), load_f32(sums + 64 * key))
            b = mul(q1, load_f32(k + 64))
            a = fma(q2, load_f32(k + 128), a)
            b = fma(q3, load_f32(k + 192), b)
            store_f32(sums + 64 * key, add(a, b))
            k += 4 * padded
    for start in range(padded & -64, padded, 16):
        q0, k = load_f32(query + 4 * start), wide + 4 * start
        for key in range(count):
            store_f32(sums + 64 * key, fma(q0, load_f32(k), load_f32(sums + 64 * key)))
            k += 4 * padded
    return totals(sums)


@device
def _softmax(scores, count):
    """Turn a run's scores into weights relative to their maximum; returns (maximum, sum)."""
    for at in range(count, (count + 15) & -16):
        put_f32(scores + 4 * at, _LOWEST)
    top = splat(_LOWEST)
    for at in range(0, count, 16):
        top = maximum(top, load_f32(scores + 4 * at))
    m = largest(top)
    sums = zeros()
    for at in range(0, count, 16):
        weight = exp(sub(load_f32(scores + 4 * at), splat(m)))
        if at + 16 > count:
            store_f32(scores + 4 * at, weight)
            for lane in range(count, at + 16):
                put_f32(scores + 4 * lane, 0.0)
            weight = load_f32(scores + 4 * at)
        store_f32(scores + 4 * at, weight)
        sums = add(sums, weight)
    return m, total(sums)


@device
def _add_values(place, row_bytes, kind, lanes, count, w0, w1, w2, w3, sums, scratch):
    """Add `weight * value` of one page's keys and up to 16 dimensions to the sums of four heads (64 bytes
    each)."""
    a0, a1, a2, a3 = load_f32(sums), load_f32(sums + 64), load_f32(sums + 128), load_f32(sums + 192)
    if kind == 1 and lanes == 16:
        for key in range(count):
            v = load_bf16(place + row_bytes * key)
            a0 = fma(splat(get_f32(w0 + 4 * key)), v, a0)
            a1 = fma(splat(get_f32(w1 + 4 * key)), v, a1)
            a2 = fma(splat(get_f32(w2 + 4 * key)), v, a2)
            a3 = fma(splat(get_f32(w3 + 4 * key)), v, a3)
    else:
        for key in range(count):
            v = load_some(place + row_bytes * key, kind, lanes, scratch)
            a0 = fma(splat(get_f32(w0 + 4 * key)), v, a0)
            a1 = fma(splat(get_f32(w1 + 4 * key)), v, a1)
            a2 = fma(splat(get_f32(w2 + 4 * key)), v, a2)
            a3 = fma(splat(get_f32(w3 + 4 * key)), v, a3)
    store_f32(sums, a0)
    store_f32(sums + 64, a1)
    store_f32(sums + 128, a2)
    store_f32(sums + 192, a3)


@device
def _values(
    weights,
    heads,
    pages,
    table,
    page_bytes,
    row_bytes,
    head_bytes,
    begin,
    count,
    kind,
    width,
    padded,
    sums,
    out,
):
    """`out[head] = sum of weight * value` over a run's keys, four heads at a time; `sums` is 320 bytes."""
    size = size_of(kind)
    for first in range(0, heads, 4):
        w0 = weights + 4 * RUN * first
        w1 = w0 + 4 * RUN * min(1, heads - first - 1)
        w2 = w0 + 4 * RUN * min(2, heads - first - 1)
        w3 = w0 + 4 * RUN * min(3, heads - first - 1)
        for start in range(0, width, 16):
            for i in range(4):
                store_f32(sums + 64 * i, zeros())
            for block in range(0, count, 64):
                page = get_i32(table + 4 * ((begin + block) >> 6))
                place = pages + page_bytes * page + head_bytes + size * start
                lanes, keys, at = min(16, width - start), min(64, count - block), 4 * block
                _add_values(
                    place, row_bytes, kind, lanes, keys, w0 + at, w1 + at, w2 + at, w3 + at, sums, sums + 256
                )
            for i in range(min(4, heads - first)):
                store_f32(out + 4 * (padded * (first + i) + start), load_f32(sums + 64 * i))


@device
def _merge(first, record, runs, padded, out):
    """Add the weighted values of a head's runs, in ascending order; returns the sum of the weights."""
    top = get_f32(first + 4 * padded)
    for run in range(1, runs):
        top = max(top, get_f32(first + record * run + 4 * padded))
    for start in range(0, padded, 16):
        store_f32(out + 4 * start, zeros())
    mass = zeros()
    for run in range(runs):
        place = first + record * run
        factor = exp(splat(get_f32(place + 4 * padded) - top))
        mass = fma(factor, splat(get_f32(place + 4 * padded + 4)), mass)
        for start in range(0, padded, 16):
            value = fma(factor, load_f32(place + 4 * start), load_f32(out + 4 * start))
            store_f32(out + 4 * start, value)
    return total(mass) / 16


def attention_kernel(data):
    """An item is a run of keys of one column and one key head.

    Arguments: 0 q, 1 its row stride in elements, 2 k pages, 3 v pages, 4 page table, 5 its row stride, 6
    cache positions, 7 columns, 8 columns a request, 9 query heads, 10 key heads, 11 width, 12 kind, 13 out,
    14 scale, 15 partial results, 16 counters (zero, and left at zero), 17 most runs of a column. A partial
    result is `padded + 16` float32: the weighted values, then maximum and sum; they stand at `(column * query
    heads + head) * most runs + run`.
    """
    q, q_stride, k_pages, v_pages = argument(data, 0), argument(data, 1), argument(data, 2), argument(data, 3)
    table, table_stride, positions = argument(data, 4), argument(data, 5), argument(data, 6)
    columns, per_request, q_heads, k_heads = (
        argument(data, 7),
        argument(data, 8),
        argument(data, 9),
        argument(data, 10),
    )
    width, kind, out, scale = argument(data, 11), argument(data, 12), argument(data, 13), get_f64(data + 112)
    partial, counters, most = argument(data, 15), argument(data, 16), argument(data, 17)
    size = size_of(kind)
    group = q_heads // k_heads
    padded = (width + 15) & -16
    row_bytes = size * width * k_heads
    page_bytes = 64 * row_bytes
    sums = stack(1024)
    queries, wide = stack(4 * padded * group), stack(64 * padded)
    scores, weighted = stack(4 * RUN * group), stack(4 * padded * group)
    tops, masses = stack(4 * group), stack(4 * group)
    while True:
        item = next_shared(data, 1)
        # Which column, key head and run is that? Columns have as many runs as their positions need.
        t = 0
        runs = 1
        while t < columns:
            runs = (get_i32(positions + 4 * t) + RUN) // RUN
            if item < runs * k_heads:
                break
            item -= runs * k_heads
            t += 1
        if t >= columns:
            break
        run, k_head = item // k_heads, item % k_heads
        begin = RUN * run
        count = min(RUN, get_i32(positions + 4 * t) + 1 - begin)
        pages = table + 4 * table_stride * (t // per_request)
        head_bytes = size * width * k_head
        for head in range(group):
            query = queries + 4 * padded * head
            read_row(q + size * (t * q_stride + (k_head * group + head) * width), kind, width, query)
            for start in range(0, width, 16):
                store_f32(query + 4 * start, mul(load_f32(query + 4 * start), splat(scale)))
        for key in range(0, count, 16):
            page = get_i32(pages + 4 * ((begin + key) >> 6))
            place = k_pages + page_bytes * page + row_bytes * ((begin + key) & 63) + head_bytes
            some = min(16, count - key)
            _widen_keys(place, kind, row_bytes, width, padded, some, wide)
            for head in range(group):
                value = _scores(queries + 4 * padded * head, padded, wide, some, sums)
                store_f32(scores + 4 * (RUN * head + key), value)
        for head in range(group):
            top, mass = _softmax(scores + 4 * RUN * head, count)
            put_f32(tops + 4 * head, top)
            put_f32(masses + 4 * head, mass)
        _values(
            scores, group, v_pages, pages, page_bytes, row_bytes, head_bytes, begin, count, kind, width,
            padded, sums, weighted,
        )  # fmt: skip
        if runs > 1:
            record = 4 * (padded + 16)
            first = partial + record * most * (t * q_heads + k_head * group)
            for head in range(group):
                mine = first + record * (most * head + run)
                copy_bytes(mine, weighted + 4 * padded * head, 4 * padded)
                put_f32(mine + 4 * padded, get_f32(tops + 4 * head))
                put_f32(mine + 4 * padded + 4, get_f32(masses + 4 * head))
            counter = counters + 8 * (t * k_heads + k_head)
            if fetch_add(counter, 1) != runs - 1:
                continue
            put_i64(counter, 0)
            for head in range(group):
                mass = _merge(
                    first + record * most * head, record, runs, padded, weighted + 4 * padded * head
                )
                put_f32(masses + 4 * head, mass)
        for head in range(group):
            row = weighted + 4 * padded * head
            mass = splat(get_f32(masses + 4 * head))
            for start in range(0, width, 16):
                store_f32(row + 4 * start, div(load_f32(row + 4 * start), mass))
            write_row(row, out + size * width * (t * q_heads + k_head * group + head), kind, width)


_attention = Kernel(attention_kernel)


def paged_attention(
    q: torch.Tensor,
    pages: KvPages,
    page_table: torch.Tensor,
    cache_positions: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    k_pages, v_pages = pages.k, pages.v
    columns, q_heads, width = q.shape
    requests = page_table.shape[0]
    k_heads = k_pages.shape[2]
    if columns % requests or q_heads % k_heads or k_pages.shape[3] != width or k_pages.dtype != q.dtype:
        raise OptionError(
            f"queries {tuple(q.shape)} {q.dtype} of {requests} requests do not fit "
            f"pages {tuple(k_pages.shape)} {k_pages.dtype}"
        )
    if columns // requests > SMALL_COLUMNS:
        return _many_columns(q, k_pages, v_pages, page_table, cache_positions, scale)
    if q.stride(2) != 1 or q.stride(1) != width:
        q = q.contiguous()
    kind = kind_of(q)
    out = torch.empty((columns, q_heads, width), dtype=q.dtype)
    most = -(-page_table.shape[1] * PAGE // RUN)
    partial = counters = None
    if most > 1:
        record = (width + 15) // 16 * 16 + 16
        partial = torch.empty(columns * q_heads * most * record, dtype=torch.float32)
        counters = torch.zeros(columns * k_heads, dtype=torch.int64)
    launch(
        _attention.address, threads(), 0, q.data_ptr(), q.stride(0), k_pages.data_ptr(), v_pages.data_ptr(),
        page_table.data_ptr(), page_table.stride(0), cache_positions.data_ptr(), columns, columns // requests,
        q_heads, k_heads, width, kind, out.data_ptr(), bits(scale),
        0 if partial is None else partial.data_ptr(), 0 if counters is None else counters.data_ptr(), most,
    )  # fmt: skip
    return out


def _many_columns(q, k_pages, v_pages, page_table, cache_positions, scale) -> torch.Tensor:
    requests = page_table.shape[0]
    columns = q.shape[0] // requests
    out = torch.empty(q.shape, dtype=q.dtype)
    for b in range(requests):
        rows = slice(b * columns, (b + 1) * columns)
        start = int(cache_positions[b * columns])
        visible = start + columns
        pages = page_table[b, : -(-visible // PAGE)].long()
        keys = k_pages[pages].flatten(0, 1)[:visible].transpose(0, 1)[None]
        values = v_pages[pages].flatten(0, 1)[:visible].transpose(0, 1)[None]
        queries = q[rows].transpose(0, 1)[None]
        mask = None
        if start:
            mask = torch.ones(columns, visible, dtype=torch.bool).tril_(start)
        result = F.scaled_dot_product_attention(
            queries, keys, values, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=True
        )
        out[rows] = result[0].transpose(0, 1)
    return out
