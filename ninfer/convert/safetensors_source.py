"""A safetensors checkpoint (folder, index or one file) as a source, read slice by slice."""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open

from ninfer.convert import encoded_matrix
from ninfer.convert.source import SourceMatrix, TensorInfo, runs
from ninfer.errors import ConversionError

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
_DTYPES = ("BF16", "F16", "F32", "F64", "I32", "I64", "I8", "U8", "F8_E4M3")
_REMAP_AFTER = 1 << 28


class SafetensorsSource:
    """The checkpoint at `path`; `config` is the folder's `config.json`, None where there is none.

    Only one shard is mapped at a time, and mapped anew after 256 MiB, so that pages already read don't pile
    up. Safe to read from several threads.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._shards = _shards(path)
        folder = path if path.is_dir() else path.parent
        config = folder / "config.json"
        self.config: dict[str, Any] | None = read_object(config) if config.is_file() else None
        self._tensors = self._read_headers()
        self._mapped: tuple[Path, Any] | None = None
        self._read_bytes = 0
        self._lock = threading.Lock()

    @property
    def path(self) -> Path:
        return self._path

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        return self._tensors

    def has(self, name: str) -> bool:
        return name in self._tensors or encoded_matrix.packed_name(name) in self._tensors

    def matrix(self, name: str, shape: tuple[int, int]) -> SourceMatrix:
        return encoded_matrix.open_matrix(self, name, shape)

    def whole(self, name: str) -> torch.Tensor:
        info = self.info(name)
        return self._slice(name, info)[:] if info.shape else self._handle(name).get_tensor(name)

    def info(self, name: str) -> TensorInfo:
        """Shape and type of a tensor; ConversionError if absent or of a type that has no meaning here."""
        info = self._tensors.get(name)
        if info is None:
            raise ConversionError(f"{self._path} has no tensor '{name}'")
        if info.dtype not in _DTYPES:
            raise ConversionError(
                f"tensor '{name}' of {self._path} has the type {info.dtype}; supported are "
                f"{', '.join(_DTYPES)}"
            )
        return info

    def rows(self, name: str, rows: np.ndarray, count: int) -> torch.Tensor:
        """Rows of a tensor seen as a matrix of `count` rows: `[len(rows), K]` as stored (FP8 as uint8)."""
        info = self.info(name)
        inner = _inner_rows(name, info, count)
        width = math.prod(info.shape) // count
        pieces = []
        for begin, end in runs(rows):
            if inner == 1:
                pieces.append(self._slice(name, info)[begin:end])
                continue
            while begin < end:  # rows of a stack of matrices: one matrix at a time
                outer, first = divmod(begin, inner)
                last = min(inner, first + end - begin)
                pieces.append(self._slice(name, info)[outer : outer + 1, first:last])
                begin += last - first
        pieces = [_as_bytes(piece).reshape(-1, width) for piece in pieces]
        return pieces[0].contiguous() if len(pieces) == 1 else torch.cat(pieces)

    def close(self) -> None:
        self._mapped = None

    def _slice(self, name: str, info: TensorInfo) -> Any:
        del info
        return _Counted(self, self._handle(name).get_slice(name))

    def _handle(self, name: str) -> Any:
        shard = self._shards[name]
        with self._lock:
            if self._mapped is None or self._mapped[0] != shard or self._read_bytes > _REMAP_AFTER:
                self._mapped = None
                self._mapped = (shard, _open(shard))
                self._read_bytes = 0
            return self._mapped[1]

    def count(self, size: int) -> None:
        """Account bytes read through the current mapping."""
        with self._lock:
            self._read_bytes += size

    def _read_headers(self) -> dict[str, TensorInfo]:
        tensors: dict[str, TensorInfo] = {}
        for shard in sorted(set(self._shards.values())):
            handle = _open(shard)
            present = set(handle.keys())
            for name in (name for name, owner in self._shards.items() if owner == shard):
                if name not in present:
                    raise ConversionError(
                        f"{shard} lacks the tensor '{name}' that the index of {self._path} lists"
                    )
                piece = handle.get_slice(name)
                tensors[name] = TensorInfo(tuple(piece.get_shape()), piece.get_dtype())
        return tensors


class _Counted:
    """A lazy slice that reports what is read through it."""

    def __init__(self, source: SafetensorsSource, piece: Any) -> None:
        self._source = source
        self._piece = piece

    def __getitem__(self, index: Any) -> torch.Tensor:
        values = self._piece[index]
        self._source.count(values.nbytes)
        return values


def read_object(path: Path) -> dict[str, Any]:
    """A JSON file whose root is an object."""
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise ConversionError(f"{path} cannot be read as JSON: {error}") from None
    if not isinstance(found, dict):
        raise ConversionError(f"{path} holds a JSON {type(found).__name__}; an object is needed")
    return found


def _shards(path: Path) -> dict[str, Path]:
    """Tensor name -> file."""
    if path.is_dir():
        if (path / INDEX).is_file():
            return _indexed(path / INDEX)
        if (path / SINGLE).is_file():
            return _single(path / SINGLE)
        raise ConversionError(f"{path} has neither {INDEX} nor {SINGLE}; it is not a safetensors checkpoint")
    if not path.exists():
        raise ConversionError(f"{path} does not exist")
    return _indexed(path) if path.suffix == ".json" else _single(path)


def _single(path: Path) -> dict[str, Path]:
    return dict.fromkeys(_open(path).keys(), path)


def _indexed(path: Path) -> dict[str, Path]:
    listed = read_object(path).get("weight_map")
    if not isinstance(listed, dict) or not listed:
        raise ConversionError(f"{path} has no 'weight_map'")
    found: dict[str, Path] = {}
    for name, file in listed.items():
        if not isinstance(file, str) or Path(file).name != file:
            raise ConversionError(f"{path} sends the tensor '{name}' to {file!r}, which is not a file name")
        found[name] = path.parent / file
    for file in sorted(set(found.values())):
        if not file.is_file():
            raise ConversionError(f"{path} lists the file {file.name}, which is missing; fetch it")
    return found


def _open(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt", device="cpu")
    except (OSError, SafetensorError) as error:
        raise ConversionError(f"{path} is not a usable safetensors file: {error}") from None


def _inner_rows(name: str, info: TensorInfo, count: int) -> int:
    """1 if rows are the first axis, else rows per item of the first axis."""
    if info.shape and info.shape[0] == count:
        return 1
    if len(info.shape) == 3 and info.shape[0] * info.shape[1] == count:
        return info.shape[1]
    raise ConversionError(f"tensor '{name}' of shape {list(info.shape)} has no {count} rows")


def _as_bytes(piece: torch.Tensor) -> torch.Tensor:
    return piece.view(torch.uint8) if piece.dtype == torch.float8_e4m3fn else piece
