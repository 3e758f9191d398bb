"""Random weights of every format: codes and scales are drawn, the values follow from the format's formula,
and the bytes are packed by the layout's rules. Nothing of this is shared with the code under test."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from ninfer.ops import Encoded, Matrix

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=np.float32)


def random_weight(format: str, rows: int, columns: int, seed: int = 0) -> tuple[Encoded, torch.Tensor]:
    """An encoded matrix and its decoded values, float32 `[rows, columns]`."""
    layout, make = MAKERS[format]
    data, values = make(np.random.default_rng(seed), rows, columns)
    encoded = Encoded(format, layout, (rows, columns), torch.from_numpy(np.array(data, dtype=np.uint8)))
    return encoded, torch.from_numpy(np.array(values, dtype=np.float32))


def random_matrix(format: str, rows: int, columns: int, seed: int = 0) -> tuple[Matrix, torch.Tensor]:
    encoded, values = random_weight(format, rows, columns, seed)
    return Matrix.of(encoded), values


def _bytes(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array).view(np.uint8).reshape(-1)


def _align(data: np.ndarray) -> np.ndarray:
    return np.concatenate((data, np.zeros(-len(data) % 256, dtype=np.uint8)))


def _halves(rng: np.random.Generator, shape, size: float) -> np.ndarray:
    """Positive FP16 of about `size`, some of them subnormal."""
    values = (rng.random(shape) + 0.5) * size
    return np.where(rng.random(shape) < 0.02, 3e-6, values).astype(np.float16)


def _bf16(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(words, values) of float32 cut to bf16."""
    words = (np.asarray(values, dtype=np.float32).view(np.uint32) >> 16).astype(np.uint16)
    return words, (words.astype(np.uint32) << 16).view(np.float32)


def _e4m3(codes: np.ndarray) -> np.ndarray:
    sign = np.where(codes & 128, -1.0, 1.0)
    exponent, mantissa = (codes >> 3) & 15, codes & 7
    small, large = mantissa * 2.0**-9, (1 + mantissa / 8) * 2.0 ** (exponent.astype(int) - 7)
    return (sign * np.where(exponent == 0, small, large)).astype(np.float32)


def _e4m3_codes(rng: np.random.Generator, shape) -> np.ndarray:
    codes = rng.integers(0, 256, shape, dtype=np.uint8)
    return np.where((codes & 127) == 127, codes ^ 1, codes)


def _make_bf16(rng, rows, columns):
    words, values = _bf16(rng.standard_normal((rows, columns)))
    return _bytes(words), values


def _make_fp16(rng, rows, columns):
    words = rng.standard_normal((rows, columns)).astype(np.float16)
    return _bytes(words), words


def _make_fp32(rng, rows, columns):
    words = rng.standard_normal((rows, columns)).astype(np.float32)
    return _bytes(words), words


def _grouped(bits: int, group: int) -> Callable:
    def make(rng, rows, columns):
        width = -(-columns // 128) * 128
        low = -127 if bits == 8 else -(1 << (bits - 1))
        codes = np.zeros((rows, width), dtype=np.int64)
        codes[:, :columns] = rng.integers(low, 1 << (bits - 1), (rows, columns))
        scales = _halves(rng, (rows, width // group), 0.5 / (1 << bits))
        scales[:, -(-columns // group) :] = 0
        values = codes.reshape(rows, -1, group).astype(np.float32) * scales.astype(np.float32)[..., None]
        words = codes & ((1 << bits) - 1)
        if bits == 8:
            return np.concatenate((_align(_bytes(words.astype(np.uint8))), _bytes(scales))), values.reshape(
                rows, width
            )[:, :columns]
        base = (words[:, 0::2] & 15) | ((words[:, 1::2] & 15) << 4)
        planes = [_align(_bytes(base.astype(np.uint8)))]
        if bits > 4:
            stream = np.stack([(words >> (4 + b)) & 1 for b in range(bits - 4)], -1)
            planes.append(_align(np.packbits(stream.reshape(-1).astype(np.uint8), bitorder="little")))
        planes.append(_bytes(scales))
        return np.concatenate(planes), values.reshape(rows, width)[:, :columns]

    return make


def _make_nvfp4(rng, rows, columns):
    codes = rng.integers(0, 16, (rows, columns), dtype=np.uint8)
    scales = rng.integers(0, 0x7F, (rows, columns // 16), dtype=np.uint8)
    divisor = np.float32(1234.5)
    products = E2M1[codes] * np.repeat(_e4m3(scales), 16, 1)
    plane = np.zeros(scales.size, dtype=np.uint8)
    for n in range(rows):
        for g in range(columns // 16):
            tile = (n // 128) * (columns // 64) + g // 4
            plane[tile * 512 + (n % 32) * 16 + ((n % 128) // 32) * 4 + g % 4] = scales[n, g]
    packed = codes[:, 0::2] | (codes[:, 1::2] << 4)
    return np.concatenate((_align(_bytes(packed)), plane, _bytes(np.array([divisor])))), products / divisor


def _make_fp8_row(rng, rows, columns):
    codes = _e4m3_codes(rng, (rows, columns))
    words, scales = _bf16((rng.random(rows) + 0.5) / 100)
    return np.concatenate((_align(_bytes(codes)), _bytes(words))), _e4m3(codes) * scales[:, None]


def _make_fp8_block(rng, rows, columns):
    codes = _e4m3_codes(rng, (rows, columns))
    words, scales = _bf16((rng.random((rows // 128, columns // 128)) + 0.5) / 100)
    values = _e4m3(codes) * np.repeat(np.repeat(scales, 128, 0), 128, 1)
    return np.concatenate((_align(_bytes(codes)), _bytes(words))), values


def _signed(rng, scales: np.ndarray) -> np.ndarray:
    return scales * np.where(rng.random(scales.shape) < 0.5, -1, 1).astype(np.float16)


def _blocks(*fields: np.ndarray) -> np.ndarray:
    return np.concatenate([_bytes(f).reshape(len(f), -1) for f in fields], 1).reshape(-1)


def _make_q4_0(rng, rows, columns):
    n = rows * columns // 32
    d, codes = _signed(rng, _halves(rng, n, 0.02)), rng.integers(0, 16, (n, 32), dtype=np.uint8)
    data = _blocks(d, codes[:, :16] | (codes[:, 16:] << 4))
    return data, (d.astype(np.float32)[:, None] * (codes.astype(np.float32) - 8)).reshape(rows, columns)


def _make_q4_1(rng, rows, columns):
    n = rows * columns // 32
    d, m = _signed(rng, _halves(rng, n, 0.02)), _signed(rng, _halves(rng, n, 0.1))
    codes = rng.integers(0, 16, (n, 32), dtype=np.uint8)
    values = (d.astype(np.float64)[:, None] * codes + m.astype(np.float64)[:, None]).astype(np.float32)
    return _blocks(d, m, codes[:, :16] | (codes[:, 16:] << 4)), values.reshape(rows, columns)


def _make_q8_0(rng, rows, columns):
    n = rows * columns // 32
    d, codes = _signed(rng, _halves(rng, n, 0.002)), rng.integers(-128, 128, (n, 32), dtype=np.int8)
    return _blocks(d, codes), (d.astype(np.float32)[:, None] * codes).reshape(rows, columns)


def _k_parts(rng, n: int):
    """(d, least, packed scales, factors, offsets) of n blocks of eight sub-blocks."""
    d, least = _signed(rng, _halves(rng, n, 1e-3)), _signed(rng, _halves(rng, n, 1e-3))
    scale, minimum = (rng.integers(0, 64, (n, 8), dtype=np.uint8) for _ in range(2))
    packed = np.zeros((n, 12), dtype=np.uint8)
    packed[:, :4] = scale[:, :4] | ((scale[:, 4:] >> 4) << 6)
    packed[:, 4:8] = minimum[:, :4] | ((minimum[:, 4:] >> 4) << 6)
    packed[:, 8:] = (scale[:, 4:] & 15) | ((minimum[:, 4:] & 15) << 4)
    factors = d.astype(np.float64)[:, None] * scale
    return d, least, packed, factors, least.astype(np.float64)[:, None] * minimum


def _k_nibbles(codes: np.ndarray) -> np.ndarray:
    """Low nibbles of `[n, 8, 32]` codes: even sub-blocks low, odd ones high."""
    low = codes & 15
    return (low[:, 0::2] | (low[:, 1::2] << 4)).reshape(len(codes), 128)


def _q4_k(rng, n: int):
    d, least, packed, factors, offsets = _k_parts(rng, n)
    codes = rng.integers(0, 16, (n, 8, 32), dtype=np.uint8)
    values = factors[..., None] * codes - offsets[..., None]
    return _blocks(d, least, packed, _k_nibbles(codes)), values.astype(np.float32)


def _make_q5_k(rng, rows, columns):
    n = rows * columns // 256
    d, least, packed, factors, offsets = _k_parts(rng, n)
    codes = rng.integers(0, 32, (n, 8, 32), dtype=np.uint8)
    high = np.zeros((n, 32), dtype=np.uint8)
    for j in range(8):
        high |= (codes[:, j] >> 4) << j
    values = factors[..., None] * codes - offsets[..., None]
    data = _blocks(d, least, packed, high, _k_nibbles(codes))
    return data, values.astype(np.float32).reshape(rows, columns)


def _q6_k(rng, n: int):
    d = _signed(rng, _halves(rng, n, 1e-4))
    scale = rng.integers(-128, 128, (n, 16), dtype=np.int8)
    codes = rng.integers(0, 64, (n, 2, 4, 32), dtype=np.uint8)  # half, section, lane
    low = (codes[:, :, :2] & 15) | ((codes[:, :, 2:] & 15) << 4)
    high = np.zeros((n, 2, 32), dtype=np.uint8)
    for section in range(4):
        high |= (codes[:, :, section] >> 4) << (2 * section)
    factors = (d.astype(np.float32)[:, None] * scale).reshape(n, 16, 1)
    values = factors * (codes.reshape(n, 16, 16).astype(np.float32) - 32)
    return _blocks(low.reshape(n, 128), high.reshape(n, 64), scale, d), values


def _make_ggml_k(rng, rows, columns):
    n = columns // 256
    six = rng.random(rows) < 0.5
    made = [(_q6_k if s else _q4_k)(rng, n) for s in six]
    starts = np.cumsum([0, *(len(data) for data, _ in made)])[:-1].astype(np.uint64)
    descriptors = (starts << np.uint64(1)) | six.astype(np.uint64)
    data = np.concatenate((_align(_bytes(descriptors)), *(data for data, _ in made)))
    return data, np.stack([values.reshape(columns) for _, values in made])


_DIRECT, _GROUPS, _ROWS = "contiguous_le_v1", "row_split_k128_v1", "ggml_rows_v1"

MAKERS: dict[str, tuple[str, Callable]] = {
    "bf16": (_DIRECT, _make_bf16),
    "fp16": (_DIRECT, _make_fp16),
    "fp32": (_DIRECT, _make_fp32),
    "q4_g64_fp16": (_GROUPS, _grouped(4, 64)),
    "q5_g64_fp16": (_GROUPS, _grouped(5, 64)),
    "q6_g64_fp16": (_GROUPS, _grouped(6, 64)),
    "q8_g32_fp16": (_GROUPS, _grouped(8, 32)),
    "nvfp4": ("block_scale_k16_m128x4_v1", _make_nvfp4),
    "fp8_e4m3fn_row_bf16": ("row_scale_v1", _make_fp8_row),
    "fp8_e4m3fn_block128_bf16": ("block_scale_m128_k128_v1", _make_fp8_block),
    "ggml_q4_0": (_ROWS, _make_q4_0),
    "ggml_q4_1": (_ROWS, _make_q4_1),
    "ggml_q8_0": (_ROWS, _make_q8_0),
    "ggml_q5_k": (_ROWS, _make_q5_k),
    "ggml_k": ("ggml_k256_v1", _make_ggml_k),
}

SHAPES: dict[str, tuple[int, int]] = {
    **dict.fromkeys(("bf16", "fp16", "fp32", "fp8_e4m3fn_row_bf16"), (53, 75)),
    **dict.fromkeys(("q4_g64_fp16", "q5_g64_fp16", "q6_g64_fp16", "q8_g32_fp16"), (53, 299)),
    **dict.fromkeys(("ggml_q4_0", "ggml_q4_1", "ggml_q8_0"), (53, 224)),
    **dict.fromkeys(("ggml_q5_k", "ggml_k"), (53, 768)),
    "nvfp4": (256, 192),
    "fp8_e4m3fn_block128_bf16": (256, 384),
}
"""An odd shape that each format allows."""
