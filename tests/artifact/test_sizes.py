"""The size table of the specification, and shapes that a layout cannot hold."""

import pytest

from ninfer import formats
from ninfer.artifact import default_layout, encoded_bytes
from ninfer.errors import FormatError

TABLE = [
    ("q4_g64_fp16", (7168, 5120), 19_496_960),
    ("q4_g64_fp16", (34816, 5120), 94_699_520),
    ("q6_g64_fp16", (248320, 5120), 993_280_000),
    ("q4_g64_fp16", (131072, 5120), 356_515_840),
    ("q8_g32_fp16", (34816, 5120), 189_399_040),
    ("nvfp4", (14336, 5120), 41_287_684),
    ("nvfp4", (34816, 5120), 100_270_084),
    ("nvfp4", (5120, 6144), 17_694_724),
    ("fp8_e4m3fn_row_bf16", (248320, 5120), 1_271_895_040),
    ("q4_g64_fp16", (262144, 2048), 285_212_672),
    ("q4_g64_fp16", (4304, 1152), 2_634_048),
    ("q5_g64_fp16", (7168, 5120), 24_084_480),
    ("q5_g64_fp16", (5120, 17408), 58_490_880),
    ("q8_g32_fp16", (248320, 5120), 1_350_860_800),
    ("q8_g32_fp16", (5120, 10240), 55_705_600),
    ("q8_g32_fp16", (5120, 25600), 139_264_000),
    ("nvfp4", (16384, 5120), 47_185_924),
    ("nvfp4", (5120, 17408), 50_135_044),
    ("fp8_e4m3fn_row_bf16", (14336, 5120), 73_428_992),
    ("fp8_e4m3fn_block128_bf16", (14336, 5120), 73_409_280),
    ("q5_g64_fp16", (524288, 512), 176_160_768),
    ("q6_g64_fp16", (524288, 512), 209_715_200),
    ("q5_g64_fp16", (1152, 4304), 3_290_112),
    ("q5_g64_fp16", (2, 130), 528),
    ("ggml_q4_0", (3, 64), 3 * 2 * 18),
    ("ggml_q4_1", (3, 64), 3 * 2 * 20),
    ("ggml_q8_0", (3, 64), 3 * 2 * 34),
    ("ggml_q5_k", (3, 512), 3 * 2 * 176),
    ("bf16", (), 2),
    ("fp16", (3,), 6),
    ("fp32", (2, 3, 4), 96),
    ("int32", (7,), 28),
]


@pytest.mark.parametrize(("format", "shape", "expected"), TABLE)
def test_sizes(format: str, shape: tuple[int, ...], expected: int) -> None:
    assert encoded_bytes(format, default_layout(format), shape) == expected


def test_ggml_k() -> None:
    assert encoded_bytes("ggml_k", "ggml_k256_v1", (33, 512), q6_rows=0) == 512 + 33 * 288
    assert encoded_bytes("ggml_k", "ggml_k256_v1", (33, 512), q6_rows=2) == 512 + 31 * 288 + 2 * 420
    for wrong in (None, -1, 34):
        with pytest.raises(FormatError, match="q6_rows"):
            encoded_bytes("ggml_k", "ggml_k256_v1", (33, 512), q6_rows=wrong)


@pytest.mark.parametrize(
    ("format", "shape"),
    [
        ("nvfp4", (127, 64)),
        ("nvfp4", (128, 32)),
        ("fp8_e4m3fn_block128_bf16", (128, 64)),
        ("fp8_e4m3fn_block128_bf16", (64, 128)),
        ("q4_g64_fp16", (64,)),
        ("q4_g64_fp16", (1, 2, 3)),
        ("q4_g64_fp16", (0, 3)),
        ("ggml_q4_0", (1, 33)),
        ("ggml_k", (1, 128)),
        ("bf16", (0,)),
        ("bf16", (1,) * 17),
    ],
)
def test_impossible_shapes(format: str, shape: tuple[int, ...]) -> None:
    with pytest.raises(FormatError, match=r"shape|dimensions"):
        encoded_bytes(format, default_layout(format), shape, q6_rows=0)


def test_only_one_layout_fits_a_format() -> None:
    for format in formats.names():
        with pytest.raises(FormatError, match="not 'raw_bytes_v1'"):
            encoded_bytes(format, "raw_bytes_v1", (128, 256), q6_rows=0)
    with pytest.raises(FormatError, match="unknown weight format"):
        encoded_bytes("nvfp8", "row_scale_v1", (1, 1))
