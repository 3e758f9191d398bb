"""Grouped integers against the scalar formula, bit for bit."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ninfer import formats
from ninfer.errors import FormatError

from . import oracles, samples

FORMATS = [("q4_g64_fp16", 4, 64), ("q5_g64_fp16", 5, 64), ("q6_g64_fp16", 6, 64), ("q8_g32_fp16", 8, 32)]


def _check(name: str, bits: int, group: int, values: torch.Tensor) -> None:
    planes = formats.encode(name, "grouped_absmax", values)
    decoded = formats.decode(name, planes)
    assert planes.scales is not None
    words = planes.scales.view(torch.int16).int() & 0xFFFF
    for row, (x, codes, scales) in enumerate(
        zip(samples.as_floats(values), planes.codes.tolist(), words.tolist(), strict=True)
    ):
        expected_codes, expected_scales = oracles.grouped_absmax(x, bits, group)
        assert scales == expected_scales
        assert codes == expected_codes
        expected = [oracles.grouped_value(code, scales[k // group]) for k, code in enumerate(codes)]
        assert samples.as_floats(decoded[row]) == expected


@pytest.mark.parametrize(("name", "bits", "group"), FORMATS)
@pytest.mark.parametrize("columns", [1, 63, 64, 65, 200])
def test_special_rows(name: str, bits: int, group: int, columns: int) -> None:
    _check(name, bits, group, samples.special_rows(columns, columns))


@given(st.data())
@settings(max_examples=150, deadline=None)
def test_random_rows(data: st.DataObject) -> None:
    name, bits, group = data.draw(st.sampled_from(FORMATS))
    columns = data.draw(st.integers(1, 2 * group + 3))
    _check(name, bits, group, samples.matrix([data.draw(samples.rows(columns, low=-60, high=8))]))


def test_inputs_of_other_types_are_rounded_to_float32_first() -> None:
    wide = torch.randn(3, 64, dtype=torch.float64)
    a = formats.encode("q4_g64_fp16", "grouped_absmax", wide)
    b = formats.encode("q4_g64_fp16", "grouped_absmax", wide.float())
    assert torch.equal(a.codes, b.codes)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf"), 1e9])
def test_values_that_have_no_scale_are_refused(bad: float) -> None:
    values = torch.zeros(5, 64)
    values[3, 9] = bad
    with pytest.raises(FormatError, match="grouped_absmax"):
        formats.encode("q4_g64_fp16", "grouped_absmax", values)


def test_the_row_of_a_bad_value_is_named() -> None:
    values = torch.zeros(5, 64)
    values[3, 9] = float("nan")
    with pytest.raises(FormatError, match="row 3"):
        formats.encode("q8_g32_fp16", "grouped_absmax", values)
