"""How one logical parameter is cut out of a checkpoint's tensors.

A matrix is a selection of whole rows (and, where a GGUF exporter reordered them, whole column blocks), so
stored codes can be moved as they are. Small direct tensors are read whole and may pass through a formula.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ninfer.convert.source import Blocks, Source, SourceMatrix
from ninfer.errors import ConversionError

if TYPE_CHECKING:
    import torch

    from ninfer.formats import Planes


@dataclass(frozen=True, eq=False)
class Rows:
    """Rows `index` (all, if None) of the source matrix `tensor` of shape `[N, K]`, in that order."""

    tensor: str
    shape: tuple[int, int]
    index: np.ndarray | None = None
    columns: Blocks | None = None

    @property
    def count(self) -> int:
        return self.shape[0] if self.index is None else len(self.index)

    @property
    def width(self) -> int:
        return self.shape[1]

    def take(self, begin: int, end: int) -> np.ndarray:
        """Stored row numbers of the logical rows [begin, end)."""
        return np.arange(begin, end) if self.index is None else self.index[begin:end]

    def open(self, source: Source) -> SourceMatrix:
        return source.matrix(self.tensor, self.shape)

    def values(self, matrix: SourceMatrix, begin: int, end: int) -> torch.Tensor:
        return matrix.values(self.take(begin, end), self.columns)

    def encoded(self, matrix: SourceMatrix, begin: int, end: int) -> Planes:
        return matrix.encoded(self.take(begin, end), self.columns)


@dataclass(frozen=True, eq=False)
class Whole:
    """A direct tensor: `transform` turns the stored tensor into the logical one of shape `shape`."""

    tensor: str
    shape: tuple[int, ...]
    stored_shapes: tuple[tuple[int, ...], ...]
    transform: Callable[[torch.Tensor], torch.Tensor]

    def check(self, source: Source) -> None:
        """ConversionError if the source lacks the tensor or has it in another shape."""
        info = source.tensors.get(self.tensor)
        if info is None:
            raise ConversionError(f"{source.path} has no tensor '{self.tensor}'")
        if info.shape not in self.stored_shapes:
            expected = " or ".join(str(list(shape)) for shape in self.stored_shapes)
            raise ConversionError(
                f"tensor '{self.tensor}' of {source.path} has shape {list(info.shape)}; the config asks "
                f"for {expected}"
            )

    def read(self, source: Source) -> torch.Tensor:
        return self.transform(source.whole(self.tensor)).reshape(self.shape)


@dataclass(frozen=True, eq=False)
class Computed:
    """A direct tensor made by the converter itself."""

    tensor: str
    data: torch.Tensor

    def read(self, source: Source) -> torch.Tensor:
        del source
        return self.data


View = Rows | Whole | Computed


def vector(tensor: str, size: int, transform: Callable[[torch.Tensor], torch.Tensor] | None = None) -> Whole:
    """A rank-1 direct tensor."""
    return Whole(tensor, (size,), ((size,),), transform or (lambda values: values))


def half_heads(heads: int, dim: int, half: int) -> np.ndarray:
    """Rows of query (half 0) or gate (half 1) in a projection that stores them head by head."""
    return (np.arange(heads)[:, None] * 2 * dim + half * dim + np.arange(dim)).reshape(-1)


def untiled(key_heads: int, value_heads: int) -> np.ndarray:
    """Tiled position of each value head: GGUF stores head (key k, repeat r) at r * key_heads + k."""
    repeats = value_heads // key_heads
    head = np.arange(value_heads)
    return (head % repeats) * key_heads + head // repeats


def head_rows(order: np.ndarray, width: int, first: int = 0) -> np.ndarray:
    """Rows of heads `order`, `width` rows each, behind `first` other rows."""
    return (first + order[:, None] * width + np.arange(width)).reshape(-1)


def half_split_pairs(heads: int, dim: int) -> np.ndarray:
    """Rows of a rotary projection whose pairs are stored adjacent, in the half-split order used here."""
    split = np.arange(dim).reshape(dim // 2, 2).T.reshape(-1)
    return (np.arange(heads)[:, None] * dim + split).reshape(-1)
