"""Matrices of a safetensors checkpoint, plain or already quantized.

Recognized by tensor names and types alone: compressed-tensors NVFP4 (`X.weight_packed`), ModelOpt NVFP4
(`X.weight` is U8), FP8 rows (`X.weight` is F8_E4M3 with one scale a row or one in all) and FP8 128x128
blocks (`X.weight_scale_inv`). Codes and scales are imported as they are.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from ninfer.convert.members import float32
from ninfer.convert.source import TILE, Blocks, is_whole_tiles, reorder_columns
from ninfer.errors import ConversionError
from ninfer.formats import Planes, decode

if TYPE_CHECKING:
    from ninfer.convert.safetensors_source import SafetensorsSource

_PLAIN = {"BF16": "bf16", "F16": "fp16", "F32": "fp32", "F64": "fp32"}
_GROUP = 16


def packed_name(name: str) -> str:
    """Where compressed-tensors keeps the NVFP4 codes of `name`."""
    return name + "_packed"


def open_matrix(source: SafetensorsSource, name: str, shape: tuple[int, int]) -> PlainMatrix | EncodedMatrix:
    """The matrix called `name` in full precision, in whatever encoding the checkpoint has it."""
    if packed_name(name) in source.tensors:
        return _compressed_nvfp4(source, name, shape)
    info = source.info(name)
    if info.dtype == "U8":
        return _modelopt_nvfp4(source, name, shape)
    if info.dtype == "F8_E4M3":
        if name + "_scale_inv" in source.tensors:
            return _fp8_blocks(source, name, shape)
        return _fp8_rows(source, name, shape)
    if info.dtype not in _PLAIN:
        raise ConversionError(
            f"tensor '{name}' of {source.path} has the type {info.dtype}, which is not a weight"
        )
    if info.shape != shape and not (len(info.shape) > 2 and math.prod(info.shape) == math.prod(shape)):
        raise _shape_error(source, name, shape)
    return PlainMatrix(source, name, shape, _PLAIN[info.dtype])


@dataclass(frozen=True, eq=False)
class PlainMatrix:
    """Numbers; see `SourceMatrix`."""

    source: SafetensorsSource
    name: str
    shape: tuple[int, int]
    stored: str
    encoded_unit: int = 1
    block_bytes: int = 0
    weight_divisor: float | None = None
    input_divisor: float | None = None

    def values(self, rows: np.ndarray, columns: Blocks | None = None) -> torch.Tensor:
        numbers = self.source.rows(self.name, rows, self.shape[0])
        return reorder_columns(numbers.float() if numbers.dtype == torch.float64 else numbers, columns)

    def encoded(self, rows: np.ndarray, columns: Blocks | None = None) -> Planes:
        return Planes(self.values(rows, columns))


@dataclass(frozen=True, eq=False)
class EncodedMatrix:
    """Codes with scales; see `SourceMatrix`. `codes`, `scale`: tensor names; one scale may serve all."""

    source: SafetensorsSource
    name: str
    shape: tuple[int, int]
    stored: str
    codes: str
    scale: str
    weight_divisor: float | None = None
    input_divisor: float | None = None
    encoded_unit: int = 0
    block_bytes: int = 0

    def values(self, rows: np.ndarray, columns: Blocks | None = None) -> torch.Tensor:
        if self.stored != "fp8_e4m3fn_block128_bf16":
            return reorder_columns(decode(self.stored, self.encoded(rows)), columns)
        tiles, position = np.unique(rows // TILE, return_inverse=True)
        whole = (tiles[:, None] * TILE + np.arange(TILE)).reshape(-1)
        decoded = decode(self.stored, self.encoded(whole))
        return reorder_columns(decoded[torch.from_numpy(position * TILE + rows % TILE)], columns)

    def encoded(self, rows: np.ndarray, columns: Blocks | None = None) -> Planes:
        if columns is not None:
            raise ConversionError(f"columns of '{self.name}' cannot be reordered in the format {self.stored}")
        codes = self.source.rows(self.codes, rows, self.shape[0])
        scales = self._scales(rows)
        if self.stored != "nvfp4" and bool(((codes & 0x7F) == 0x7F).any()):
            raise ConversionError(f"tensor '{self.codes}' of {self.source.path} holds FP8 codes that are NaN")
        self._check(scales)
        return Planes(codes, scales, self.weight_divisor)

    def _scales(self, rows: np.ndarray) -> torch.Tensor:
        count = self.shape[0]
        if self.stored == "nvfp4":
            return self.source.rows(self.scale, rows, count)
        if self.stored == "fp8_e4m3fn_block128_bf16":
            return _bf16(self.source.rows(self.scale, self._tiles(rows), count // TILE), self, exact=True)
        info = self.source.info(self.scale)
        numbers = self.source.whole(self.scale).reshape(-1)
        if math.prod(info.shape) == 1:
            numbers = numbers.expand(count)
        return _bf16(numbers[torch.from_numpy(rows)], self, exact=False)

    def _tiles(self, rows: np.ndarray) -> np.ndarray:
        if not is_whole_tiles(rows):
            raise ConversionError(
                f"'{self.name}' is stored in 128x128 blocks; its rows cannot be cut otherwise"
            )
        return rows[::TILE] // TILE

    def _check(self, scales: torch.Tensor) -> None:
        if scales.dtype == torch.uint8:
            valid = scales < 0x7F
        else:
            valid = torch.isfinite(scales) & ~torch.signbit(scales)
        if not bool(valid.all()):
            raise ConversionError(
                f"tensor '{self.scale}' of {self.source.path} holds negative or non-finite scales"
            )


def _compressed_nvfp4(source: SafetensorsSource, name: str, shape: tuple[int, int]) -> EncodedMatrix:
    codes, scale = packed_name(name), name + "_scale"
    _check_nvfp4(source, name, codes, scale, shape)
    stem = name.removesuffix("weight")
    divisor = _positive(source, stem + "weight_global_scale")
    calibrated = stem + "input_global_scale"
    activation = _positive(source, calibrated) if calibrated in source.tensors else None
    return EncodedMatrix(source, name, shape, "nvfp4", codes, scale, divisor, activation)


def _modelopt_nvfp4(source: SafetensorsSource, name: str, shape: tuple[int, int]) -> EncodedMatrix:
    _check_nvfp4(source, name, name, name + "_scale", shape)
    stem = name.removesuffix("weight")
    divisor = _reciprocal(source, stem + "weight_scale_2")
    calibrated = stem + "input_scale"
    activation = _reciprocal(source, calibrated) if calibrated in source.tensors else None
    return EncodedMatrix(source, name, shape, "nvfp4", name, name + "_scale", divisor, activation)


def _fp8_rows(source: SafetensorsSource, name: str, shape: tuple[int, int]) -> EncodedMatrix:
    scale = name + "_scale"
    info = source.info(scale)
    if source.info(name).shape != shape:
        raise _shape_error(source, name, shape)
    if info.dtype not in ("BF16", "F32") or math.prod(info.shape) not in (1, shape[0]):
        raise ConversionError(
            f"'{name}' of {source.path} is FP8 with scales {info.dtype} {list(info.shape)}; one BF16 or "
            "FP32 scale a row is supported"
        )
    return EncodedMatrix(source, name, shape, "fp8_e4m3fn_row_bf16", name, scale)


def _fp8_blocks(source: SafetensorsSource, name: str, shape: tuple[int, int]) -> EncodedMatrix:
    scale = name + "_scale_inv"
    info = source.info(scale)
    if source.info(name).shape != shape:
        raise _shape_error(source, name, shape)
    if shape[0] % TILE or shape[1] % TILE:
        raise ConversionError(
            f"'{name}' of {source.path} is FP8 in 128x128 blocks, but {list(shape)} has partial blocks"
        )
    if info.shape != (shape[0] // TILE, shape[1] // TILE) or info.dtype not in ("BF16", "F32"):
        raise ConversionError(
            f"tensor '{scale}' of {source.path} is {info.dtype} {list(info.shape)}; one BF16 scale for "
            "each 128x128 block is supported"
        )
    return EncodedMatrix(source, name, shape, "fp8_e4m3fn_block128_bf16", name, scale)


def _check_nvfp4(
    source: SafetensorsSource, name: str, codes: str, scale: str, shape: tuple[int, int]
) -> None:
    rows, columns = shape
    packed, scales = source.info(codes), source.info(scale)
    if packed.dtype != "U8":
        raise ConversionError(
            f"tensor '{codes}' of {source.path} is packed as {packed.dtype}; only NVFP4 (U8) is supported"
        )
    if packed.shape != (rows, columns // 2):
        raise _shape_error(source, codes, (rows, columns // 2))
    if scales.shape != (rows, columns // _GROUP) or scales.dtype != "F8_E4M3" or columns % _GROUP:
        raise ConversionError(
            f"tensor '{scale}' of {source.path} is {scales.dtype} {list(scales.shape)}; NVFP4 of '{name}' "
            "needs one F8_E4M3 scale for 16 columns"
        )


def _positive(source: SafetensorsSource, name: str) -> float:
    value = _scalar(source, name)
    if not math.isfinite(value) or value <= 0:
        raise ConversionError(
            f"tensor '{name}' of {source.path} is {value}; a divisor must be positive and finite"
        )
    return value


def _reciprocal(source: SafetensorsSource, name: str) -> float:
    value = _positive(source, name)
    divisor = float32(1.0 / value)
    if not math.isfinite(divisor) or divisor <= 0:
        raise ConversionError(
            f"tensor '{name}' of {source.path} is {value}; its reciprocal is not a positive finite FP32"
        )
    return divisor


def _scalar(source: SafetensorsSource, name: str) -> float:
    info = source.info(name)
    if math.prod(info.shape) != 1 or info.dtype != "F32":
        raise ConversionError(
            f"tensor '{name}' of {source.path} is {info.dtype} {list(info.shape)}; an F32 scalar is needed"
        )
    return float(source.whole(name).reshape(()))


def _bf16(scales: torch.Tensor, matrix: EncodedMatrix, exact: bool) -> torch.Tensor:
    rounded = scales.to(torch.bfloat16)
    if exact and bool((rounded.float() != scales.float()).any()):
        raise ConversionError(
            f"tensor '{matrix.scale}' of {matrix.source.path} holds scales that are not BF16 values"
        )
    return rounded


def _shape_error(source: SafetensorsSource, name: str, shape: tuple[int, int]) -> ConversionError:
    found = list(source.info(name).shape)
    return ConversionError(
        f"tensor '{name}' of {source.path} has shape {found}; the config asks for {list(shape)}"
    )
