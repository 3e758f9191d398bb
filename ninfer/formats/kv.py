"""What a number in the KV cache is: the formats, which codes their keys and values have, and their sizes.

The codecs themselves are in `kv_codec`; this module needs no PyTorch.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from ninfer.errors import FormatError

INT8_GROUP = 64
NVFP4_GROUP = 16
_MULTIPLE = 32


class KvCode(StrEnum):
    """How one vector of a head is stored."""

    PLAIN = "plain"
    """The activation type itself, no scales."""
    INT8 = "int8"
    """int8 codes `[D]`, one FP16 scale for each 64 (the last group may be shorter)."""
    FP8 = "fp8"
    """E4M3 codes `[D]` (uint8) and one FP16 scale."""
    NVFP4 = "nvfp4"
    """E2M1 codes, two a byte, the lower dimension in the low nibble `[D/2]`, an E4M3 scale for each 16."""

    def codes(self, width: int) -> int:
        """Entries of the code plane for a vector of `width`: bytes, unless the code is plain."""
        return width // 2 if self is KvCode.NVFP4 else width

    def scales(self, width: int) -> int:
        """Entries of the scale plane: bytes of NVFP4, binary16 of the others."""
        if self is KvCode.INT8:
            return -(-width // INT8_GROUP)
        if self is KvCode.NVFP4:
            return width // NVFP4_GROUP
        return 1 if self is KvCode.FP8 else 0

    def vector_bytes(self, width: int, activation_bytes: int) -> int:
        """Bytes of one stored vector, scales included."""
        if self is KvCode.PLAIN:
            return width * activation_bytes
        return self.codes(width) + self.scales(width) * (1 if self is KvCode.NVFP4 else 2)


@dataclass(frozen=True)
class KvSide:
    """The keys or the values of a format; `rotated` ones are turned by a Hadamard matrix before coding."""

    code: KvCode
    rotated: bool = False

    def rotation(self, width: int) -> bool:
        """Are vectors of `width` rotated? Only powers of two have a rotation."""
        return self.rotated and width & (width - 1) == 0


class KvFormat(StrEnum):
    """Storage of keys and values; the values are the words of options and reports.

    BF16 keeps the activation type (float32 in tests); the others are quantized per vector of a head.
    """

    BF16 = "bf16"
    INT8 = "int8"
    FP8 = "fp8"
    NVFP4 = "nvfp4"
    K8V4 = "k8v4"

    @property
    def keys(self) -> KvSide:
        return _SIDES[self][0]

    @property
    def values(self) -> KvSide:
        return _SIDES[self][1]

    def check(self, width: int) -> None:
        """Raise `FormatError` unless heads of `width` can be stored in this format."""
        if self is not KvFormat.BF16 and (width <= 0 or width % _MULTIPLE):
            raise FormatError(
                f"KV format '{self}' needs a head dimension that is a multiple of {_MULTIPLE}, "
                f"but this model's is {width}; use 'bf16'"
            )


_SIDES = {
    KvFormat.BF16: (KvSide(KvCode.PLAIN), KvSide(KvCode.PLAIN)),
    KvFormat.INT8: (KvSide(KvCode.INT8, rotated=True), KvSide(KvCode.INT8)),
    KvFormat.FP8: (KvSide(KvCode.FP8, rotated=True), KvSide(KvCode.FP8)),
    KvFormat.NVFP4: (KvSide(KvCode.NVFP4, rotated=True), KvSide(KvCode.NVFP4, rotated=True)),
    KvFormat.K8V4: (KvSide(KvCode.FP8, rotated=True), KvSide(KvCode.NVFP4, rotated=True)),
}
