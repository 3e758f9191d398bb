"""Matrix products: every format, every route, against float64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from ninfer.errors import FormatError, OptionError
from ninfer.ops import Encoded, Matrix, RowSpan, linear, linear_swiglu, logits
from ninfer.ops.cpu import products
from tests.ops.criteria import LINEAR, criterion
from tests.ops.weights import MAKERS, SHAPES, random_matrix, random_weight

TILED = ("bf16", "q5_g64_fp16", "nvfp4", "ggml_q4_1")
"""Formats whose wide kernel is tested: one for each way that rows end and codes are ordered."""


def columns_of(count: int, width: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, width, generator=generator).to(dtype)


def swiglu(x: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    gate, up = (x.double() @ values.double().T).chunk(2, -1)
    return F.silu(gate) * up


@pytest.mark.parametrize("format", MAKERS)
def test_few_columns(format: str, dtype: torch.dtype) -> None:
    rows, width = SHAPES[format]
    w, values = random_matrix(format, rows, width)
    for count in (1, 2, 3, 4):
        x, residual = columns_of(count, width, dtype), columns_of(count, rows, dtype, 1)
        reference = x.double() @ values.double().T
        criterion(LINEAR, dtype).check(linear(x, w), reference)
        criterion(LINEAR, dtype).check(linear(x, w, residual), reference + residual.double())
        scores = logits(x, w, rows - 3)
        assert scores.dtype == torch.float32
        criterion(LINEAR, dtype).check(scores, reference[:, : rows - 3])
        assert torch.equal(scores, linear(x, w)[:, : rows - 3].float())


@pytest.mark.parametrize("format", MAKERS)
def test_gate_and_up(format: str, dtype: torch.dtype) -> None:
    rows, width = SHAPES[format]
    encoded, values = random_weight(format, rows, width)
    rows -= rows % 2
    w = Matrix([RowSpan(encoded, 0, rows)])
    for count in (1, 3):
        x = columns_of(count, width, dtype) / 4
        criterion(LINEAR, dtype).check(linear_swiglu(x, w), swiglu(x, values[:rows]))


@pytest.mark.parametrize("format", TILED)
@pytest.mark.parametrize("count", [5, 16, 17, 31, 33, 70])
def test_more_columns(format: str, count: int, dtype: torch.dtype) -> None:
    rows, width = SHAPES[format]
    encoded, values = random_weight(format, rows, width)
    w = Matrix.of(encoded)
    x, residual = columns_of(count, width, dtype), columns_of(count, rows, dtype, 1)
    reference = x.double() @ values.double().T
    criterion(LINEAR, dtype).check(linear(x, w), reference)
    criterion(LINEAR, dtype).check(linear(x, w, residual), reference + residual.double())
    criterion(LINEAR, dtype).check(logits(x, w, rows - 3), reference[:, : rows - 3])
    half = Matrix([RowSpan(encoded, 0, rows - rows % 2)])
    x = x / 4
    criterion(LINEAR, dtype).check(linear_swiglu(x, half), swiglu(x, values[: rows - rows % 2]))


@pytest.mark.parametrize("count", [5, 16, 17, 40])
def test_machines_without_tiles(count: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products.amx, "available", lambda: False)
    monkeypatch.setattr(products, "_DECODED_ROWS", 20)
    w, values = random_matrix("ggml_q4_1", 54, 224)
    x, residual = columns_of(count, 224, dtype), columns_of(count, 54, dtype, 1)
    reference = x.double() @ values.double().T
    criterion(LINEAR, dtype).check(linear(x, w, residual), reference + residual.double())
    criterion(LINEAR, dtype).check(logits(x, w, 50), reference[:, :50])
    criterion(LINEAR, dtype).check(linear_swiglu(x / 4, w), swiglu(x / 4, values))


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("width", [32, 64, 2016, 2048, 2080, 4128])
def test_panels_of_columns(width: int, seed: int) -> None:
    w, values = random_matrix("ggml_q4_0", 19, width, seed)
    for count in (1, 2, 3):
        x = columns_of(count, width, torch.float32, seed)
        criterion(LINEAR, torch.float32).check(linear(x, w), x.double() @ values.double().T)


@pytest.mark.parametrize("format", ["bf16", "ggml_q4_1"])
def test_a_column_does_not_see_its_neighbours(format: str) -> None:
    rows, width = SHAPES[format]
    w, _ = random_matrix(format, rows, width)
    x = columns_of(40, width, torch.bfloat16)
    few = linear(x[:4], w)
    for t in range(4):
        assert torch.equal(few[t], linear(x[t : t + 1], w)[0])
    many = linear(x, w)
    order = torch.randperm(40)
    assert torch.equal(linear(x[order], w), many[order])
    assert torch.equal(linear(x[:23], w), many[:23])


def test_the_number_of_threads_changes_no_bit() -> None:
    w, _ = random_matrix("ggml_q4_1", 100, 224)
    before = torch.get_num_threads()
    results = []
    try:
        for count in (1, 2, 3, 5):
            torch.set_num_threads(count)
            results.append([linear(columns_of(t, 224, torch.bfloat16), w) for t in (1, 3, 20)])
    finally:
        torch.set_num_threads(before)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


def test_a_matrix_of_several_parents_and_formats(dtype: torch.dtype) -> None:
    parts = [random_weight(f, 30, 256, i) for i, f in enumerate(("q4_g64_fp16", "bf16", "ggml_q8_0"))]
    w = Matrix([RowSpan(e, i, 30 - i) for i, (e, _) in enumerate(parts)])
    values = torch.cat([v[i : 30 - i] for i, (_, v) in enumerate(parts)])
    assert w.rows == len(values) == 84
    for count in (1, 4, 20):
        x = columns_of(count, 256, dtype) / 4
        criterion(LINEAR, dtype).check(linear(x, w), x.double() @ values.double().T)
        criterion(LINEAR, dtype).check(linear_swiglu(x, w), swiglu(x, values))


def test_gate_and_up_in_parents_of_their_own(dtype: torch.dtype) -> None:
    gate, up, more = (random_weight("ggml_q4_1", 40, 64, seed) for seed in range(3))
    w = Matrix([RowSpan(gate[0], 3, 38), RowSpan(up[0], 0, 20), RowSpan(more[0], 10, 25)])
    values = torch.cat((gate[1][3:38], up[1][:20], more[1][10:25]))
    for count in (1, 3, 20):
        x = columns_of(count, 64, dtype) / 4
        criterion(LINEAR, dtype).check(linear_swiglu(x, w), swiglu(x, values))


def test_adjacent_spans_are_merged_and_stacked() -> None:
    encoded, _ = random_weight("bf16", 10, 16)
    merged = Matrix([RowSpan(encoded, 0, 4), RowSpan(encoded, 4, 10)])
    assert len(merged.spans) == 1
    stacked = Matrix.stack([Matrix([RowSpan(encoded, 6, 10)]), Matrix([RowSpan(encoded, 0, 6)])])
    assert [(s.begin, s.end) for s in stacked.spans] == [(6, 10), (0, 6)]
    assert "Matrix([10, 16], bf16, 2 spans)" in repr(stacked)


def test_what_does_not_fit_is_refused() -> None:
    encoded, _ = random_weight("bf16", 10, 16)
    w = Matrix.of(encoded)
    x = torch.zeros(2, 16, dtype=torch.bfloat16)
    with pytest.raises(OptionError, match="does not fit a matrix of 16 columns"):
        linear(x[:, :15], w)
    with pytest.raises(OptionError, match="even number of rows, got 9"):
        linear_swiglu(x, Matrix([RowSpan(encoded, 0, 9)]))
    with pytest.raises(OptionError, match=r"public rows must be 1\.\.10, got 11"):
        logits(x, w, 11)
    with pytest.raises(OptionError, match="residual"):
        linear(x, w, torch.zeros(1, 10, dtype=torch.bfloat16))
    with pytest.raises(OptionError, match=r"must be bfloat16 or float32, got torch\.float16"):
        linear(x.half(), w)
    with pytest.raises(FormatError, match="different widths"):
        Matrix([RowSpan(encoded, 0, 2), RowSpan(random_weight("bf16", 4, 8)[0], 0, 2)])
    with pytest.raises(FormatError, match="outside a parent of 10 rows"):
        RowSpan(encoded, 4, 11)


@pytest.mark.parametrize("format", MAKERS)
def test_bytes_that_do_not_fit_the_shape_are_refused(format: str) -> None:
    encoded, _ = random_weight(format, *SHAPES[format])
    x = torch.zeros(1, encoded.shape[1], dtype=torch.bfloat16)
    for data in (encoded.data[:-1], torch.cat((encoded.data, encoded.data[:1]))):
        w = Matrix.of(Encoded(encoded.format, encoded.layout, encoded.shape, data))
        with pytest.raises(FormatError, match="bytes"):
            linear(x, w)


@pytest.mark.parametrize(
    ("format", "layout", "shape", "message"),
    [
        ("bf17", "contiguous_le_v1", (4, 4), "no kernel for format 'bf17'"),
        ("bf16", "ggml_rows_v1", (4, 4), "in layout 'ggml_rows_v1'"),
        ("nvfp4", "block_scale_k16_m128x4_v1", (64, 64), "multiples of 128"),
        ("ggml_q4_0", "ggml_rows_v1", (4, 40), "columns of 32"),
    ],
)
def test_unknown_and_impossible_formats_are_refused(format, layout, shape, message) -> None:
    w = Matrix.of(Encoded(format, layout, shape, torch.zeros(4096, dtype=torch.uint8)))
    with pytest.raises(FormatError, match=message):
        linear(torch.zeros(1, shape[1]), w)


def test_a_damaged_descriptor_table_is_refused() -> None:
    encoded, _ = random_weight("ggml_k", 5, 256)
    encoded.data[8] ^= 2
    with pytest.raises(FormatError, match="not canonical"):
        linear(torch.zeros(1, 256), Matrix.of(encoded))
