"""Products of the shapes of a 27B model against float64, on rows of the first, the last and other tiles."""

from __future__ import annotations

import importlib

import pytest
import torch
import torch.nn.functional as F

from ninfer.api.synthetic import weights
from ninfer.artifact import TensorObject, encoded_bytes
from ninfer.artifact.layouts import decode_rows
from ninfer.artifact.sizes import default_layout
from ninfer.ops import ActivationPolicy, Encoded, Matrix, RowSpan
from ninfer.ops.weights import Role
from tests.ops.criteria import LINEAR, LINEAR_A8

products = importlib.import_module("ninfer.ops.cuda.linear")
SHAPES = [(34_816, 5120), (5120, 17_408), (16_384, 5120), (5120, 6144)]
FORMATS = [
    "nvfp4", "fp8_e4m3fn_row_bf16", "fp8_e4m3fn_block128_bf16", "ggml_k", "ggml_q5_k", "ggml_q8_0",
    "ggml_q4_1", "q4_g64_fp16", "q5_g64_fp16", "q6_g64_fp16", "q8_g32_fp16", "bf16",
]  # fmt: skip
COLUMNS = (1, 4, 8, 9, 33, 64, 65, 1024)
SAMPLES = 3
"""Runs of 128 rows that are compared."""

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def encoded(format: str, rows: int, columns: int, device: torch.device) -> Encoded:
    """Random bytes of a format, values of about `columns ** -0.5`; of `ggml_k` every third row Q6_K."""
    layout, six = default_layout(format), None
    if format == "ggml_k":
        six = (torch.arange(rows) % 3 == 2).numpy()
    count = 0 if six is None else int(six.sum())
    size = encoded_bytes(format, layout, (rows, columns), q6_rows=count)
    tensor = TensorObject(
        id="weight", offset=0, bytes=size, format=format, layout=layout, shape=(rows, columns)
    )
    return Encoded(
        format, layout, (rows, columns), weights.encoded(tensor, columns**-0.5, device, rows + columns, six)
    )


def values_of(whole: Encoded, data: torch.Tensor, begin: int) -> torch.Tensor:
    """128 rows from `begin` on, from the host's bytes."""
    if whole.format == "bf16":
        return data.view(torch.bfloat16).view(whole.shape)[begin : begin + 128].float()
    return decode_rows(whole.format, whole.shape, data, begin, begin + 128)


def sampled(whole: Encoded, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Indices of some of the first `rows` rows, and their values in float64."""
    tiles = rows // 128
    inner = torch.randperm(tiles - 2, generator=torch.Generator().manual_seed(rows))[: SAMPLES - 2] + 1
    data, index, values = whole.data.cpu(), [], []
    for tile in [0, *inner.tolist(), tiles - 1]:
        index.append(torch.arange(128 * tile, 128 * tile + 128))
        values.append(values_of(whole, data, 128 * tile))
    device = whole.data.device
    return torch.cat(index).to(device), torch.cat(values).double().to(device)


def columns_of(count: int, width: int, device: torch.device, seed: int = 0) -> torch.Tensor:
    x = torch.randn(count, width, generator=torch.Generator(device).manual_seed(seed), device=device)
    return x.bfloat16()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("format", FORMATS)
def test_rows(format: str, shape: tuple[int, int], device: torch.device) -> None:
    check_rows(format, shape, device, COLUMNS)


def check_rows(format: str, shape: tuple[int, int], device: torch.device, counts: tuple[int, ...]) -> None:
    rows, columns = shape
    whole = encoded(format, rows, columns, device)
    index, values = sampled(whole, rows)
    w = Matrix.of(whole)
    products.place(w, device, Role.LINEAR)
    few = None
    for count in counts:
        x, residual = columns_of(count, columns, device), columns_of(count, rows, device, 1)
        reference = x.double() @ values.T
        out = products.linear(x, w)
        assert bool(out.isfinite().all())
        LINEAR.check(out[:, index], reference)
        added = products.linear(x, w, residual)
        LINEAR.check(added[:, index], reference + residual[:, index].double())
        if few is None:
            few = out[0]
        elif count <= products.SMALL and x.is_cuda:
            # The first column is the same in all counts.
            assert torch.equal(out[0], few)


@pytest.mark.parametrize("format", FORMATS)
def test_gate_and_up(format: str, device: torch.device) -> None:
    check_gate_and_up(format, (34_816, 5120), device, COLUMNS)


def check_gate_and_up(
    format: str, shape: tuple[int, int], device: torch.device, counts: tuple[int, ...]
) -> None:
    rows, columns = shape
    whole = encoded(format, rows, columns, device)
    index, gates = sampled(whole, rows // 2)
    data = whole.data.cpu()
    ups = [values_of(whole, data, rows // 2 + int(first)) for first in index[::128]]
    w = Matrix.of(whole)
    products.place(w, device, Role.SWIGLU)
    for count in counts:
        x = columns_of(count, columns, device)
        gate, up = x.double() @ gates.T, x.double() @ torch.cat(ups).double().to(device).T
        LINEAR.check(products.linear_swiglu(x, w)[:, index], F.silu(gate) * up)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_fp8_products_of_permitted_matrices(shape: tuple[int, int], device: torch.device) -> None:
    whole = encoded("fp8_e4m3fn_row_bf16", *shape, device)
    index, values = sampled(whole, shape[0])
    w = Matrix([RowSpan(whole, 0, shape[0])], ActivationPolicy.A8)
    products.place(w, device, Role.LINEAR)
    for count in (65, 200, 1024):
        x = columns_of(count, shape[1], device)
        LINEAR_A8.check(products.linear(x, w)[:, index], x.double() @ values.T)


@pytest.mark.parametrize("format", ["fp8_e4m3fn_row_bf16", "nvfp4", "ggml_k"])
def test_head(format: str, device: torch.device) -> None:
    rows, public = 248_320, 248_077
    whole = encoded(format, rows, 5120, device)
    index, values = sampled(whole, rows - 384)
    w = Matrix.of(whole)
    products.place(w, device, Role.LINEAR)
    for count in (1, 4, 8):
        x = columns_of(count, 5120, device)
        scores = products.logits(x, w, public)
        assert scores.shape == (count, public)
        assert bool(scores.isfinite().all())
        LINEAR.check(scores[:, index], x.double() @ values.T)
