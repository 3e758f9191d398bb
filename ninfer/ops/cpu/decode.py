"""Decoders of every weight format in plain torch: encoded parent rows -> float32."""

from __future__ import annotations

import torch

from ninfer.errors import FormatError
from ninfer.ops.weights import Encoded, Matrix

_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def decode_matrix(matrix: Matrix) -> torch.Tensor:
    """The whole matrix as float32 `[rows, columns]`."""
    return torch.cat([decode_rows(span.parent, span.begin, span.end) for span in matrix.spans])


def decode_rows(parent: Encoded, begin: int, end: int) -> torch.Tensor:
    """Rows `[begin, end)` of a parent as float32."""
    decoder = _DECODERS.get(parent.format)
    if decoder is None:
        raise FormatError(f"no decoder for format '{parent.format}'; known: {', '.join(_DECODERS)}")
    return decoder(parent, begin, end)


def _up(x: int) -> int:
    return (x + 255) // 256 * 256


def _plane(parent: Encoded, offset: int, row_bytes: int, begin: int, end: int) -> torch.Tensor:
    flat = parent.data[offset + begin * row_bytes : offset + end * row_bytes]
    return flat.reshape(end - begin, row_bytes)


def _half(bytes_: torch.Tensor) -> torch.Tensor:
    return bytes_.contiguous().view(torch.float16).float()


def _direct(dtype: torch.dtype):
    def decode(parent: Encoded, begin: int, end: int) -> torch.Tensor:
        width = parent.shape[1] * dtype.itemsize
        return _plane(parent, 0, width, begin, end).contiguous().view(dtype).float()

    return decode


def _grouped(bits: int, group: int, high: int):
    def decode(parent: Encoded, begin: int, end: int) -> torch.Tensor:
        rows, columns = parent.shape
        groups = (columns + 127) // 128 * 128 // group
        high_at = _up(rows * groups * 32)
        scale_at = high_at + _up(rows * groups * high)
        n = end - begin
        base = _plane(parent, 0, groups * 32, begin, end)
        scale = _half(_plane(parent, scale_at, groups * 2, begin, end))
        if bits == 8:
            codes = base.contiguous().view(torch.int8).float()
        else:
            low = torch.stack((base & 15, base >> 4), -1).reshape(n, groups * 64).int()
            if high:
                plane = _plane(parent, high_at, groups * high, begin, end)
                stream = (plane[..., None] >> torch.arange(8, dtype=torch.uint8)) & 1
                stream = stream.reshape(n, groups * 64, bits - 4).int()
                for bit in range(bits - 4):
                    low |= stream[..., bit] << (4 + bit)
            codes = (low - ((low >> (bits - 1)) << bits)).float()
        weights = codes.reshape(n, groups, group) * scale[..., None]
        return weights.reshape(n, -1)[:, :columns].contiguous()

    return decode


def _nvfp4(parent: Encoded, begin: int, end: int) -> torch.Tensor:
    rows, columns = parent.shape
    scale_at = _up(rows * columns // 2)
    count = rows * columns // 16
    tiles = columns // 64
    words = parent.data[scale_at : scale_at + count].reshape(rows // 128, tiles, 32, 4, 4)
    scale = words.permute(0, 3, 2, 1, 4).reshape(rows, columns // 16)[begin:end]
    divisor = parent.data[scale_at + count : scale_at + count + 4].clone().view(torch.float32)
    codes = _plane(parent, 0, columns // 2, begin, end)
    codes = torch.stack((codes & 15, codes >> 4), -1).reshape(end - begin, columns).long()
    table = torch.tensor(_E2M1 + tuple(-m for m in _E2M1))
    weights = table[codes].reshape(end - begin, -1, 16) * _e4m3(scale)[..., None]
    return (weights / divisor).reshape(end - begin, columns)


def _e4m3(words: torch.Tensor) -> torch.Tensor:
    return words.contiguous().view(torch.float8_e4m3fn).float()


def _fp8_row(parent: Encoded, begin: int, end: int) -> torch.Tensor:
    rows, columns = parent.shape
    scale = _plane(parent, _up(rows * columns), 2, begin, end).contiguous().view(torch.bfloat16).float()
    return _e4m3(_plane(parent, 0, columns, begin, end)) * scale


def _fp8_block(parent: Encoded, begin: int, end: int) -> torch.Tensor:
    rows, columns = parent.shape
    scale = _plane(parent, _up(rows * columns), columns // 64, 0, rows // 128)
    scale = scale.contiguous().view(torch.bfloat16).float()
    scale = scale.repeat_interleave(128, 0)[begin:end].repeat_interleave(128, 1)
    return _e4m3(_plane(parent, 0, columns, begin, end)) * scale


def _blocks(parent: Encoded, size: int, values: int, begin: int, end: int) -> torch.Tensor:
    per_row = parent.shape[1] // values
    return _plane(parent, 0, per_row * size, begin, end).reshape(-1, size)


def _q4_0(parent: Encoded, begin: int, end: int) -> torch.Tensor:
    blocks = _blocks(parent, 18, 32, begin, end)
    codes = torch.cat((blocks[:, 2:] & 15, blocks[:, 2:] >> 4), 1).float() - 8
    return (codes * _half(blocks[:, :2])).reshape(end - begin, -1)


def _q4_1(parent: Encoded, begin: int, end: int) -> torch.Tensor:
    blocks = _blocks(parent, 20, 32, begin, end)
    codes = torch.cat((blocks[:, 4:] & 15, blocks[:, 4:] >> 4), 1).float()
    return (codes * _half(blocks[:, :2]) + _half(blocks[:, 2:4])).reshape(end - begin, -1)


def _q8_0(parent: Encoded, begin: int, end: int) -> torch.Tensor:
    blocks = _blocks(parent, 34, 32, begin, end)
    return (blocks[:, 2:].contiguous().view(torch.int8) * _half(blocks[:, :2])).reshape(end - begin, -1)


def _k_scales(s: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    scale = torch.cat((s[:, :4] & 63, (s[:, 8:] & 15) | ((s[:, :4] >> 6) << 4)), 1)
    least = torch.cat((s[:, 4:8] & 63, (s[:, 8:] >> 4) | ((s[:, 4:8] >> 6) << 4)), 1)
    return scale.float(), least.float()


def _k_values(blocks: torch.Tensor, quants_at: int, high_at: int | None) -> torch.Tensor:
    scale, least = _k_scales(blocks[:, 4:16])
    quants = blocks[:, quants_at : quants_at + 128].reshape(-1, 4, 32)
    codes = torch.stack((quants & 15, quants >> 4), 2).reshape(-1, 8, 32).float()
    if high_at is not None:
        high = blocks[:, None, high_at : high_at + 32] >> torch.arange(8, dtype=torch.uint8)[:, None]
        codes += 16 * (high & 1)
    d, least_d = _half(blocks[:, :2]), _half(blocks[:, 2:4])
    return (d * scale)[..., None] * codes - (least_d * least)[..., None]


def _q5_k(parent: Encoded, begin: int, end: int) -> torch.Tensor:
    blocks = _blocks(parent, 176, 256, begin, end)
    return _k_values(blocks, 48, 16).reshape(end - begin, -1)


def _q6_k_values(blocks: torch.Tensor) -> torch.Tensor:
    low = blocks[:, :128].reshape(-1, 2, 2, 32)
    low = torch.cat((low & 15, low >> 4), 2).int()
    high = blocks[:, 128:192].reshape(-1, 2, 1, 32) >> torch.tensor([0, 2, 4, 6], dtype=torch.uint8)[:, None]
    codes = (low | ((high & 3).int() << 4)) - 32
    scale = blocks[:, 192:208].contiguous().view(torch.int8).float() * _half(blocks[:, 208:])
    return codes.reshape(-1, 16, 16).float() * scale[..., None]


def _ggml_k(parent: Encoded, begin: int, end: int) -> torch.Tensor:
    rows, columns = parent.shape
    descriptors = parent.data[: 8 * rows].clone().view(torch.int64)[begin:end]
    area = parent.data[_up(8 * rows) :]
    out = torch.empty(end - begin, columns)
    for row, descriptor in enumerate(descriptors.tolist()):
        size = 210 if descriptor & 1 else 144
        blocks = area[descriptor >> 1 :][: columns // 256 * size].reshape(-1, size)
        values = _q6_k_values(blocks) if descriptor & 1 else _k_values(blocks, 16, None)
        out[row] = values.reshape(-1)
    return out


_DECODERS = {
    "bf16": _direct(torch.bfloat16),
    "fp16": _direct(torch.float16),
    "fp32": _direct(torch.float32),
    "q4_g64_fp16": _grouped(4, 64, 0),
    "q5_g64_fp16": _grouped(5, 64, 8),
    "q6_g64_fp16": _grouped(6, 64, 16),
    "q8_g32_fp16": _grouped(8, 32, 0),
    "nvfp4": _nvfp4,
    "fp8_e4m3fn_row_bf16": _fp8_row,
    "fp8_e4m3fn_block128_bf16": _fp8_block,
    "ggml_q4_0": _q4_0,
    "ggml_q4_1": _q4_1,
    "ggml_q8_0": _q8_0,
    "ggml_q5_k": _q5_k,
    "ggml_k": _ggml_k,
}
