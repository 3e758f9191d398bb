"""From the encoded bytes of row spans to packed segments: PyTorch operations on the device, chunk by chunk.

The bytes of a chunk are copied to the device as they are and turned there into one byte per code, in the
order of `packed.py`, then into words. A lane's 32 codes of 64 columns are two halves (row r, row r + 8) of
four steps of two pairs.

- Four bits: a word holds the eight codes of two steps of a half, low codes of pairs at bits 0, 4, 8, 12,
  high ones at bits 16, 20, 24, 28, so that a shift and a mask give a pair in two halves of a register.
- Five bits: bytes 0, 2 and bytes 1, 3 of a word hold the codes of a pair in their last bits. Two words have
  pairs 0 .. 3 of a half; bytes 0, 2 of a fifth word pair 4 of row r, bytes 1, 3 that of row r + 8. What the
  bytes have left, three bits each, holds pairs 6 and 7 (three bits in the first word, two in the second) and
  pair 5 (three in the fifth word; bits 1 and 0 at bit 5 of row r's and of row r + 8's second word, in bytes
  0, 2 for row r, in bytes 1, 3 for row r + 8).
- Six bits: likewise pairs 0 .. 5 in three words of a half, and two bits of pairs 6 and 7 in each.
- Eight bits: a word holds the codes 0, 2, 1, 3 of a step; first all lanes' row r, then all lanes' row r + 8.
- FP8 and bf16 are described beside their decoders in `csrc/formats_a.cuh`; NVFP4 goes another way, by
  `pack_nvfp4.py`.

Integer codes are stored without a sign (code minus the least one). A unit holds four words of each lane (the
first two of row r, the first two of row r + 8), then the others, then scales. Extra memory: about 20 bytes
for each of the 8 million codes of a chunk.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F

from ninfer.artifact.layouts import decode_rows
from ninfer.ops.cuda.native import Rows, Run, divisor, fetch, runs_of
from ninfer.ops.cuda.pack_nvfp4 import pack_rows
from ninfer.ops.cuda.packed import FP8_BYTES, TILE, Order, Packed, Packing, Segment
from ninfer.ops.cuda.upload import Copy
from ninfer.ops.weights import Matrix, Role, Upload

_CHUNK = 1 << 23
"""Codes of a chunk."""

PACKINGS: dict[str, Packing] = {
    packing.kernel: packing
    for packing in (
        Packing("Nvfp4", Order.OWNED, 576, row_scaled=True),
        Packing("Fp8Row", Order.OWNED, 1024, row_scaled=True),
        Packing("Bf16", Order.OWNED, 2048),
        Packing("Dense", Order.OWNED, 4096),
        Packing("Q4G64", Order.STEPPED, 544, sums=1),
        Packing("Q5G64", Order.STEPPED, 672, sums=1),
        Packing("Q6G64", Order.STEPPED, 800, sums=1),
        Packing("Q8G32", Order.STEPPED, 1088, sums=2),
        Packing("Q4G32", Order.STEPPED, 576, sums=2),
        Packing("Q41", Order.STEPPED, 640, sums=2),
        Packing("Q4K", Order.STEPPED, 640, sums=2),
        Packing("Q5K", Order.STEPPED, 768, sums=2),
        Packing("Q6K", Order.STEPPED, 864, sums=4),
        Packing("Fp8Tile", Order.OWNED, 1056),
    )
}
"""Every packing by the name of its kernel. `dense` is plain float32 `[rows, columns]` for rare formats."""


def pack(matrix: Matrix, device: torch.device, role: Role, upload: Upload | None = None) -> Packed:
    """The matrix in packed segments on `device`, one for each of its formats; see `packed.py`.

    SWIGLU matrices of one format are interleaved. Raises `FormatError` on formats without a kernel and on
    bytes that do not fit a shape.
    """
    runs, bring = list(runs_of(matrix)), upload or Copy(device)
    kernels = list(dict.fromkeys(run.kernel for run in runs))
    interleaved = role is Role.SWIGLU and len(kernels) == 1 and kernels != ["Dense"]
    segments = [
        _segment([run for run in runs if run.kernel == kernel], matrix.columns, bring, interleaved)
        for kernel in kernels
    ]
    return Packed(matrix.rows, matrix.columns, tuple(segments), interleaved)


def dense(matrix: Matrix, device: torch.device, upload: Upload | None = None) -> torch.Tensor:
    """A small matrix decoded, bf16 `[rows, columns]`. What other formats stand for is rounded, an error as
    large as that of the bf16 columns it is multiplied with."""
    pieces, bring = [], upload or Copy(device)
    for run in runs_of(matrix):
        if run.kernel == "Bf16":
            pieces.append(fetch(run, bring).codes.view(torch.bfloat16))
        else:
            data, shape = run.parent.data.cpu(), run.parent.shape
            rows = decode_rows(run.parent.format, shape, data, run.begin, run.end)
            pieces.append(bring(rows.bfloat16()))
    return torch.cat(pieces)


def divisors(matrix: Matrix, device: torch.device) -> torch.Tensor | None:
    """NVFP4's divisor of each row, float32, in the order of the packed segment; None without such rows."""
    runs = [run for run in runs_of(matrix) if run.kernel == "Nvfp4"]
    if not runs:
        return None
    return torch.cat([torch.full((run.rows,), divisor(run.parent)) for run in runs]).to(device)


def _segment(runs: Sequence[Run], columns: int, upload: Upload, interleaved: bool) -> Segment:
    packing, first = PACKINGS[runs[0].kernel], runs[0].first
    count = sum(run.rows for run in runs)
    names = ", ".join(dict.fromkeys(run.parent.format for run in runs))
    row_map = None
    if any(a.first + a.rows != b.first for a, b in itertools.pairwise(runs)):
        places = [torch.arange(run.first, run.first + run.rows, dtype=torch.int32) for run in runs]
        row_map = torch.cat(places).to(upload.device)
    if packing.kernel == "Dense":
        data = torch.cat([fetch(run, upload).codes for run in runs])
        return Segment(
            packing, names, first, count, columns, data.view(torch.uint8).reshape(-1), None, row_map
        )
    if packing.kernel == "Nvfp4":
        data, factors = pack_rows(runs, columns, upload, interleaved)
        return Segment(packing, names, first, count, columns, data, factors, row_map)
    height, halves = (TILE // 2, 2) if interleaved else (TILE, 1)
    length = count // halves
    tiles, units = -(-length // height), -(-columns // packing.unit_columns)
    data = torch.empty(tiles, units, packing.unit_bytes, dtype=torch.uint8, device=upload.device)
    factors = torch.empty(tiles * TILE, device=upload.device) if packing.row_scaled else None
    step = max(1, _CHUNK // (TILE * units * packing.unit_columns))
    for begin in range(0, tiles, step):
        end = min(begin + step, tiles)
        parts = []
        for half in range(halves):
            a, b = begin * height, min(end * height, length)
            part = _take(runs, half * length + a, half * length + b, upload, packing, units)
            parts.append(_padded(part, (end - begin) * height, packing, units))
        rows = parts[0] if halves == 1 else _interleaved(parts[0], parts[1], end - begin)
        data[begin:end] = _words(rows, packing, end - begin, units)
        if factors is not None and rows.factors is not None:
            factors[TILE * begin : TILE * end] = rows.factors
    return Segment(packing, names, first, count, columns, data.reshape(-1), factors, row_map)


def _take(runs: Sequence[Run], begin: int, end: int, upload: Upload, packing: Packing, units: int) -> Rows:
    """Rows `[begin, end)` of the runs one below the other."""
    found, at = [], 0
    for run in runs:
        a, b = max(begin - at, 0), min(end - at, run.rows)
        if a < b:
            found.append(_padded(fetch(run.part(a, b), upload), b - a, packing, units))
        at += run.rows
    if len(found) == 1:
        return found[0]
    codes = torch.cat([rows.codes for rows in found])
    scales = [rows.scales for rows in found if rows.scales is not None]
    factors = [rows.factors for rows in found if rows.factors is not None]
    return Rows(codes, torch.cat(scales) if scales else None, torch.cat(factors) if factors else None)


def _padded(rows: Rows, count: int, packing: Packing, units: int) -> Rows:
    """Zero rows up to `count`, columns cut or filled to whole units; what is added has a zero scale."""
    missing = count - len(rows.codes)
    codes = F.pad(rows.codes, (0, units * packing.unit_columns - rows.codes.shape[1], 0, missing))
    scales = rows.scales
    if scales is not None:
        scales = F.pad(scales, (0, 0, 0, units - scales.shape[1], 0, missing))
    return Rows(codes, scales, None if rows.factors is None else F.pad(rows.factors, (0, missing)))


def _interleaved(gate: Rows, up: Rows, tiles: int) -> Rows:
    """Eight rows of the one, eight of the other."""

    def both(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return torch.stack((a.unflatten(0, (tiles, 8)), b.unflatten(0, (tiles, 8))), 1).flatten(0, 2)

    scales = factors = None
    if gate.scales is not None and up.scales is not None:
        scales = both(gate.scales, up.scales)
    if gate.factors is not None and up.factors is not None:
        factors = both(gate.factors, up.factors)
    return Rows(both(gate.codes, up.codes), scales, factors)


def _words(rows: Rows, packing: Packing, tiles: int, units: int) -> torch.Tensor:
    """uint8 `[tiles, units, unit_bytes]`."""
    lanes = _lanes(rows.codes, packing, tiles, units)
    planes = _PLANES[packing.kernel](lanes)
    planes = planes if isinstance(planes, tuple) else (planes,)
    parts = [plane.reshape(tiles, units, -1) for plane in planes]
    if rows.scales is not None:
        parts.append(_scale_plane(rows.scales, packing, tiles, units))
    return parts[0] if len(parts) == 1 else torch.cat(parts, -1)


def _scale_plane(scales: torch.Tensor, packing: Packing, tiles: int, units: int) -> torch.Tensor:
    """By r, half, byte; of Q6K all rows' factors, then their d."""
    rows = scales.view(tiles, 2, 8, units, -1).permute(0, 3, 2, 1, 4)  # t u r h byte
    if packing.kernel == "Q6K":
        parts = [part.reshape(tiles, units, -1) for part in rows.split_with_sizes((4, 2), -1)]
        return torch.cat(parts, -1)
    return rows.reshape(tiles, units, -1)


def _lanes(codes: torch.Tensor, packing: Packing, tiles: int, units: int) -> torch.Tensor:
    """`[tiles, units, 8 r, 4 q, 2 halves, 4 steps, 4]`, a view."""
    split = codes.view(tiles, 2, 8, units, 4, 4, 4)
    if packing.order is Order.OWNED:
        return split.permute(0, 3, 2, 4, 1, 5, 6)  # from t h r u q j c
    return split.permute(0, 3, 2, 5, 1, 4, 6)  # from t h r u j q c


def _pairs(lanes: torch.Tensor) -> torch.Tensor:
    """The last two axes, steps and columns, as two, two, pairs and members of pairs."""
    return lanes.unflatten(5, (2, 2)).unflatten(7, (2, 2))  # t u r q h jp s pp e


def _four_plane(lanes: torch.Tensor) -> torch.Tensor:
    """Byte 2 e + s of two steps holds pair 2 s low and pair 2 s + 1 high."""
    nibbles = _pairs(lanes).permute(0, 1, 2, 3, 4, 5, 8, 6, 7).contiguous() & 15
    return nibbles[..., 0] | (nibbles[..., 1] << 4)


def _five_planes(lanes: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Words of pairs 0..3, then of pair 4, each with the bits of pairs 5, 6 and 7."""
    first, second, direct, fifth, late = _by_pairs(lanes).split_with_sizes((2, 2, 1, 1, 2), -1)
    first = first | (late >> 2 << 5)
    second = second | ((late & 3) << 6)
    # Bits 1 and 0 of pair 5: of row r in byte 0 of either row's word, of row r + 8 in byte 1.
    both = fifth[..., 0].transpose(4, 5)  # t u r q e h
    second = second | torch.stack((both >> 1 & 1, both & 1), 4) << 5
    own = (direct | (fifth >> 2 << 5))[..., 0].transpose(4, 5)
    return torch.stack((first, second), 5).contiguous(), own.contiguous()


def _six_planes(lanes: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Words of pairs 0..3, then of pairs 4 and 5, each with two bits of pairs 6 and 7."""
    *direct, late = _by_pairs(lanes).split(2, -1)
    words = [codes | ((late >> shift & 3) << 6) for codes, shift in zip(direct, (4, 2, 0), strict=True)]
    return torch.stack(words[:2], 5).contiguous(), words[2].contiguous()


def _by_pairs(lanes: torch.Tensor) -> torch.Tensor:
    """`[.., 2 halves, 2 members of pairs, 8 pairs]`."""
    return lanes.unflatten(6, (2, 2)).flatten(5, 6).transpose(5, 6)


def _byte_plane(lanes: torch.Tensor) -> torch.Tensor:
    """Eight bits: bytes 0, 2, 1, 3 of a step; all lanes' row r, then all lanes' row r + 8."""
    return lanes.unflatten(6, (2, 2)).permute(0, 1, 4, 2, 3, 5, 7, 6).contiguous()  # from t u r q h j pp e


def _fp8_plane(lanes: torch.Tensor) -> torch.Tensor:
    """A step's columns in the order of `FP8_BYTES`; all lanes' row r, then all lanes' row r + 8."""
    split = lanes.permute(0, 1, 4, 2, 3, 5, 6)  # from t u r q h j c
    return torch.stack([split[..., column] for column in FP8_BYTES], -1)


def _word_plane(lanes: torch.Tensor) -> torch.Tensor:
    """16 bits, step after step: columns 0 and 1 of row r and of row r + 8, then columns 2 and 3 of both."""
    split = lanes.unflatten(6, (2, 2))  # t u r q h j pp e
    return split.permute(0, 1, 5, 2, 3, 6, 4, 7).contiguous().view(torch.uint8)


_PLANES: dict[str, Callable[[torch.Tensor], torch.Tensor | tuple[torch.Tensor, ...]]] = {
    "Fp8Row": _fp8_plane,
    "Fp8Tile": _fp8_plane,
    "Bf16": _word_plane,
    "Q4G64": _four_plane,
    "Q5G64": _five_planes,
    "Q6G64": _six_planes,
    "Q8G32": _byte_plane,
    "Q4G32": _four_plane,
    "Q41": _four_plane,
    "Q4K": _four_plane,
    "Q5K": _five_planes,
    "Q6K": _six_planes,
}
