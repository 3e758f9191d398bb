"""Blocks of GGUF files, decoded exactly as ggml's reference does; there is no encoder.

Blocks are uint8 `[rows, blocks, block bytes]`, a row's blocks in k order. All products of scales and codes
are exact in float32, so only the final addition or subtraction rounds.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from ninfer.errors import FormatError
from ninfer.formats.chunks import row_chunks
from ninfer.formats.registry import Format

Q4_K, Q6_K = 144, 210


def as_blocks(format: Format, codes: torch.Tensor) -> torch.Tensor:
    """`[rows, blocks, block bytes]` from that shape, or `[rows, row bytes]` where the block size is clear."""
    if codes.dtype != torch.uint8:
        raise FormatError(f"{format.name} blocks must be uint8, got {codes.dtype}")
    if codes.dim() == 3 and codes.shape[2] in format.block_bytes:
        return codes
    if codes.dim() != 2:
        raise FormatError(
            f"{format.name} blocks must have shape [rows, blocks, {'|'.join(map(str, format.block_bytes))}], "
            f"got {list(codes.shape)}"
        )
    sizes = [size for size in format.block_bytes if codes.shape[1] % size == 0]
    if len(sizes) != 1:
        raise FormatError(
            f"{format.name} rows of {codes.shape[1]} bytes are not whole blocks of one known size; "
            f"give [rows, blocks, block bytes]"
        )
    return codes.reshape(len(codes), -1, sizes[0])


def decode(format: Format, codes: torch.Tensor) -> torch.Tensor:
    """float32 `[rows, K]`."""
    blocks = as_blocks(format, codes)
    rows, count, size = blocks.shape
    decoder = _DECODERS["q6_k" if format.name == "ggml_k" and size == Q6_K else format.name]
    out = torch.empty(rows, count * format.group, dtype=torch.float32, device=codes.device)
    for begin, end in row_chunks(rows, count * format.group, codes.device):
        out[begin:end] = decoder(blocks[begin:end].contiguous()).reshape(end - begin, -1)
    return out


def _half(blocks: torch.Tensor, offset: int) -> torch.Tensor:
    """The FP16 number at a byte offset of every block, float32 `[rows, blocks, 1]`."""
    return blocks[..., offset : offset + 2].contiguous().view(torch.float16).float()


def _nibbles(data: torch.Tensor) -> torch.Tensor:
    """Low nibbles of all bytes of the last axis, then their high nibbles."""
    return torch.cat((data & 15, data >> 4), -1).float()


def _q4_0(blocks: torch.Tensor) -> torch.Tensor:
    return _half(blocks, 0) * (_nibbles(blocks[..., 2:]) - 8)


def _q4_1(blocks: torch.Tensor) -> torch.Tensor:
    return _half(blocks, 0) * _nibbles(blocks[..., 4:]) + _half(blocks, 2)


def _q8_0(blocks: torch.Tensor) -> torch.Tensor:
    return _half(blocks, 0) * blocks[..., 2:].contiguous().view(torch.int8).float()


def _k_scales(s: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The eight 6-bit scales and minima of Q4_K and Q5_K, float32 `[rows, blocks, 8]`, from 12 bytes."""
    a, b, c = s[..., 0:4], s[..., 4:8], s[..., 8:12]
    scale = torch.cat((a & 63, (c & 15) | ((a >> 6) << 4)), -1)
    minimum = torch.cat((b & 63, (c >> 4) | ((b >> 6) << 4)), -1)
    return scale.float(), minimum.float()


def _k_codes(data: torch.Tensor) -> torch.Tensor:
    """4-bit codes `[rows, blocks, 8, 32]`: two sub-blocks share 32 bytes, the even one low."""
    pairs = data.reshape(*data.shape[:-1], 4, 32)
    return torch.stack((pairs & 15, pairs >> 4), -2).reshape(*data.shape[:-1], 8, 32)


def _k_values(blocks: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
    scale, minimum = _k_scales(blocks[..., 4:16])
    scale, minimum = _half(blocks, 0) * scale, _half(blocks, 2) * minimum
    return scale.unsqueeze(-1) * codes.float() - minimum.unsqueeze(-1)


def _q4_k(blocks: torch.Tensor) -> torch.Tensor:
    return _k_values(blocks, _k_codes(blocks[..., 16:]))


def _q5_k(blocks: torch.Tensor) -> torch.Tensor:
    shifts = torch.arange(8, dtype=torch.uint8, device=blocks.device).reshape(8, 1)
    high = (blocks[..., 16:48].unsqueeze(-2) >> shifts) & 1
    return _k_values(blocks, _k_codes(blocks[..., 48:]) | (high << 4))


def _q6_k(blocks: torch.Tensor) -> torch.Tensor:
    lead = blocks.shape[:-1]
    low = blocks[..., :128].reshape(*lead, 2, 1, 64)
    low = torch.cat((low & 15, low >> 4), -2).reshape(*lead, 2, 4, 32)
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8, device=blocks.device).reshape(4, 1)
    high = (blocks[..., 128:192].reshape(*lead, 2, 1, 32) >> shifts) & 3
    codes = (low | (high << 4)).float().sub_(32).reshape(*lead, 16, 16)
    scale = _half(blocks, 208) * blocks[..., 192:208].contiguous().view(torch.int8).float()
    return scale.unsqueeze(-1) * codes


_DECODERS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "ggml_q4_0": _q4_0,
    "ggml_q4_1": _q4_1,
    "ggml_q8_0": _q8_0,
    "ggml_q5_k": _q5_k,
    "ggml_k": _q4_k,
    "q6_k": _q6_k,
}
