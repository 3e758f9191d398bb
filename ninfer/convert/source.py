"""What a checkpoint offers to the converter: named tensors, read a few rows at a time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np

if TYPE_CHECKING:
    import torch

    from ninfer.formats import Planes

TILE = 128
"""Rows and columns that share one scale in block FP8."""


@dataclass(frozen=True)
class TensorInfo:
    """Shape (slowest axis first) and the source's own name of the stored type."""

    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True, eq=False)
class Blocks:
    """A reordering of column blocks: logical block j of `width` columns is the stored block `order[j]`."""

    width: int
    order: np.ndarray

    @property
    def identity(self) -> bool:
        return bool(np.array_equal(self.order, np.arange(len(self.order))))


class SourceMatrix(Protocol):
    """A `[N, K]` matrix in a checkpoint, stored as numbers or as codes of a known format."""

    @property
    def shape(self) -> tuple[int, int]: ...

    @property
    def stored(self) -> str:
        """Name of the format whose words the source holds: `bf16`, `fp32`, `nvfp4`, `ggml_q4_1`, ..."""
        ...

    @property
    def encoded_unit(self) -> int:
        """Columns that move together when reordered; 1 for plain numbers, 0 if columns cannot move."""
        ...

    @property
    def block_bytes(self) -> int:
        """Bytes of one GGML block, which tells Q4_K from Q6_K; 0 for everything else."""
        ...

    @property
    def weight_divisor(self) -> float | None:
        """FP32 divisor of the stored codes (NVFP4 only)."""
        ...

    @property
    def input_divisor(self) -> float | None:
        """FP32 activation divisor that the checkpoint was calibrated with, if it has one."""
        ...

    def values(self, rows: np.ndarray, columns: Blocks | None = None) -> torch.Tensor:
        """Numbers `[len(rows), K]` in bf16, fp16 or fp32; codes are decoded to fp32."""
        ...

    def encoded(self, rows: np.ndarray, columns: Blocks | None = None) -> Planes:
        """Codes and scales of the rows, unchanged."""
        ...


class Source(Protocol):
    """An opened checkpoint. Reading is lazy; `close` releases files and mappings."""

    @property
    def path(self) -> Path: ...

    @property
    def tensors(self) -> Mapping[str, TensorInfo]: ...

    def matrix(self, name: str, shape: tuple[int, int]) -> SourceMatrix:
        """The matrix whose full-precision tensor is called `name`; ConversionError if absent or misshapen."""
        ...

    def has(self, name: str) -> bool:
        """Whether `matrix(name)` or `whole(name)` would find something."""
        ...

    def whole(self, name: str) -> torch.Tensor:
        """A small unquantized tensor in the shape and type of the file."""
        ...

    def close(self) -> None: ...


def runs(index: np.ndarray) -> Iterator[tuple[int, int]]:
    """Maximal ascending runs [begin, end) of an index vector, in order."""
    if not len(index):
        return
    breaks = np.flatnonzero(np.diff(index) != 1) + 1
    starts = np.concatenate(([0], breaks))
    ends = np.concatenate((breaks, [len(index)]))
    for start, end in zip(starts.tolist(), ends.tolist(), strict=True):
        yield int(index[start]), int(index[end - 1]) + 1


def is_whole_tiles(rows: np.ndarray) -> bool:
    """Whether a selection of rows consists of aligned groups of 128 that stay together."""
    if len(rows) % TILE:
        return False
    groups = rows.reshape(-1, TILE)
    return bool((groups == groups[:, :1] + np.arange(TILE)).all() and not (groups[:, 0] % TILE).any())


def reorder_columns(values: torch.Tensor, columns: Blocks | None) -> torch.Tensor:
    """Apply a block reordering to `[n, K]` numbers."""
    import torch

    if columns is None:
        return values
    blocks = values.reshape(values.shape[0], -1, columns.width)
    return blocks[:, torch.from_numpy(columns.order)].reshape(values.shape)
