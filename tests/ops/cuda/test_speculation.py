"""What happens between the passes of a round on the GPU."""

from __future__ import annotations

import random

import pytest
import torch

from ninfer.errors import OptionError
from ninfer.ops.cuda import speculation as module
from ninfer.ops.cuda.embedding import embedding
from ninfer.ops.cuda.linear import norm_logits, place
from ninfer.ops.cuda.norms import rms_norm
from ninfer.ops.cuda.stem import embedding_pair
from ninfer.ops.weights import Matrix, Role, RowSpan
from tests.ops.criteria import ELEMENTWISE, LINEAR
from tests.ops.speculation import check_accept, check_columns, check_drafts
from tests.ops.test_norms import reference_norm
from tests.ops.weights import MAKERS, SHAPES, random_matrix, random_weight


def gpu(test):
    """A test for the GPU alone."""
    return pytest.mark.gpu(pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")(test))


@pytest.mark.parametrize("width", [2, 4, 6])
def test_a_few_rounds(width: int, device: torch.device) -> None:
    rng = random.Random(width)
    for rows in (1, 3):
        check_accept(module, device, rng, rows, width)


@gpu
@pytest.mark.parametrize("width", range(2, 7))
@pytest.mark.parametrize("rows", range(1, 9))
def test_drafts_stand_up_to_the_first_that_differs(rows: int, width: int, device: torch.device) -> None:
    rng = random.Random(10 * rows + width)
    for _ in range(20):
        check_accept(module, device, rng, rows, width)


@pytest.mark.parametrize("width", [1, 4])
def test_a_few_columns(width: int, device: torch.device) -> None:
    check_columns(module, device, random.Random(width), 3, width, torch.bfloat16)


@gpu
@pytest.mark.parametrize("width", range(1, 7))
def test_last_columns_are_taken_and_kept(width: int, device: torch.device) -> None:
    for rows in range(1, 9):
        check_columns(module, device, random.Random(rows), rows, width, torch.bfloat16)


@pytest.mark.parametrize("size", [5, 2500])
def test_a_few_drafts(size: int, device: torch.device) -> None:
    rng = random.Random(size)
    for trial in range(4):
        check_drafts(module, device, rng, 3, size, trial % 2 > 0)


@gpu
@pytest.mark.parametrize("size", [1, 37, 2047, 2049, 8192, 131_072, 248_077, 300_000])
def test_drafts_are_the_likeliest_tokens(size: int, device: torch.device) -> None:
    rng = random.Random(size)
    for trial in range(16):
        check_drafts(module, device, rng, trial % 8 + 1, size, trial % 3 > 0)


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("width", [24, 384])
def test_two_norms_stand_side_by_side(rows: int, width: int, device: torch.device) -> None:
    check_pair(rows, width, device)


@gpu
@pytest.mark.parametrize("rows", [1, 4, 32, 1000])
@pytest.mark.parametrize("width", [64, 512, 1024, 2048, 5120])
def test_two_norms_of_models(rows: int, width: int, device: torch.device) -> None:
    check_pair(rows, width, device)


def check_pair(rows: int, width: int, device: torch.device) -> None:
    a, b = (torch.randn(rows, width).bfloat16().to(device) for _ in range(2))
    gains = torch.randn(width).bfloat16().to(device), torch.randn(width).to(device)
    wanted = [rms_norm(x, gain, 1e-6, True) for x, gain in zip((a, b), gains, strict=True)]
    assert torch.equal(module.norm_pair(a, b, *gains, 1e-6), torch.cat(wanted, 1))
    with pytest.raises(OptionError, match="side by side"):
        module.norm_pair(a, b[:, 1:], *gains, 1e-6)


@pytest.mark.parametrize("format", MAKERS)
def test_stems_of_tables_of_every_format(format: str, device: torch.device) -> None:
    rows, columns = SHAPES[format]
    table, _ = random_matrix(format, rows, columns, seed=3)
    place(table, device, Role.TABLE)
    check_stem(table, torch.tensor([rows - 1, 0, 5], dtype=torch.int32), device)


def test_a_stem_of_a_table_of_several_parents(device: torch.device) -> None:
    first, second = random_weight("ggml_q8_0", 20, 64, seed=1)[0], random_weight("bf16", 10, 64, seed=2)[0]
    table = Matrix([RowSpan(first, 5, 15), RowSpan(second, 0, 10), RowSpan(first, 0, 5)])
    place(table, device, Role.TABLE)
    check_stem(table, torch.tensor([24, 11, 0], dtype=torch.int32), device)


@gpu
@pytest.mark.parametrize("format", ["bf16", "fp8_e4m3fn_row_bf16", "nvfp4", "q4_g64_fp16", "ggml_k"])
@pytest.mark.parametrize("columns", [1024, 5120])
def test_stems_of_models(format: str, columns: int, device: torch.device) -> None:
    table, _ = random_matrix(format, 512, columns, seed=4)
    place(table, device, Role.TABLE)
    for rows in (1, 4, 32, 300):
        check_stem(table, torch.randint(0, 512, (rows,), dtype=torch.int32), device)


def check_stem(table: Matrix, ids: torch.Tensor, device: torch.device) -> None:
    """Each half is the norm of its row; a column does not depend on others."""
    ids, columns = ids.to(device), table.columns
    hidden = torch.randn(len(ids), columns).bfloat16().to(device) * 3
    gains = torch.randn(columns).bfloat16().to(device), torch.randn(columns).to(device)
    if device.type == "cuda":
        torch.cuda.synchronize()  # kernels read gains ahead of others, as those of a loaded model
    out = embedding_pair(ids, table, hidden, *gains, 1e-6)
    for half, x, gain in zip(out.split(columns, 1), (embedding(ids, table), hidden), gains, strict=True):
        ELEMENTWISE.check(half, reference_norm(x, gain.double() + 1, 1e-6))
    last = embedding_pair(ids[-1:], table, hidden[-1:], *gains, 1e-6)
    assert torch.equal(last, out[-1:])
    with pytest.raises(OptionError, match="do not fit"):
        embedding_pair(ids, table, hidden[:, 1:], *gains, 1e-6)


@gpu
@pytest.mark.parametrize("format", ["fp8_e4m3fn_row_bf16", "q4_g64_fp16"])
def test_scores_behind_a_norm(format: str, device: torch.device) -> None:
    head, values = random_matrix(format, 3000, 1024, seed=5)
    place(head, device, Role.LINEAR)
    gain = torch.rand(1024).bfloat16().to(device)
    torch.cuda.synchronize()
    for count in (1, 3, 8):
        x = torch.randn(count, 1024).bfloat16().to(device)
        scores, h = norm_logits(x, gain, 1e-6, True, head, 2990)
        normed = reference_norm(x, gain.double() + 1, 1e-6)
        ELEMENTWISE.check(h, normed)
        LINEAR.check(scores, (normed @ values.double().to(device).T)[:, :2990])
