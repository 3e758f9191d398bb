"""Products of 1 to 64 tokens with packed weights: plain, with a residual, SwiGLU, logits, after a norm.

The kernel is `csrc/small.cuh`; here is how a matrix is divided among the multiprocessors, which depends on
its shape and format only, and the launch. Everything may be captured in a graph, once each kernel has run.

16 tokens on an H200 (2026-11-30, us for NVFP4 / FP8 rows): SwiGLU [34816, 5120] with a norm 39.1 / 48.6,
[16384, 5120] with a norm 24.0 / 27.6, [5120, 6144] 11.0 / 12.8, [5120, 17408] 23.0 / 30.7; 32: twice that.
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
_COPY_BYTES = 28_672
"""Of weights that come at a time, at most."""
_COPIES = (3, 12)
"""Fewest and most in a ring."""
_ASKED_BYTES = 50_000
"""Of weights that a block asks for at a time, if its ring is larger."""
_BUFFERS = 2
_AHEAD = 40 << 10
"""Of weights in flight, at least, where copies are made smaller: a multiprocessor's share of 4.4 TB/s for 1.2
us."""


class Mode(IntEnum):
    """What becomes of the sums. LOGITS: rounded to bf16, kept as float32; RAW: float32, not rounded."""

    PLAIN = 0
    SWIGLU = 1
    LOGITS = 2
    RAW = 3


@dataclass(frozen=True)
class Device:
    """What matters of a GPU: `shared_bytes` that a block can have, `clusters` of up to so many blocks."""

    processors: int
    shared_bytes: int
    clusters: int

    @property
    def half(self) -> int:
        """Shared memory of a block where two share a multiprocessor; 1 KiB more belongs to the system."""
        return self.shared_bytes // 2 - 512


HOPPER = Device(132, 232_448, 4)
AMPERE = Device(108, 166_912, 1)


@cache
def device_of(index: int) -> Device:
    properties = torch.cuda.get_device_properties(index)
    shared = properties.shared_memory_per_block_optin
    return Device(properties.multi_processor_count, shared, 4 if properties.major >= 9 else 1)


def divide(tiles: int, units: int, device: Device) -> int:
    """Into how many slices K is cut: what decides in which order a matrix's products are added.

    16 or 32, of warps of one block or of two: two, if that leaves fewer multiprocessors and warps idle.
    """

    def busy(blocks: int) -> float:
        places, slices = device.processors // blocks, 16 * blocks
        return tiles / (places * -(-tiles // places)) * units / (slices * -(-units // slices))

    return 32 if device.clusters > 1 and units >= 32 and busy(2) > busy(1) else 16


@dataclass(frozen=True)
class Plan:
    """A kernel: its constants (see small.cuh), and the shared memory it takes."""

    token_tiles: int
    warps: int
    cluster: int
    turns: int
    least_turns: int
    copy_turns: int
    copies: int
    pace: int
    buffers: int
    live: int
    blocks: int
    norm: int
    shared_bytes: int


@cache
def plan(packing: Packing, slices: int, units: int, tokens: int, norm: int, device: Device) -> Plan | None:
    """For up to `tokens` tokens (1, 2, 4, 8 or 16); with a norm: 1 of bf16 gains, 2 of float32. None if a
    multiprocessor has no room for them.

    For one or two tokens a block leaves room for one of the next product, whose ring fills while this one
    ends. Two of the same product must not share a multiprocessor, or others would have none: products behind
    a norm take less than half of the memory, the others more, and only these may start beside small kernels.
    Where x takes much, copies are smaller, and for more than 8 tokens sums may have one buffer, before warps
    are fewer.
    """
    tiles = 1 if tokens <= 8 else 2
    live = 1 if tokens <= 2 else 2 if tokens <= 4 else 4
    turns = -(-units // slices)
    least = units // 16 if slices == 16 else max(0, units - 16 * turns) // 16
    whole, part = device.shared_bytes, device.half + (-1024 if norm else 1024)
    choices = [(16, 2, part)] if tokens <= 2 and device.clusters > 1 else []
    for warps, blocks, memory in (*choices, (16, 1, whole), (8, 1, whole)):
        cluster = slices // warps
        if cluster > device.clusters:
            continue
        fixed = slices * 8 * tiles * 4 + 512 if norm else 512  # squares and barriers
        fixed += turns * warps * tokens * 128 + 256  # x, and what alignment takes
        fixed += turns * warps * (1 if live == 1 else 4 * tiles) * 16 * packing.sums
        turn = warps * packing.unit_bytes
        most = _equal(turns, max(1, min(turns, _COPY_BYTES // turn)))
        for buffers in range(_BUFFERS, 0, -1) if tiles > 1 else (_BUFFERS,):
            sums = buffers * tiles * slices * 8 * live * 16
            room = memory - fixed - sums
            for smaller in range(most, 0, -1) if tiles > 1 else (most, 1)[:blocks]:
                copy = _equal(turns, smaller)
                size = copy * turn
                copies = min(_COPIES[1], room // size)
                fewest = _COPIES[0] + (buffers == 1 and warps == 16)  # else 8 warps are faster
                if copies < fewest or (copies * size < _AHEAD and (tiles > 1 or copy < most)):
                    continue
                shared = fixed + sums + _up(copies * size, 128)
                if blocks == 2 and not norm:
                    shared = max(shared, memory)
                pace = copies if blocks == 2 else min(copies, -(-_ASKED_BYTES // size))
                return Plan(
                    tiles, warps, cluster, turns, least, copy, copies, pace, buffers, live, blocks, norm,
                    shared,
                )  # fmt: skip
    return None


def _up(value: int, step: int) -> int:
    return -(-value // step) * step


def _equal(turns: int, most: int) -> int:
    """Turns of a copy, up to `most`, if copies are equal."""
    return -(-turns // -(-turns // most))


@cache
def module(packing: Packing, p: Plan) -> Module:
    """The kernel of a format for a plan."""
    return Module(
        "small.cuh",
        {
            "FORMAT": packing.kernel,
            "TOKEN_TILES": p.token_tiles,
            "WARPS": p.warps,
            "CLUSTER": p.cluster,
            "TURNS": p.turns,
            "LEAST_TURNS": p.least_turns,
            "COPY_TURNS": p.copy_turns,
            "RING_COPIES": p.copies,
            "PACE": p.pace,
            "SUM_BUFFERS": p.buffers,
            "LIVE": p.live,
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
        *((name, ctypes.c_int32) for name in ("tiles", "units", "mode")),
        *((name, ctypes.c_float) for name in ("unit_offset", "eps")),
    )


@dataclass(frozen=True, eq=False)
class Norm:
    """An `rms_norm` in front of the product; `gain [K]` bf16 or float32. `normed` `[T, K]`, if the result is
    wanted, too."""

    gain: torch.Tensor
    eps: float
    unit_offset: bool
    normed: torch.Tensor | None = None


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
    index = x.device.index if x.device.index is not None else torch.cuda.current_device()
    device = device_of(index)
    for segment, rows in _wanted(packed, out.shape[1], mode):
        begin = 0
        while begin < tokens:
            made, count = _next(segment, tokens - begin, _kind(norm), device)
            part = slice(begin, begin + count)
            added = None if residual is None else residual[part]
            _launch(x[part], segment, made, rows, out[part], mode, added, _part(norm, part), device)
            begin += count
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


def _next(segment: Segment, tokens: int, norm: int, device: Device) -> tuple[Plan, int]:
    """The kernel for the next of so many tokens, and how many it takes."""
    slices = divide(segment.tiles, segment.units, device)
    for most in (16, 8, 4, 2, 1):
        if most < 2 * tokens:
            made = plan(segment.packing, slices, segment.units, most, norm, device)
            if made is not None:
                return made, min(most, tokens)
    raise OptionError(f"rows of {segment.columns} columns are too long for this GPU's shared memory")


def _part(norm: Norm | None, part: slice) -> Norm | None:
    """The norm of some of the rows."""
    if norm is None or norm.normed is None:
        return norm
    return replace(norm, normed=norm.normed[part])


def _kind(norm: Norm | None) -> int:
    if norm is None:
        return 0
    return 2 if norm.gain.dtype == torch.float32 else 1


def _launch(
    x: torch.Tensor,
    segment: Segment,
    made: Plan,
    rows: int,
    out: torch.Tensor,
    mode: Mode,
    residual: torch.Tensor | None,
    norm: Norm | None,
    device: Device,
) -> None:
    tiles = -(-rows * (2 if mode == Mode.SWIGLU else 1) // TILE)
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
        mode=mode,
    )
    if norm is not None:
        params.gain = norm.gain.data_ptr()
        params.eps, params.unit_offset = norm.eps, float(norm.unit_offset)
        params.normed = None if norm.normed is None else norm.normed.data_ptr()
    function = module(segment.packing, made).function("small_linear", x.device, made.shared_bytes)
    threads = 32 * (made.warps + 2)
    places = device.processors // made.cluster
    if made.cluster > 2:  # not every group of multiprocessors is a multiple of four
        places = min(places, function.most_clusters(threads, made.cluster))
    function.launch(
        (min(places, tiles) * made.cluster,),
        (threads,),
        (params,),
        pdl=device.clusters > 1,
        cluster=made.cluster,
    )
