"""Where the rows of a matrix lie in memory: what a kernel needs to know of a weight, computed once.

A plan is a list of segments, each a run of rows of one codec with a constant stride in every plane. It also
checks that every byte a kernel may touch lies inside the encoded object, since kernels read by address.
"""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass

import numpy as np
import torch

from ninfer.errors import FormatError
from ninfer.ops.cpu.block import ARGUMENTS, DYNAMIC
from ninfer.ops.cpu.codecs import CODECS, UNIT
from ninfer.ops.cpu.kernel import bits
from ninfer.ops.weights import Encoded, Matrix, RowSpan


@dataclass(frozen=True)
class Planes:
    """Addresses and byte strides per parent row of the three planes; `divisor` divides every weight."""

    codec: str
    codes: int
    codes_stride: int
    high: int = 0
    high_stride: int = 0
    scale: int = 0
    scale_stride: int = 0
    divisor: float = 1.0


@dataclass(frozen=True, eq=False)
class Segment:
    """Matrix rows `[first, first + rows)`, which are rows `[begin, begin + rows)` of the planes."""

    planes: Planes
    begin: int
    rows: int
    first: int
    constants: np.ndarray
    """The kernels' constant arguments with this segment on both sides."""

    @functools.cached_property
    def address(self) -> int:
        """Where the constants lie."""
        return self.constants.ctypes.data

    @functools.cached_property
    def pairs(self) -> bool:
        """Does the codec yield even and odd weights apart?"""
        return CODECS[self.planes.codec].pairs


@dataclass(frozen=True, eq=False)
class Pair:
    """Equally many gate and up rows that stand side by side, for outputs `[first, first + rows)`."""

    left: Segment
    right: Segment
    first: int
    rows: int
    constants: np.ndarray

    @functools.cached_property
    def address(self) -> int:
        return self.constants.ctypes.data


@dataclass(frozen=True, eq=False)
class Plan:
    """The segments of a matrix, top to bottom, and the parents whose bytes they point into.

    `halves` pairs the upper with the lower half of the rows (gate and up); None if their codecs differ.
    """

    segments: tuple[Segment, ...]
    units: int
    parents: tuple[Encoded, ...]
    halves: tuple[Pair, ...] | None


def plan_of(matrix: Matrix) -> Plan:
    """The matrix's plan, made at first use and kept with the matrix."""
    if matrix.plan is None:
        matrix.plan = _make_plan(matrix)
    assert isinstance(matrix.plan, Plan)
    return matrix.plan


def constants_of(left: Segment, right: Segment, columns: int) -> np.ndarray:
    """Arguments `DYNAMIC` and up of the linear kernel for rows of `left` paired with rows of `right`."""
    values = [-(-columns // UNIT), columns]
    for part in (left, right):
        planes = part.planes
        values += [planes.codes, planes.codes_stride, planes.high, planes.high_stride]
        values += [planes.scale, planes.scale_stride, part.begin]
    values += [bits(left.planes.divisor), bits(right.planes.divisor)]
    values += [0] * (ARGUMENTS - DYNAMIC - len(values))
    return np.array(values, dtype=np.int64)


def _make_plan(matrix: Matrix) -> Plan:
    segments: list[Segment] = []
    first = 0
    for span in matrix.spans:
        for planes, begin, rows in _runs(span):
            segments.append(_segment(planes, begin, rows, first, matrix.columns))
            first += rows
    parents = tuple(span.parent for span in matrix.spans)
    units = -(-matrix.columns // UNIT)
    return Plan(tuple(segments), units, parents, _halves(segments, matrix))


def _segment(planes: Planes, begin: int, rows: int, first: int, columns: int) -> Segment:
    bare = Segment(planes, begin, rows, first, np.empty(0, dtype=np.int64))
    return Segment(planes, begin, rows, first, constants_of(bare, bare, columns))


def _halves(segments: list[Segment], matrix: Matrix) -> tuple[Pair, ...] | None:
    """Cut the upper and the lower half of the rows at each other's seams and pair the pieces."""
    if matrix.rows % 2:
        return None
    half = matrix.rows // 2
    seams = sorted({s.first % half for s in segments} | {0, half})
    pairs: list[Pair] = []
    for low, high in itertools.pairwise(seams):
        sides = []
        for start in (low, half + low):
            home = next(s for s in segments if s.first <= start < s.first + s.rows)
            begin = home.begin + start - home.first
            sides.append(_segment(home.planes, begin, high - low, start, matrix.columns))
        left, right = sides
        if left.planes.codec != right.planes.codec:
            return None
        constants = constants_of(left, right, matrix.columns)
        pairs.append(Pair(left, right, low, high - low, constants))
    return tuple(pairs)


def _up(size: int) -> int:
    return (size + 255) // 256 * 256


def _runs(span: RowSpan) -> list[tuple[Planes, int, int]]:
    """(planes, begin, rows) of each run of a span."""
    parent = span.parent
    make = _PLANES.get((parent.format, parent.layout))
    if make is None:
        raise FormatError(
            f"the CPU backend has no kernel for format '{parent.format}' in layout '{parent.layout}'"
        )
    runs, size = make(parent)
    if parent.data.numel() != size:
        raise FormatError(
            f"a {parent.format} matrix {tuple(parent.shape)} takes {size} bytes, "
            f"but {parent.data.numel()} are given"
        )
    result = []
    for planes, begin, end in runs:
        low, high = max(begin, span.begin), min(end, span.end)
        if low < high:
            result.append((planes, low, high - low))
    return result


def _need(parent: Encoded, rows: int, columns: int) -> None:
    if parent.shape[0] % rows or parent.shape[1] % columns:
        raise FormatError(
            f"{parent.format} needs rows in multiples of {rows} and columns of {columns}, "
            f"got {tuple(parent.shape)}"
        )


def _whole(parent: Encoded, planes: Planes, size: int):
    return [(planes, 0, parent.shape[0])], size


def _words(codec: str, width: int):
    def make(parent: Encoded):
        rows, columns = parent.shape
        return _whole(parent, Planes(codec, parent.data.data_ptr(), columns * width), rows * columns * width)

    return make


def _grouped(codec: str, group: int, high: int):
    def make(parent: Encoded):
        rows, columns = parent.shape
        groups = (columns + 127) // 128 * 128 // group
        high_at = _up(rows * groups * 32)
        scale_at = high_at + _up(rows * groups * high)
        base = parent.data.data_ptr()
        planes = Planes(codec, base, groups * 32, base + high_at, groups * high, base + scale_at, groups * 2)
        return _whole(parent, planes, scale_at + rows * groups * 2)

    return make


def _nvfp4(parent: Encoded):
    _need(parent, 128, 64)
    rows, columns = parent.shape
    scale_at = _up(rows * columns // 2)
    end = scale_at + rows * columns // 16
    base = parent.data.data_ptr()
    divisor = 1.0
    if parent.data.numel() >= end + 4:
        divisor = float(parent.data[end : end + 4].clone().view(torch.float32))
        if not 0.0 < divisor < float("inf"):
            raise FormatError(f"an NVFP4 divisor must be positive and finite, got {divisor}")
    planes = Planes("nvfp4", base, columns // 2, 0, 0, base + scale_at, columns // 64 * 512, divisor)
    return _whole(parent, planes, end + 4)


def _fp8_row(parent: Encoded):
    rows, columns = parent.shape
    base, scale_at = parent.data.data_ptr(), _up(rows * columns)
    return _whole(parent, Planes("fp8_row", base, columns, 0, 0, base + scale_at, 2), scale_at + 2 * rows)


def _fp8_block(parent: Encoded):
    _need(parent, 128, 128)
    rows, columns = parent.shape
    base, scale_at = parent.data.data_ptr(), _up(rows * columns)
    planes = Planes("fp8_block", base, columns, 0, 0, base + scale_at, columns // 64)
    return _whole(parent, planes, scale_at + rows // 128 * (columns // 64))


def _ggml(codec: str, values: int, size: int):
    def make(parent: Encoded):
        _need(parent, 1, values)
        rows, columns = parent.shape
        stride = columns // values * size
        return _whole(parent, Planes(codec, parent.data.data_ptr(), stride), rows * stride)

    return make


def _ggml_k(parent: Encoded):
    """Runs of Q4_K and of Q6_K rows; the address of a run is where row 0 of the parent would be."""
    _need(parent, 1, 256)
    rows, columns = parent.shape
    blocks = columns // 256
    area = _up(8 * rows)
    if parent.data.numel() < area + rows * blocks * 144:
        raise FormatError(f"a ggml_k matrix {tuple(parent.shape)} cannot have {parent.data.numel()} bytes")
    words = parent.data[: 8 * rows].numpy().view(np.uint64)
    six = (words & 1).astype(bool)
    sizes = np.where(six, blocks * 210, blocks * 144).astype(np.uint64)
    starts = np.concatenate(([0], np.cumsum(sizes)))
    if not np.array_equal(words >> np.uint64(1), starts[:-1].astype(np.uint64)):
        raise FormatError("the row descriptors of a ggml_k matrix are not canonical")
    edges = [0, *(np.flatnonzero(six[1:] != six[:-1]) + 1).tolist(), rows]
    runs = []
    for begin, end in itertools.pairwise(edges):
        stride = blocks * (210 if six[begin] else 144)
        origin = parent.data.data_ptr() + area + int(starts[begin]) - begin * stride
        runs.append((Planes("q6_k" if six[begin] else "q4_k", origin, stride), begin, end))
    return runs, area + int(starts[-1])


_DIRECT, _ROWS, _GROUPS = "contiguous_le_v1", "ggml_rows_v1", "row_split_k128_v1"

_PLANES = {
    ("bf16", _DIRECT): _words("bf16", 2),
    ("fp16", _DIRECT): _words("fp16", 2),
    ("fp32", _DIRECT): _words("fp32", 4),
    ("q4_g64_fp16", _GROUPS): _grouped("q4_g64", 64, 0),
    ("q5_g64_fp16", _GROUPS): _grouped("q5_g64", 64, 8),
    ("q6_g64_fp16", _GROUPS): _grouped("q6_g64", 64, 16),
    ("q8_g32_fp16", _GROUPS): _grouped("q8_g32", 32, 0),
    ("nvfp4", "block_scale_k16_m128x4_v1"): _nvfp4,
    ("fp8_e4m3fn_row_bf16", "row_scale_v1"): _fp8_row,
    ("fp8_e4m3fn_block128_bf16", "block_scale_m128_k128_v1"): _fp8_block,
    ("ggml_k", "ggml_k256_v1"): _ggml_k,
    ("ggml_q4_0", _ROWS): _ggml("q4_0", 32, 18),
    ("ggml_q4_1", _ROWS): _ggml("q4_1", 32, 20),
    ("ggml_q8_0", _ROWS): _ggml("q8_0", 32, 34),
    ("ggml_q5_k", _ROWS): _ggml("q5_k", 256, 176),
}
