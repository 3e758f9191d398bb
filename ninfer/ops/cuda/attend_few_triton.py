"""Attention of few columns over pages, portable: Triton kernels for every format and head width.

A program takes one key head of a request and one run of its keys; its rows are the columns times the query
heads of that head. Roofline: the bytes of K and V. These kernels decode each number to 16 bits in registers
and reach about half of it; `csrc/attend_few.cu` is the fast form. Here for machines and widths that it does
not serve, and for the interpreter.
"""

# pyright: reportGeneralTypeIssues=false, reportArgumentType=false, reportOperatorIssue=false
# pyright: reportIndexIssue=false, reportCallIssue=false, reportAttributeAccessIssue=false
from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl

from ninfer.formats import KvCode, KvFormat
from ninfer.ops.attention import KvPages
from ninfer.ops.cuda.bf16 import INTERPRETED, to_bf16, to_f32
from ninfer.ops.cuda.specimens import Specimen

PLAIN, INT8, FP8, NVFP4 = (tl.constexpr(i) for i in range(4))
_CODES = {KvCode.PLAIN: 0, KvCode.INT8: 1, KvCode.FP8: 2, KvCode.NVFP4: 3}
_LOWEST = tl.constexpr(-1e30)
_LOG2E = 1.4426950408889634


@triton.jit
def _e4m3(codes):
    """float32 of E4M3 codes, by moving their bits."""
    bits = codes.to(tl.int32)
    magnitude = ((bits & 127) << 20).to(tl.float32, bitcast=True) * 1.329227995784916e36  # 2^120
    return tl.where(bits > 127, -magnitude, magnitude)


@triton.jit
def _e2m1(codes):
    """float32 of E2M1 codes (int32, 0 to 15)."""
    magnitude = ((codes & 7) << 22).to(tl.float32, bitcast=True) * 8.507059173023462e37  # 2^126
    return tl.where(codes > 7, -magnitude, magnitude)


@triton.jit
def _dot(a, b, total):
    """Of 16-bit numbers; the interpreter multiplies the bits of bf16."""
    if INTERPRETED:
        return tl.dot(to_f32(a), to_f32(b), total)
    else:
        return tl.dot(a, b, total)


@triton.jit
def _vectors(
    codes, scales, vectors, present, WIDTH: tl.constexpr, PADDED: tl.constexpr, CODE: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """Decoded vectors `[ROWS, PADDED]`: bf16 if plain, else float16; zeros where absent."""
    dims = tl.arange(0, PADDED)
    inside = present[:, None] & (dims < WIDTH)[None, :]
    if CODE == PLAIN:
        result = tl.load(codes + vectors[:, None] * WIDTH + dims[None, :], mask=inside, other=0.0)
    elif CODE == NVFP4:
        pairs = tl.arange(0, PADDED // 2)
        there = present[:, None] & (pairs < WIDTH // 2)[None, :]
        at = vectors[:, None] * (WIDTH // 2) + pairs[None, :]
        both = tl.load(codes + at, mask=there, other=0).to(tl.int32)
        units = tl.reshape(tl.join(_e2m1(both & 15), _e2m1(both >> 4)), (ROWS, PADDED))
        at = vectors[:, None] * (WIDTH // 16) + (dims // 16)[None, :]
        result = (units * _e4m3(tl.load(scales + at, mask=inside, other=0))).to(tl.float16)
    else:
        x = tl.load(codes + vectors[:, None] * WIDTH + dims[None, :], mask=inside, other=0)
        if CODE == FP8:
            s = tl.load(scales + vectors, mask=present, other=0.0).to(tl.float32)
            result = (_e4m3(x) * s[:, None]).to(tl.float16)
        else:
            at = vectors[:, None] * ((WIDTH + 63) // 64) + (dims // 64)[None, :]
            s = tl.load(scales + at, mask=inside, other=0.0).to(tl.float32)
            result = (x.to(tl.float32) * s).to(tl.float16)
    return result


@triton.jit
def _signs(WIDTH: tl.constexpr):
    """The matrix of Hadamard signs, bf16."""
    i = tl.arange(0, WIDTH)
    both = i[:, None] & i[None, :]
    both = both ^ (both >> 8)
    both = both ^ (both >> 4)
    both = both ^ (both >> 2)
    both = both ^ (both >> 1)
    return to_bf16((1 - 2 * (both & 1)).to(tl.float32))


@triton.jit
def split_kernel(
    q, q_stride, k, k_scales, v, v_scales, table, table_stride, positions, sums, tops, factor, target, splits,
    columns, tile_columns, K_HEADS: tl.constexpr, GROUP: tl.constexpr, WIDTH: tl.constexpr,
    PADDED: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, K_CODE: tl.constexpr, V_CODE: tl.constexpr,
    K_TURNED: tl.constexpr, ROTATION: tl.constexpr,
):  # fmt: skip
    """Sums of weighted values, their reference score and mass, of one split: see `attend_few`."""
    split = tl.program_id(0)
    head = tl.program_id(1) % K_HEADS
    tile = tl.program_id(1) // K_HEADS
    request = tl.program_id(2)
    rows = tl.arange(0, ROWS)
    dims = tl.arange(0, PADDED)
    column = tile * tile_columns + rows // GROUP
    used = (rows < tile_columns * GROUP) & (column < columns)
    t = request * columns + column
    length = tl.load(positions + t, mask=used, other=-1) + 1
    length = tl.maximum(length, 0)
    run = ((length + 63) // 64 + target - 1) // target * 64
    begin = split * run
    end = tl.minimum(length, begin + run)
    some = begin < end
    first = tl.min(tl.where(some, begin, 0x7FFFFFFF), 0)
    last = tl.max(tl.where(some, end, 0), 0)
    if last == 0:
        return
    q_head = head * GROUP + rows % GROUP
    inside = used[:, None] & (dims < WIDTH)[None, :]
    x = tl.load(q + t[:, None] * q_stride + (q_head * WIDTH)[:, None] + dims[None, :], mask=inside, other=0.0)
    if K_TURNED:
        turned = _dot(x, _signs(WIDTH), tl.zeros((ROWS, WIDTH), tl.float32)) * ROTATION
        x = turned.to(tl.float16)
    elif K_CODE != PLAIN:
        x = to_f32(x).to(tl.float16)
    top = tl.full((ROWS,), _LOWEST, tl.float32)
    mass = tl.zeros((ROWS,), tl.float32)
    total = tl.zeros((ROWS, PADDED), tl.float32)
    for start in range(first, last, KEYS):
        key = start + tl.arange(0, KEYS)
        present = key < last
        page = tl.load(table + request * table_stride + key // 64, mask=present, other=0).to(tl.int64)
        vectors = (page * 64 + key % 64) * K_HEADS + head
        keys = _vectors(k, k_scales, vectors, present, WIDTH, PADDED, K_CODE, KEYS)
        score = _dot(x, tl.trans(keys), tl.zeros((ROWS, KEYS), tl.float32)) * factor
        mine = (key[None, :] >= begin[:, None]) & (key[None, :] < end[:, None])
        score = tl.where(mine, score, float("-inf"))
        new = tl.maximum(top, tl.max(score, 1))
        weight = tl.exp2(score - new[:, None])
        shrink = tl.exp2(top - new)
        top = new
        values = _vectors(v, v_scales, vectors, present, WIDTH, PADDED, V_CODE, KEYS)
        weight = to_bf16(weight) if V_CODE == PLAIN else weight.to(tl.float16)
        mass = mass * shrink + tl.sum(to_f32(weight), 1)
        total = _dot(weight, values, total * shrink[:, None])
    place = (t * (K_HEADS * GROUP) + q_head).to(tl.int64) * splits + split
    keep = used & some
    tl.store(
        sums + place[:, None] * WIDTH + dims[None, :], total, mask=keep[:, None] & (dims < WIDTH)[None, :]
    )
    tl.store(tops + 2 * place, top, mask=keep)
    tl.store(tops + 2 * place + 1, mass, mask=keep)


@triton.jit
def _butterflies(x, WIDTH: tl.constexpr, STRIDE: tl.constexpr):
    pairs = tl.permute(tl.reshape(x, (WIDTH // (2 * STRIDE), 2, STRIDE)), (0, 2, 1))
    a, b = tl.split(pairs)
    return tl.reshape(tl.permute(tl.join(a + b, a - b), (0, 2, 1)), (WIDTH,))


@triton.jit
def merge_kernel(
    sums, tops, positions, gate, gate_stride, out, target, splits, Q_HEADS: tl.constexpr, WIDTH: tl.constexpr,
    PADDED: tl.constexpr, SPLITS: tl.constexpr, GATED: tl.constexpr, V_TURNED: tl.constexpr,
    ROTATION: tl.constexpr,
):  # fmt: skip
    """Fold the splits of one column and head in ascending order."""
    t = tl.program_id(0)
    head = tl.program_id(1)
    dims = tl.arange(0, PADDED)
    inside = dims < WIDTH
    length = tl.maximum(tl.load(positions + t) + 1, 0)
    pages = (length + 63) // 64
    per_split = tl.maximum((pages + target - 1) // target, 1)
    count = (pages + per_split - 1) // per_split
    place = (t * Q_HEADS + head).to(tl.int64) * splits
    each = tl.arange(0, SPLITS)
    highest = tl.max(tl.load(tops + 2 * (place + each), mask=each < count, other=_LOWEST), 0)
    mass = 0.0
    total = tl.zeros((PADDED,), tl.float32)
    for split in range(count):
        weight = tl.exp2(tl.load(tops + 2 * (place + split)) - highest)
        mass += weight * tl.load(tops + 2 * (place + split) + 1)
        total += weight * tl.load(sums + (place + split) * WIDTH + dims, mask=inside, other=0.0)
    total = total / tl.where(count > 0, mass, 1.0)
    if V_TURNED:
        total = _butterflies(total, WIDTH, 1)
        if WIDTH > 2:
            total = _butterflies(total, WIDTH, 2)
        if WIDTH > 4:
            total = _butterflies(total, WIDTH, 4)
        if WIDTH > 8:
            total = _butterflies(total, WIDTH, 8)
        if WIDTH > 16:
            total = _butterflies(total, WIDTH, 16)
        if WIDTH > 32:
            total = _butterflies(total, WIDTH, 32)
        if WIDTH > 64:
            total = _butterflies(total, WIDTH, 64)
        if WIDTH > 128:
            total = _butterflies(total, WIDTH, 128)
        total *= ROTATION
    result = to_bf16(total)
    if GATED:
        g = tl.load(gate + t * gate_stride + head * WIDTH + dims, mask=inside, other=0.0)
        result = to_bf16(to_f32(result) / (1.0 + tl.exp(-to_f32(g))))
    tl.store(out + (t * Q_HEADS + head) * WIDTH + dims, result, mask=inside)


def attend(
    q: torch.Tensor,
    pages: KvPages,
    page_table: torch.Tensor,
    positions: torch.Tensor,
    scale: float,
    gate: torch.Tensor | None,
    target: int,
    splits: int,
    sums: torch.Tensor,
    tops: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """`attend_few.paged_attention_few` with all that it allocates."""
    total, q_heads, width = q.shape
    requests, heads = page_table.shape[0], pages.heads
    columns, group = total // requests, q_heads // heads
    tile = max(1, min(columns, 32 // group))
    rows = max(16, triton.next_power_of_2(tile * group))
    padded = max(16, triton.next_power_of_2(width))
    k_side, v_side = pages.format.keys, pages.format.values
    scales = [p if p is not None else pages.k for p in (pages.k_scales, pages.v_scales)]
    split_kernel[(splits, heads * -(-columns // tile), requests)](
        q, q.stride(0), pages.k, scales[0], pages.v, scales[1], page_table, page_table.stride(0), positions,
        sums, tops, scale * _LOG2E, target, splits, columns, tile, heads, group, width, padded, rows,
        64 if pages.format is not KvFormat.BF16 else 32, _CODES[k_side.code], _CODES[v_side.code],
        k_side.rotation(width), width**-0.5, num_warps=4, num_stages=2,
    )  # fmt: skip
    merge_kernel[(total, q_heads)](
        sums, tops, positions, out if gate is None else gate, 0 if gate is None else gate.stride(0), out,
        target, splits, q_heads, width, padded, triton.next_power_of_2(splits), gate is not None,
        v_side.rotation(width), width**-0.5, num_warps=4 if width > 128 else 2,
    )  # fmt: skip


_PLANES = {
    KvCode.PLAIN: ("*bf16", "*bf16"),
    KvCode.INT8: ("*i8", "*fp16"),
    KvCode.FP8: ("*u8", "*fp16"),
    KvCode.NVFP4: ("*u8", "*u8"),
}


def specimens() -> Iterator[Specimen]:
    """The kernels for 24 query and 4 key heads of 256, each format."""
    integers = ("q_stride", "table_stride", "target", "splits", "columns", "tile_columns")
    for format in KvFormat:
        keys, values = format.keys, format.values
        (k, k_scales), (v, v_scales) = _PLANES[keys.code], _PLANES[values.code]
        planes = {"q": "*bf16", "k": k, "k_scales": k_scales, "v": v, "v_scales": v_scales}
        others = {"table": "*i32", "positions": "*i32", "sums": "*fp32", "tops": "*fp32", "factor": "fp32"}
        constants = {"K_HEADS": 4, "GROUP": 6, "WIDTH": 256, "PADDED": 256, "ROWS": 32}
        constants |= {"KEYS": 32 if format is KvFormat.BF16 else 64, "K_CODE": _CODES[keys.code]}
        constants |= {"V_CODE": _CODES[values.code], "K_TURNED": keys.rotation(256), "ROTATION": 0.0625}
        yield Specimen(
            split_kernel,
            planes | others | dict.fromkeys(integers, "i32"),
            constants,
            {"num_warps": 4, "num_stages": 2},
        )
    floats = {"sums": "*fp32", "tops": "*fp32", "gate": "*bf16", "out": "*bf16", "positions": "*i32"}
    signature = floats | dict.fromkeys(("gate_stride", "target", "splits"), "i32")
    for turned in (False, True):
        constants = {"Q_HEADS": 24, "WIDTH": 256, "PADDED": 256, "SPLITS": 64, "GATED": True}
        constants |= {"V_TURNED": turned, "ROTATION": 0.0625}
        yield Specimen(merge_kernel, signature, constants, {"num_warps": 4})
