"""From natural planes to an object's bytes and back, in chunks of rows.

`pack_rows` returns the byte runs that a chunk occupies, so that a converter never holds a whole object;
the chunk with the last row also returns the gaps between planes and the divisor, so that all chunks together
write every byte exactly once.
"""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F

from ninfer import formats
from ninfer.artifact import bits
from ninfer.artifact.sizes import (
    TILE,
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
from ninfer.formats import Format, Planes
from ninfer.formats import direct as direct_codec
from ninfer.formats import ggml as ggml_codec

Run = tuple[int, np.ndarray]
Bytes = np.ndarray | torch.Tensor


def pack_rows(
    format: str, shape: Sequence[int], row_begin: int, planes: Planes, *, q6: np.ndarray | None = None
) -> list[Run]:
    """The runs `(offset in the object, uint8 [n])` of rows from `row_begin` on, as many as the planes hold.

    shape: the whole object's. Direct formats of any rank: a row is one step of axis 0. nvfp4 and 128x128
    tiles: `row_begin` and the number of rows are multiples of 128. q6: `ggml_k` only, bool `[N]`, which rows
    of the whole object are Q6_K; a chunk holds rows of one type. Raises FormatError on planes that don't fit.
    """
    found = formats.get(format)
    if found.kind == "direct":
        return _pack_direct(found, shape, row_begin, planes)
    rows, columns = matrix_shape(format, shape)
    count = len(planes.codes)
    if not 0 <= row_begin < row_begin + count <= rows:
        raise FormatError(f"rows [{row_begin}, {row_begin + count}) are outside {format} {list(shape)}")
    if found.kind == "grouped":
        return _pack_grouped(found, rows, columns, row_begin, planes)
    if found.kind == "block_float":
        return _pack_nvfp4(rows, columns, row_begin, planes)
    if found.kind == "row_float":
        return _pack_row_scale(rows, columns, row_begin, planes)
    if found.kind == "tile_float":
        return _pack_tiles(rows, columns, row_begin, planes)
    blocks = ggml_codec.as_blocks(found, planes.codes)
    _expect(blocks, f"{format} blocks", torch.uint8, (count, columns // found.group, blocks.shape[2]))
    if found.name == "ggml_k":
        return _pack_k(rows, columns, row_begin, blocks, q6)
    return [(row_begin * blocks.shape[1] * blocks.shape[2], _flat(blocks))]


def unpack_rows(format: str, shape: Sequence[int], data: Bytes, r0: int, r1: int) -> Planes:
    """Planes of rows `[r0, r1)` of an object whose bytes are `data` (uint8 `[bytes]`, NumPy or torch).

    nvfp4 and 128x128 tiles: multiples of 128. `ggml_k`: rows of one block type.
    """
    found, buffer = formats.get(format), _tensor(data)
    if found.name != "ggml_k":
        expected = encoded_bytes(format, default_layout(format), shape)
        if buffer.numel() != expected:
            raise FormatError(
                f"{format} {list(shape)} takes {expected} bytes, but {buffer.numel()} are given"
            )
    if not 0 <= r0 < r1 <= (shape[0] if shape else 1):
        raise FormatError(f"rows [{r0}, {r1}) are outside {format} {list(shape)}")
    if found.kind == "direct":
        words = buffer.view(direct_codec.dtype(found)).reshape(tuple(shape))
        return Planes(words[r0:r1] if shape else words)
    rows, columns = matrix_shape(format, shape)
    if found.kind == "grouped":
        return _unpack_grouped(found, rows, columns, buffer, r0, r1)
    if found.kind == "block_float":
        return _unpack_nvfp4(rows, columns, buffer, r0, r1)
    if found.kind == "ggml":
        return _unpack_blocks(found, rows, columns, buffer, r0, r1)
    codes = buffer[r0 * columns : r1 * columns].reshape(-1, columns)
    start = scale_offset(rows, columns)
    if found.kind == "row_float":
        return Planes(codes, buffer[start + 2 * r0 : start + 2 * r1].view(torch.bfloat16))
    _tiled(format, r0, r1)
    wide = columns // TILE
    tiles = buffer[start : start + 2 * wide * (rows // TILE)].view(torch.bfloat16).reshape(-1, wide)
    return Planes(codes, tiles[r0 // TILE : r1 // TILE])


def decode_rows(format: str, shape: Sequence[int], data: Bytes, r0: int, r1: int) -> torch.Tensor:
    """float32 `[r1 - r0, K]`: the values of rows of an object, any rows of any format."""
    found = formats.get(format)
    if found.kind in ("block_float", "tile_float"):
        begin, end = r0 // TILE * TILE, min(-(-r1 // TILE) * TILE, shape[0])
        return formats.decode(found, unpack_rows(format, shape, data, begin, end))[r0 - begin : r1 - begin]
    if found.name != "ggml_k":
        return formats.decode(found, unpack_rows(format, shape, data, r0, r1))
    types = k_row_types(shape, data)[r0:r1]
    edges = [r0, *(r0 + 1 + np.flatnonzero(types[1:] != types[:-1])).tolist(), r1]
    runs = [unpack_rows(format, shape, data, a, b) for a, b in itertools.pairwise(edges)]
    return torch.cat([formats.decode(found, run) for run in runs])


def decode_direct(format: str, shape: Sequence[int], data: Bytes) -> torch.Tensor:
    """A direct object as a tensor of its own dtype (bf16, fp16, fp32, int32) and shape; a view of `data`."""
    found = formats.get(format)
    if found.kind != "direct":
        raise FormatError(f"format '{format}' is encoded; only direct formats have words to take as they are")
    return _tensor(data).view(direct_codec.dtype(found)).reshape(tuple(shape))


def k_row_types(shape: Sequence[int], data: Bytes) -> np.ndarray:
    """bool `[N]`: which rows of a `ggml_k` object are Q6_K, from its row table."""
    rows, _ = matrix_shape("ggml_k", shape)
    table = _tensor(data)[: 8 * rows].cpu().numpy().view("<u8")
    return (table & np.uint64(1)).astype(bool)


def _pack_direct(found: Format, shape: Sequence[int], row_begin: int, planes: Planes) -> list[Run]:
    row_elements = math.prod(shape[1:])
    begin, count = row_begin * row_elements, planes.codes.numel()
    if planes.codes.dtype != direct_codec.dtype(found):
        raise FormatError(f"{found.name} words must have dtype {found.dtype}, got {planes.codes.dtype}")
    if count % row_elements or not 0 <= begin < begin + count <= math.prod(shape):
        raise FormatError(
            f"{count} elements from row {row_begin} on are no rows of {found.name} {list(shape)}"
        )
    return [(begin * found.bits // 8, _flat(planes.codes))]


def _pack_grouped(found: Format, rows: int, columns: int, begin: int, planes: Planes) -> list[Run]:
    split, count = RowSplit.of(found, columns, rows), len(planes.codes)
    real = -(-columns // found.group)
    codes = _expect(planes.codes, f"{found.name} codes", torch.int8, (count, columns))
    scales = _expect(planes.scales, f"{found.name} scales", torch.float16, (count, real))
    padded = split.groups * found.group
    if padded != columns:
        codes = F.pad(codes, (0, padded - columns))
        scales = F.pad(scales, (0, split.groups - real))
    codes = codes.contiguous()
    base = codes if found.bits == 8 else bits.pack_nibbles(codes)
    runs = [(begin * split.base_stride, _flat(base))]
    if split.high_stride:
        pack = bits.pack_bit4 if found.bits == 5 else bits.pack_bits45
        runs.append((split.high_offset + begin * split.high_stride, _flat(pack(codes))))
    runs.append((split.scale_offset + begin * split.groups * 2, _flat(scales)))
    if begin + count == rows:
        runs += _gap(rows * split.base_stride, split.high_offset)
        runs += _gap(split.high_offset + rows * split.high_stride, split.scale_offset)
    return runs


def _unpack_grouped(found: Format, rows: int, columns: int, data: torch.Tensor, r0: int, r1: int) -> Planes:
    split, count = RowSplit.of(found, columns, rows), r1 - r0
    base = data[r0 * split.base_stride : r1 * split.base_stride].reshape(count, -1)
    high = data[split.high_offset + r0 * split.high_stride : split.high_offset + r1 * split.high_stride]
    if found.bits == 8:
        codes = base.view(torch.int8)
    elif found.bits == 4:
        codes = bits.sign_extend(bits.unpack_nibbles(base), 4)
    else:
        unpack = bits.unpack_bit4 if found.bits == 5 else bits.unpack_bits45
        codes = bits.sign_extend(bits.unpack_nibbles(base) | unpack(high.reshape(count, -1)), found.bits)
    stride = 2 * split.groups
    scales = data[split.scale_offset + r0 * stride : split.scale_offset + r1 * stride].view(torch.float16)
    return Planes(codes[:, :columns], scales.reshape(count, -1)[:, : -(-columns // found.group)])


def _pack_nvfp4(rows: int, columns: int, begin: int, planes: Planes) -> list[Run]:
    count = len(planes.codes)
    _tiled("nvfp4", begin, begin + count)
    codes = _expect(planes.codes, "nvfp4 codes", torch.uint8, (count, columns // 2))
    scales = _expect(_words(planes.scales), "nvfp4 scales", torch.uint8, (count, columns // 16))
    if planes.divisor is None:
        raise FormatError("nvfp4 planes need a divisor")
    start, divisor = block_scale_offsets(rows, columns)
    swizzled = scales.reshape(count // TILE, 4, 32, columns // 64, 4).permute(0, 3, 2, 1, 4)
    runs = [(begin * columns // 2, _flat(codes)), (start + begin * columns // 16, _flat(swizzled))]
    if begin + count == rows:
        runs += _gap(rows * columns // 2, start)
        runs.append((divisor, np.array([planes.divisor], dtype="<f4").view(np.uint8)))
    return runs


def _unpack_nvfp4(rows: int, columns: int, data: torch.Tensor, r0: int, r1: int) -> Planes:
    _tiled("nvfp4", r0, r1)
    start, divisor = block_scale_offsets(rows, columns)
    codes = data[r0 * columns // 2 : r1 * columns // 2].reshape(r1 - r0, -1)
    scales = data[start + r0 * columns // 16 : start + r1 * columns // 16]
    natural = scales.reshape((r1 - r0) // TILE, columns // 64, 32, 4, 4).permute(0, 3, 2, 1, 4)
    value = data[divisor : divisor + 4].view(torch.float32).item()
    return Planes(codes, natural.reshape(r1 - r0, -1), value)


def _pack_row_scale(rows: int, columns: int, begin: int, planes: Planes) -> list[Run]:
    count, start = len(planes.codes), scale_offset(rows, columns)
    codes = _expect(_words(planes.codes), "fp8 codes", torch.uint8, (count, columns))
    scales = _expect(planes.scales, "fp8 row scales", torch.bfloat16, (count,))
    runs = [(begin * columns, _flat(codes)), (start + 2 * begin, _flat(scales))]
    return runs + (_gap(rows * columns, start) if begin + count == rows else [])


def _pack_tiles(rows: int, columns: int, begin: int, planes: Planes) -> list[Run]:
    count, start = len(planes.codes), scale_offset(rows, columns)
    _tiled("fp8_e4m3fn_block128_bf16", begin, begin + count)
    wide = columns // TILE
    codes = _expect(_words(planes.codes), "fp8 codes", torch.uint8, (count, columns))
    scales = _expect(planes.scales, "fp8 tile scales", torch.bfloat16, (count // TILE, wide))
    runs = [(begin * columns, _flat(codes)), (start + 2 * wide * (begin // TILE), _flat(scales))]
    return runs + (_gap(rows * columns, start) if begin + count == rows else [])


def _pack_k(rows: int, columns: int, begin: int, blocks: torch.Tensor, q6: np.ndarray | None) -> list[Run]:
    count, sizes = len(blocks), k_row_bytes(columns)
    if q6 is None or q6.shape != (rows,):
        raise FormatError(f"packing ggml_k needs `q6`, bool [{rows}]: which rows are Q6_K")
    six = blocks.shape[2] == ggml_codec.Q6_K
    if bool((q6[begin : begin + count] != six).any()):
        raise FormatError(
            f"rows [{begin}, {begin + count}) of ggml_k are not all {'Q6_K' if six else 'Q4_K'}"
        )
    first = begin * sizes[0] + int(q6[:begin].sum()) * (sizes[1] - sizes[0])
    offsets = first + np.arange(count, dtype=np.uint64) * np.uint64(sizes[six])
    table = (offsets.astype("<u8") << np.uint64(1)) | np.uint64(six)
    start = k_table_bytes(rows)
    runs = [(8 * begin, table.astype("<u8").view(np.uint8)), (start + first, _flat(blocks))]
    return runs + (_gap(8 * rows, start) if begin + count == rows else [])


def _unpack_blocks(found: Format, rows: int, columns: int, data: torch.Tensor, r0: int, r1: int) -> Planes:
    blocks = columns // found.group
    start, size = 0, found.block_bytes[0]
    first = r0 * blocks * size
    if found.name == "ggml_k":
        types = k_row_types((rows, columns), data)
        if bool((types[r0:r1] != types[r0]).any()):
            raise FormatError(f"rows [{r0}, {r1}) of ggml_k mix Q4_K and Q6_K; unpack runs of one type")
        start, size = k_table_bytes(rows), found.block_bytes[int(types[r0])]
        first = blocks * (144 * r0 + 66 * int(types[:r0].sum()))
    begin = start + first
    return Planes(data[begin : begin + (r1 - r0) * blocks * size].reshape(r1 - r0, blocks, size))


def _tiled(format: str, begin: int, end: int) -> None:
    if begin % TILE or end % TILE:
        raise FormatError(f"rows of {format} go in multiples of {TILE}, got [{begin}, {end})")


def _expect(
    plane: torch.Tensor | None, what: str, dtype: torch.dtype, shape: tuple[int, ...]
) -> torch.Tensor:
    if plane is None:
        raise FormatError(f"{what} are missing")
    if plane.dtype != dtype or tuple(plane.shape) != shape:
        raise FormatError(f"{what} must be {dtype} {list(shape)}, got {plane.dtype} {list(plane.shape)}")
    return plane


def _words(plane: torch.Tensor | None) -> torch.Tensor | None:
    """E4M3 planes are words; a float8 tensor (as safetensors gives it) is the same bytes."""
    return plane.view(torch.uint8) if plane is not None and plane.dtype == torch.float8_e4m3fn else plane


def _gap(begin: int, end: int) -> list[Run]:
    return [(begin, np.zeros(end - begin, dtype=np.uint8))] if end > begin else []


def _flat(plane: torch.Tensor) -> np.ndarray:
    return plane.contiguous().reshape(-1).view(torch.uint8).cpu().numpy()


def _tensor(data: Bytes) -> torch.Tensor:
    if isinstance(data, torch.Tensor):
        return data
    with warnings.catch_warnings():
        # Mapped files are read-only, and nobody writes to an object's bytes.
        warnings.simplefilter("ignore", UserWarning)
        return torch.from_numpy(data)
