"""Matrix products and embeddings on packed weights against float64, in every format and on every route."""

from __future__ import annotations

import importlib

import pytest
import torch
import torch.nn.functional as F

from ninfer.errors import OptionError
from ninfer.ops import ActivationPolicy, Matrix, RowSpan
from ninfer.ops.cuda import decode, wide
from ninfer.ops.cuda.embedding import embedding
from ninfer.ops.cuda.packed import Packed
from ninfer.ops.weights import Role
from tests.ops.criteria import LINEAR, LINEAR_A8
from tests.ops.weights import MAKERS, SHAPES, random_matrix, random_weight

products = importlib.import_module("ninfer.ops.cuda.linear")  # the package has an operator of that name
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
LARGE = {
    "nvfp4": (1280, 640),
    "fp8_e4m3fn_block128_bf16": (1280, 640),
    "ggml_k": (300, 1280),
    "ggml_q5_k": (300, 1280),
}
"""Shapes of several tiles, units and panels; other formats take `[300, 1312]`."""


def columns_of(count: int, width: int, device: torch.device, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, width, generator=generator).bfloat16().to(device)


def swiglu(x: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    gate, up = (x.double() @ values.double().T).chunk(2, -1)
    return F.silu(gate) * up


def placed(matrix: Matrix, device: torch.device, role: Role = Role.LINEAR) -> Matrix:
    products.place(matrix, device, role)
    return matrix


@pytest.fixture(autouse=True)
def _larger_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter's time is that of programs, not of elements."""
    if not torch.cuda.is_available():
        monkeypatch.setattr(decode, "_BLOCK", 2048)


def check_linear(w: Matrix, values: torch.Tensor, device: torch.device, counts) -> None:
    values = values.to(device)
    for count in counts:
        x, residual = columns_of(count, w.columns, device), columns_of(count, w.rows, device, 1)
        reference = x.double() @ values.double().T
        LINEAR.check(products.linear(x, w, residual), reference + residual.double())
        if x.is_cuda:
            out = products.linear(x, w)
            LINEAR.check(out, reference)
            scores = products.logits(x, w, w.rows - 3)
            assert scores.dtype == torch.float32
            assert torch.equal(scores, out[:, : w.rows - 3].float())


@pytest.mark.parametrize("format", MAKERS)
def test_every_format(format: str, device: torch.device) -> None:
    w, values = random_matrix(format, *SHAPES[format])
    check_linear(placed(w, device), values, device, (3,))


@pytest.mark.parametrize("format", MAKERS)
def test_gate_and_up(format: str, device: torch.device) -> None:
    encoded, values = random_weight(format, *SHAPES[format])
    rows = len(values) - len(values) % 2
    w = placed(Matrix([RowSpan(encoded, 0, rows)]), device, Role.SWIGLU)
    x = columns_of(20, w.columns, device) / 4
    LINEAR.check(products.linear_swiglu(x, w), swiglu(x, values[:rows].to(device)))


@pytest.mark.parametrize("format", ["fp8_e4m3fn_row_bf16", "ggml_k", "q6_g64_fp16"])
def test_wide_panels(format: str, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "SMALL", 0)
    monkeypatch.setattr(wide, "PANEL", 33 * 768)
    monkeypatch.setattr(wide, "DIRECT", 4)
    encoded, values = random_weight(format, *SHAPES[format], seed=2)
    check_linear(placed(Matrix.of(encoded), device), values, device, (2, 5))
    w = placed(Matrix([RowSpan(encoded, 1, 53)]), device, Role.SWIGLU)
    x = columns_of(40, w.columns, device) / 4
    LINEAR.check(products.linear_swiglu(x, w), swiglu(x, values[1:].to(device)))


def test_several_formats(device: torch.device) -> None:
    names = ("q4_g64_fp16", "bf16", "ggml_q8_0", "bf16", "fp32")
    parts = [random_weight(name, 30, 256, seed) for seed, name in enumerate(names)]
    spans = [RowSpan(encoded, i, 30 - i) for i, (encoded, _) in enumerate(parts)]
    values = torch.cat([v[i : 30 - i] for i, (_, v) in enumerate(parts)])
    check_linear(placed(Matrix(spans), device), values, device, (1, 4))
    w = placed(Matrix(spans), device, Role.SWIGLU)
    x = columns_of(20, 256, device) / 4
    LINEAR.check(products.linear_swiglu(x, w), swiglu(x, values.to(device)))


def test_fp8_products_of_permitted_matrices(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "SMALL", 0)
    encoded, values = random_weight("fp8_e4m3fn_row_bf16", 64, 192)
    values = values.to(device)
    x, residual = columns_of(20, 192, device), columns_of(20, 64, device, 1)
    w = placed(Matrix([RowSpan(encoded, 0, 64)], ActivationPolicy.A8), device)
    reference = x.double() @ values.double().T
    LINEAR_A8.check(products.linear(x, w), reference)
    LINEAR_A8.check(products.linear(x, w, residual), reference + residual.double())
    w = placed(Matrix([RowSpan(encoded, 0, 64)], ActivationPolicy.A4), device, Role.SWIGLU)
    LINEAR_A8.check(products.linear_swiglu(x, w), swiglu(x, values))


def test_codes_of_inputs_are_the_nearest(device: torch.device) -> None:
    from ninfer.ops.cuda.finish import quantize

    generator = torch.Generator().manual_seed(7)
    x = torch.randn(5, 301, generator=generator) * torch.exp(3 * torch.randn(5, 301, generator=generator))
    x = x.bfloat16().to(device)
    x[3] = 0
    codes, scales = quantize(x, 320)
    assert torch.equal(scales, x.float().abs().amax(1) / 448)
    assert int(codes[3].max()) == 0
    assert int(codes[:, 301:].max()) == 0
    inverse = torch.where(scales > 0, 1 / scales, 0)
    expected = (x.float() * inverse[:, None]).clamp(-448, 448).to(torch.float8_e4m3fn)
    assert torch.equal(codes[:, :301].view(torch.float8_e4m3fn).float(), expected.float())


@pytest.mark.parametrize("format", MAKERS)
def test_rows_of_a_table_are_exact(format: str, device: torch.device) -> None:
    encoded, values = random_weight(format, *SHAPES[format], seed=3)
    other, more = random_weight("q8_g32_fp16", 9, SHAPES[format][1], seed=4)
    rows = len(values)
    table = Matrix([RowSpan(encoded, 0, 20), RowSpan(other, 0, 9), RowSpan(encoded, 20, rows)])
    values = torch.cat((values[:20], more, values[20:]))
    placed(table, device, Role.TABLE)
    ids = torch.randint(0, rows + 9, (11,), dtype=torch.int32)
    ids[:3] = torch.tensor([0, rows + 8, 24])
    assert torch.equal(embedding(ids.to(device), table).cpu(), values[ids.long()].bfloat16())
    outside = torch.tensor([-5, rows + 9, 1 << 30], dtype=torch.int64, device=device)
    assert torch.equal(embedding(outside, table).cpu(), values[[0, -1, -1]].bfloat16())


def test_logits_are_rounded_and_widened(device: torch.device) -> None:
    w, values = random_matrix("ggml_q8_0", 20, 64)
    x = columns_of(2, 64, device)
    scores = products.logits(x, placed(w, device), 17)
    assert scores.dtype == torch.float32
    assert torch.equal(scores, products.linear(x, w)[:, :17].float())
    LINEAR.check(scores, x.double() @ values[:17].double().to(device).T)


def test_other_types_are_refused(device: torch.device) -> None:
    w, _ = random_matrix("bf16", 10, 16)
    placed(w, device)
    x = torch.zeros(2, 16, device=device)
    with pytest.raises(OptionError, match="bfloat16"):
        products.linear(x, w)
    with pytest.raises(OptionError, match="residual"):
        products.linear(x.bfloat16(), w, torch.zeros(1, 10, dtype=torch.bfloat16, device=device))
    with pytest.raises(OptionError, match="placed"):
        products.linear(x.bfloat16(), random_matrix("bf16", 10, 16)[0])
    with pytest.raises(OptionError, match="bfloat16"):
        embedding(torch.zeros(1, dtype=torch.int32, device=device), w, torch.float32)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("format", MAKERS)
def test_edges_of_routes(format: str) -> None:
    device = torch.device("cuda")
    w, values = random_matrix(format, *LARGE.get(format, (300, 1312)), seed=5)
    counts = (1, 2, 7, 8, 9, 15, 16, 17, 31, 32, 33, 48, 49, 63, 64, 65, 70, 128, 1024)
    check_linear(placed(w, device), values, device, counts)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("format", MAKERS)
def test_edges_of_gate_and_up(format: str) -> None:
    device = torch.device("cuda")
    encoded, values = random_weight(format, *LARGE.get(format, (300, 1312)), seed=6)
    w = placed(Matrix.of(encoded), device, Role.SWIGLU)
    for count in (1, 5, 8, 9, 16, 17, 33, 64, 65, 128, 1024):
        x = columns_of(count, w.columns, device) / 8
        LINEAR.check(products.linear_swiglu(x, w), swiglu(x, values.to(device)))


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("format", MAKERS)
def test_a_column_does_not_see_its_neighbours(format: str) -> None:
    device = torch.device("cuda")
    w, _ = random_matrix(format, *LARGE.get(format, (300, 1312)), seed=7)
    placed(w, device)
    assert isinstance(w.plan, Packed)
    if w.plan.segments[0].packing.kernel == "Dense":
        pytest.skip("rare formats take a library product")
    x = columns_of(max(products.SMALL, 1), w.columns, device)
    whole = products.linear(x, w)
    for count in (1, 2, 3, 8, 9, 17, 33):
        if count <= products.SMALL:
            assert torch.equal(products.linear(x[:count], w), whole[:count])
    order = torch.randperm(len(x), device=device)
    assert torch.equal(products.linear(x[order], w), whole[order])


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("format", MAKERS)
def test_what_is_not_finite_stays_in_its_column(format: str) -> None:
    device = torch.device("cuda")
    w, _ = random_matrix(format, *LARGE.get(format, (300, 1312)), seed=8)
    placed(w, device)
    x = columns_of(8, w.columns, device)
    clean = products.linear(x, w)
    x[1, 3], x[4, 5], x[6, 9] = float("inf"), float("nan"), 3e38
    out = products.linear(x, w)
    kept = [0, 2, 3, 5, 7]
    assert torch.equal(out[kept], clean[kept])
    assert not torch.isfinite(out[4]).any()


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("format", ["ggml_k", "ggml_q5_k", "q4_g64_fp16", "q8_g32_fp16"])
def test_a_norm_in_front_of_some_formats(format: str) -> None:
    device = torch.device("cuda")
    w, values = random_matrix(format, *LARGE.get(format, (300, 1312)), seed=9)
    placed(w, device)
    gain = torch.rand(w.columns, device=device).bfloat16()
    for count in (1, 2, 3, 9, 20, 64):
        x = columns_of(count, w.columns, device) * 3
        out, h = products.norm_linear(x, gain, 1e-6, False, w)
        wide_x = x.double()
        normed = wide_x / (wide_x.square().mean(1, keepdim=True) + 1e-6).sqrt() * gain.double()
        LINEAR.check(h, normed)
        LINEAR.check(out, normed @ values.double().to(device).T)
