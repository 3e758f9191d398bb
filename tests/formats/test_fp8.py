"""FP8 rows and tiles against the scalar formula."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ninfer import formats
from ninfer.errors import FormatError
from ninfer.formats import Planes, fp8

from . import oracles, samples

NAME = "fp8_e4m3fn_row_bf16"


def _check(values: torch.Tensor) -> None:
    planes = formats.encode(NAME, "fp8_row_maxabs", values)
    decoded = formats.decode(NAME, planes)
    assert planes.scales is not None
    words = (planes.scales.view(torch.int16).int() & 0xFFFF).tolist()
    for row, x in enumerate(samples.as_floats(values)):
        codes, word = oracles.fp8_row(x)
        assert words[row] == word
        assert planes.codes[row].tolist() == codes
        expected = [oracles.f32(oracles.e4m3(code) * oracles.bf16(word)) for code in codes]
        assert samples.as_floats(decoded[row]) == expected


@pytest.mark.parametrize("columns", [1, 8, 77])
def test_special_rows(columns: int) -> None:
    _check(samples.special_rows(columns, columns))


@given(st.integers(1, 24).flatmap(lambda n: samples.rows(n, low=-115, high=100)))
@settings(max_examples=150, deadline=None)
def test_random_rows(row: list[float]) -> None:
    _check(samples.matrix([row]))


def test_every_word_has_the_value_of_the_formula() -> None:
    words = torch.arange(256, dtype=torch.uint8)
    for word, value in zip(words.tolist(), fp8.e4m3(words).tolist(), strict=True):
        expected = oracles.e4m3(word)
        assert (math.isnan(value) and math.isnan(expected)) or value == expected
        assert math.isnan(value) or math.copysign(1, value) == math.copysign(1, expected)


def test_rows_too_small_for_a_scale_are_refused() -> None:
    # The first scale is 2^-128, whose reciprocal is infinite in FP32; the second is one BF16 step more.
    with pytest.raises(FormatError, match="row 1"):
        formats.encode(NAME, "fp8_row_maxabs", torch.tensor([[1.0], [448 * 2.0**-128]]))
    _check(torch.tensor([[448 * (2.0**-128 + 2.0**-133)]]))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 3.4e38])
def test_non_finite_values_are_refused(bad: float) -> None:
    # 3.4e38 becomes infinite when it is rounded to BF16.
    with pytest.raises(FormatError, match="non-finite"):
        formats.encode(NAME, "fp8_row_maxabs", torch.tensor([[1.0, bad]]))


def test_tiles_decode_by_the_formula() -> None:
    codes = torch.randint(0, 0x7F, (256, 384), dtype=torch.uint8)
    scales = torch.rand(2, 3).bfloat16()
    values = formats.decode("fp8_e4m3fn_block128_bf16", Planes(codes, scales))
    for n, k in [(0, 0), (0, 383), (127, 128), (128, 127), (255, 383), (200, 300)]:
        expected = oracles.f32(oracles.e4m3(int(codes[n, k])) * float(scales[n // 128, k // 128]))
        assert float(values[n, k]) == expected


def test_tiles_have_no_encoder() -> None:
    with pytest.raises(FormatError, match="imported"):
        formats.encode("fp8_e4m3fn_block128_bf16", "fp8_row_maxabs", torch.zeros(128, 128))
