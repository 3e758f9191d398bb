"""From packed segments to rows of numbers: a panel of a matrix for library products, or rows of a table.

A thread decodes four neighbouring columns of row r and of row r + 8; 16 neighbouring threads write a row's 64
columns. Roofline: the bytes written (2 for a number, or 1 where FP8 codes are kept as they are) and the
packed bytes read, about 2.5 bytes a weight in all. Measured on an H200 (2026-11-30,
`python -m bench.ops.wide --decode`), [34816, 5120]: NVFP4 152 us, Q4_K 161, bf16 210, FP8 152 as numbers and
107 as codes: 2.7 to 3.4 TB/s of both.
"""

# pyright: reportArgumentType=false, reportIndexIssue=false, reportCallIssue=false, reportAttributeAccessIssue=false
# pyright: reportAssignmentType=false, reportGeneralTypeIssues=false, reportOperatorIssue=false, reportPossiblyUnboundVariable=false

from __future__ import annotations

from collections.abc import Iterator
from enum import IntEnum

import torch
import triton
import triton.language as tl

from ninfer.ops.cuda.dependent import start, wait_for_previous
from ninfer.ops.cuda.packed import UNIT, Order, Segment
from ninfer.ops.cuda.specimens import Specimen

_BLOCK = 1024


@triton.jit
def _half(data, offset, TYPE: tl.constexpr):
    """The 16-bit number at a byte offset, as float32."""
    return tl.load((data + offset).to(tl.pointer_type(TYPE))).to(tl.float32)


@triton.jit
def _word(data, offset):
    return tl.load((data + offset).to(tl.pointer_type(tl.int32)))


@triton.jit
def _e4m3(code):
    """float32 of an E4M3 code; its bits at 31 and 26:20 of a float32 are its value times 2^-120."""
    bits = ((code & 0x80) << 24) | ((code & 0x7F) << 20)
    return bits.to(tl.float32, bitcast=True) * 1.329227995784916e36


@triton.jit
def _e2m1(code):
    """float32 of an E2M1 code; its bits at 31 and 24:22 of a float32 are its value times 2^-126."""
    return (((code & 8) << 28) | ((code & 7) << 22)).to(tl.float32, bitcast=True) * 8.507059173023462e37


@triton.jit
def _left_over(data, base, lane, j, h, KERNEL: tl.constexpr):
    """Codes of five and six bits, some of which are made of the bits that others leave; see `pack.py`."""
    at = base + 16 * lane
    v, w = _word(data, at + 8 * h), _word(data, at + 8 * h + 4)
    if KERNEL == "Q6G64" or KERNEL == "Q6K":
        u = _word(data, base + 512 + 8 * lane + 4 * h)
        late = ((v >> 2) & 0x30303030) | ((w >> 4) & 0x0C0C0C0C) | ((u >> 6) & 0x03030303)
        w = tl.where(j == 0, v, tl.where(j == 1, w, tl.where(j == 2, u, late)))
        return w & 63, (w >> 16) & 63, (w >> 8) & 63, (w >> 24) & 63
    first, second = _word(data, at + 4), _word(data, at + 12)
    u = _word(data, base + 512 + 4 * lane) >> (8 * h)
    fifth = ((first >> (8 * h + 4)) & 0x00020002) | ((second >> (8 * h + 5)) & 0x00010001)
    fifth |= (u >> 3) & 0x001C001C
    u = (u & 0x001F001F) | (fifth << 8)
    late = ((v >> 3) & 0x1C1C1C1C) | ((w >> 6) & 0x03030303)
    w = tl.where(j == 0, v, tl.where(j == 1, w, tl.where(j == 2, u, late)))
    return w & 31, (w >> 16) & 31, (w >> 8) & 31, (w >> 24) & 31


@triton.jit
def _codes(data, base, lane, j, h, KERNEL: tl.constexpr):
    """Codes of four columns of a lane's step j, as int32; of integer formats without a sign."""
    if KERNEL == "Bf16":
        at = base + 512 * j + 16 * lane + 4 * h
        w, v = _word(data, at), _word(data, at + 8)
        return w << 16, w & -65536, v << 16, v & -65536
    if KERNEL == "Fp8Row" or KERNEL == "Fp8Tile" or KERNEL == "Q8G32":
        w = _word(data, base + 512 * h + 16 * lane + 4 * j)
        b0, b1, b2, b3 = w & 255, (w >> 8) & 255, (w >> 16) & 255, (w >> 24) & 255
        if KERNEL == "Q8G32":
            return b0, b2, b1, b3
        return b1, b3, b0, b2
    if KERNEL == "Q5G64" or KERNEL == "Q5K" or KERNEL == "Q6G64" or KERNEL == "Q6K":
        return _left_over(data, base, lane, j, h, KERNEL)
    w = _word(data, base + 16 * lane + 8 * h + 4 * (j // 2))
    if KERNEL == "Nvfp4":
        # Magnitudes of pairs stand at bits 6, 3, 0, 9, signs at bits 15, 12, 13, 14.
        odd = j % 2 == 1
        m0 = tl.where(odd, w, w >> 6)
        m1 = tl.where(odd, w >> 9, w >> 3)
        s0 = tl.where(odd, w >> 10, w >> 12)
        s1 = tl.where(odd, w >> 11, w >> 9)
        a0, a1 = (m0 & 7) | (s0 & 8), ((m0 >> 16) & 7) | ((s0 >> 16) & 8)
        a2, a3 = (m1 & 7) | (s1 & 8), ((m1 >> 16) & 7) | ((s1 >> 16) & 8)
        return a0, a1, a2, a3
    w = w >> (8 * (j % 2))
    return w & 15, (w >> 16) & 15, (w >> 4) & 15, (w >> 20) & 15


@triton.jit
def quad(data, factors, base, row, j, q, KERNEL: tl.constexpr, FORM: tl.constexpr):
    """float32 values of four columns: step j of lane 4 r + q of the unit at byte `base`, in packed row `row`.

    FORM: 0 with the rows' factors, 1 without, -1: `factors` of nvfp4 are the divisors themselves.
    """
    h, r = (row // 8) % 2, row % 8
    lane, at = 4 * r + q, 2 * r + h
    c0, c1, c2, c3 = _codes(data, base, lane, j, h, KERNEL)
    if KERNEL == "Bf16":
        return (
            c0.to(tl.float32, bitcast=True), c1.to(tl.float32, bitcast=True),
            c2.to(tl.float32, bitcast=True), c3.to(tl.float32, bitcast=True),
        )  # fmt: skip
    if KERNEL == "Nvfp4":
        scale = tl.load(data + base + 512 + 2 * lane + h).to(tl.int32)
        scale = ((scale << 20) + (105 << 23)).to(tl.float32, bitcast=True)
        v0, v1, v2, v3 = _e2m1(c0) * scale, _e2m1(c1) * scale, _e2m1(c2) * scale, _e2m1(c3) * scale
        if FORM == -1:
            factor = tl.load(factors + row)
            return tl.div_rn(v0, factor), tl.div_rn(v1, factor), tl.div_rn(v2, factor), tl.div_rn(v3, factor)
        factor = 0.0078125 if FORM == 1 else 0.0078125 * tl.load(factors + row)
        return v0 * factor, v1 * factor, v2 * factor, v3 * factor
    if KERNEL == "Fp8Row" or KERNEL == "Fp8Tile":
        if KERNEL == "Fp8Row":
            scale = 1.0 if FORM == 1 else tl.load(factors + row)
        else:
            scale = _half(data, base + 1024 + 2 * at, tl.bfloat16)
        return _e4m3(c0) * scale, _e4m3(c1) * scale, _e4m3(c2) * scale, _e4m3(c3) * scale
    offset: tl.constexpr = (
        0 if KERNEL == "Q41" or KERNEL == "Q4K" or KERNEL == "Q5K"
        else 8 if KERNEL == "Q4G64" or KERNEL == "Q4G32"
        else 16 if KERNEL == "Q5G64" else 128 if KERNEL == "Q8G32" else 32
    )  # fmt: skip
    f0, f1 = (c0 - offset).to(tl.float32), (c1 - offset).to(tl.float32)
    f2, f3 = (c2 - offset).to(tl.float32), (c3 - offset).to(tl.float32)
    if KERNEL == "Q4G64" or KERNEL == "Q5G64" or KERNEL == "Q6G64":
        start: tl.constexpr = 512 if KERNEL == "Q4G64" else 640 if KERNEL == "Q5G64" else 768
        scale = _half(data, base + start + 2 * at, tl.float16)
    elif KERNEL == "Q8G32" or KERNEL == "Q4G32":
        start: tl.constexpr = 1024 if KERNEL == "Q8G32" else 512
        scale = _half(data, base + start + 4 * at + 2 * (j // 2), tl.float16)
    elif KERNEL == "Q41":
        scale = _half(data, base + 512 + 8 * at + 2 * (j // 2), tl.float16)
        least = _half(data, base + 516 + 8 * at + 2 * (j // 2), tl.float16)
        return f0 * scale + least, f1 * scale + least, f2 * scale + least, f3 * scale + least
    elif KERNEL == "Q6K":
        factor = tl.load(data + base + 768 + 4 * at + j).to(tl.int32) - 128
        scale = _half(data, base + 832 + 2 * at, tl.float16) * factor.to(tl.float32)
    else:
        at = base + (512 if KERNEL == "Q4K" else 640) + 8 * at
        word = _word(data, at)
        scale = _half(data, at + 4, tl.float16) * ((word >> (6 + 6 * (j // 2))) & 63).to(tl.float32)
        least = _half(data, at + 6, tl.float16) * ((word >> (18 * (j // 2))) & 63).to(tl.float32)
        return f0 * scale - least, f1 * scale - least, f2 * scale - least, f3 * scale - least
    return f0 * scale, f1 * scale, f2 * scale, f3 * scale


@triton.jit
def _bits(value):
    """A finite float32 rounded to the nearest bf16, half to even, as an int32 below 2^16."""
    bits = value.to(tl.int32, bitcast=True)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16) & 0xFFFF


@triton.jit
def _store(target, value, mask):
    tl.store(target.to(tl.pointer_type(tl.int16)), _bits(value).to(tl.int16), mask)


@triton.jit
def panel_kernel(
    data, factors, out, first, units, stride,
    KERNEL: tl.constexpr, UNIT_BYTES: tl.constexpr, STEPPED: tl.constexpr,
    FORM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Tiles from `first` on as rows of `stride` numbers; a program has BLOCK / 128 units of a tile."""
    g = tl.arange(0, BLOCK)
    r, tile = (g // 16) % 8, tl.program_id(0)
    unit = tl.program_id(1) * (BLOCK // 128) + g // 128
    mask = unit < units
    unit = tl.minimum(unit, units - 1)
    if STEPPED:
        j, q = (g // 4) % 4, g % 4
    else:
        j, q = g % 4, (g // 4) % 4
    data += (first + tile).to(tl.int64) * units * UNIT_BYTES
    out += tile.to(tl.int64) * 16 * stride
    base, column = unit * UNIT_BYTES, 64 * unit + 4 * (g % 16)
    for h in tl.static_range(2):
        row = (first + tile) * 16 + 8 * h + r
        target = (8 * h + r) * stride + column
        if FORM == 2:
            c0, c1, c2, c3 = _codes(data, base, 4 * r + q, j, h, KERNEL)
            tl.store((out + target).to(tl.pointer_type(tl.int32)), c0 | c1 << 8 | c2 << 16 | c3 << 24, mask)
        else:
            v0, v1, v2, v3 = quad(data, factors, base, row, j, q, KERNEL, FORM)
            low, high = _bits(v0) | _bits(v1) << 16, _bits(v2) | _bits(v3) << 16
            both = (low.to(tl.int64) & 0xFFFFFFFF) | (high.to(tl.int64) << 32)
            tl.store((out + target).to(tl.pointer_type(tl.int64)), both, mask)


@triton.jit
def rows_kernel(
    ids, lookup, data, factors, out, units, columns, first, rows, table,
    KERNEL: tl.constexpr, UNIT_BYTES: tl.constexpr, STEPPED: tl.constexpr,
    MAPPED: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Row `ids[t]`, brought between 0 and `table` - 1, if it is of this segment."""
    # The next kernel is not let in: with this one a pass of a model begins (see `dependent`).
    wait_for_previous(EARLY)
    t = tl.program_id(0)
    row = tl.load(ids + t).to(tl.int32)
    row = tl.minimum(tl.maximum(row, 0), table - 1)
    row = tl.load(lookup + row) if MAPPED else row - first
    if (row >= 0) & (row < rows):
        g = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        unit = tl.minimum(g // 16, units - 1)
        if STEPPED:
            j, q = (g // 4) % 4, g % 4
        else:
            j, q = g % 4, (g // 4) % 4
        base = ((row // 16).to(tl.int64) * units + unit) * UNIT_BYTES
        v0, v1, v2, v3 = quad(data, factors, base, tl.zeros_like(g) + row, j, q, KERNEL, -1)
        target = out + t.to(tl.int64) * columns + 4 * g
        _store(target, v0, 4 * g < columns)
        _store(target + 1, v1, 4 * g + 1 < columns)
        _store(target + 2, v2, 4 * g + 2 < columns)
        _store(target + 3, v3, 4 * g + 3 < columns)


def width(segment: Segment) -> int:
    """Columns of a decoded row, the last ones beyond the matrix's zero."""
    return segment.units * UNIT


class Form(IntEnum):
    """What becomes of factors of rows: in the numbers; not in them (FP8 and nvfp4 are exact in bf16 then); or
    not, and FP8 codes stay bytes. nvfp4 without them is 2^7 too small, which its factors make good."""

    WHOLE = 0
    BARE = 1
    CODES = 2


def panel(segment: Segment, begin: int, end: int, out: torch.Tensor, form: Form = Form.WHOLE) -> None:
    """Decode tiles `[begin, end)` into `out` `[16 (end - begin), width]`, bf16 rounded from the exact float32
    (an nvfp4 number: from its exact product times its row's factor), in packed order of rows."""
    packing = segment.packing
    factors = segment.data if segment.row_scales is None else segment.row_scales
    panel_kernel[(end - begin, triton.cdiv(128 * segment.units, _BLOCK))](
        segment.data, factors, out, begin, segment.units, out.stride(0),
        packing.kernel, packing.unit_bytes, packing.order == Order.STEPPED, int(form), _BLOCK,
        num_warps=4,
    )  # fmt: skip


def rows(
    segment: Segment, lookup: torch.Tensor | None, factors: torch.Tensor | None, ids: torch.Tensor,
    table: int, out: torch.Tensor,
) -> None:  # fmt: skip
    """Write row t of `out` (bf16 `[T, columns]`) if row `ids[t]` of a table of `table` rows is in it.

    `lookup`: int32 `[table]`, the segment's row or -1, where its rows do not stand together. `factors` of
    nvfp4 are the divisors, so that each value is the float32 quotient, rounded once more.
    """
    packing = segment.packing
    block = min(_BLOCK, triton.next_power_of_2(triton.cdiv(segment.columns, 4)))
    start(
        rows_kernel, (len(ids), triton.cdiv(segment.columns, 4 * block)), ids.device,
        ids, ids if lookup is None else lookup,
        segment.data, segment.data if factors is None else factors, out,
        segment.units, segment.columns, segment.first, segment.rows, table,
        KERNEL=packing.kernel, UNIT_BYTES=packing.unit_bytes, STEPPED=packing.order == Order.STEPPED,
        MAPPED=lookup is not None, BLOCK=block, num_warps=max(1, min(4, block // 64)),
    )  # fmt: skip


def specimens() -> Iterator[Specimen]:
    from ninfer.ops.cuda.pack import PACKINGS

    ints = ("first", "units", "stride", "columns", "rows", "table")
    for packing in PACKINGS.values():
        if packing.kernel == "Dense":
            continue
        shared = {
            "KERNEL": packing.kernel,
            "UNIT_BYTES": packing.unit_bytes,
            "STEPPED": packing.order == Order.STEPPED,
            "BLOCK": _BLOCK,
        }
        for kernel, constants, out in (
            (panel_kernel, {"FORM": 0}, "*bf16"),
            (panel_kernel, {"FORM": 2}, "*u8"),
            (rows_kernel, {"MAPPED": True}, "*bf16"),
        ):
            if constants.get("FORM") == 2 and packing.kernel != "Fp8Row":
                continue
            pointers = {"data": "*u8", "factors": "*fp32", "out": out, "ids": "*i64", "lookup": "*i32"}
            names = [name for name in kernel.arg_names if not name.isupper()]
            signature = {name: "i32" if name in ints else pointers[name] for name in names}
            yield Specimen(kernel, signature, {**constants, **shared}, {"num_warps": 4})
