"""Attention of few columns (decode and verification) over paged keys and values.

The keys of a column are cut into splits of whole pages, of equal length but the last: `split_target` of them
or fewer, as a function of the column's own length alone. A split yields the reference score, the mass and the
weighted values of each column and query head (float32); a second kernel folds a column's splits in ascending
order, turns the sum back where values are rotated, and rounds once. Lengths are read on the device; launches
and scratch follow from shapes and `extent`.

The first kernel reads positions, the table, and keys before the first column of a request while the kernel
ahead may still run. That one must only be writing the columns' own keys: all else must have been complete
before it began, as it is in a pass of a model (see `dependent`).

Kernels: `csrc/attend_few.cuh`; for other widths and in the interpreter, `attend_few_triton`.

Roofline: the bytes of K and V. INT8 at 85,000 keys of 4 heads of 256: 179.5 MB, 40 us on an H200.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from ninfer.errors import OptionError
from ninfer.formats import KvCode, KvFormat
from ninfer.ops.attention import PAGE, KvPages
from ninfer.ops.cuda import attend_few_triton
from ninfer.ops.cuda.compile import Module

MOST_COLUMNS = 16
"""Columns of a request that this route takes."""
_ASSUMED_SMS = 8
"""Multiprocessors of a device that is none (Triton's interpreter)."""
_LOG2E = 1.4426950408889634
_CODES = {KvCode.PLAIN: 0, KvCode.INT8: 1, KvCode.FP8: 2, KvCode.NVFP4: 3}
_TILES = (1, 2, 3, 4, 6)
"""Tiles of 8 rows that a block may have."""
_SHARED_BYTES = 227 << 10
_MOST_STAGES = 4


@dataclass(frozen=True)
class Shape:
    """Keys of a tile; tiles that a group of warps holds (0: what fits); groups of a block; blocks of a
    multiprocessor."""

    keys: int
    stages: int = 0
    groups: int = 2
    blocks: int = 1


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":
        return _ASSUMED_SMS
    return torch.cuda.get_device_properties(device).multi_processor_count


def split_target(device: torch.device, heads: int) -> int:
    """Most splits of a column's keys for so many key heads: one block for each multiprocessor."""
    return max(1, _multiprocessors(device) // heads)


def launched_splits(target: int, table_pages: int, extent: int | None) -> int:
    """Splits for which blocks are launched and scratch is there: those with keys come first."""
    pages = table_pages if extent is None else min(table_pages, -(-extent // PAGE))
    return max(1, min(target, pages))


def paged_attention_few(
    q: torch.Tensor,
    pages: KvPages,
    page_table: torch.Tensor,
    cache_positions: torch.Tensor,
    scale: float,
    gate: torch.Tensor | None = None,
    extent: int | None = None,
) -> torch.Tensor:
    """`ops.paged_attention` for at most 16 columns a request: `[T, Hq, D]` bf16.

    With `gate [T, Hq * D]` (bf16, rows may be strided) the result, rounded, is multiplied by `sigmoid(gate)`
    and rounded again. Capture-safe after a first call with the same format, heads and columns a request.
    """
    if q.dtype != torch.bfloat16:
        raise OptionError(f"attention on CUDA takes bf16 queries, got {q.dtype}")
    columns, q_heads, width = q.shape
    pages.check(pages.heads, width, q.dtype)
    requests = len(page_table)
    if columns % requests or q_heads % pages.heads or len(cache_positions) != columns:
        raise OptionError(
            f"queries {tuple(q.shape)} at {len(cache_positions)} positions of {requests} requests do not fit "
            f"pages of {pages.heads} heads"
        )
    if columns > MOST_COLUMNS * requests:
        raise OptionError(f"{columns // requests} columns of a request are more than {MOST_COLUMNS}")
    if gate is not None and (gate.shape != (columns, q_heads * width) or gate.dtype != q.dtype):
        raise OptionError(f"a gate {tuple(gate.shape)} {gate.dtype} does not fit queries {tuple(q.shape)}")
    return attend(q, pages, page_table, cache_positions, scale, gate, extent)


def attend(
    q: torch.Tensor,
    pages: KvPages,
    page_table: torch.Tensor,
    positions: torch.Tensor,
    scale: float,
    gate: torch.Tensor | None,
    extent: int | None,
    target: int | None = None,
    shape: Shape | None = None,
    portable: bool = False,
) -> torch.Tensor:
    """`paged_attention_few` of what was checked; benchmarks choose `target`, `shape` and Triton's kernels."""
    columns, q_heads, width = q.shape
    if q.stride(2) != 1 or q.stride(1) != width or q.stride(0) % 8 or q.data_ptr() % 16:
        q = q.contiguous()
    if gate is not None and gate.stride(1) != 1:
        gate = gate.contiguous()
    if target is None:
        target = split_target(q.device, pages.heads)
    splits = launched_splits(target, page_table.shape[1], extent)
    out = torch.empty((columns, q_heads, width), dtype=q.dtype, device=q.device)
    rows = columns * q_heads * splits
    sums = torch.empty(rows * width, dtype=torch.float32, device=q.device)
    tops = torch.empty(rows * 2, dtype=torch.float32, device=q.device)
    if q.is_cuda and not portable and _served(pages.format, width, q_heads // pages.heads):
        run = _launch if shape is None else functools.partial(_launch, shape=shape)
        run(q, pages, page_table, positions, scale, gate, target, splits, sums, tops, out)
    else:
        attend_few_triton.attend(
            q, pages, page_table, positions, scale, gate, target, splits, sums, tops, out
        )
    return out


def _served(format: KvFormat, width: int, group: int) -> bool:
    """Have the CUDA C++ kernels this?"""
    if width == 64 and KvCode.NVFP4 in (format.keys.code, format.values.code):
        return False
    return width in (64, 128, 256) and group <= 8 * _TILES[-1]


def shared_bytes(format: KvFormat, width: int, tiles: int, shape: Shape) -> int:
    """Shared memory of a block, as `attend_few.cuh` lays it out."""
    stage = 0
    for side in (format.keys, format.values):
        codes = side.code.codes(width) * (2 if side.code is KvCode.PLAIN else 1)
        scales = side.code.vector_bytes(width, 2) - codes
        stage += codes + (4 if scales == 2 else scales)
    steps = width // (32 if format.keys.code is KvCode.INT8 else 16)
    queries = steps * 512 * ((tiles + 1) // 2 if format.keys.code is KvCode.PLAIN else tiles)
    weights = tiles * shape.keys * (32 if format.values.code is KvCode.PLAIN else 16)
    of_group = shape.stages * shape.keys * stage + weights + tiles * 128
    return shape.groups * of_group + queries + tiles * 32 + 256


def best_shape(format: KvFormat, width: int, tiles: int, shape: Shape | None = None) -> Shape:
    """`shape`, or what was best on an H200, with as many stages as fit."""
    if shape is None:
        shape = Shape(32 if format is KvFormat.BF16 else 64)
    if shape.stages:
        return shape
    room = _SHARED_BYTES // shape.blocks - 1024 * (shape.blocks > 1)
    shapes = [replace(shape, stages=n) for n in range(_MOST_STAGES, 1, -1)]
    return next((s for s in shapes if shared_bytes(format, width, tiles, s) <= room), shapes[-1])


@functools.cache
def _kernels(
    format: KvFormat, width: int, heads: int, group: int, target: int, tiles: int, shape: Shape | None
) -> tuple[Module, int]:
    """The compiled kernels and the shared memory of the first."""
    shape = best_shape(format, width, tiles, shape)
    keys, values = format.keys, format.values
    shared = shared_bytes(format, width, tiles, shape)
    defines: Mapping[str, int] = {
        "D": width,
        "HEADS": heads,
        "GROUP": group,
        "TARGET": target,
        "K_CODE": _CODES[keys.code],
        "V_CODE": _CODES[values.code],
        "K_TURNED": int(keys.rotation(width)),
        "V_TURNED": int(values.rotation(width)),
        "NT": tiles,
        "KEYS": shape.keys,
        "STAGES": shape.stages,
        "GROUPS": shape.groups,
        "BLOCKS": shape.blocks,
        "SHARED": shared,
    }
    return Module("attend_few.cuh", defines), shared


def _launch(
    q: torch.Tensor,
    pages: KvPages,
    page_table: torch.Tensor,
    positions: torch.Tensor,
    scale: float,
    gate: torch.Tensor | None,
    target: int,
    splits: int,
    sums: torch.Tensor,
    tops: torch.Tensor,
    out: torch.Tensor,
    shape: Shape | None = None,
) -> None:
    total, q_heads, width = q.shape
    requests, heads = len(page_table), pages.heads
    columns, group = total // requests, q_heads // heads
    blocks = -(-columns // max(1, 8 * _TILES[-1] // group))
    block_columns = -(-columns // blocks)
    needed = -(-block_columns * group // 8)
    tiles = next(n for n in _TILES if n >= needed)
    module, shared = _kernels(pages.format, width, heads, group, target, tiles, shape)
    split = module.function("attend_split", q.device, shared)
    merge = module.function("attend_merge", q.device)
    split.launch(
        (heads * blocks, splits, requests), (128 * (shape.groups if shape else 2),),
        (q, q.stride(0), pages.k, pages.k_scales, pages.v, pages.v_scales, page_table, page_table.stride(0),
         positions, sums, tops, scale * _LOG2E, splits, columns, block_columns),
        pdl=True,
    )  # fmt: skip
    turned = pages.format.values.rotation(width)
    merge.launch(
        (total * q_heads, 1 if turned else width // 64), (512 if turned else 256,),
        (sums, tops, positions, gate, 0 if gate is None else gate.stride(0), out, splits),
        pdl=True,
    )  # fmt: skip


def few_bytes(device: torch.device, columns: int, context: int, heads: int, kv_heads: int, width: int) -> int:
    """Output and scratch of a call with tables for `context` tokens."""
    splits = launched_splits(split_target(device, kv_heads), -(-context // PAGE), None)
    return columns * heads * (2 * width + splits * (4 * width + 8))
