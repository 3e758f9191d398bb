"""Rows of an encoded parent as one byte per code, and the bytes of their scales as packed units hold them.

Only the bytes of the rows that are asked for go to the device; everything else is computed there.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from ninfer import formats
from ninfer.artifact import bits
from ninfer.artifact.sizes import (
    RowSplit,
    block_scale_offsets,
    default_layout,
    encoded_bytes,
    k_row_bytes,
    k_table_bytes,
    matrix_shape,
    scale_offset,
)
from ninfer.errors import FormatError
from ninfer.ops.weights import Encoded, Matrix, Upload

_PARENT_TILE = 128
_KERNELS = {
    "bf16": "Bf16",
    "fp16": "Dense",
    "fp32": "Dense",
    "q4_g64_fp16": "Q4G64",
    "q5_g64_fp16": "Q5G64",
    "q6_g64_fp16": "Q6G64",
    "q8_g32_fp16": "Q8G32",
    "nvfp4": "Nvfp4",
    "fp8_e4m3fn_row_bf16": "Fp8Row",
    "fp8_e4m3fn_block128_bf16": "Fp8Tile",
    "ggml_q4_0": "Q4G32",
    "ggml_q4_1": "Q41",
    "ggml_q8_0": "Q8G32",
    "ggml_q5_k": "Q5K",
}
NVFP4_EXCESS = 128.0
"""What the decoder of NVFP4 leaves to the factors of rows."""
_BLOCKS = {"Q4G32": 18, "Q41": 20, "Q8G32": 34, "Q5K": 176, "Q4K": 144, "Q6K": 210}


@dataclass(frozen=True, eq=False)
class Run:
    """Rows `[begin, end)` of a parent, all of one kernel; `first` is the matrix's row of `begin`."""

    kernel: str
    parent: Encoded
    begin: int
    end: int
    first: int
    start: int = 0
    """`ggml_k`: the parent's byte where row `begin` starts."""

    @property
    def rows(self) -> int:
        return self.end - self.begin

    def part(self, begin: int, end: int) -> Run:
        """Some of the rows, counted from the run's first one."""
        start = self.start + begin * k_row_bytes(self.parent.shape[1])[self.kernel == "Q6K"]
        return Run(self.kernel, self.parent, self.begin + begin, self.begin + end, self.first + begin, start)


@dataclass(frozen=True, eq=False)
class Rows:
    """`codes` `[n, K]`: uint8, or words of a direct format. `scales` uint8 `[n, units, bytes]`: what a unit
    holds for a row. `factors` float32 `[n]`: each row's factor."""

    codes: torch.Tensor
    scales: torch.Tensor | None = None
    factors: torch.Tensor | None = None


def runs_of(matrix: Matrix) -> Iterator[Run]:
    """The matrix's rows from the top, in runs of one kernel. FormatError on what has none or doesn't fit."""
    first = 0
    for span in matrix.spans:
        check(span.parent)
        if span.parent.format == "ggml_k":
            yield from _k_runs(span.parent, span.begin, span.end, first)
        else:
            yield Run(_KERNELS[span.parent.format], span.parent, span.begin, span.end, first)
        first += span.end - span.begin


def check(parent: Encoded) -> None:
    """FormatError if no kernel reads this format and layout, or the bytes don't fit the shape."""
    if parent.format not in _KERNELS and parent.format != "ggml_k":
        raise FormatError(f"no kernel for format '{parent.format}'")
    if parent.layout != default_layout(parent.format):
        raise FormatError(f"no kernel for format '{parent.format}' in layout '{parent.layout}'")
    if parent.format == "ggml_k":
        return  # its row table is checked when it is read
    if formats.get(parent.format).kind != "direct":
        matrix_shape(parent.format, parent.shape)
    _expect(parent, encoded_bytes(parent.format, parent.layout, parent.shape))


def fetch(run: Run, upload: Upload) -> Rows:
    """The rows of a run, on the device."""
    return _FETCH[run.kernel](run, upload)


def divisor(parent: Encoded) -> float:
    """What an nvfp4 parent's numbers are divided by."""
    _, at = block_scale_offsets(*parent.shape)
    return float(parent.data[at : at + 4].cpu().clone().view(torch.float32))


def _expect(parent: Encoded, size: int) -> None:
    if parent.data.numel() != size:
        raise FormatError(
            f"{parent.format} {list(parent.shape)} takes {size} bytes, but {parent.data.numel()} are given"
        )


def _k_runs(parent: Encoded, begin: int, end: int, first: int) -> Iterator[Run]:
    """Runs of rows of one block type, from the object's row table, whose offsets must be canonical."""
    rows, columns = matrix_shape("ggml_k", parent.shape)
    four, six = k_row_bytes(columns)
    start = k_table_bytes(rows)
    if parent.data.numel() < start:
        _expect(parent, start + rows * four)
    table = parent.data[: 8 * rows].cpu().clone().view(torch.int64)
    types = (table & 1).bool()
    ends = torch.where(types, six, four).cumsum(0)
    starts = F.pad(ends[:-1], (1, 0))
    if not torch.equal(table >> 1, starts):
        raise FormatError(f"the row table of ggml_k {list(parent.shape)} is not canonical")
    _expect(parent, start + int(ends[-1]))
    part = types[begin:end]
    edges = [0, *((part[1:] != part[:-1]).nonzero()[:, 0] + 1).tolist(), end - begin]
    for a, b in itertools.pairwise(edges):
        kernel = "Q6K" if bool(part[a]) else "Q4K"
        yield Run(kernel, parent, begin + a, begin + b, first + a, start + int(starts[begin + a]))


def _bytes(run: Run, upload: Upload, begin: int, size: int) -> torch.Tensor:
    """Bytes of the parent, as `[rows, -1]`."""
    return upload(run.parent.data[begin : begin + size]).reshape(run.rows, -1)


def _direct(run: Run, upload: Upload) -> Rows:
    size = formats.get(run.parent.format).bits // 8 * run.parent.shape[1]
    data = _bytes(run, upload, run.begin * size, run.rows * size)
    if run.kernel == "Bf16":
        return Rows(data.view(torch.int16))
    words = data.view(torch.float16 if run.parent.format == "fp16" else torch.float32)
    return Rows(words.float())


def _grouped(run: Run, upload: Upload) -> Rows:
    found, (rows, columns) = formats.get(run.parent.format), run.parent.shape
    split = RowSplit.of(found, columns, rows)
    base = _bytes(run, upload, run.begin * split.base_stride, run.rows * split.base_stride)
    if found.bits == 8:
        codes = base ^ 0x80
    else:
        codes = bits.unpack_nibbles(base)
        if split.high_stride:
            begin = split.high_offset + run.begin * split.high_stride
            high = _bytes(run, upload, begin, run.rows * split.high_stride)
            codes |= bits.unpack_bit4(high) if found.bits == 5 else bits.unpack_bits45(high)
        codes = codes.view(torch.uint8) ^ (1 << (found.bits - 1))
    stride = 2 * split.groups
    scales = _bytes(run, upload, split.scale_offset + run.begin * stride, run.rows * stride)
    return Rows(codes, scales.view(run.rows, -1, 2 * 64 // found.group))


def _fp8_row(run: Run, upload: Upload) -> Rows:
    columns, start = run.parent.shape[1], scale_offset(*run.parent.shape)
    codes = _bytes(run, upload, run.begin * columns, run.rows * columns)
    scales = _bytes(run, upload, start + 2 * run.begin, 2 * run.rows).view(torch.bfloat16)
    return Rows(codes, None, scales.float().reshape(-1))


def _fp8_tile(run: Run, upload: Upload) -> Rows:
    columns, start = run.parent.shape[1], scale_offset(*run.parent.shape)
    codes = _bytes(run, upload, run.begin * columns, run.rows * columns)
    wide, low = columns // _PARENT_TILE, run.begin // _PARENT_TILE
    high = -(-run.end // _PARENT_TILE)
    tiles = upload(run.parent.data[start + 2 * wide * low : start + 2 * wide * high])
    of_rows = torch.arange(run.begin, run.end, device=upload.device) // _PARENT_TILE - low
    return Rows(codes, tiles.view(high - low, wide, 2).repeat_interleave(2, 1)[of_rows])


def _blocks(run: Run, upload: Upload) -> torch.Tensor:
    """uint8 `[rows, blocks, block bytes]`."""
    size, columns = _BLOCKS[run.kernel], run.parent.shape[1]
    group = 256 if size > 100 else 32
    row = columns // group * size
    begin = run.start if run.parent.format == "ggml_k" else run.begin * row
    return _bytes(run, upload, begin, run.rows * row).view(run.rows, -1, size)


def _block_scales(scales: torch.Tensor) -> torch.Tensor:
    """`[rows, blocks of 32, 2 k bytes]` to units of two blocks, `[rows, units, k numbers of both]`."""
    if scales.shape[1] % 2:
        scales = F.pad(scales, (0, 0, 0, 1))
    rows, count, size = scales.shape
    return scales.reshape(rows, count // 2, 2, size // 2, 2).transpose(2, 3).reshape(rows, count // 2, -1)


def _split(data: torch.Tensor) -> torch.Tensor:
    """Low nibbles of the last axis, then their high ones."""
    return torch.cat((data & 15, data >> 4), -1)


def _q4_0(run: Run, upload: Upload) -> Rows:
    blocks = _blocks(run, upload)
    head = blocks.shape[2] - 16
    return Rows(_split(blocks[..., head:]).reshape(run.rows, -1), _block_scales(blocks[..., :head]))


def _q8(run: Run, upload: Upload) -> Rows:
    if run.parent.format != "ggml_q8_0":
        return _grouped(run, upload)
    blocks = _blocks(run, upload)
    return Rows((blocks[..., 2:] ^ 0x80).reshape(run.rows, -1), _block_scales(blocks[..., :2]))


def _k(run: Run, upload: Upload) -> Rows:
    """Scales of a unit: a word with a minimum at bit 0, both sub-blocks' scales at bits 6 and 12, the other
    minimum at bit 18; d and dmin."""
    blocks = _blocks(run, upload)
    lead, head = blocks.shape[:2], 48 if run.kernel == "Q5K" else 16
    pairs = blocks[..., head:].reshape(*lead, 4, 1, 32)
    codes = _split_axis(pairs)
    if run.kernel == "Q5K":
        shifts = torch.arange(8, dtype=torch.uint8, device=upload.device).view(8, 1)
        codes = codes | (((blocks[..., None, 16:48] >> shifts) & 1) << 4).view(codes.shape)
    a, b, c = blocks[..., 4:8], blocks[..., 8:12], blocks[..., 12:16]
    scale = torch.cat((a & 63, (c & 15) | ((a >> 6) << 4)), -1)
    minimum = torch.cat((b & 63, (c >> 4) | ((b >> 6) << 4)), -1)
    whole = blocks[..., None, :4].expand(*lead, 4, 4)
    scale, minimum = (part.view(*lead, 4, 2).int() for part in (scale, minimum))
    words = minimum[..., 0] | scale[..., 0] << 6 | scale[..., 1] << 12 | minimum[..., 1] << 18
    scales = torch.cat((words[..., None].view(torch.uint8), whole), -1)
    return Rows(codes.reshape(run.rows, -1), scales.flatten(1, 2))


def _split_axis(pairs: torch.Tensor) -> torch.Tensor:
    """Low nibbles and high nibbles along the axis before the last."""
    return torch.cat((pairs & 15, pairs >> 4), -2)


def _q6_k(run: Run, upload: Upload) -> Rows:
    """Scales of a unit: the factors of its four groups plus 128, then d."""
    blocks = _blocks(run, upload)
    lead = blocks.shape[:2]
    low = _split_axis(blocks[..., :128].reshape(*lead, 2, 1, 64)).view(*lead, 2, 4, 32)
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8, device=upload.device).view(4, 1)
    high = (blocks[..., 128:192].reshape(*lead, 2, 1, 32) >> shifts) & 3
    whole = blocks[..., None, 208:].expand(*lead, 4, 2)
    scales = torch.cat(((blocks[..., 192:208] ^ 0x80).unflatten(-1, (4, 4)), whole), -1).flatten(1, 2)
    return Rows((low | (high << 4)).reshape(run.rows, -1), scales)


_FETCH: dict[str, Callable[[Run, Upload], Rows]] = {
    "Bf16": _direct,
    "Dense": _direct,
    "Q4G64": _grouped,
    "Q5G64": _grouped,
    "Q6G64": _grouped,
    "Q8G32": _q8,
    "Fp8Row": _fp8_row,
    "Fp8Tile": _fp8_tile,
    "Q4G32": _q4_0,
    "Q41": _q4_0,
    "Q5K": _k,
    "Q4K": _k,
    "Q6K": _q6_k,
}
