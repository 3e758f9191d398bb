"""Packing the bits of small signed codes, several lanes at a time in one integer.

All functions work on the last axis of contiguous uint8 or int8 tensors; lane 0 is the least significant.
"""

from __future__ import annotations

import torch


def pack_nibbles(codes: torch.Tensor) -> torch.Tensor:
    """int8 or uint8 `[..., 2n]` to uint8 `[..., n]`: low nibbles of the codes, even lane low."""
    pairs = codes.view(torch.int16)
    return ((pairs & 0x0F) | ((pairs >> 4) & 0xF0)).to(torch.uint8)


def unpack_nibbles(packed: torch.Tensor) -> torch.Tensor:
    """uint8 `[..., n]` to int8 `[..., 2n]`, values 0..15."""
    pairs = packed.to(torch.int16)
    return ((pairs & 0x0F) | ((pairs & 0xF0) << 4)).view(torch.int8)


def pack_bit4(codes: torch.Tensor) -> torch.Tensor:
    """int8 `[..., 8n]` to uint8 `[..., n]`: bit 4 of every code.

    The product moves bit 8i of the masked word to bit 56 + i; no two terms meet, so nothing carries.
    """
    lanes = (codes.view(torch.int64) >> 4) & 0x0101010101010101
    return ((lanes * 0x0102040810204080) >> 56).to(torch.uint8)


def unpack_bit4(packed: torch.Tensor) -> torch.Tensor:
    """uint8 `[..., n]` to int8 `[..., 8n]`, values 0 or 16."""
    lanes = (packed.to(torch.int64) * 0x0101010101010101) & (0x8040201008040201 - (1 << 64))
    return lanes.view(torch.int8).ne(0).to(torch.int8) << 4


def pack_bits45(codes: torch.Tensor) -> torch.Tensor:
    """int8 `[..., 4n]` to uint8 `[..., n]`: bits 4 and 5 of every code, bit 4 first."""
    lanes = (codes.view(torch.int32) >> 4) & 0x03030303
    return ((lanes * 0x01041040) >> 24).to(torch.uint8)


def unpack_bits45(packed: torch.Tensor) -> torch.Tensor:
    """uint8 `[..., n]` to int8 `[..., 4n]`, values 0, 16, 32 or 48."""
    word = packed.to(torch.int32)
    lanes = (word | (word << 6) | (word << 12) | (word << 18)) & 0x03030303
    return (lanes << 4).view(torch.int8)


def sign_extend(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """int8 two's complement values of codes of `bits` bits."""
    half = 1 << (bits - 1)
    return (codes ^ half) - half
