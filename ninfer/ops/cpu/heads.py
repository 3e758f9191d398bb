"""Query and key heads: norm, rotation, and appending keys and values to the pages, in one pass.

Roofline: every element is read and written once; at T = 1 the call and the angles count. Angles are formed
and reduced in float64 and their sines evaluated in float32, once for each column.
"""

from __future__ import annotations

import functools

import numpy as np
import torch

from ninfer.formats import KvFormat
from ninfer.ops.attention import KvPages
from ninfer.ops.checks import check_heads, side_by_side
from ninfer.ops.cpu.access import kind_of, read_row, size_of, write_row
from ninfer.ops.cpu.block import argument, next_shared
from ninfer.ops.cpu.functions import angle_quadrant, angle_rest, choose
from ninfer.ops.cpu.instructions import device
from ninfer.ops.cpu.kernel import Kernel, bits, launch, threads
from ninfer.ops.cpu.kv import (
    PLAIN,
    bindings,
    code_bytes,
    hadamard,
    rotation,
    scale_addresses,
    scale_bytes,
)
from ninfer.ops.cpu.normalize import inverse_rms
from ninfer.ops.cpu.simd import (
    add,
    as_bf16,
    copy_bytes,
    fma,
    get_f64,
    get_i32,
    load_f32,
    mul,
    put_f64,
    splat,
    stack,
    store_f32,
    sub,
    zeros,
)
from ninfer.ops.rope import Rope

_PARALLEL = 1 << 13  # elements


def _float(value: float) -> np.float32:
    return np.float32(value)


_ONE = _float(1.0)
_S3, _S5, _S7 = _float(-1.6666654611e-1), _float(8.3321608736e-3), _float(-1.9515295891e-4)
_C2, _C4, _C6, _C8 = _float(-0.5), _float(4.166664568e-2), _float(-1.388731625e-3), _float(2.443315711e-5)


@device
def _angles(position, axis_stride, axes, frequencies, pairs, turns, cosines, sines):
    """cos and sin of `pairs` angles of one column; frequencies (in quarter turns per position) are padded to
    16."""
    for i in range(pairs):
        p = get_i32(position + 4 * axis_stride * get_i32(axes + 4 * i))
        put_f64(turns + 8 * i, p * 1.0)
    for i in range(0, pairs, 16):
        quadrant = angle_quadrant(turns + 8 * i, frequencies + 8 * i)
        r = angle_rest(turns + 8 * i, frequencies + 8 * i)
        z = mul(r, r)
        s = fma(fma(splat(_S7), z, splat(_S5)), z, splat(_S3))
        s = fma(mul(s, z), r, r)
        c = fma(fma(fma(splat(_C8), z, splat(_C6)), z, splat(_C4)), z, splat(_C2))
        c = fma(c, z, splat(_ONE))
        # A quarter turn more: sin becomes cos, cos becomes -sin.
        store_f32(sines + 4 * i, choose(quadrant, s, c, sub(zeros(), s), sub(zeros(), c)))
        store_f32(cosines + 4 * i, choose(quadrant, c, sub(zeros(), s), sub(zeros(), c), s))


# What the kernel is specialized for: the format of the pages; see `kv.Side`.
encode_key = encode_value = PLAIN.encode
K_BITS = V_BITS = K_SCALE = V_SCALE = 0
K_GROUP = V_GROUP = 1
K_ROTATED = V_ROTATED = QUANTIZED = False


def heads_kernel(data):
    """An item is one column.

    Arguments: 0 q, 1 k, 2 v, 3 out, 4..6 row strides of q, k, v, 7 positions, 8 stride between their axes, 9
    cache positions, 10 T, 11 page table, 12 its row stride, 13 columns a request, 14 k pages, 15 v pages, 16
    kind, 17 query heads, 18 key heads, 19 head width, 20 rotated pairs, 21 axes, 22 frequencies, 23 query
    norm or 0, 24 its kind, 25 key norm or 0, 26 its kind, 27 eps, 28 key scales, 29 value scales, 30 factor
    of the rotation, 0 without one. Strides count elements.
    """
    q, k, v, out = argument(data, 0), argument(data, 1), argument(data, 2), argument(data, 3)
    q_stride, k_stride, v_stride = argument(data, 4), argument(data, 5), argument(data, 6)
    position, axis_stride, cache_position = argument(data, 7), argument(data, 8), argument(data, 9)
    columns, table, table_stride = argument(data, 10), argument(data, 11), argument(data, 12)
    per_request, k_pages, v_pages = argument(data, 13), argument(data, 14), argument(data, 15)
    kind, q_heads, k_heads = argument(data, 16), argument(data, 17), argument(data, 18)
    width, pairs, axes, frequencies = (
        argument(data, 19),
        argument(data, 20),
        argument(data, 21),
        argument(data, 22),
    )
    q_norm, q_norm_kind = argument(data, 23), argument(data, 24)
    k_norm, k_norm_kind = argument(data, 25), argument(data, 26)
    eps, k_scales, v_scales = get_f64(data + 8 * 27), argument(data, 28), argument(data, 29)
    factor = get_f64(data + 8 * 30)
    size = size_of(kind)
    k_bytes, v_bytes = code_bytes(K_BITS, width, size), code_bytes(V_BITS, width, size)
    k_scale_bytes, v_scale_bytes = scale_bytes(K_GROUP, K_SCALE, width), scale_bytes(V_GROUP, V_SCALE, width)
    turns, cosines, sines = stack(8 * pairs + 128), stack(4 * pairs + 64), stack(4 * pairs + 64)
    row, first, second = stack(4 * width + 128), stack(4 * pairs + 64), stack(4 * pairs + 64)
    q_gains, k_gains = stack(4 * width + 64), stack(4 * width + 64)
    for side in range(2):
        norm, gains = (k_norm, k_gains) if side else (q_norm, q_gains)
        if norm:
            read_row(norm, k_norm_kind if side else q_norm_kind, width, gains)
            for start in range(0, width, 16):
                store_f32(gains + 4 * start, add(load_f32(gains + 4 * start), splat(_ONE)))
    while True:
        t = next_shared(data, 1)
        if t >= columns:
            break
        _angles(position + 4 * t, axis_stride, axes, frequencies, pairs, turns, cosines, sines)
        place = get_i32(cache_position + 4 * t)
        masked = place < 0
        vector = 0  # of the first head in the pages
        if not masked:
            page = get_i32(table + 4 * (table_stride * (t // per_request) + (place >> 6)))
            vector = (64 * page + (place & 63)) * k_heads
        for index in range(q_heads + (0 if masked else k_heads)):
            head = index - q_heads
            if head < 0:
                source = q + size * (t * q_stride + index * width)
                target = out + size * width * (t * q_heads + index)
                norm, gains = q_norm, q_gains
            else:
                source = k + size * (t * k_stride + head * width)
                target = k_pages + k_bytes * (vector + head)
                norm, gains = k_norm, k_gains
            read_row(source, kind, width, row)
            if norm:
                inverse = inverse_rms(row, width, eps)
                for start in range(0, width, 16):
                    at = row + 4 * start
                    value = mul(mul(load_f32(at), inverse), load_f32(gains + 4 * start))
                    store_f32(at, as_bf16(value) if kind == 1 else value)
            # The halves are copied first: with fewer than 16 pairs their vectors overlap.
            copy_bytes(first, row, 4 * pairs)
            copy_bytes(second, row + 4 * pairs, 4 * pairs)
            for i in range(0, pairs, 16):
                a, b = load_f32(first + 4 * i), load_f32(second + 4 * i)
                c, s = load_f32(cosines + 4 * i), load_f32(sines + 4 * i)
                store_f32(first + 4 * i, sub(mul(a, c), mul(b, s)))
                store_f32(second + 4 * i, add(mul(b, c), mul(a, s)))
            copy_bytes(row, first, 4 * pairs)
            copy_bytes(row + 4 * pairs, second, 4 * pairs)
            if QUANTIZED and head >= 0:
                if kind == 1:
                    for start in range(0, width, 16):
                        store_f32(row + 4 * start, as_bf16(load_f32(row + 4 * start)))
                if K_ROTATED and factor:
                    hadamard(row, width, factor)
                encode_key(row, kind, width, target, k_scales + k_scale_bytes * (vector + head))
            else:
                write_row(row, target, kind, width)
        if masked:
            continue
        if QUANTIZED:
            for head in range(k_heads):
                read_row(v + size * (t * v_stride + head * width), kind, width, row)
                if V_ROTATED and factor:
                    hadamard(row, width, factor)
                at = vector + head
                encode_value(row, kind, width, v_pages + v_bytes * at, v_scales + v_scale_bytes * at)
        else:
            copy_bytes(v_pages + v_bytes * vector, v + size * t * v_stride, size * width * k_heads)


@functools.cache
def _heads(format: KvFormat) -> Kernel:
    return Kernel(heads_kernel, f"heads_{format}", **bindings(format))


def qk_prepare(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    positions: torch.Tensor,
    rope: Rope,
    q_norm: torch.Tensor | None,
    k_norm: torch.Tensor | None,
    eps: float,
    pages: KvPages,
    page_table: torch.Tensor,
    cache_positions: torch.Tensor,
) -> torch.Tensor:
    columns, q_heads, width = q.shape
    k_heads = k.shape[1]
    check_heads(q, k, v, rope, positions, page_table, cache_positions)
    pages.check(k_heads, width, q.dtype)
    q, k, v = side_by_side(q), side_by_side(k), side_by_side(v)
    kind = kind_of(q)
    out = torch.empty((columns, q_heads, width), dtype=q.dtype)
    team = threads() if columns * (q_heads + k_heads) * width > _PARALLEL else 1
    launch(
        _heads(pages.format).address, team, 0, q.data_ptr(), k.data_ptr(), v.data_ptr(), out.data_ptr(),
        q.stride(0), k.stride(0), v.stride(0), positions.data_ptr(),
        positions.stride(0) if positions.dim() == 2 else 0,
        cache_positions.data_ptr(), columns, page_table.data_ptr(), page_table.stride(0),
        columns // page_table.shape[0], pages.k.data_ptr(), pages.v.data_ptr(), kind, q_heads, k_heads, width,
        rope.rotary_dim // 2, rope.axes.data_ptr(), rope.quarter_turns.data_ptr(),
        0 if q_norm is None else q_norm.data_ptr(), kind if q_norm is None else kind_of(q_norm),
        0 if k_norm is None else k_norm.data_ptr(), kind if k_norm is None else kind_of(k_norm), bits(eps),
        *scale_addresses(pages), bits(rotation(width)),
    )  # fmt: skip
    return out
