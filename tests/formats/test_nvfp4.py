"""NVFP4 against the scalar formula."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ninfer import formats
from ninfer.errors import FormatError
from ninfer.formats import nvfp4

from . import oracles, samples

METHODS = ["nvfp4_absmax", "nvfp4_mse"]


def _unpacked(packed: torch.Tensor) -> list[int]:
    return [nibble for byte in packed.tolist() for nibble in (byte & 15, byte >> 4)]


def _check(method: str, values: torch.Tensor) -> None:
    absmax = float(values.abs().max())
    d = formats.nvfp4_divisor(absmax, method)
    assert d == oracles.nvfp4_divisor(absmax, method)
    planes = formats.encode("nvfp4", method, values, divisor=d)
    decoded = formats.decode("nvfp4", planes)
    assert planes.scales is not None
    for row, x in enumerate(samples.as_floats(values)):
        codes, scales = _unpacked(planes.codes[row]), planes.scales[row].tolist()
        for group, word in enumerate(scales):
            part = slice(16 * group, 16 * group + 16)
            _check_group(x[part], method, d, word, codes[part])
        assert samples.as_floats(decoded[row]) == [
            oracles.nvfp4_value(code, scales[k // 16], d) for k, code in enumerate(codes)
        ]


def _check_group(group: list[float], method: str, d: float, word: int, codes: list[int]) -> None:
    """The choice must be a candidate; a worse one than the best only by the rounding of a float32 sum."""
    candidates = oracles.nvfp4_candidates(group, method, d)
    chosen = [error for scale, found, error in candidates if (scale, found) == (word, codes)]
    assert chosen, (word, codes, candidates)
    best = min(error for _, _, error in candidates)
    assert chosen[0] <= best * (1 + 1e-5) + 1e-44
    assert 8 not in codes
    assert word <= 0x7E


@pytest.mark.parametrize("method", METHODS)
def test_special_rows(method: str) -> None:
    _check(method, samples.special_rows(64, 1))


@pytest.mark.parametrize("method", METHODS)
@given(st.data())
@settings(max_examples=60, deadline=None)
def test_random_rows(method: str, data: st.DataObject) -> None:
    rows = [data.draw(samples.rows(32, low=-20, high=20)) for _ in range(2)]
    _check(method, samples.matrix(rows))


@pytest.mark.parametrize("method", METHODS)
def test_all_zero_parent(method: str) -> None:
    planes = formats.encode("nvfp4", method, torch.zeros(2, 16), divisor=formats.nvfp4_divisor(0.0, method))
    assert planes.divisor == 1.0
    assert not planes.codes.any()
    assert not formats.decode("nvfp4", planes).any()


def test_rounding_of_every_sixteenth_and_the_ties() -> None:
    m = torch.arange(0, 6 * 64 + 1) / 64
    codes = nvfp4._codes(m, m.clone())
    assert codes.tolist() == [oracles.e2m1_code(float(x)) for x in m]
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    assert nvfp4._codes(-ties, ties.clone()).tolist() == [0, 10, 10, 12, 12, 14, 14]
    for tie in ties.tolist():
        for x in (math.nextafter(tie, 0), math.nextafter(tie, 9)):
            near = torch.tensor([x], dtype=torch.float64).float()
            expected = oracles.e2m1_code(float(near))
            assert nvfp4._codes(near, near.clone()).tolist() == [expected]


@pytest.mark.parametrize("absmax", [math.nan, math.inf, -1.0, 1e-40])
def test_divisors_that_cannot_be(absmax: float) -> None:
    with pytest.raises(FormatError, match="nvfp4_absmax"):
        formats.nvfp4_divisor(absmax, "nvfp4_absmax")


def test_bad_requests() -> None:
    with pytest.raises(FormatError, match="divisor"):
        formats.encode("nvfp4", "nvfp4_absmax", torch.zeros(1, 16))
    with pytest.raises(FormatError, match="positive finite FP32"):
        formats.encode("nvfp4", "nvfp4_absmax", torch.zeros(1, 16), divisor=0.1)
    with pytest.raises(FormatError, match="multiple of 16"):
        formats.encode("nvfp4", "nvfp4_absmax", torch.zeros(1, 24), divisor=1.0)
    with pytest.raises(FormatError, match="non-finite"):
        formats.encode("nvfp4", "nvfp4_mse", torch.full((1, 16), math.nan), divisor=1.0)
    with pytest.raises(FormatError, match="no encoder 'grouped_absmax'"):
        formats.encode("nvfp4", "grouped_absmax", torch.zeros(1, 16), divisor=1.0)
    with pytest.raises(FormatError, match="no encoder"):
        formats.nvfp4_divisor(1.0, "nvfp4")
