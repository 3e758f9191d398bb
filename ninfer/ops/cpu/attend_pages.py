"""Softmax attention over pages: one pass over keys and values, decoded in the cache.

The keys of a request are cut into runs at fixed places: eight of 128, eight of 256, and so on, so that
262,144 keys are 65 runs. A run yields, for each column and query head, the maximum score, the sum of the
weights and the weighted values (float32, 128 keys at a time); a column's runs are folded in ascending order.
So its result depends on its own keys only, whoever did the runs.

An item is a run, or all runs, of one key head and some columns of a request. Roofline for one column: the
bytes of K and V (a run of 128 bf16 keys of width 64 takes about 1 us for three query heads), for many: the
multiplications.
"""

from __future__ import annotations

import functools

import numpy as np
import torch

from ninfer.formats import KvFormat
from ninfer.ops.attention import KvPages
from ninfer.ops.cpu.access import kind_of, load_some, read_row, size_of, write_row
from ninfer.ops.cpu.block import argument, next_shared, team_size
from ninfer.ops.cpu.functions import exp
from ninfer.ops.cpu.instructions import device
from ninfer.ops.cpu.kernel import Kernel, bits, launch, threads
from ninfer.ops.cpu.kv import PLAIN, bindings, code_bytes, hadamard, rotation, scale_addresses, scale_bytes
from ninfer.ops.cpu.simd import (
    add,
    copy_bytes,
    div,
    fetch_add,
    fma,
    get_f32,
    get_f64,
    get_i32,
    get_i64,
    largest,
    load_bf16,
    load_f32,
    maximum,
    mul,
    prefetch,
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

RUN, RUNS = 128, 8
"""Keys of the shortest runs, and how many runs have the same length."""
ROWS = 64
"""Most rows (columns times query heads of a key head) of an item, unless one column has more."""
FEW_COLUMNS = 16
"""Most columns of a request in a decode round."""
_LOWEST = np.float32(-3.0e38)

# What the kernel is specialized for: the format of the pages; see `kv.Side`.
decode_key = decode_value = PLAIN.decode
K_BITS = V_BITS = K_SCALE = V_SCALE = 0
K_GROUP = V_GROUP = 1
K_ROTATED = V_ROTATED = QUANTIZED = False


@device
def run_begin(run):
    """The first key of a run."""
    level = run // RUNS
    return RUN * RUNS * ((1 << level) - 1) + run % RUNS * (RUN << level)


@device
def runs_of(keys):
    """How many runs so many keys have; 0 for none."""
    level = 0
    while keys > RUN * RUNS * ((2 << level) - 1):
        level += 1
    length = RUN << level
    return RUNS * level + (max(0, keys) - RUN * RUNS * ((1 << level) - 1) + length - 1) // length


@device
def _scores(query, padded, wide, count, sums):
    """A row's scores of up to 16 keys. The loops over keys are the inner ones: their bodies are straight."""
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
def _softmax(scores, count, m):
    """Turn scores into weights relative to the larger of `m` and their maximum; returns (that, sum)."""
    for at in range(count, (count + 15) & -16):
        put_f32(scores + 4 * at, _LOWEST)
    top = splat(m)
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
def _add_values(place, row_bytes, kind, lanes, count, w0, w1, w2, w3, s0, s1, s2, s3, scratch):
    """Add `weight * value` of neighbouring keys and up to 16 dimensions to the sums of four rows."""
    a0, a1, a2, a3 = load_f32(s0), load_f32(s1), load_f32(s2), load_f32(s3)
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
    store_f32(s0, a0)
    store_f32(s1, a1)
    store_f32(s2, a2)
    store_f32(s3, a3)


@device
def _add_to_column(place, row_bytes, kind, width, padded, begin, end, count, weights, heads, sums, scratch):
    """Add dimensions [begin, end) of up to 64 neighbouring values to the sums of a column's heads; `weights`
    are those of the first head, `scratch` is 128 bytes."""
    size = size_of(kind)
    for first in range(0, heads, 4):
        w0 = weights + 4 * RUN * first
        w1 = w0 + 4 * RUN * min(1, heads - first - 1)
        w2 = w0 + 4 * RUN * min(2, heads - first - 1)
        w3 = w0 + 4 * RUN * min(3, heads - first - 1)
        for start in range(begin, end, 16):
            s0 = sums + 4 * (padded * first + start)
            s1 = s0 + 4 * padded if first + 1 < heads else scratch
            s2 = s0 + 8 * padded if first + 2 < heads else scratch
            s3 = s0 + 12 * padded if first + 3 < heads else scratch
            lanes = min(16, width - start)
            _add_values(
                place + size * start, row_bytes, kind, lanes, count, w0, w1, w2, w3, s0, s1, s2, s3,
                scratch + 64,
            )  # fmt: skip


@device
def _fold(part, m, mass, padded, sums, top, total_mass):
    """Add a run's (weighted values, maximum, sum of weights) to what earlier runs of the row made; returns
    the new (maximum, sum). Nothing earlier: `total_mass` is zero."""
    if total_mass == 0.0:
        copy_bytes(sums, part, 4 * padded)
        return m, mass
    new = max(m, top)
    a, b = exp(splat(top - new)), exp(splat(m - new))
    for start in range(0, 4 * padded, 64):
        store_f32(sums + start, fma(b, load_f32(part + start), mul(a, load_f32(sums + start))))
    return new, largest(fma(b, splat(mass), mul(a, splat(total_mass))))


@device
def _write_out(row, width, padded, mass, factor, target, kind):
    """Divide by the sum of the weights, undo the values' rotation, round."""
    inverse = splat(mass)
    for start in range(0, width, 16):
        store_f32(row + 4 * start, div(load_f32(row + 4 * start), inverse))
    if V_ROTATED and factor:
        hadamard(row, width, factor)
    write_row(row, target, kind, width)


@device
def _keys(k_pages, k_scales, table, vector_bytes, scales, heads, head, at, count, kind, width, padded, wide):
    """Up to 16 neighbouring keys of one page as float32, `padded` apart."""
    vector = (64 * get_i32(table + 4 * (at >> 6)) + (at & 63)) * heads + head
    place = k_pages + vector_bytes * vector
    if QUANTIZED:
        for key in range(count):
            decode_key(
                place + vector_bytes * heads * key, k_scales + scales * (vector + heads * key), kind, width,
                wide + 4 * padded * key,
            )  # fmt: skip
    elif kind == 1 and width == padded:
        for start in range(0, width, 16):
            for key in range(count):
                value = load_bf16(place + vector_bytes * heads * key + 2 * start)
                store_f32(wide + 4 * (padded * key + start), value)
    else:
        for key in range(count):
            read_row(place + vector_bytes * heads * key, kind, width, wide + 4 * padded * key)


@device
def _fetch(planes, table, vector_bytes, heads, head, at, end):
    """Start loading the codes of keys [at, end)."""
    for key in range(at, end):
        place = planes + vector_bytes * ((64 * get_i32(table + 4 * (key >> 6)) + (key & 63)) * heads + head)
        for line in range(0, vector_bytes, 64):
            prefetch(place + line)


def attention_kernel(data):
    """Arguments: 0 q, 1 its row stride in elements, 2 k pages, 3 v pages, 4 key scales, 5 value scales, 6
    page table, 7 its row stride, 8 cache positions, 9 columns, 10 columns a request, 11 query heads, 12 key
    heads, 13 width, 14 kind, 15 out, 16 scale, 17 factor of the rotation, 0 without one, 18 partial results,
    0: an item is all runs, 19 counters (zero, and left at zero), 20 most runs of a column. A partial result
    is `padded + 16` float32: the weighted values, then maximum and sum; they stand at
    `(column * query heads + head) * most runs + run`.
    """
    q, q_stride, k_pages, v_pages = argument(data, 0), argument(data, 1), argument(data, 2), argument(data, 3)
    k_scales, v_scales, table, table_stride = (
        argument(data, 4),
        argument(data, 5),
        argument(data, 6),
        argument(data, 7),
    )
    positions, columns, per_request = argument(data, 8), argument(data, 9), argument(data, 10)
    q_heads, k_heads, width, kind = (
        argument(data, 11),
        argument(data, 12),
        argument(data, 13),
        argument(data, 14),
    )
    out, scale, factor = argument(data, 15), get_f64(data + 8 * 16), get_f64(data + 8 * 17)
    partial, counters, most = argument(data, 18), argument(data, 19), argument(data, 20)
    size = size_of(kind)
    group = q_heads // k_heads
    padded = (width + 15) & -16
    record = 4 * (padded + 16)
    k_bytes, v_bytes = code_bytes(K_BITS, width, size), code_bytes(V_BITS, width, size)
    k_scale_bytes, v_scale_bytes = scale_bytes(K_GROUP, K_SCALE, width), scale_bytes(V_GROUP, V_SCALE, width)

    # How many columns an item has: many, unless the team would lack items.
    requests = columns // per_request
    longest = stack(8 * requests)
    all_runs = 0
    for b in range(requests):
        last = 0
        for t in range(b * per_request, (b + 1) * per_request):
            last = max(last, get_i32(positions + 4 * t) + 1)
        runs = max(1, runs_of(last))
        put_i64(longest + 8 * b, runs)
        all_runs += runs if partial else 1
    some = min(per_request, max(1, ROWS // group))
    while some > 1 and all_runs * k_heads * ((per_request + some - 1) // some) < 4 * team_size(data):
        some = (some + 1) // 2
    blocks = (per_request + some - 1) // some

    rows = some * group
    queries, sums, weighted = stack(4 * padded * rows), stack(4 * padded * rows), stack(4 * padded * rows)
    wide, scores = stack(64 * padded + 64), stack(4 * RUN * rows)
    tops, masses, all_tops, all_masses = stack(4 * rows), stack(4 * rows), stack(4 * rows), stack(4 * rows)
    lanes = stack(64 + 1024)
    store_f32(lanes, zeros())
    while True:
        item = next_shared(data, 1)
        b = 0
        runs = 1
        while b < requests:
            runs = get_i64(longest + 8 * b)
            items = blocks * k_heads * (runs if partial else 1)
            if item < items:
                break
            item -= items
            b += 1
        if b >= requests:
            break
        # The longest runs, the latest columns first.
        k_head, block = item % k_heads, blocks - 1 - item // k_heads % blocks
        run = runs - 1 - item // (k_heads * blocks)
        begin_run, end_run = (run, run + 1) if partial else (0, runs)
        first = b * per_request + block * some
        many = min(some, (b + 1) * per_request - first)
        rows = many * group
        pages = table + 4 * table_stride * b
        for row in range(rows):
            t, head = first + row // group, k_head * group + row % group
            query = queries + 4 * padded * row
            read_row(q + size * (t * q_stride + head * width), kind, width, query)
            if K_ROTATED and factor:
                hadamard(query, width, factor)
            for start in range(0, width, 16):
                store_f32(query + 4 * start, mul(load_f32(query + 4 * start), splat(scale)))
            put_f32(all_masses + 4 * row, 0.0)
            put_f32(all_tops + 4 * row, _LOWEST)
        for run in range(begin_run, end_run):
            for row in range(rows):
                put_f32(tops + 4 * row, _LOWEST)
                put_f32(masses + 4 * row, 0.0)
            for start in range(0, 4 * padded * rows, 64):
                store_f32(weighted + start, zeros())
            last = 0
            for t in range(first, first + many):
                last = max(last, get_i32(positions + 4 * t) + 1)
            for begin in range(run_begin(run), min(last, run_begin(run + 1)), RUN):
                present = min(RUN, last - begin)
                for key in range(0, present, 16):
                    # While keys are read, their values are on the way; with those, the next keys.
                    ahead = begin + key
                    _fetch(v_pages, pages, v_bytes, k_heads, k_head, ahead, min(ahead + 16, begin + present))
                    _keys(
                        k_pages, k_scales, pages, k_bytes, k_scale_bytes, k_heads, k_head, begin + key,
                        min(16, present - key), kind, width, padded, wide,
                    )  # fmt: skip
                    for row in range(rows):
                        count = get_i32(positions + 4 * (first + row // group)) + 1 - begin - key
                        if count > 0:
                            query = queries + 4 * padded * row
                            value = _scores(query, padded, wide, min(16, count), lanes + 64)
                            store_f32(scores + 4 * (RUN * row + key), value)
                for row in range(rows):
                    count = min(RUN, get_i32(positions + 4 * (first + row // group)) + 1 - begin)
                    if count <= 0:
                        continue
                    old, mass = get_f32(tops + 4 * row), get_f32(masses + 4 * row)
                    top, more = _softmax(scores + 4 * RUN * row, count, old)
                    if top > old and mass > 0.0:
                        shrink = exp(splat(old - top))
                        for start in range(0, padded, 16):
                            at = weighted + 4 * (padded * row + start)
                            store_f32(at, mul(load_f32(at), shrink))
                        mass = largest(mul(splat(mass), shrink))
                    put_f32(tops + 4 * row, top)
                    put_f32(masses + 4 * row, mass + more)
                following = min(last, run_begin(run + 1))
                if QUANTIZED:
                    for key in range(0, present, 16):
                        at = begin + key
                        _fetch(
                            k_pages, pages, k_bytes, k_heads, k_head, at + RUN, min(at + RUN + 16, following)
                        )
                        vector = (64 * get_i32(pages + 4 * (at >> 6)) + (at & 63)) * k_heads + k_head
                        for i in range(min(16, present - key)):
                            decode_value(
                                v_pages + v_bytes * (vector + k_heads * i),
                                v_scales + v_scale_bytes * (vector + k_heads * i), kind, width,
                                wide + 4 * padded * i,
                            )  # fmt: skip
                        for column in range(many):
                            count = min(16, get_i32(positions + 4 * (first + column)) + 1 - at)
                            if count > 0:
                                _add_to_column(
                                    wide, 4 * padded, 0, padded, padded, 0, padded, count,
                                    scores + 4 * (RUN * group * column + key), group,
                                    weighted + 4 * padded * group * column, lanes,
                                )  # fmt: skip
                else:
                    for column in range(many):
                        for start in range(0, width, 16):
                            if column == 0:
                                at, few = begin + RUN + start * RUN // padded, RUN * 16 // padded
                                _fetch(k_pages, pages, k_bytes, k_heads, k_head, at, min(at + few, following))
                            count = min(RUN, get_i32(positions + 4 * (first + column)) + 1 - begin)
                            for key in range(0, count, 64):
                                page = get_i32(pages + 4 * ((begin + key) >> 6))
                                _add_to_column(
                                    v_pages + v_bytes * (64 * page * k_heads + k_head), v_bytes * k_heads,
                                    kind, width, padded, start, min(width, start + 16), min(64, count - key),
                                    scores + 4 * (RUN * group * column + key), group,
                                    weighted + 4 * padded * group * column, lanes,
                                )  # fmt: skip
            for row in range(rows):
                m, mass = get_f32(tops + 4 * row), get_f32(masses + 4 * row)
                part = weighted + 4 * padded * row
                if mass == 0.0:
                    continue
                if partial and runs > 1:
                    place = (first + row // group) * q_heads + k_head * group + row % group
                    place = partial + record * (most * place + run)
                    copy_bytes(place, part, 4 * padded)
                    put_f32(place + 4 * padded, m)
                    put_f32(place + 4 * padded + 4, mass)
                else:
                    top, mass = _fold(
                        part, m, mass, padded, sums + 4 * padded * row, get_f32(all_tops + 4 * row),
                        get_f32(all_masses + 4 * row),
                    )  # fmt: skip
                    put_f32(all_tops + 4 * row, top)
                    put_f32(all_masses + 4 * row, mass)
        if partial and runs > 1:
            counter = counters + 8 * (first * k_heads + k_head)
            if fetch_add(counter, 1) != runs - 1:
                continue
            put_i64(counter, 0)
            for row in range(rows):
                t = first + row // group
                place = partial + record * most * (t * q_heads + k_head * group + row % group)
                top, mass = _LOWEST, get_f32(all_masses + 4 * row)
                for _ in range(runs_of(get_i32(positions + 4 * t) + 1)):
                    m, more = get_f32(place + 4 * padded), get_f32(place + 4 * padded + 4)
                    top, mass = _fold(place, m, more, padded, sums + 4 * padded * row, top, mass)
                    place += record
                put_f32(all_masses + 4 * row, mass)
        for row in range(rows):
            t, head = first + row // group, k_head * group + row % group
            target = out + size * width * (t * q_heads + head)
            mass = get_f32(all_masses + 4 * row)
            at = sums + 4 * padded * row
            if mass == 0.0:
                for start in range(0, padded, 16):
                    store_f32(at + 4 * start, zeros())
                write_row(at, target, kind, width)
            else:
                _write_out(at, width, padded, mass, factor, target, kind)


@functools.cache
def _attention(format: KvFormat) -> Kernel:
    return Kernel(attention_kernel, f"attention_{format}", **bindings(format))


def attend_pages(
    q: torch.Tensor, pages: KvPages, page_table: torch.Tensor, cache_positions: torch.Tensor, scale: float
) -> torch.Tensor:
    columns, q_heads, width = q.shape
    requests, k_heads = page_table.shape[0], pages.heads
    if q.stride(2) != 1 or q.stride(1) != width:
        q = q.contiguous()
    out = torch.empty((columns, q_heads, width), dtype=q.dtype)
    team = threads()
    most = runs_of(page_table.shape[1] * 64)
    partial = counters = None
    # With items enough for the team, each does all runs of its columns, and nothing has to be kept.
    per_request = columns // requests
    together = max(1, ROWS * k_heads // q_heads) if per_request <= FEW_COLUMNS else 1
    items = requests * k_heads * -(-per_request // together)
    if most > 1 and team > 1 and items < 4 * team:
        record = (width + 15) // 16 * 16 + 16
        partial = torch.empty(columns * q_heads * most * record, dtype=torch.float32)
        counters = torch.zeros(columns * k_heads, dtype=torch.int64)
    launch(
        _attention(pages.format).address, team, 0, q.data_ptr(), q.stride(0), pages.k.data_ptr(),
        pages.v.data_ptr(), *scale_addresses(pages), page_table.data_ptr(), page_table.stride(0),
        cache_positions.data_ptr(), columns, per_request, q_heads, k_heads, width, kind_of(q),
        out.data_ptr(), bits(scale), bits(rotation(width)), 0 if partial is None else partial.data_ptr(),
        0 if counters is None else counters.data_ptr(), most,
    )  # fmt: skip
    return out
