"""How many bytes an encoded object takes, and where its planes lie. No PyTorch, no NumPy."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ninfer import formats
from ninfer.artifact.records import ALIGNMENT, align_up
from ninfer.errors import FormatError
from ninfer.formats import Format

MAX_RANK = 16
K_PADDING = 128
TILE = 128
_LAYOUTS = {
    "direct": "contiguous_le_v1",
    "grouped": "row_split_k128_v1",
    "block_float": "block_scale_k16_m128x4_v1",
    "row_float": "row_scale_v1",
    "tile_float": "block_scale_m128_k128_v1",
}


def default_layout(format: str) -> str:
    """The one layout that a format is stored in; FormatError if the format is unknown."""
    found = formats.get(format)
    if found.kind == "ggml":
        return "ggml_k256_v1" if found.name == "ggml_k" else "ggml_rows_v1"
    return _LAYOUTS[found.kind]


def encoded_bytes(format: str, layout: str, shape: Sequence[int], *, q6_rows: int | None = None) -> int:
    """Size of an object; FormatError on an unknown or incompatible format, layout or shape.

    `ggml_k` needs `q6_rows`, the number of its Q6_K rows, because its size is no function of its shape.
    """
    expected = default_layout(format)
    if layout != expected:
        raise FormatError(f"format '{format}' is stored in layout '{expected}', not {layout!r:.80}")
    found = formats.get(format)
    if found.kind == "direct":
        return _elements(shape) * found.bits // 8
    rows, columns = matrix_shape(format, shape)
    if found.kind == "grouped":
        return RowSplit.of(found, columns, rows).bytes
    if found.kind == "block_float":
        return block_scale_offsets(rows, columns)[1] + 4
    if found.kind == "row_float":
        return scale_offset(rows, columns) + 2 * rows
    if found.kind == "tile_float":
        return scale_offset(rows, columns) + 2 * (rows // TILE) * (columns // TILE)
    if found.name != "ggml_k":
        return rows * (columns // found.group) * found.block_bytes[0]
    if q6_rows is None or not 0 <= q6_rows <= rows:
        raise FormatError(f"the size of ggml_k [{rows}, {columns}] needs `q6_rows`, got {q6_rows}")
    q4, q6 = k_row_bytes(columns)
    return k_table_bytes(rows) + rows * q4 + q6_rows * (q6 - q4)


def matrix_shape(format: str, shape: Sequence[int]) -> tuple[int, int]:
    """(N, K) of a shape that the (non-direct) format can have; FormatError otherwise."""
    found = formats.get(format)
    if len(shape) != 2 or min(shape) < 1:
        raise FormatError(f"format '{format}' needs a matrix [N, K], got shape {list(shape)}")
    rows, columns = shape
    row_step = TILE if found.kind in ("block_float", "tile_float") else 1
    column_step = {"block_float": 64, "tile_float": TILE, "ggml": found.group}.get(found.kind, 1)
    if rows % row_step or columns % column_step:
        steps = f"N % {row_step} = 0 and K % {column_step} = 0" if row_step > 1 else f"K % {column_step} = 0"
        raise FormatError(f"format '{format}' needs {steps}, got shape {list(shape)}")
    return rows, columns


def _elements(shape: Sequence[int]) -> int:
    if len(shape) > MAX_RANK or any(size < 1 for size in shape):
        raise FormatError(f"a shape has at most {MAX_RANK} positive dimensions, got {list(shape)}")
    return math.prod(shape)


@dataclass(frozen=True)
class RowSplit:
    """Planes of a `row_split_k128_v1` object: offsets, bytes per row, groups per row (padding included)."""

    groups: int
    base_stride: int
    high_offset: int
    high_stride: int
    scale_offset: int
    bytes: int

    @classmethod
    def of(cls, format: Format, columns: int, rows: int) -> RowSplit:
        """The planes of `[rows, columns]` in a grouped format."""
        groups = align_up(columns, K_PADDING) // format.group
        base_stride = groups * 32
        high_stride = groups * {5: 8, 6: 16}.get(format.bits, 0)
        high_offset = align_up(rows * base_stride, ALIGNMENT)
        scales = high_offset + align_up(rows * high_stride, ALIGNMENT)
        return cls(groups, base_stride, high_offset, high_stride, scales, scales + rows * groups * 2)


def block_scale_offsets(rows: int, columns: int) -> tuple[int, int]:
    """Byte offsets of the scale plane and the divisor of a `block_scale_k16_m128x4_v1` object."""
    scales = align_up(rows * columns // 2, ALIGNMENT)
    return scales, scales + rows * columns // 16


def scale_offset(rows: int, columns: int) -> int:
    """Byte offset of the BF16 scales of `row_scale_v1` and `block_scale_m128_k128_v1`."""
    return align_up(rows * columns, ALIGNMENT)


def k_row_bytes(columns: int) -> tuple[int, int]:
    """Bytes of a Q4_K row and of a Q6_K row."""
    return columns // 256 * 144, columns // 256 * 210


def k_table_bytes(rows: int) -> int:
    """Bytes of the row table of a `ggml_k256_v1` object, up to its first block."""
    return align_up(8 * rows, ALIGNMENT)
