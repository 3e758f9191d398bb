"""Embedding: the decoded value, bit for bit, in every format."""

from __future__ import annotations

import pytest
import torch

from ninfer.artifact import layouts
from ninfer.errors import OptionError
from ninfer.ops import Matrix, RowSpan, embedding
from tests.ops.weights import MAKERS, SHAPES, random_matrix, random_weight


@pytest.mark.parametrize("format", MAKERS)
def test_rows_are_exact(format: str, dtype: torch.dtype) -> None:
    rows, columns = SHAPES[format]
    table, values = random_matrix(format, rows, columns, seed=3)
    ids = torch.randint(0, rows, (41,), dtype=torch.int32)
    ids[:2] = torch.tensor([0, rows - 1])
    out = embedding(ids, table, dtype)
    assert out.dtype == dtype
    assert torch.equal(out, values[ids.long()].to(dtype))


@pytest.mark.parametrize("format", MAKERS)
def test_the_artifact_room_decodes_the_same(format: str) -> None:
    rows, columns = SHAPES[format]
    encoded, values = random_weight(format, rows, columns, seed=4)
    decoded = layouts.decode_rows(format, encoded.shape, encoded.data.numpy(), 0, rows)
    assert torch.equal(decoded, values)


def test_a_table_of_several_parents() -> None:
    first, a = random_weight("ggml_q8_0", 20, 64, seed=1)
    second, b = random_weight("bf16", 10, 64, seed=2)
    table = Matrix([RowSpan(first, 5, 15), RowSpan(second, 0, 10), RowSpan(first, 0, 5)])
    values = torch.cat((a[5:15], b, a[:5]))
    ids = torch.tensor([24, 0, 11, 9, 10, 20, 19], dtype=torch.int64)
    assert torch.equal(embedding(ids, table, torch.float32), values[ids])


@pytest.mark.parametrize("bad", [-1, 20, 1 << 30])
def test_ids_outside_the_table_are_refused(bad: int) -> None:
    table, _ = random_matrix("bf16", 20, 16)
    with pytest.raises(OptionError, match=f"token id {bad} is outside an embedding of 20 rows"):
        embedding(torch.tensor([1, bad]), table)
