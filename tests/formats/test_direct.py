"""Direct formats: conversions, and words that must survive as they are."""

import math
import struct

import pytest
import torch

from ninfer import formats
from ninfer.errors import FormatError

from . import oracles


def test_float32_to_bf16_rounds_to_nearest_even() -> None:
    values = torch.cat(
        [torch.randn(500) * 10.0**e for e in range(-40, 38, 6)]
        + [torch.tensor([1 + 2.0**-8, 1 + 3 * 2.0**-8, 0.0, -0.0, 3.4e38, math.inf])]
    )
    words = formats.encode("bf16", "cast_direct", values).codes.view(torch.int16).int() & 0xFFFF
    assert words.tolist() == [oracles.bf16_word(x) for x in values.double().tolist()]


def test_float64_goes_through_float32() -> None:
    value = 1 + 2.0**-8 + 2.0**-40
    once = formats.encode("bf16", "cast_direct", torch.tensor([value], dtype=torch.float64)).codes
    assert float(once) == 1.0


@pytest.mark.parametrize(
    ("name", "dtype", "words"),
    [
        ("bf16", torch.int16, [0x7FC1, 0x7F81, -0x8000, 1]),
        ("fp16", torch.int16, [0x7E01, 0x7C01, -0x8000, 1]),
        ("fp32", torch.int32, [0x7FC00001, 0x7F800001, -0x80000000, 1]),
    ],
)
def test_equal_types_pass_bit_for_bit(name: str, dtype: torch.dtype, words: list[int]) -> None:
    target = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[name]
    values = torch.tensor(words, dtype=dtype).view(target)
    assert formats.encode(name, "cast_direct", values).codes.view(dtype).tolist() == words


def test_bf16_to_fp32_appends_zero_bits() -> None:
    words = torch.arange(-(2**15), 2**15, dtype=torch.int16)
    wide = formats.encode("fp32", "cast_direct", words.view(torch.bfloat16)).codes
    assert torch.equal(wide.view(torch.int32), words.int() << 16)


def test_float32_to_fp16() -> None:
    values = torch.tensor([1.0, 1 + 2.0**-11, 2.0**-25, 65504.0, 65519.0, -math.inf])
    words = formats.encode("fp16", "cast_direct", values).codes.view(torch.int16).int() & 0xFFFF
    assert words.tolist() == [
        *(struct.unpack("<H", struct.pack("<e", x))[0] for x in values[:-1].tolist()),
        0xFC00,
    ]
    with pytest.raises(FormatError, match="65504"):
        formats.encode("fp16", "cast_direct", torch.tensor([65520.0]))


def test_int32_is_range_checked() -> None:
    exact = torch.tensor([-(2**31), 0, 2**31 - 1])
    assert formats.encode("int32", "cast_direct", exact).codes.tolist() == exact.tolist()
    assert formats.encode("int32", "cast_direct", torch.tensor([3.0, -2.0])).codes.tolist() == [3, -2]
    for bad in (torch.tensor([2**31]), torch.tensor([1.5]), torch.tensor([math.nan]), torch.tensor([3e9])):
        with pytest.raises(FormatError, match="int32"):
            formats.encode("int32", "cast_direct", bad)
    with pytest.raises(FormatError, match="numbers"):
        formats.encode("int32", "cast_direct", torch.tensor([True]))


def test_integers_do_not_become_floats() -> None:
    with pytest.raises(FormatError, match="floating-point"):
        formats.encode("bf16", "cast_direct", torch.tensor([1]))


def test_any_shape() -> None:
    assert formats.encode("fp32", "cast_direct", torch.tensor(2.5)).codes.shape == ()
    assert formats.decode("bf16", formats.encode("bf16", "cast_direct", torch.ones(2, 3, 4))).shape == (
        2,
        3,
        4,
    )
