"""Tensors of a GGUF file as a source, copied out of a mapping whose pages are given back at once."""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from ninfer.convert.gguf_file import GgufFile, GgufTensor
from ninfer.convert.source import Blocks, TensorInfo, reorder_columns
from ninfer.errors import ConversionError
from ninfer.formats import Planes, decode, get

DIRECT = {"F32": ("fp32", np.float32), "F16": ("fp16", np.float16), "BF16": ("bf16", np.int16)}
BLOCKS = {
    "Q4_0": "ggml_q4_0",
    "Q4_1": "ggml_q4_1",
    "Q8_0": "ggml_q8_0",
    "Q5_K": "ggml_q5_k",
    "Q4_K": "ggml_k",
    "Q6_K": "ggml_k",
}


class GgufSource:
    """A GGUF file opened for conversion; owns the mapping."""

    def __init__(self, path: Path) -> None:
        self.file = GgufFile.open(path)
        self._tensors = {
            name: TensorInfo(tensor.shape, tensor.type) for name, tensor in self.file.tensors.items()
        }

    @property
    def path(self) -> Path:
        return self.file.path

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        return self._tensors

    def has(self, name: str) -> bool:
        return name in self._tensors

    def matrix(self, name: str, shape: tuple[int, int]) -> GgufMatrix:
        tensor = self._tensor(name)
        if tensor.shape != shape:
            raise ConversionError(
                f"tensor '{name}' of {self.path} has shape {list(tensor.shape)}; the config asks for "
                f"{list(shape)}"
            )
        if tensor.type not in DIRECT and tensor.type not in BLOCKS:
            known = ", ".join((*DIRECT, *BLOCKS))
            raise ConversionError(
                f"tensor '{name}' of {self.path} has the type {tensor.type}; supported are {known}"
            )
        return GgufMatrix(self.file, tensor)

    def whole(self, name: str) -> torch.Tensor:
        tensor = self._tensor(name)
        if tensor.type not in DIRECT:
            raise ConversionError(
                f"tensor '{name}' of {self.path} has the type {tensor.type}; it has to be {', '.join(DIRECT)}"
            )
        rows = np.arange(tensor.shape[0])
        return _numbers(self.file, tensor, rows).reshape(tensor.shape)

    def close(self) -> None:
        with contextlib.suppress(BufferError):  # an error's traceback may still hold a view; it unmaps later
            self.file.data.close()

    def _tensor(self, name: str) -> GgufTensor:
        tensor = self.file.tensors.get(name)
        if tensor is None:
            raise ConversionError(f"{self.path} has no tensor '{name}'")
        return tensor


@dataclass(frozen=True, eq=False)
class GgufMatrix:
    """One matrix of the file; see `SourceMatrix`."""

    file: GgufFile
    tensor: GgufTensor
    weight_divisor: float | None = None
    input_divisor: float | None = None

    @property
    def shape(self) -> tuple[int, int]:
        return self.tensor.shape[0], self.tensor.shape[1]

    @property
    def stored(self) -> str:
        kind = self.tensor.type
        return DIRECT[kind][0] if kind in DIRECT else BLOCKS[kind]

    @property
    def encoded_unit(self) -> int:
        return 1 if self.tensor.type in DIRECT else get(self.stored).group

    @property
    def block_bytes(self) -> int:
        return 0 if self.tensor.type in DIRECT else self.row_bytes * self.encoded_unit // self.shape[1]

    @property
    def row_bytes(self) -> int:
        return self.tensor.bytes // self.tensor.shape[0]

    def values(self, rows: np.ndarray, columns: Blocks | None = None) -> torch.Tensor:
        if self.tensor.type in DIRECT:
            return reorder_columns(_numbers(self.file, self.tensor, rows), columns)
        return reorder_columns(decode(self.stored, self.encoded(rows)), columns)

    def encoded(self, rows: np.ndarray, columns: Blocks | None = None) -> Planes:
        if columns is not None and columns.width % self.encoded_unit:
            raise ConversionError(
                f"columns of '{self.tensor.name}' are {self.tensor.type} blocks of {self.encoded_unit}; "
                "they cannot move in "
                f"groups of {columns.width}"
            )
        blocks = torch.from_numpy(_rows(self.file, self.tensor, rows, np.uint8))
        if columns is not None:
            blocks = reorder_columns(
                blocks, Blocks(columns.width // self.encoded_unit * self.block_bytes, columns.order)
            )
        return Planes(blocks.reshape(len(rows), -1, self.block_bytes))


def _numbers(file: GgufFile, tensor: GgufTensor, rows: np.ndarray) -> torch.Tensor:
    words = torch.from_numpy(_rows(file, tensor, rows, DIRECT[tensor.type][1]))
    return words.view(torch.bfloat16) if tensor.type == "BF16" else words


def _rows(file: GgufFile, tensor: GgufTensor, rows: np.ndarray, dtype: type[np.generic]) -> np.ndarray:
    """A copy of the given rows, `[len(rows), words a row]`."""
    table = np.frombuffer(file.data, np.uint8, tensor.bytes, tensor.offset).reshape(tensor.shape[0], -1)
    copied = table[rows].view(np.dtype(dtype).newbyteorder("<"))
    del table
    if len(rows) and hasattr(
        mmap, "MADV_DONTNEED"
    ):  # resident pages of the mapping would count as our memory
        row_bytes = tensor.bytes // tensor.shape[0]
        begin = tensor.offset + int(rows.min()) * row_bytes
        end = tensor.offset + (int(rows.max()) + 1) * row_bytes
        begin -= begin % mmap.PAGESIZE
        file.data.madvise(mmap.MADV_DONTNEED, begin, min(end, len(file.data)) - begin)
    return copied
