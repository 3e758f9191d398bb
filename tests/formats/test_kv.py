"""Codecs of the KV cache against scalar formulas, bit by bit."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ninfer.errors import FormatError
from ninfer.formats import KvCode, KvFormat, KvSide, kv_codec

from . import kv_oracle, samples

ORACLES = {KvCode.INT8: kv_oracle.int8, KvCode.FP8: kv_oracle.fp8, KvCode.NVFP4: kv_oracle.nvfp4}
CODES = pytest.mark.parametrize("code", ORACLES)
SIDES = sorted(
    {side for format in KvFormat for side in (format.keys, format.values) if side.code in ORACLES}, key=repr
)


def check(values: torch.Tensor, side: KvSide) -> None:
    """`values` float32 `[rows, D]`."""
    codes, scales = kv_codec.encode(values, side)
    decoded = kv_codec.decode(codes, scales, side)
    assert scales is not None
    assert codes.shape[1:] == (side.code.codes(values.shape[1]),)
    assert scales.shape[1:] == (side.code.scales(values.shape[1]),)
    assert (codes.dtype, scales.dtype) == kv_codec.plane_types(side.code, torch.bfloat16)
    words = scales.view(torch.int16) if scales.dtype == torch.float16 else scales
    for row, x in enumerate(samples.as_floats(values)):
        if side.rotation(len(x)):
            x = kv_oracle.hadamard(x)
        found, expected_words, expected = ORACLES[side.code](kv_oracle.finite(x))
        assert words[row].tolist() == expected_words
        assert codes[row].tolist() == found
        got = samples.as_floats(decoded[row])
        assert got == expected
        assert [math.copysign(1, v) for v in got if not v] == [math.copysign(1, v) for v in expected if not v]


@pytest.mark.parametrize("side", SIDES, ids=str)
@pytest.mark.parametrize("width", [32, 64, 96, 160, 256])
def test_special_vectors(side: KvSide, width: int) -> None:
    check(samples.special_rows(width, width), side)


@pytest.mark.parametrize("side", SIDES, ids=str)
@given(st.data())
@settings(max_examples=40, deadline=None)
def test_random_vectors(side: KvSide, data: st.DataObject) -> None:
    width = data.draw(st.sampled_from([32, 96]))
    check(samples.matrix([data.draw(samples.rows(width, low=-40, high=25))]), side)


def filled(values: list[float], largest: float, width: int) -> torch.Tensor:
    """Rows of `values` in order, each group of 16 led by `largest`."""
    groups = [values[i : i + 15] for i in range(0, len(values), 15)]
    numbers = [v for group in groups for v in [largest, *group, *[0.0] * (15 - len(group))]]
    numbers += [0.0] * (-len(numbers) % width)
    return samples.matrix([numbers]).view(-1, width)


@pytest.mark.parametrize("scale", [1.0, 2.0**-8])
def test_every_tie(scale: float) -> None:
    """Halfway between neighbouring codes, and the floats beside, where the scale is a power of two."""

    def around(numbers: list[float]) -> list[float]:
        middles = [(a + b) / 2 for a, b in itertools.pairwise(numbers)]
        near = [m * f for m in middles for f in (1, 1 + 2.0**-23, 1 - 2.0**-24)]
        return [s * v * scale for v in near for s in (1, -1)]

    integers = [float(i) for i in range(128)]
    e4m3 = [kv_oracle.e4m3(word) for word in range(0x7F)]
    check(filled(around(integers), 127.0 * scale, 64), KvSide(KvCode.INT8))
    check(filled(around(e4m3), 448.0 * scale, 256), KvSide(KvCode.FP8))
    check(filled(around(list(kv_oracle.oracles.E2M1)), 6.0 * scale, 32), KvSide(KvCode.NVFP4))


@CODES
def test_scales_at_their_limits(code: KvCode) -> None:
    """From subnormal scales to saturated ones, single numbers with a smaller companion."""
    sizes = [
        m * 2.0**e for e in (*range(-149, -5, 3), *range(5, 127, 4)) for m in (1.0, 1.3359375, 1.9921875)
    ]
    values = torch.zeros(len(sizes), 32, dtype=torch.float64)
    values[:, 3] = torch.tensor(sizes, dtype=torch.float64)
    values[:, 20] = -values[:, 3] / 3
    check(values.float(), KvSide(code))


@pytest.mark.parametrize("side", SIDES, ids=str)
def test_a_cache_holds_finite_numbers(side: KvSide) -> None:
    values = torch.randn(4, 64, generator=torch.Generator().manual_seed(1))
    values[0, 5], values[1, 6], values[2, 7] = math.nan, math.inf, -math.inf
    values[3] = 3e38
    codes, scales = kv_codec.encode(values, side)
    assert torch.isfinite(kv_codec.decode(codes, scales, side)).all()
    if not side.rotated:
        check(values, side)
        clean = torch.cat((values[0, :5], torch.zeros(1), values[0, 6:]))
        assert torch.equal(codes[0], kv_codec.encode(clean, side)[0])


def test_what_coding_loses() -> None:
    x = torch.randn(50, 256, generator=torch.Generator().manual_seed(2)) * 3
    for format, worst in ((KvFormat.INT8, 0.01), (KvFormat.FP8, 0.04), (KvFormat.NVFP4, 0.13)):
        turned = kv_codec.decode(*kv_codec.encode(x, format.keys), format.keys)
        error = (kv_codec.rotate(turned) - x).norm() / x.norm()
        assert error < worst, format


@pytest.mark.parametrize("width", [1, 2, 32, 64, 128, 256, 512])
def test_rotation(width: int) -> None:
    x = torch.randn(3, width, generator=torch.Generator().manual_seed(3))
    turned = kv_codec.rotate(x)
    assert samples.as_floats(turned) == [kv_oracle.hadamard(row) for row in samples.as_floats(x)]
    torch.testing.assert_close(turned.norm(dim=-1), x.norm(dim=-1))
    torch.testing.assert_close(kv_codec.rotate(turned), x)
    signs = kv_codec.rotate(torch.eye(width)) * math.sqrt(width)
    expected = [[(-1.0) ** (i & j).bit_count() for j in range(width)] for i in range(width)]
    torch.testing.assert_close(signs, torch.tensor(expected))


def test_which_sides_are_rotated() -> None:
    rotated = {f: (f.keys.rotation(256), f.values.rotation(256)) for f in KvFormat}
    assert rotated == {
        KvFormat.BF16: (False, False),
        KvFormat.INT8: (True, False),
        KvFormat.FP8: (True, False),
        KvFormat.NVFP4: (True, True),
        KvFormat.K8V4: (True, True),
    }
    assert not KvFormat.NVFP4.keys.rotation(96)
    with pytest.raises(FormatError, match="power of two can be rotated, got 96"):
        kv_codec.rotate(torch.zeros(96))


@pytest.mark.parametrize(
    ("format", "vectors"),
    [("bf16", 1024), ("int8", 528), ("fp8", 516), ("k8v4", 402), ("nvfp4", 288)],
)
def test_bytes_of_a_head(format: str, vectors: int) -> None:
    sides = KvFormat(format).keys, KvFormat(format).values
    assert sum(side.code.vector_bytes(256, 2) for side in sides) == vectors
    for side in sides:
        planes = kv_codec.encode(torch.zeros(96).bfloat16(), side)
        size = sum(plane.numel() * plane.itemsize for plane in planes if plane is not None)
        assert side.code.vector_bytes(96, 2) == size


def test_widths_that_cannot_be_quantized_are_refused() -> None:
    KvFormat.BF16.check(40)
    for format in KvFormat:
        format.check(96)
    with pytest.raises(
        FormatError, match=r"'int8' needs .* multiple of 32, but this model's is 40; use 'bf16'"
    ):
        KvFormat.INT8.check(40)
