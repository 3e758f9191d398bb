"""The closed registry of weight formats: names and the few facts that everybody needs. No PyTorch here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ninfer.errors import FormatError

Kind = Literal["direct", "grouped", "block_float", "row_float", "tile_float", "ggml"]


@dataclass(frozen=True)
class Format:
    """One weight format.

    kind: `direct` (a word is the value), `grouped` (signed integers, FP16 scale per group), `block_float`
    (NVFP4), `row_float` (FP8, BF16 scale per row), `tile_float` (FP8, BF16 scale per 128x128 tile), `ggml`
    (blocks of a GGUF file, decode only).
    bits: width of one code (ggml: 0, see `block_bytes`).
    group: values of K that share a scale or a block; 0 where there is none.
    dtype: direct formats only, the name of the PyTorch dtype of a word.
    block_bytes: ggml only, bytes of one block of `group` values; `ggml_k` has two, Q4_K and Q6_K.
    methods: names of the encoders that `ninfer.formats.encode` accepts for it.
    """

    name: str
    kind: Kind
    bits: int
    group: int = 0
    dtype: str = ""
    block_bytes: tuple[int, ...] = ()
    methods: tuple[str, ...] = ()

    @property
    def code_min(self) -> int:
        """Smallest legal code of a grouped format (Q8 never uses -128)."""
        return -127 if self.bits == 8 else -(1 << (self.bits - 1))

    @property
    def code_max(self) -> int:
        """Largest legal code of a grouped format."""
        return (1 << (self.bits - 1)) - 1


def _direct(name: str, bits: int, dtype: str) -> Format:
    return Format(name, "direct", bits, dtype=dtype, methods=("cast_direct",))


def _grouped(bits: int, group: int) -> Format:
    return Format(f"q{bits}_g{group}_fp16", "grouped", bits, group, methods=("grouped_absmax",))


_FORMATS = {
    format.name: format
    for format in (
        _direct("bf16", 16, "bfloat16"),
        _direct("fp16", 16, "float16"),
        _direct("fp32", 32, "float32"),
        _direct("int32", 32, "int32"),
        _grouped(4, 64),
        _grouped(5, 64),
        _grouped(6, 64),
        _grouped(8, 32),
        Format("nvfp4", "block_float", 4, 16, methods=("nvfp4_absmax", "nvfp4_mse")),
        Format("fp8_e4m3fn_row_bf16", "row_float", 8, methods=("fp8_row_maxabs",)),
        Format("fp8_e4m3fn_block128_bf16", "tile_float", 8, 128),
        Format("ggml_k", "ggml", 0, 256, block_bytes=(144, 210)),
        Format("ggml_q4_0", "ggml", 0, 32, block_bytes=(18,)),
        Format("ggml_q4_1", "ggml", 0, 32, block_bytes=(20,)),
        Format("ggml_q8_0", "ggml", 0, 32, block_bytes=(34,)),
        Format("ggml_q5_k", "ggml", 0, 256, block_bytes=(176,)),
    )
}


def get(name: str) -> Format:
    """The format called `name`; FormatError if there is none."""
    found = _FORMATS.get(name)
    if found is None:
        raise FormatError(f"unknown weight format {name!r:.80}; known: {', '.join(_FORMATS)}")
    return found


def names() -> tuple[str, ...]:
    """All format names."""
    return tuple(_FORMATS)
