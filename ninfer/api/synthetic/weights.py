"""Random bytes of encoded objects, made on the device that they are for.

Codes are drawn uniformly from those of a format (E4M3: from four binades), scales within a quarter of the
one that gives the values the wanted standard deviation. All in place: beside the object itself, only its
scales take memory. A seed gives the same bytes on the same kind of device.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ninfer import formats
from ninfer.artifact import TensorObject
from ninfer.artifact.sizes import RowSplit, block_scale_offsets, k_row_bytes, k_table_bytes, scale_offset
from ninfer.formats import Format

Fill = Callable[[torch.Tensor, torch.Generator], object]
_E2M1 = (0, 0.5, 1, 1.5, 2, 3, 4, 6)
_TILE = 128


def encoded(
    tensor: TensorObject, std: float, device: torch.device, seed: int, q6: np.ndarray | None = None
) -> torch.Tensor:
    """uint8 `[tensor.bytes]`: a matrix whose values have mean 0 and standard deviation `std`.

    q6: `ggml_k` only, which rows are Q6_K (none, if None).
    """
    found = formats.get(tensor.format)
    draw = _Draw(tensor, found, std, device, torch.Generator(device).manual_seed(seed))
    {
        "direct": draw.direct,
        "grouped": draw.grouped,
        "block_float": draw.nvfp4,
        "row_float": draw.fp8_rows,
        "tile_float": draw.fp8_tiles,
        "ggml": lambda: draw.k_rows(q6) if found.name == "ggml_k" else draw.ggml(),
    }[found.kind]()
    return draw.data


def direct(
    tensor: TensorObject,
    fill: Fill,
    device: torch.device,
    seed: int,
) -> torch.Tensor:
    """uint8 `[tensor.bytes]` of a direct object; `fill` writes its words, float32 of the object's shape."""
    words = torch.empty(tensor.shape, dtype=torch.float32, device=device)
    fill(words, torch.Generator(device).manual_seed(seed))
    dtype = getattr(torch, formats.get(tensor.format).dtype)
    return words.to(dtype).reshape(-1).view(torch.uint8)


@dataclass(eq=False)
class _Draw:
    """One object being filled. `data` is random all over at first."""

    tensor: TensorObject
    format: Format
    std: float
    device: torch.device
    generator: torch.Generator

    def __post_init__(self) -> None:
        size = self.tensor.bytes
        if self.format.kind == "direct":
            self.data = torch.empty(size, dtype=torch.uint8, device=self.device)
            return
        words = torch.empty(-(-size // 8), dtype=torch.int64, device=self.device)
        self.data = words.random_(-(2**63), None, generator=self.generator).view(torch.uint8)[:size]

    @property
    def _shape(self) -> tuple[int, int]:
        rows, columns = self.tensor.shape
        return rows, columns

    def direct(self) -> None:
        self.data.view(getattr(torch, self.format.dtype)).normal_(0, self.std, generator=self.generator)

    def grouped(self) -> None:
        rows, columns = self._shape
        split = RowSplit.of(self.format, columns, rows)
        base = self.data[: rows * split.base_stride]
        codes = self._balance(base)
        self._clear(rows * split.base_stride, split.high_offset)
        self._clear(split.high_offset + rows * split.high_stride, split.scale_offset)
        scales = self._scales((rows, split.groups), self.std / _rms(codes), torch.float16)
        padded = split.groups * self.format.group
        if padded != columns:
            # Padding holds zeros, as in a file.
            for plane, stride in ((base, split.base_stride), (self._high(rows, split), split.high_stride)):
                if stride:
                    plane.view(rows, stride)[:, -(-columns * stride // padded) :] = 0
            scales[:, -(-columns // self.format.group) :] = 0
        self._write(split.scale_offset, scales)

    def _balance(self, base: torch.Tensor) -> list[int]:
        """Make the codes' mean 0, else whole layers drift into one direction; returns all codes, each as
        often as it appears."""
        bits = self.format.bits
        least = -(1 << (bits - 1))
        codes = list(range(least, -least))
        if bits == 8:
            base.masked_fill_(base == 0x80, 0)
            return [code if code != least else 0 for code in codes]
        if bits == 4:
            # A nibble 8 (-8) becomes 0.
            some = (base | base >> 1 | base >> 2) & 0x11
            base &= some << 3 | 0x77
            return [code if code != least else 0 for code in codes]
        # Nibbles 0 become 8, which with any high bits has its opposite among the others.
        some = (base | base >> 1 | base >> 2 | base >> 3) & 0x11
        base |= (some ^ 0x11) << 3
        return [code if code % 16 else code + 8 for code in codes]

    def _high(self, rows: int, split: RowSplit) -> torch.Tensor:
        return self.data[split.high_offset : split.high_offset + rows * split.high_stride]

    def nvfp4(self) -> None:
        rows, columns = self._shape
        start, divisor = block_scale_offsets(rows, columns)
        self._clear(rows * columns // 2, start)
        scales = self.data[start:divisor]
        scales.bitwise_and_(0x0F).bitwise_or_(0x60)  # E4M3 of 32 to 120
        size = _rms(_E2M1) * _rms([(1 + m / 8) * 2.0**e for e in (5, 6) for m in range(8)])
        self._write(divisor, torch.tensor([size / self.std], dtype=torch.float32))

    def fp8_rows(self) -> None:
        rows, columns = self._shape
        size = self._e4m3(rows, columns)
        self._write(scale_offset(rows, columns), self._scales((rows,), self.std / size, torch.bfloat16))

    def fp8_tiles(self) -> None:
        rows, columns = self._shape
        size = self._e4m3(rows, columns)
        tiles = (rows // _TILE, columns // _TILE)
        self._write(scale_offset(rows, columns), self._scales(tiles, self.std / size, torch.bfloat16))

    def _e4m3(self, rows: int, columns: int) -> float:
        """Keep sign, mantissa and two bits of the exponent: 1/8 to 15/8. Returns their size."""
        self.data[: rows * columns].bitwise_and_(0x9F).bitwise_or_(0x20)
        self._clear(rows * columns, scale_offset(rows, columns))
        return _rms([(1 + m / 8) * 2.0**e for e in range(-3, 1) for m in range(8)])

    def ggml(self) -> None:
        self._blocks(self.data.view(-1, self.format.block_bytes[0]), self.format.name)

    def k_rows(self, q6: np.ndarray | None) -> None:
        rows, columns = self._shape
        six = np.zeros(rows, dtype=bool) if q6 is None else q6
        sizes = np.where(six, k_row_bytes(columns)[1], k_row_bytes(columns)[0]).astype(np.int64)
        starts = np.cumsum(sizes) - sizes
        begin = k_table_bytes(rows)
        self._write(0, torch.from_numpy(starts << 1 | six))
        self._clear(8 * rows, begin)
        edges = [0, *(1 + np.flatnonzero(six[1:] != six[:-1])).tolist(), rows]
        for a, b in itertools.pairwise(edges):
            run = self.data[begin + starts[a] : begin + starts[b - 1] + sizes[b - 1]]
            self._blocks(run.view(-1, self.format.block_bytes[int(six[a])]), "q6_k" if six[a] else "q4_k")

    def _blocks(self, blocks: torch.Tensor, kind: str) -> None:
        """Factors of random GGML blocks, uint8 `[n, bytes]`; offsets such that the mean is 0."""
        if kind in ("q4_k", "ggml_q5_k"):
            top = 15 if kind == "q4_k" else 31
            # 6-bit scales of 32 to 63, and the same minima.
            packed = blocks[:, 4:16]
            packed[:, :4] |= 0xA0
            packed[:, 4:8] = packed[:, :4]
            packed[:, 8:] &= 0x0F
            packed[:, 8:] |= packed[:, 8:] << 4
            centre = top / 2
            size = _rms(range(32, 64)) * _rms([code - centre for code in range(top + 1)])
            self._factors(blocks, 0, self.std / size, (2, centre))
        elif kind == "q6_k":
            size = _rms(range(-128, 128)) * _rms(range(-32, 32))
            self._factors(blocks, 208, self.std / size)
        elif kind == "ggml_q4_1":
            self._factors(blocks, 0, self.std / _rms([code - 7.5 for code in range(16)]), (2, -7.5))
        elif kind == "ggml_q4_0":
            self._factors(blocks, 0, self.std / _rms(range(-8, 8)))
        else:
            self._factors(blocks, 0, self.std / _rms(range(-128, 128)))

    def _factors(
        self, blocks: torch.Tensor, at: int, size: float, offset: tuple[int, float] | None = None
    ) -> None:
        """FP16 factors of about `size` at byte `at` of each block; `offset`: byte, multiple of the factor."""
        factors = self._scales((len(blocks), 1), size, torch.float16)
        if offset is None:  # codes reach from -n to n - 1: with either sign their mean is 0
            signs = torch.empty_like(factors).random_(2, generator=self.generator)
            factors *= 2 * signs - 1
        blocks[:, at : at + 2] = factors.view(torch.uint8)
        if offset is not None:
            byte, multiple = offset
            blocks[:, byte : byte + 2] = (factors.float() * multiple).half().view(torch.uint8)

    def _scales(self, shape: Sequence[int], size: float, dtype: torch.dtype) -> torch.Tensor:
        scales = torch.empty(tuple(shape), dtype=torch.float32, device=self.device)
        return scales.uniform_(0.75 * size, 1.25 * size, generator=self.generator).to(dtype)

    def _write(self, at: int, words: torch.Tensor) -> None:
        data = words.contiguous().reshape(-1).view(torch.uint8)
        self.data[at : at + len(data)] = data.to(self.device)

    def _clear(self, begin: int, end: int) -> None:
        self.data[begin:end] = 0


def _rms(values: Sequence[float]) -> float:
    return math.sqrt(sum(value * value for value in values) / len(values))
