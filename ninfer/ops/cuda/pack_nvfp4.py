"""NVFP4 from the bytes of a file to packed units, in one kernel.

Roofline: bytes, 0.56 of them a weight read and as many written. A word of the file holds eight neighbouring
columns, as a word of a packed unit does, so that each thread turns one into the other; what packing waits for
is the copies from the host. (As a chain of PyTorch operators it took about a hundred launches a chunk.)
"""

# pyright: reportArgumentType=false, reportIndexIssue=false, reportCallIssue=false, reportAttributeAccessIssue=false
# pyright: reportOperatorIssue=false, reportPossiblyUnboundVariable=false, reportGeneralTypeIssues=false

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import triton
import triton.language as tl

from ninfer.artifact.sizes import block_scale_offsets
from ninfer.ops.cuda.native import NVFP4_EXCESS, Run, divisor
from ninfer.ops.cuda.packed import NIBBLES, TILE
from ninfer.ops.cuda.specimens import Specimen
from ninfer.ops.weights import Upload

_CHUNK = 1 << 26
"""Codes that are on the device in both forms at a time: 64 MiB beside the packed ones."""
_UNITS = 4
"""Units of a tile that a program packs."""
_PARENT_TILE = 128
_UNIT_BYTES = 576
_BITS = tl.constexpr(tuple(bit for pair in NIBBLES for bit in pair))


@triton.jit
def pack_kernel(
    codes, scales, words, bytes_, factors, first, count, skip, length, from_tile, units, factor,
    INTERLEAVED: tl.constexpr, UNITS: tl.constexpr, BITS: tl.constexpr,
):  # fmt: skip
    """Rows `[first, first + count)` of a segment, whose codes begin at `codes`; the first is row `skip` of
    the tiles of scales. Of an interleaved segment `length` rows are gate rows."""
    tile = from_tile + tl.program_id(0)
    # Words of a unit: r, q, half, jp. Of its scales: r, q, half.
    n = tl.arange(0, UNITS * 128)
    unit = tl.program_id(1) * UNITS + n // 128
    r, q, half, jp = n // 16 % 8, n // 4 % 4, n // 2 % 2, n % 2
    row = half * length + tile * 8 + r if INTERLEAVED else tile * 16 + half * 8 + r
    local = row - first
    there = (local >= 0) & (local < count) & (unit < units)
    if INTERLEAVED:
        there = there & (tile * 8 + r < length)
    at = local + skip
    where = (at // 128 * units + unit).to(tl.int64) * 512 + at % 32 * 16 + at // 32 % 4 * 4 + q
    scale = tl.load(scales + where, there, 0).to(tl.int32)
    word = tl.load(codes + local.to(tl.int64) * (units * 8) + unit * 8 + q * 2 + jp, there, 0)
    flip = tl.where(scale >= 128, 0x88888888 - (1 << 32), 0).to(tl.int32)
    word = tl.where(scale % 128 > 0, word ^ flip, 0)
    packed = tl.zeros_like(word)
    for pair in tl.static_range(4):
        for half_word in tl.static_range(2):
            code = (word >> (8 * pair + 4 * half_word)) & 15
            turned = ((code & 7) << BITS[2 * pair]) | ((code >> 3) << BITS[2 * pair + 1])
            packed |= turned << (16 * half_word)
    out = (tile.to(tl.int64) * units + unit) * 144 + n % 128
    tl.store(words + out, packed, there)
    # Scales: E4M3, subnormal or not, as 8 (E + 22) + M.
    exponent, mantissa = scale % 128 // 8, scale % 8
    small = tl.where(mantissa > 3, 16 + 2 * (mantissa - 4), tl.where(mantissa > 1, 8 + 4 * (mantissa - 2), 0))
    byte = tl.where(exponent > 0, scale % 128 + 120, 104 + small)
    place = (tile.to(tl.int64) * units + unit) * 576 + 512 + (r * 4 + q) * 2 + half
    tl.store(bytes_ + place, byte.to(tl.uint8), there & (jp == 0))
    if tl.program_id(1) == 0:
        mine = there & (unit == 0) & (q == 0) & (jp == 0)
        tl.store(factors + tile * 16 + half * 8 + r, tl.zeros_like(word).to(tl.float32) + factor, mine)


def pack_rows(
    runs: Sequence[Run], columns: int, upload: Upload, interleaved: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """`data` uint8 and `row_scales` of a segment of these runs; what is padded is zero."""
    count, units = sum(run.rows for run in runs), columns // 64
    tiles = -(-(count // 2) // 8) if interleaved else -(-count // TILE)
    data = torch.zeros(tiles * units * _UNIT_BYTES, dtype=torch.uint8, device=upload.device)
    factors = torch.zeros(tiles * TILE, device=upload.device)
    step, first = max(1, _CHUNK // columns), 0
    for run in runs:
        begin = run.begin
        while begin < run.end:
            # Up to a border of the tiles of scales, so that none is copied twice.
            end = run.end if run.end - begin <= step else (begin + step) // _PARENT_TILE * _PARENT_TILE
            end = max(end, min(run.end, begin + 1))
            part = Run(run.kernel, run.parent, begin, end, run.first)
            _pack(part, first, units, count // 2 if interleaved else 0, upload, data, factors)
            first += end - begin
            begin = end
    return data, factors


def _pack(
    run: Run, first: int, units: int, length: int, upload: Upload, data: torch.Tensor, factors: torch.Tensor
) -> None:
    columns, start = run.parent.shape[1], block_scale_offsets(*run.parent.shape)[0]
    codes = upload(run.parent.data[run.begin * columns // 2 : run.end * columns // 2])
    low, high = run.begin // _PARENT_TILE, -(-run.end // _PARENT_TILE)
    size = _PARENT_TILE * columns // 16
    scales = upload(run.parent.data[start + low * size : start + high * size])
    height, tiles = (8, -(-length // 8)) if length else (TILE, -(-(first + run.rows) // TILE))
    begin, end = first, first + run.rows
    if length and begin < length < end:
        begin, end = 0, length
    elif length and begin >= length:
        begin, end = begin - length, end - length
    from_tile, to_tile = begin // height, min(tiles, -(-end // height))
    factor = NVFP4_EXCESS * float(1 / torch.tensor(divisor(run.parent)))
    pack_kernel[to_tile - from_tile, triton.cdiv(units, _UNITS)](
        _words(codes), scales, data.view(torch.int32), data, factors, first, run.rows,
        run.begin - low * _PARENT_TILE, length, from_tile, units, factor, length > 0, _UNITS, _BITS,
        num_warps=4,
    )  # fmt: skip


def _words(data: torch.Tensor) -> torch.Tensor:
    """int32 words; a synthetic weight's rows may begin at any byte."""
    return (data if data.data_ptr() % 4 == 0 else data.clone()).view(torch.int32)


def specimens() -> Iterator[Specimen]:
    pointers = {"codes": "*i32", "scales": "*u8", "words": "*i32", "bytes_": "*u8", "factors": "*fp32"}
    names = [name for name in pack_kernel.arg_names if not name.isupper()]
    types = {name: pointers.get(name, "fp32" if name == "factor" else "i32") for name in names}
    for interleaved in (False, True):
        constants = {"INTERLEAVED": interleaved, "UNITS": _UNITS, "BITS": _BITS.value}
        yield Specimen(pack_kernel, types, constants, {"num_warps": 4})
