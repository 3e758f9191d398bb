"""Weights on the device: fragments of 16 rows by 64 columns, in the order in which lanes of a warp use them.

A matrix becomes one or more segments, each of one format. A segment's rows are padded with zeros to whole
tiles of 16, its columns to whole units of 64 (`unit_columns`, where a format needs more). `data` holds tile
after tile, in a tile unit after unit, `unit_bytes` each: first the codes, then the scales.

Codes of a unit, by lane = 4 r + q (r in 0..7, q in 0..3): the codes of row r, then those of row r + 8, of the
lane's 16 columns, which are 16 q .. 16 q + 15 of the unit (`Order.OWNED`: one scale group of NVFP4 belongs to
one lane), or 16 j + 4 q .. 16 j + 4 q + 3 for j in 0..3 (`Order.STEPPED`: step j is one group of 16). In both
orders the lane's columns 4 j .. 4 j + 3 are what it feeds to step j of four `mma.m16n8k16` products. A lane's
codes are cut into vectors of 16 bytes, and vector v of all lanes stand together, at `512 v + 16 lane`.
How codes stand in a vector, and which scales follow, is the format's choice, written above its decoder in
`csrc/formats_a.cuh` and `csrc/formats_b.cuh`.

NVFP4: 8 codes in a word of 32 bits, columns 0, 2, 4, 6 in the low half, 1, 3, 5, 7 in the high half, each
half's bits by `NIBBLES`; a unit's scales are bytes `8 (E + 22) + M` for 2^E (1 + M / 8) at `512 + 2 lane`
(row r) and `513 + 2 lane` (row r + 8); codes under a zero scale are 0; `row_scales` hold `2^7 / divisor`. FP8
by rows: bytes 0 .. 3 of a word are columns `FP8_BYTES`; `row_scales` hold the rows' factors. BF16: vector j
of a lane is step j: columns 4 j, 4 j + 1 of row r, of row r + 8, then 4 j + 2, 4 j + 3 of both.

In a SWIGLU segment a tile holds 8 gate rows and the 8 up rows that belong to them, so that a lane holds both.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import torch

TILE = 16
UNIT = 64

NIBBLES = ((6, 15), (3, 12), (0, 13), (9, 14))
"""Of four codes in 16 bits: the lowest bit of the magnitude, the bit of the sign."""

FP8_BYTES = (2, 0, 3, 1)
"""Which of four columns each byte of a word holds."""


class Order(IntEnum):
    """Which columns of a unit a lane holds."""

    OWNED = 0
    STEPPED = 1


@dataclass(frozen=True)
class Packing:
    """How a format is packed: `kernel` names its decoder in `csrc/`, sizes in bytes and columns.

    `row_scaled`: each row's sum is multiplied by a float32 factor of the row (`Segment.row_scales`). `sums`:
    what small products keep beside a unit's columns of x, 16 bytes each for two tokens.
    """

    kernel: str
    order: Order
    unit_bytes: int
    unit_columns: int = UNIT
    row_scaled: bool = False
    sums: int = 0


@dataclass(frozen=True, eq=False)
class Segment:
    """Rows of one format. `first` is the first output row; `row_map` (int32 `[rows]`) says instead where each
    row goes, where they do not stand together (-1: nowhere). `data` uint8; `row_scales` float32
    `[rows padded to 16]`, in the order of the packed rows. In a SWIGLU segment `rows` counts gate and up
    rows, and `first` and `row_map` mean outputs, half as many."""

    packing: Packing
    format: str
    first: int
    rows: int
    columns: int
    data: torch.Tensor
    row_scales: torch.Tensor | None = None
    row_map: torch.Tensor | None = None

    @property
    def tiles(self) -> int:
        return -(-self.rows // TILE)

    @property
    def units(self) -> int:
        return -(-self.columns // self.packing.unit_columns)


@dataclass(frozen=True, eq=False)
class Packed:
    """What `Matrix.plan` is on the device, for LINEAR and SWIGLU matrices.

    `interleaved`: SWIGLU tiles as above, one segment; else a SWIGLU matrix is packed as it is, because its
    halves have different formats. `bytes`: what the segments take.
    """

    rows: int
    columns: int
    segments: tuple[Segment, ...]
    interleaved: bool = False

    @property
    def bytes(self) -> int:
        return sum(segment.data.numel() for segment in self.segments)
