"""Attention of many columns a request (prefill): flash attention over pages of 64 keys.

bf16 pages are read where they are. Quantized ones are decoded once a call, in segments of `SEGMENT` keys, to
bf16 scratch (a rotated vector is turned back), and the state of the softmax is carried from one segment to
the next in float32. A program has `BLOCK_M` rows of one key head: neighbouring columns times the query heads
of the key head, so that a key is read once for all of them. Tiles of keys stand at multiples of 64, so a row's
result depends on its own keys only.

Roofline: `4 D Hq` operations a visible key and column on the matrix units. A chunk of 4,096 columns at 85,000
keys (24 heads of 256) is 8.5 TFLOP.
"""

# pyright: reportArgumentType=false, reportIndexIssue=false, reportAttributeAccessIssue=false, reportCallIssue=false

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from ninfer.errors import OptionError
from ninfer.formats import KvCode, KvFormat
from ninfer.formats.kv_codec import rotation_factor
from ninfer.ops.attention import PAGE, KvPages
from ninfer.ops.cuda.bf16 import INTERPRETED, to_bf16, to_f32
from ninfer.ops.cuda.kv_codes import CODES, e2m1_value, e4m3_value, hadamard
from ninfer.ops.cuda.specimens import Specimen

SEGMENT = 32768
"""Most keys that are decoded at a time."""
ENOUGH = 512
"""Programs that fill a device without splits."""
LEAST_SPLIT = 1024
_DECODED = 2048
"""Numbers that a program decodes."""


def wide_attention_bytes(columns: int, context: int, heads: int, kv_heads: int, width: int) -> int:
    """Most bytes of scratch that a call of one request with so many columns and visible keys allocates, its
    result apart: decoded keys and values, and states of the softmax where there are segments or splits."""
    bound = -(-context // PAGE) * PAGE
    decoded = 2 * 2 * min(bound, SEGMENT) * kv_heads * width
    states = int(bound > SEGMENT)
    for rows in {cut.rows for cut in (tiling((9, 0), width), tiling((8, 0), width))}:
        split = split_of(columns, heads // kv_heads, kv_heads, rows)
        if split and bound > split:
            states = max(states, -(-bound // split))
    return decoded + 4 * states * columns * heads * (width + 2) + 64


@dataclass(frozen=True)
class Tiling:
    """How a device cuts the work: rows of a program, its warps and stages, and whether tiles of keys come by
    the bulk copy engine."""

    rows: int
    warps: int
    stages: int
    bulk: bool


@functools.cache
def tiling(capability: tuple[int, int] | None, width: int) -> Tiling:
    """The rule for all devices; None is the interpreter."""
    if capability is None:
        return Tiling(32, 4, 1, False)
    if capability[0] == 9:
        return Tiling(128, 8, 2, width & (width - 1) == 0 and width >= 64)
    return Tiling(64, 4, 1 if width > 128 else 2, False)


@triton.jit
def _decode_kernel(
    codes, scales, out, table, last, first_page, PAGE_VECTORS: tl.constexpr, CODE: tl.constexpr,
    ROTATED: tl.constexpr, FACTOR: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
    ROWS: tl.constexpr, EACH: tl.constexpr, SCALES: tl.constexpr,
):  # fmt: skip
    """`ROWS` vectors of a page (of `PAGE_VECTORS`) to bf16; rows beyond the last position become zeros.

    `EACH` and `SCALES` are the entries of a vector in its planes, `last` the request's last position.
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
            word = tl.load(codes + vector[:, None] * EACH + d[None, :], mask=inside, other=0).to(tl.int32)
            if CODE == 1:
                at = scales + vector[:, None] * SCALES + (d // 64)[None, :]
                x = word.to(tl.float32) * tl.load(at, mask=inside, other=0.0).to(tl.float32)
            else:
                scale = tl.load(scales + vector, mask=wanted, other=0.0).to(tl.float32)
                x = e4m3_value(word) * scale[:, None]
        if ROTATED:
            x = hadamard(x, ROWS, BLOCK, FACTOR)
        target = (index.to(tl.int64) * PAGE_VECTORS + row)[:, None] * WIDTH + d[None, :]
        tl.store(out + target, to_bf16(x), mask=(row < PAGE_VECTORS)[:, None] & (d < WIDTH)[None, :])


@triton.jit
def _product(a, b):
    """`a b` of bf16 tiles in float32."""
    if INTERPRETED:
        return tl.dot(to_f32(a), to_f32(b), input_precision="ieee")
    return tl.dot(a, b)


@triton.jit
def _tile(
    plane, row, first, key_head, n, d, limit, HEADS: tl.constexpr, WIDTH: tl.constexpr,
    BULK: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Keys or values `[64, D]` from row `row` of a plane on; with `MASKED` those from `limit` on are zeros."""
    if BULK and not MASKED:
        return plane.load([row, key_head * WIDTH])
    else:  # noqa: RET505 (Triton 3.6 compiles what follows a return)
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
        if PAGED:
            row = tl.load(table + first // 64) * 64
        else:
            row = first - base
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
def _wide_kernel(
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
def _merge_kernel(
    state, tops, masses, cache_positions, out, rows,
    Q_HEADS: tl.constexpr, WIDTH: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr, SPLIT: tl.constexpr,
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
    for part in range(0, tl.max(positions, axis=0) // SPLIT + 1):
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


@functools.cache
def split_of(columns: int, group: int, kv_heads: int, rows: int) -> int:
    """Keys of a program where there are few of them, 0 where one program takes all keys of its rows.

    A rule of the columns of a request only: the deeper the context, the more splits there are.
    """
    programs = -(-columns * group // rows) * kv_heads
    if programs >= ENOUGH:
        return 0
    return min(SEGMENT, max(LEAST_SPLIT, 1 << (256 * programs).bit_length() - 1))


def paged_attention_wide(
    q: torch.Tensor,
    pages: KvPages,
    page_table: torch.Tensor,
    cache_positions: torch.Tensor,
    scale: float,
    extent: int | None = None,
) -> torch.Tensor:
    """`ninfer.ops.paged_attention` for bf16 and any number of columns, made for more than 16 a request.

    Without `extent` launches are sized by the table; nothing is read back from the device.
    """
    columns, q_heads, width = q.shape
    requests = page_table.shape[0]
    if q.dtype != torch.bfloat16:
        raise OptionError(f"activations on a GPU are bf16, got {q.dtype}")
    pages.check(pages.heads, width, q.dtype)
    if columns % requests or q_heads % pages.heads or len(cache_positions) != columns:
        raise OptionError(
            f"queries {tuple(q.shape)} at {len(cache_positions)} positions of {requests} requests do not fit "
            f"pages of {pages.heads} heads"
        )
    q = q.contiguous()
    out = torch.empty_like(q)
    bound = page_table.shape[1] * PAGE
    if extent is not None:
        bound = min(bound, -(-extent // PAGE) * PAGE)
    if pages.format is KvFormat.BF16:
        call = _Call(q, page_table, cache_positions, out, scale, pages.heads, bound, True)
        call.launch(pages.k, pages.v, 0, bound)
        call.merge()
        return out
    each = columns // requests
    for request in range(requests):
        part = slice(request * each, (request + 1) * each)
        table, positions = page_table[request : request + 1], cache_positions[part]
        call = _Call(q[part], table, positions, out[part], scale, pages.heads, bound, False)
        keys = min(bound, SEGMENT)
        k, v = (
            torch.empty((keys // PAGE, PAGE, pages.heads, width), dtype=q.dtype, device=q.device)
            for _ in range(2)
        )
        last = positions.amax(0, keepdim=True)
        for begin in range(0, bound, SEGMENT):
            end = min(begin + SEGMENT, bound)
            _decode(pages, table, last, begin, end, k, v)
            call.launch(k, v, begin, end)
        call.merge()
    return out


class _Call:
    """Attention of some requests to `bound` keys (a multiple of the page), segment after segment."""

    def __init__(self, q, table, positions, out, scale: float, heads: int, bound: int, paged: bool) -> None:
        self.q, self.table, self.positions, self.out = q, table, positions, out
        self.scale, self.bound, self.paged = scale / math.log(2.0), bound, paged
        columns, q_heads, width = q.shape
        self.columns, self.group = columns // table.shape[0], q_heads // heads
        capability = torch.cuda.get_device_capability(q.device) if q.is_cuda else None
        self.cut = tiling(capability, width)
        self.split = split_of(self.columns, self.group, heads, self.cut.rows)
        if self.split >= bound:  # one split: its state is the result
            self.split = 0
        self.state = self.tops = self.masses = q
        if self.split or (bound > SEGMENT and not paged):
            parts = -(-bound // self.split) if self.split else 1
            self.state, self.tops, self.masses = (
                torch.empty((parts, columns, q_heads, n), dtype=torch.float32, device=q.device)
                for n in (width, 1, 1)
            )

    def launch(self, k: torch.Tensor, v: torch.Tensor, begin: int, end: int) -> None:
        """Keys `begin .. end`, which are all of k and v or, paged, where the table says."""
        width, heads, cut = self.q.shape[2], k.shape[2], self.cut
        k_bulk, v_bulk = k, v
        if cut.bulk:
            k_bulk, v_bulk = (
                TensorDescriptor(x, [x.shape[0] * PAGE, heads * width], [heads * width, 1], [PAGE, width])
                for x in (k, v)
            )
        tiles = triton.cdiv(self.columns * self.group, cut.rows)
        splits = triton.cdiv(end - begin, self.split) if self.split else 1
        _wide_kernel[(tiles, heads * self.table.shape[0], splits)](
            self.q, k, v, k_bulk, v_bulk, self.table, self.positions, self.out, self.state, self.tops,
            self.masses, self.columns, self.table.stride(0), begin, end, self.scale,
            GROUP=self.group, HEADS=heads, WIDTH=width, BLOCK_D=max(16, triton.next_power_of_2(width)),
            BLOCK_M=cut.rows, PAGED=self.paged, BULK=cut.bulk, FIRST=begin == 0 or self.split > 0,
            LAST=end == self.bound and not self.split, SPLIT=self.split,
            num_warps=cut.warps, num_stages=cut.stages,
        )  # fmt: skip

    def merge(self) -> None:
        """Make the result of the splits."""
        if not self.split:
            return
        columns, q_heads, width = self.q.shape
        _merge_kernel[(triton.cdiv(columns * q_heads, 8),)](
            self.state, self.tops, self.masses, self.positions, self.out, columns * q_heads,
            Q_HEADS=q_heads, WIDTH=width, BLOCK_D=max(16, triton.next_power_of_2(width)), ROWS=8,
            SPLIT=self.split, num_warps=4,
        )  # fmt: skip


def _decode(pages: KvPages, table, last, begin: int, end: int, k, v) -> None:
    width = pages.width
    block = max(16, triton.next_power_of_2(width))
    rows = max(1, _DECODED // block)
    vectors = PAGE * pages.heads
    for side, codes, scales, out in (
        (pages.format.keys, pages.k, pages.k_scales, k),
        (pages.format.values, pages.v, pages.v_scales, v),
    ):
        _decode_kernel[(triton.cdiv(vectors, rows), (end - begin) // PAGE)](
            codes, scales, out, table, last, begin // PAGE, PAGE_VECTORS=vectors, CODE=CODES[side.code],
            ROTATED=side.rotation(width), FACTOR=rotation_factor(width) if side.rotation(width) else 1.0,
            WIDTH=width, BLOCK=block, ROWS=rows, EACH=side.code.codes(width), SCALES=side.code.scales(width),
            num_warps=4,
        )  # fmt: skip


def specimens() -> Iterator[Specimen]:
    planes = {KvCode.INT8: ("*i8", "*fp16"), KvCode.FP8: ("*u8", "*fp16"), KvCode.NVFP4: ("*u8", "*u8")}
    width, heads = 256, 4
    for code, (codes, scales) in planes.items():
        constants = {
            "PAGE_VECTORS": PAGE * heads, "CODE": CODES[code], "ROTATED": True,
            "FACTOR": rotation_factor(width), "WIDTH": width, "BLOCK": width, "ROWS": _DECODED // width,
            "EACH": code.codes(width), "SCALES": code.scales(width),
        }  # fmt: skip
        signature = {"codes": codes, "scales": scales, "out": "*bf16", "table": "*i32", "last": "*i32"}
        yield Specimen(_decode_kernel, {**signature, "first_page": "i32"}, constants, {"num_warps": 4})
    cut = tiling((8, 0), width)
    signature = {
        **dict.fromkeys(("q", "k", "v", "k_bulk", "v_bulk"), "*bf16"), "table": "*i32",
        "cache_positions": "*i32", "out": "*bf16", **dict.fromkeys(("state", "tops", "masses"), "*fp32"),
        **dict.fromkeys(("columns", "table_stride", "base", "end"), "i32"), "scale": "fp32",
    }  # fmt: skip
    for paged, first, last, split in (
        (True, True, True, 0), (False, True, False, 0), (False, False, True, 0), (False, True, False, 4096)
    ):  # fmt: skip
        constants = {
            "GROUP": 6, "HEADS": heads, "WIDTH": width, "BLOCK_D": width, "BLOCK_M": cut.rows, "PAGED": paged,
            "BULK": False, "FIRST": first, "LAST": last, "SPLIT": split,
        }  # fmt: skip
        yield Specimen(_wide_kernel, signature, constants, {"num_warps": cut.warps, "num_stages": cut.stages})
    signature = {
        **dict.fromkeys(("state", "tops", "masses"), "*fp32"), "cache_positions": "*i32", "out": "*bf16",
        "rows": "i32",
    }  # fmt: skip
    constants = {"Q_HEADS": 24, "WIDTH": width, "BLOCK_D": width, "ROWS": 8, "SPLIT": 4096}
    yield Specimen(_merge_kernel, signature, constants, {"num_warps": 4})
