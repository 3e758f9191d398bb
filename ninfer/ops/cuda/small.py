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
_SHARED_BYTES = 232_448  # of a block on sm_90; two blocks share 233,472, with 1,024 of each for the system
_ROOM = 160
"""Registers of a lane for x: two blocks share a multiprocessor with half of that."""


class Mode(IntEnum):
    """What becomes of the sums. LOGITS: rounded to bf16, kept as float32; RAW: float32, not rounded."""

    PLAIN = 0
    SWIGLU = 1
    LOGITS = 2
    RAW = 3


@dataclass(frozen=True)
class Division:
    """How a segment is divided: `groups` of blocks share K, in a block `warps` do.

    `slice_units` in the longest share, `copy_units` in one copy, `copies` of a warp under way, `buffers` of
    sums under way, `blocks` that share a multiprocessor.
    """

    groups: int
    warps: int
    slice_units: int
    copy_units: int
    copies: int
    buffers: int
    blocks: int

    def shared_bytes(self, packing: Packing, tiles: int, norm: bool = False) -> int:
        """Of a block, for `tiles` token tiles; as `struct Shared` has it."""
        ring = _up(self.copies * self.copy_units * packing.unit_bytes, 128) * self.warps
        sums = self.buffers * tiles * self.warps * 512
        return _up(
            ring + sums + 8 * (self.warps * self.copies + 2 * self.buffers) + 512 * self.warps * norm, 128
        )


def _up(value: int, step: int) -> int:
    return -(-value // step) * step


def divide(packing: Packing, tiles: int, units: int, processors: int) -> Division:
    """The division of `[16 tiles, units]` among multiprocessors: the one whose busiest block has least to
    do."""
    warps = 8
    most = max(1, _ROOM // 2 * 8 // packing.unit_columns)
    choices = []
    for groups in range(1, max(1, min(processors, 16, units // warps)) + 1):
        length = -(-units // (groups * warps))
        places = processors // groups
        work = -(-tiles // places) * (-(-units // groups) + 2 + (groups > 1)) + 4 * (groups > 1)
        choices.append((max(0, length - most), work, groups))
    groups = min(choices)[2]
    length = -(-units // (groups * warps))
    copy = max(1, min(length, 4096 // packing.unit_bytes))
    copy = -(-length // -(-length // copy))  # equal copies
    copies = max(2, min(16, 98_304 // (warps * copy * packing.unit_bytes)))
    return Division(groups, warps, length, copy, copies, 2, 2)


@cache
def _divided(packing: Packing, tiles: int, units: int, processors: int) -> Division:
    return divide(packing, tiles, units, processors)


def _for_tokens(packing: Packing, division: Division, tiles: int) -> Division:
    """For `tiles` token tiles: their sums and registers may need a whole multiprocessor. The order of sums is
    the same."""
    shared = _registers(packing, division.slice_units) * tiles <= _ROOM // 2
    return replace(division, buffers=2 if tiles < 4 else 1, blocks=division.blocks if shared else 1)


def _registers(packing: Packing, slice_units: int) -> int:
    return slice_units * packing.unit_columns // 8


def most_tiles(packing: Packing, division: Division) -> int:
    """Token tiles of one launch: 1, 2 or 4."""
    return max((t for t in (1, 2, 4) if _registers(packing, division.slice_units) * t <= _ROOM), default=1)


@cache
def module(packing: Packing, division: Division, tiles: int, norm: int = 0) -> Module:
    """The kernels of a format and a division for `tiles` token tiles of 8; with a norm: 1 of bf16 gains, 2 of
    float32."""
    return Module(
        "small.cuh",
        {
            "FORMAT": packing.kernel,
            "TOKEN_TILES": tiles,
            "SLICE_UNITS": division.slice_units,
            "BLOCK_WARPS": division.warps,
            "COPY_UNITS": division.copy_units,
            "RING_COPIES": division.copies,
            "SUM_BUFFERS": division.buffers,
            "SM_BLOCKS": division.blocks,
            "NORM": norm,
        },
    )


class _Params(ctypes.Structure):
    """`struct Params` of small.cuh."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("weights", "row_scales", "row_map", "x", "residual", "out")),
        *((name, ctypes.c_void_p) for name in ("gain", "normed", "partial", "counters")),
        *((name, ctypes.c_int32) for name in ("tokens", "columns", "rows", "first")),
        ("out_stride", ctypes.c_uint32),
        *((name, ctypes.c_int32) for name in ("tiles", "units", "groups", "mode", "unit_offset")),
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
    """Tiles of 8 tokens that a kernel is compiled for: 1, 2 or 4."""
    return 1 if tokens <= 8 else 2 if tokens <= 16 else 4


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
    processors = processors_of(x.device.index if x.device.index is not None else torch.cuda.current_device())
    for segment, rows in _wanted(packed, out.shape[1], mode):
        row_tiles = -(-rows * (2 if mode == Mode.SWIGLU else 1) // TILE)
        division = _divided(segment.packing, row_tiles, segment.units, processors)
        if norm is not None and tokens > 8:
            x, norm = _normed(x, segment, division, norm), None
        step = 8 * most_tiles(segment.packing, division)
        for t in range(0, tokens, step):
            part = slice(t, t + step)
            added = None if residual is None else residual[part]
            _launch(x[part], segment, division, row_tiles, rows, out[part], mode, added, norm, processors)
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


def _normed(x: torch.Tensor, segment: Segment, division: Division, norm: Norm) -> torch.Tensor:
    """The norm by itself, in the same arithmetic as in front of a product."""
    h = torch.empty_like(x) if norm.normed is None else norm.normed
    params = _Params(x=x.data_ptr(), tokens=x.shape[0], columns=x.shape[1])
    params.units, params.groups = segment.units, division.groups
    _set_norm(params, norm)
    params.normed = h.data_ptr()
    function = module(segment.packing, division, 1, _kind(norm)).function("norm_rows", x.device)
    blocks = -(-x.shape[0] // 8) * division.groups
    function.launch((blocks,), (32 * division.warps,), (params,), pdl=_may_overlap(x.device))
    return h


def _kind(norm: Norm | None) -> int:
    if norm is None:
        return 0
    return 2 if norm.gain.dtype == torch.float32 else 1


def _set_norm(params: _Params, norm: Norm) -> None:
    params.gain = norm.gain.data_ptr()
    params.eps, params.unit_offset = norm.eps, norm.unit_offset
    if norm.normed is not None:
        params.normed = norm.normed.data_ptr()


def _may_overlap(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device)[0] >= 9


def _launch(
    x: torch.Tensor,
    segment: Segment,
    division: Division,
    row_tiles: int,
    rows: int,
    out: torch.Tensor,
    mode: Mode,
    residual: torch.Tensor | None,
    norm: Norm | None,
    processors: int,
) -> None:
    groups, tiles = division.groups, token_tiles(x.shape[0])
    division = _for_tokens(segment.packing, division, tiles)
    params = _Params(
        weights=segment.data.data_ptr(),
        row_scales=None if segment.row_scales is None else segment.row_scales.data_ptr(),
        row_map=None if segment.row_map is None else segment.row_map.data_ptr(),
        x=x.data_ptr(),
        residual=None if residual is None else residual.data_ptr(),
        out=out.data_ptr(),
        counters=segment.counters.data_ptr(),
        tokens=x.shape[0],
        columns=x.shape[1],
        rows=rows,
        first=segment.first,
        out_stride=out.shape[1],
        tiles=row_tiles,
        units=segment.units,
        groups=groups,
        mode=mode,
    )
    if norm is not None:
        _set_norm(params, norm)
    partial = None
    if groups > 1:
        partial = torch.empty(row_tiles * tiles * groups * 128, dtype=torch.float32, device=x.device)
        params.partial = partial.data_ptr()
    places = min(processors // groups, row_tiles)
    function = module(segment.packing, division, tiles, _kind(norm)).function(
        "small_linear", x.device, division.shared_bytes(segment.packing, tiles, norm is not None)
    )
    function.launch((places * groups,), (32 * division.warps,), (params,), pdl=_may_overlap(x.device))
