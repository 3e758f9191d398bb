"""The natural form of an encoded matrix, between codecs, converters and layouts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, eq=False)
class Planes:
    """Encoded rows of a `[N, K]` matrix (n of them, possibly all), in natural order.

    | kind | codes | scales | divisor |
    |---|---|---|---|
    | direct | words, the format's dtype, any shape | - | - |
    | grouped | int8 `[n, K]` | float16 `[n, ceil(K/group)]` | - |
    | block_float (nvfp4) | uint8 `[n, K/2]`, low nibble = even k | uint8 E4M3 words `[n, K/16]` | float |
    | row_float | uint8 E4M3 words `[n, K]` | bfloat16 `[n]` | - |
    | tile_float | uint8 E4M3 words `[n, K]`, n % 128 = 0 | bfloat16 `[n/128, K/128]` | - |
    | ggml | uint8 `[n, blocks, block bytes]`, one block type; `[n, row bytes]` where that is clear | - | - |

    The nvfp4 divisor belongs to the whole parent: every chunk of its rows carries the same one.
    """

    codes: torch.Tensor
    scales: torch.Tensor | None = None
    divisor: float | None = None
