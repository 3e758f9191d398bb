"""Bytes of every layout against the scalar formulas; chunks, views and refusals."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from ninfer import formats
from ninfer.artifact import layouts, sizes
from ninfer.errors import FormatError
from ninfer.formats import Planes

from . import layout_oracles as oracle

GROUPED = {"q4_g64_fp16": (4, 64), "q5_g64_fp16": (5, 64), "q6_g64_fp16": (6, 64), "q8_g32_fp16": (8, 32)}


def assemble(
    format: str, shape: Sequence[int], chunks: Sequence[tuple[int, Planes]], q6: np.ndarray | None = None
) -> np.ndarray:
    """The object's bytes from its chunks; every byte must come exactly once."""
    six = None if q6 is None else int(q6.sum())
    size = sizes.encoded_bytes(format, sizes.default_layout(format), shape, q6_rows=six)
    out, count = np.zeros(size, np.uint8), np.zeros(size, np.uint8)
    for row, planes in chunks:
        for offset, data in layouts.pack_rows(format, shape, row, planes, q6=q6):
            out[offset : offset + len(data)] = data
            count[offset : offset + len(data)] += 1
    assert (count == 1).all()
    return out


def chunked(planes: Planes, step: int, scale_step: int | None = None) -> list[tuple[int, Planes]]:
    chunks = []
    for row in range(0, len(planes.codes), step):
        ratio = step if scale_step is None else scale_step
        first = row // step * ratio
        scales = None if planes.scales is None else planes.scales[first : first + ratio]
        chunks.append((row, Planes(planes.codes[row : row + step], scales, planes.divisor)))
    return chunks


def equal(a: Planes, b: Planes) -> bool:
    same = torch.equal(a.codes, b.codes) and a.divisor == b.divisor
    if a.scales is None or b.scales is None:
        return same and a.scales is b.scales
    return same and torch.equal(a.scales, b.scales)


@pytest.mark.parametrize("format", GROUPED)
@pytest.mark.parametrize(
    ("rows", "columns", "step"), [(2, 130, 1), (5, 64, 2), (3, 256, 3), (7, 33, 4), (1, 1, 1)]
)
def test_row_split(format: str, rows: int, columns: int, step: int) -> None:
    bits, group = GROUPED[format]
    planes = formats.encode(format, "grouped_absmax", torch.randn(rows, columns))
    data = assemble(format, (rows, columns), chunked(planes, step))
    assert data.tobytes() == oracle.row_split(bits, group, planes, rows, columns)
    assert equal(layouts.unpack_rows(format, (rows, columns), data, 0, rows), planes)
    part = layouts.decode_rows(format, (rows, columns), data, rows - 1, rows)
    assert torch.equal(part, formats.decode(format, planes)[rows - 1 :])


def test_row_split_check_of_the_specification() -> None:
    split = sizes.RowSplit.of(formats.get("q5_g64_fp16"), 130, 2)
    assert (split.groups, split.high_offset, split.scale_offset, split.bytes) == (4, 256, 512, 528)


RAMP = torch.tensor([[(i - 32) / 10 for i in range(64)]])


@pytest.mark.parametrize(
    ("format", "scale", "base", "high"),
    [
        ("q4_g64_fp16", "5037", "99a9aababbbbccccdcddedeeeeffff0000101121222233334444545555666677", ""),
        (
            "q5_g64_fp16",
            "d432",
            "112233445566778899a9bacbdcedfe0f00112233445566778798a9bacbdcedfe",
            "ffffff7f00000000",
        ),
        (
            "q6_g64_fp16",
            "9b2e",
            "21436587a9cbed0f1032547698badcfe1032547698badcfe0021436587a9cbed",
            "aaaaaaeaffffffff0000000055555555",
        ),
    ],
)
def test_vectors_of_the_specification(format: str, scale: str, base: str, high: str) -> None:
    data = assemble(format, (1, 64), [(0, formats.encode(format, "grouped_absmax", RAMP))])
    split = sizes.RowSplit.of(formats.get(format), 64, 1)
    assert data[:32].tobytes().hex() == base
    assert data[split.high_offset : split.high_offset + len(high) // 2].tobytes().hex() == high
    assert data[split.scale_offset :].tobytes().hex() == scale + "0000"


@pytest.mark.parametrize(("rows", "columns"), [(128, 64), (256, 192)])
def test_block_scale(rows: int, columns: int) -> None:
    values = torch.randn(rows, columns)
    d = formats.nvfp4_divisor(float(values.abs().max()), "nvfp4_absmax")
    planes = formats.encode("nvfp4", "nvfp4_absmax", values, divisor=d)
    data = assemble("nvfp4", (rows, columns), chunked(planes, 128))
    assert data.tobytes() == oracle.block_scale(planes, rows, columns)
    assert equal(layouts.unpack_rows("nvfp4", (rows, columns), data, 0, rows), planes)
    part = layouts.decode_rows("nvfp4", (rows, columns), data, rows - 5, rows - 2)
    assert torch.equal(part, formats.decode("nvfp4", planes)[-5:-2])


def test_scale_places_of_the_specification() -> None:
    places = {(0, 0): 0, (0, 3): 3, (0, 4): 512, (1, 0): 16, (31, 0): 496, (32, 0): 4, (127, 0): 508}
    places |= {(128, 0): 40960, (129, 5): 41489}
    scales = torch.arange(256 * 320, dtype=torch.int32).to(torch.uint8).reshape(256, 320)
    planes = Planes(torch.zeros(256, 2560, dtype=torch.uint8), scales, 1.0)
    start, _ = sizes.block_scale_offsets(256, 5120)
    data = assemble("nvfp4", (256, 5120), [(0, planes)])
    for (n, g), place in places.items():
        assert oracle.scale_place(n, g, 5120) == place
        assert data[start + place] == scales[n, g]


def test_float8_planes_of_a_source_are_words() -> None:
    codes = torch.randint(0, 255, (128, 32), dtype=torch.uint8)
    scales = torch.randint(0, 126, (128, 4), dtype=torch.uint8)
    a = assemble("nvfp4", (128, 64), [(0, Planes(codes, scales, 2.0))])
    b = assemble("nvfp4", (128, 64), [(0, Planes(codes, scales.view(torch.float8_e4m3fn), 2.0))])
    assert np.array_equal(a, b)


def test_row_scale() -> None:
    planes = formats.encode("fp8_e4m3fn_row_bf16", "fp8_row_maxabs", torch.randn(5, 77))
    data = assemble("fp8_e4m3fn_row_bf16", (5, 77), chunked(planes, 2))
    assert data.tobytes() == oracle.codes_then_bf16(planes)
    assert equal(layouts.unpack_rows("fp8_e4m3fn_row_bf16", (5, 77), data, 0, 5), planes)


def test_tile_scale() -> None:
    format, shape = "fp8_e4m3fn_block128_bf16", (256, 384)
    planes = Planes(torch.randint(0, 127, shape, dtype=torch.uint8), torch.rand(2, 3).bfloat16())
    data = assemble(format, shape, chunked(planes, 128, 1))
    assert data.tobytes() == oracle.codes_then_bf16(planes)
    assert equal(layouts.unpack_rows(format, shape, data, 0, 256), planes)
    part = layouts.decode_rows(format, shape, data, 127, 130)
    assert torch.equal(part, formats.decode(format, planes)[127:130])


@pytest.mark.parametrize(
    ("format", "size", "group"),
    [("ggml_q4_0", 18, 32), ("ggml_q4_1", 20, 32), ("ggml_q8_0", 34, 32), ("ggml_q5_k", 176, 256)],
)
def test_ggml_rows(format: str, size: int, group: int) -> None:
    blocks = torch.randint(0, 100, (5, 3, size), dtype=torch.uint8)
    shape = (5, 3 * group)
    data = assemble(format, shape, chunked(Planes(blocks), 2))
    assert data.tobytes() == blocks.numpy().tobytes()
    assert np.array_equal(assemble(format, shape, [(0, Planes(blocks.reshape(5, -1)))]), data)
    part = layouts.decode_rows(format, shape, data, 1, 4)
    assert torch.equal(part, formats.decode(format, Planes(blocks))[1:4])


def test_ggml_k_mixes_rows() -> None:
    q6 = np.array([False, True, True, False, False, True])
    shape = (6, 512)
    rows = [torch.randint(0, 100, (2, 210 if six else 144), dtype=torch.uint8) for six in q6]
    chunks = [(0, rows[0:1]), (1, rows[1:3]), (3, rows[3:5]), (5, rows[5:6])]
    data = assemble("ggml_k", shape, [(at, Planes(torch.stack(part))) for at, part in chunks], q6)
    expected = oracle.k_rows([row.numpy().tobytes() for row in rows], lambda n: bool(q6[n]))
    assert data.tobytes() == expected
    assert layouts.k_row_types(shape, data).tolist() == q6.tolist()
    values = torch.cat([formats.decode("ggml_k", Planes(row.unsqueeze(0))) for row in rows])
    assert torch.equal(layouts.decode_rows("ggml_k", shape, data, 0, 6), values)
    assert torch.equal(layouts.decode_rows("ggml_k", shape, data, 2, 4), values[2:4])
    with pytest.raises(FormatError, match="mix Q4_K and Q6_K"):
        layouts.unpack_rows("ggml_k", shape, data, 0, 2)
    with pytest.raises(FormatError, match="not all Q6_K"):
        layouts.pack_rows("ggml_k", shape, 0, Planes(rows[1].unsqueeze(0)), q6=q6)
    with pytest.raises(FormatError, match="q6"):
        layouts.pack_rows("ggml_k", shape, 0, Planes(rows[0].unsqueeze(0)))


@pytest.mark.parametrize("format", ["bf16", "fp16", "fp32", "int32"])
@pytest.mark.parametrize("shape", [(), (5,), (3, 4), (2, 3, 4)])
def test_contiguous(format: str, shape: tuple[int, ...]) -> None:
    words = formats.encode(format, "cast_direct", torch.randint(-9, 9, shape).float()).codes
    chunks = chunked(Planes(words), 2) if shape else [(0, Planes(words))]
    data = assemble(format, shape, chunks)
    assert data.tobytes() == words.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    direct = layouts.decode_direct(format, shape, data)
    assert direct.dtype == words.dtype
    assert torch.equal(direct, words)
    if shape:
        assert torch.equal(layouts.decode_rows(format, shape, data, 1, 2), words[1:2].float())


def test_planes_that_do_not_fit() -> None:
    codes, scales = torch.zeros(2, 64, dtype=torch.int8), torch.zeros(2, 1, dtype=torch.float16)
    for begin, planes in [
        (-1, Planes(codes, scales)),
        (1, Planes(codes, scales)),
        (0, Planes(codes)),
        (0, Planes(codes.to(torch.uint8), scales)),
        (0, Planes(codes[:, :63], scales)),
        (0, Planes(codes, scales.float())),
        (0, Planes(codes[:0], scales[:0])),
    ]:
        with pytest.raises(FormatError, match="q4_g64_fp16"):
            layouts.pack_rows("q4_g64_fp16", (2, 64), begin, planes)
    packed, words = torch.zeros(64, 32, dtype=torch.uint8), torch.zeros(64, 4, dtype=torch.uint8)
    with pytest.raises(FormatError, match="multiples of 128"):
        layouts.pack_rows("nvfp4", (128, 64), 0, Planes(packed, words, 1.0))
    with pytest.raises(FormatError, match="divisor"):
        layouts.pack_rows("nvfp4", (128, 64), 0, Planes(packed.repeat(2, 1), words.repeat(2, 1)))
    with pytest.raises(FormatError, match="dtype bfloat16"):
        layouts.pack_rows("bf16", (2,), 0, Planes(torch.zeros(2)))
    with pytest.raises(FormatError, match="no rows"):
        layouts.pack_rows("fp32", (2, 2), 1, Planes(torch.zeros(4)))
    for format, size in (("q4_g64_fp16", 264), ("bf16", 256)):
        with pytest.raises(FormatError, match="outside"):
            layouts.unpack_rows(format, (2, 64), np.zeros(size, np.uint8), 1, 3)
    with pytest.raises(FormatError, match="takes 264 bytes, but 600"):
        layouts.unpack_rows("q4_g64_fp16", (2, 64), np.zeros(600, np.uint8), 0, 1)
    with pytest.raises(FormatError, match="is encoded"):
        layouts.decode_direct("nvfp4", (128, 64), np.zeros(1, np.uint8))
