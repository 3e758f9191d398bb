"""Packed segments against the definition of their layout, on any device."""

from __future__ import annotations

import pytest
import torch

from ninfer.errors import FormatError
from ninfer.ops import Encoded, Matrix, RowSpan
from ninfer.ops.cuda import pack as packer
from ninfer.ops.cuda import pack_nvfp4
from ninfer.ops.cuda.packed import Packed
from ninfer.ops.weights import Role, place
from tests.ops.cuda.unpack import unpacked
from tests.ops.weights import MAKERS, SHAPES, random_matrix, random_weight


def same(packed: Packed, values: torch.Tensor) -> None:
    """Equal but for the last bit of a float32, where a divisor or a minimum was rounded."""
    assert torch.allclose(unpacked(packed), values.double(), rtol=3e-7, atol=1e-7)
    for segment in packed.segments:
        if segment.packing.kernel != "Dense":
            assert segment.data.numel() == segment.tiles * segment.units * segment.packing.unit_bytes
    assert packed.bytes == sum(segment.data.numel() for segment in packed.segments)


@pytest.mark.parametrize("format", MAKERS)
def test_every_format(format: str, device: torch.device) -> None:
    matrix, values = random_matrix(format, *SHAPES[format], seed=5)
    same(packer.pack(matrix, device, Role.LINEAR), values)


@pytest.mark.parametrize("format", MAKERS)
def test_spans_begin_anywhere_and_join(
    format: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packer, "_CHUNK", 40 * 768)
    monkeypatch.setattr(pack_nvfp4, "_CHUNK", 40 * 192)
    (first, a), (second, b) = (random_weight(format, *SHAPES[format], seed) for seed in (6, 7))
    matrix = Matrix([RowSpan(first, 3, 48), RowSpan(second, 17, 18), RowSpan(second, 20, 53)])
    packed = packer.pack(matrix, device, Role.LINEAR)
    assert len(packed.segments) == (2 if format == "ggml_k" else 1)
    same(packed, torch.cat((a[3:48], b[17:18], b[20:53])))


@pytest.mark.parametrize("format", MAKERS)
@pytest.mark.parametrize("half", [8, 19, 26])
def test_gate_and_up_are_interleaved(
    format: str, half: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packer, "_CHUNK", 20 * 768)
    monkeypatch.setattr(pack_nvfp4, "_CHUNK", 20 * 192)
    encoded, values = random_weight(format, *SHAPES[format], seed=8)
    matrix = Matrix([RowSpan(encoded, 1, 1 + half), RowSpan(encoded, 52 - half, 52)])
    packed = packer.pack(matrix, device, Role.SWIGLU)
    assert packed.interleaved == (format not in ("ggml_k", "fp16", "fp32"))
    same(packed, torch.cat((values[1 : 1 + half], values[52 - half : 52])))


def test_formats_between_others_get_a_map(device: torch.device) -> None:
    names = ("q4_g64_fp16", "ggml_q8_0", "q4_g64_fp16", "fp16")
    parts = [random_weight(name, 20, 256, seed) for seed, name in enumerate(names)]
    matrix = Matrix.stack(Matrix.of(encoded) for encoded, _ in parts)
    for role in (Role.LINEAR, Role.SWIGLU):
        packed = packer.pack(matrix, device, role)
        assert [s.packing.kernel for s in packed.segments] == ["Q4G64", "Q8G32", "Dense"]
        assert not packed.interleaved
        same(packed, torch.cat([values for _, values in parts]))


def test_small_projections_are_decoded(device: torch.device) -> None:
    plain, values = random_matrix("bf16", 6, 70)
    assert torch.equal(packer.dense(plain, device).cpu().float(), values)
    other, more = random_matrix("ggml_q4_1", 6, 96)
    decoded = packer.dense(other, device)
    assert torch.equal(decoded.cpu(), more.bfloat16())


@pytest.mark.parametrize("format", MAKERS)
def test_bytes_that_do_not_fit_are_refused(format: str, device: torch.device) -> None:
    encoded, _ = random_weight(format, *SHAPES[format])
    for data in (encoded.data[:-1], torch.cat((encoded.data, encoded.data[:1])), encoded.data[:3]):
        w = Matrix.of(Encoded(encoded.format, encoded.layout, encoded.shape, data))
        with pytest.raises(FormatError, match="bytes"):
            packer.pack(w, device, Role.LINEAR)


def test_unknown_formats_and_damaged_tables_are_refused(device: torch.device) -> None:
    for format, layout in (("bf17", "contiguous_le_v1"), ("bf16", "ggml_rows_v1")):
        w = Matrix.of(Encoded(format, layout, (4, 4), torch.zeros(32, dtype=torch.uint8)))
        with pytest.raises(FormatError):
            packer.pack(w, device, Role.LINEAR)
    encoded, _ = random_weight("ggml_k", 5, 256)
    encoded.data[8] ^= 2
    with pytest.raises(FormatError, match="not canonical"):
        packer.pack(Matrix.of(encoded), device, Role.LINEAR)


def test_a_matrix_is_placed_once() -> None:
    matrix, _ = random_matrix("bf16", 16, 64, seed=5)
    matrix.placed(torch.device("cuda", 0), object())
    with pytest.raises(FormatError, match="is on cuda:0 already"):
        place(matrix, torch.device("cuda", 0), Role.LINEAR)
