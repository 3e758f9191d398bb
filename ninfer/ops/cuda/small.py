"""Products of 1 to 64 tokens with packed weights: plain, with a residual, SwiGLU, logits, after a norm.

The kernel is `csrc/small.cuh`; here is how a matrix is divided among the multiprocessors, which depends on
its shape and format only, and the launch. Everything may be captured in a graph, once each kernel has run.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import IntEnum
from functools import cache

import torch

from ninfer.errors import OptionError
from ninfer.ops.cuda.compile import Module
from ninfer.ops.cuda.packed import TILE, Packed, Packing, Segment

MOST_TOKENS = 64
WARPS = 8
"""That multiply, in a block; two more copy and add."""
_SHARED_BYTES = 115_712
"""Of a block, where two share a multiprocessor of Hopper; `_SHARED_BYTES_WHOLE` where it has one alone."""
_SHARED_BYTES_WHOLE = 231_424
_ROOM = 48
"""Registers of a lane for x, where two blocks share a multiprocessor."""
_ROOM_WHOLE = 104
_MOST_TOTALS = 8


class Mode(IntEnum):
    """What becomes of the sums. LOGITS: rounded to bf16, kept as float32; RAW: float32, not rounded."""

    PLAIN = 0
    SWIGLU = 1
    LOGITS = 2
    RAW = 3


@dataclass(frozen=True)
class Division:
    """How a segment is divided: `cluster` blocks share K, their warps have slices of at most `slice_units` of
    it, one after the other in `passes`.

    `copy_units` of a warp in one copy, `totals` of a block's tiles kept between passes, `blocks` that share a
    multiprocessor.
    """

    cluster: int
    passes: int
    slice_units: int
    copy_units: int
    totals: int
    blocks: int

    def registers(self, packing: Packing) -> int:
        """Of a lane, for x, for each token tile."""
        return self.slice_units * packing.unit_columns // 8

    def copy_bytes(self, packing: Packing) -> int:
        """Of the ring, that one copy takes."""
        return WARPS * self.copy_units * packing.unit_bytes


def _up(value: int, step: int) -> int:
    return -(-value // step) * step


def divide(packing: Packing, tiles: int, units: int, processors: int, cluster: int = 2) -> Division:
    """How `[16 tiles, units]` is divided among multiprocessors, with clusters of up to `cluster` blocks."""
    blocks = 2 if packing.unit_columns == 64 else 1
    room = (_ROOM if blocks == 2 else _ROOM_WHOLE) * 8 // packing.unit_columns
    cluster = min(cluster, max(1, units // WARPS))
    passes = -(-units // (cluster * WARPS * room))
    length = -(-units // (cluster * WARPS * passes))
    copy = max(1, min(length, 3584 // packing.unit_bytes))
    copy = -(-length // -(-length // copy))  # equal copies
    totals = 0
    if passes > 1:
        totals = min(_MOST_TOTALS, -(-tiles // max(1, processors // cluster)))
        totals = -(-totals // cluster)
    return Division(cluster, passes, length, copy, totals, blocks)


@cache
def _divided(packing: Packing, tiles: int, units: int, device: int) -> Division:
    cluster = 2 if torch.cuda.get_device_capability(device)[0] >= 9 else 1
    return divide(packing, tiles, units, processors_of(device), cluster)


@dataclass(frozen=True)
class Plan:
    """A division with what depends on the number of token tiles and on the norm, but changes no sum."""

    division: Division
    token_tiles: int
    norm: int
    blocks: int
    buffers: int
    copies: int
    shared_bytes: int


@cache
def plan(packing: Packing, division: Division, tiles: int, norm: int = 0) -> Plan:
    """For `tiles` token tiles of 8 (1 or 2); with a norm: 1 of bf16 gains, 2 of float32."""
    blocks = division.blocks if tiles == 1 else 1
    buffers = 2
    room = _SHARED_BYTES if blocks == 2 else _SHARED_BYTES_WHOLE
    fixed = (buffers * division.cluster * WARPS + division.totals) * tiles * 512 + 512  # 512: barriers
    if norm:
        fixed += WARPS * (division.slice_units * packing.unit_columns * 2 * norm + division.cluster * tiles * 32)
    copies = max(2, min(16, (room - fixed) // division.copy_bytes(packing)))
    used = _up(copies * division.copy_bytes(packing), 16) + fixed
    return Plan(division, tiles, norm, blocks, buffers, copies, _up(used, 128))


@cache
def module(packing: Packing, p: Plan) -> Module:
    """The kernels of a format for a plan."""
    return Module(
        "small.cuh",
        {
            "FORMAT": packing.kernel,
            "TOKEN_TILES": p.token_tiles,
            "SLICE_UNITS": p.division.slice_units,
            "COPY_UNITS": p.division.copy_units,
            "RING_COPIES": p.copies,
            "SUM_BUFFERS": p.buffers,
            "CLUSTER": p.division.cluster,
            "TOTALS": p.division.totals,
            "SM_BLOCKS": p.blocks,
            "NORM": p.norm,
        },
    )


class _Params(ctypes.Structure):
    """`struct Params` of small.cuh."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("weights", "row_scales", "row_map", "x", "residual", "out")),
        *((name, ctypes.c_void_p) for name in ("gain", "normed")),
        *((name, ctypes.c_int32) for name in ("tokens", "columns", "rows", "first")),
        ("out_stride", ctypes.c_uint32),
        *((name, ctypes.c_int32) for name in ("tiles", "units", "passes", "mode", "unit_offset")),
        ("eps", ctypes.c_float),
    )


@dataclass(frozen=True, eq=False)
class Norm:
    """An `rms_norm` in front of the product; `gain [K]` bf16 or float32. `normed` `[T, K]`, if the result is
    wanted, too."""

    gain: torch.Tensor
    eps: float
    unit_offset: bool
    normed: torch.Tensor | None = None


@cache
def processors_of(device: int) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def token_tiles(tokens: int) -> int:
    """Tiles of 8 tokens that a launch takes: 1 or 2."""
    return 1 if tokens <= 8 else 2


def small_linear(
    x: torch.Tensor,
    packed: Packed,
    out: torch.Tensor,
    *,
    mode: Mode = Mode.PLAIN,
    residual: torch.Tensor | None = None,
    norm: Norm | None = None,
) -> torch.Tensor:
    """`x [T, K]` (bf16, contiguous, T <= 64) times the matrix, into `out [T, N]` (contiguous), which is
    returned.

    `out` is bf16, float32 with LOGITS and RAW; if N is less than the matrix's rows, these are its first ones.
    With SWIGLU the matrix is interleaved and `out [T, rows / 2]`. `residual` has `out`'s shape and type bf16.
    `out` may be `residual`, but not `x`.
    """
    tokens = x.shape[0]
    if x.dtype != torch.bfloat16 or not 0 < tokens <= MOST_TOKENS:
        raise OptionError(f"small products take 1 to {MOST_TOKENS} rows of bf16, got {tokens} of {x.dtype}")
    if mode == Mode.SWIGLU and not packed.interleaved:
        raise OptionError("SwiGLU needs gate and up rows of one format, interleaved")
    if x.shape[1] % 8:
        if norm is not None:
            raise OptionError(f"a norm in front of a product needs a multiple of 8 columns, got {x.shape[1]}")
        x = torch.nn.functional.pad(x, (0, -x.shape[1] % 8))
    elif x.data_ptr() % 16:
        x = x.clone()
    device = x.device.index if x.device.index is not None else torch.cuda.current_device()
    for segment, rows in _wanted(packed, out.shape[1], mode):
        tiles = -(-rows * (2 if mode == Mode.SWIGLU else 1) // TILE)
        division = _divided(segment.packing, tiles, segment.units, device)
        step = 16 if 2 * division.registers(segment.packing) <= _ROOM_WHOLE else 8
        for t in range(0, tokens, step):
            part = slice(t, t + step)
            added = None if residual is None else residual[part]
            _launch(x[part], segment, division, tiles, rows, out[part], mode, added, _part(norm, part))
        if norm is not None and norm.normed is not None:
            norm = replace(norm, normed=None)
    return out


def _wanted(packed: Packed, columns: int, mode: Mode) -> Iterator[tuple[Segment, int]]:
    """Segments with the number of their outputs that are among the first `columns`."""
    for segment in packed.segments:
        rows = segment.rows // 2 if mode == Mode.SWIGLU else segment.rows
        rows = rows if segment.row_map is not None else min(rows, columns - segment.first)
        if rows > 0:
            yield segment, rows


def _part(norm: Norm | None, part: slice) -> Norm | None:
    """The norm of some of the rows."""
    if norm is None or norm.normed is None:
        return norm
    return replace(norm, normed=norm.normed[part])


def _kind(norm: Norm | None) -> int:
    if norm is None:
        return 0
    return 2 if norm.gain.dtype == torch.float32 else 1


def _may_overlap(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device)[0] >= 9


def _launch(
    x: torch.Tensor,
    segment: Segment,
    division: Division,
    tiles: int,
    rows: int,
    out: torch.Tensor,
    mode: Mode,
    residual: torch.Tensor | None,
    norm: Norm | None,
) -> None:
    params = _Params(
        weights=segment.data.data_ptr(),
        row_scales=None if segment.row_scales is None else segment.row_scales.data_ptr(),
        row_map=None if segment.row_map is None else segment.row_map.data_ptr(),
        x=x.data_ptr(),
        residual=None if residual is None else residual.data_ptr(),
        out=out.data_ptr(),
        tokens=x.shape[0],
        columns=x.shape[1],
        rows=rows,
        first=segment.first,
        out_stride=out.shape[1],
        tiles=tiles,
        units=segment.units,
        passes=division.passes,
        mode=mode,
    )
    if norm is not None:
        params.gain = norm.gain.data_ptr()
        params.eps, params.unit_offset = norm.eps, norm.unit_offset
        params.normed = None if norm.normed is None else norm.normed.data_ptr()
    made = plan(segment.packing, division, token_tiles(x.shape[0]), _kind(norm))
    function = module(segment.packing, made).function("small_linear", x.device, made.shared_bytes)
    clusters = min(processors_of(function.device) // division.cluster, tiles)
    function.launch(
        (clusters * division.cluster,),
        (32 * (WARPS + 2),),
        (params,),
        pdl=_may_overlap(x.device),
        cluster=division.cluster,
    )
