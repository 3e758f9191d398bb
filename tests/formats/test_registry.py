"""Names, the light import, and the test vectors of the specification."""

import subprocess
import sys

import pytest
import torch

from ninfer import formats
from ninfer.errors import FormatError

RAMP = [(i - 32) / 10 for i in range(64)]
NVFP4 = [0.1, -0.2, 0.3, -0.4, 0.5, -0.6, 0.7, -0.8, 0.9, -1, 1.1, -1.2, 0.05, -0.03, 0, 0.33]


def test_names() -> None:
    assert set(formats.names()) == {
        *(
            "bf16",
            "fp16",
            "fp32",
            "int32",
            "q4_g64_fp16",
            "q5_g64_fp16",
            "q6_g64_fp16",
            "q8_g32_fp16",
            "nvfp4",
        ),
        *("fp8_e4m3fn_row_bf16", "fp8_e4m3fn_block128_bf16", "ggml_k"),
        *("ggml_q4_0", "ggml_q4_1", "ggml_q8_0", "ggml_q5_k"),
    }
    with pytest.raises(FormatError, match="unknown weight format 'Q4_K'"):
        formats.get("Q4_K")


@pytest.mark.parametrize(
    ("name", "low", "high"), [("q4_g64_fp16", -8, 7), ("q5_g64_fp16", -16, 15), ("q8_g32_fp16", -127, 127)]
)
def test_code_ranges(name: str, low: int, high: int) -> None:
    assert (formats.get(name).code_min, formats.get(name).code_max) == (low, high)


@pytest.mark.parametrize("module", ["ninfer.formats", "ninfer.artifact", "ninfer.cli.inspect"])
def test_looking_up_formats_is_light(module: str) -> None:
    code = f"import {module}, sys; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_q8_vector() -> None:
    planes = formats.encode(
        "q8_g32_fp16", "grouped_absmax", torch.tensor([[(i - 16) / 8 for i in range(32)]])
    )
    assert planes.scales is not None
    assert planes.scales.view(torch.int16).item() == 0x2408
    expected = "81899199a1a9b1b9c0c8d0d8e0e8f0f8000810182028303840474f575f676f77"
    assert planes.codes.numpy().tobytes().hex() == expected


def test_fp8_vector() -> None:
    row = [0, 0.5, -1, 3, -0.007, 100, 2.25, -33]
    planes = formats.encode("fp8_e4m3fn_row_bf16", "fp8_row_maxabs", torch.tensor([row]))
    assert planes.scales is not None
    assert planes.scales.view(torch.int16).item() == 0x3E65
    assert planes.codes.numpy().tobytes().hex() == "0041c955907e52f1"


@pytest.mark.parametrize(
    ("method", "divisor", "packed"),
    [("nvfp4_absmax", "00000c45", "a1c3d4e6e6f70030"), ("nvfp4_mse", "aaaaba44", "91b2c3d4d5e60020")],
)
def test_nvfp4_vector(method: str, divisor: str, packed: str) -> None:
    values = torch.tensor([NVFP4])
    d = formats.nvfp4_divisor(float(values.abs().max()), method)
    assert torch.tensor(d).numpy().tobytes().hex() == divisor
    planes = formats.encode("nvfp4", method, values, divisor=d)
    assert planes.scales is not None
    assert planes.scales.tolist() == [[0x7E]]
    assert planes.codes.numpy().tobytes().hex() == packed


def test_bad_requests() -> None:
    with pytest.raises(FormatError, match=r"matrix \[rows, K\]"):
        formats.encode("q4_g64_fp16", "grouped_absmax", torch.zeros(4))
    with pytest.raises(FormatError, match="floating-point"):
        formats.encode("q4_g64_fp16", "grouped_absmax", torch.zeros(4, 4, dtype=torch.int32))


@pytest.mark.parametrize(
    ("name", "method"),
    [
        ("q6_g64_fp16", "grouped_absmax"),
        ("fp8_e4m3fn_row_bf16", "fp8_row_maxabs"),
        ("nvfp4", "nvfp4_absmax"),
        ("nvfp4", "nvfp4_mse"),
    ],
)
def test_many_rows_equal_one_row_at_a_time(name: str, method: str) -> None:
    values = torch.randn(5, 65_600)
    divisor = formats.nvfp4_divisor(float(values.abs().max()), method) if name == "nvfp4" else None
    whole = formats.encode(name, method, values, divisor=divisor)
    rows = [formats.encode(name, method, values[n : n + 1], divisor=divisor) for n in range(5)]
    assert torch.equal(whole.codes, torch.cat([row.codes for row in rows]))
    assert whole.scales is not None
    assert torch.equal(whole.scales, torch.cat([row.scales for row in rows if row.scales is not None]))
