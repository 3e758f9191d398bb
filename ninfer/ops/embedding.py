"""Embedding gather: `out[t] = round(decode(table[ids[t]]))`.

Exact: the decoded float32 value, rounded once to the activation type. Ids must be below `table.rows`.
"""

from __future__ import annotations

import torch

from ninfer.ops.dispatch import backend
from ninfer.ops.weights import Matrix


def embedding(ids: torch.Tensor, table: Matrix, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Rows `ids` (int32 or int64 `[T]`) of `table` `[V, H]` as `dtype` (bf16 or float32) `[T, H]`.

    Raises `OptionError` if an id is negative or not below `table.rows`.
    """
    return backend(ids.device.type).embedding(ids, table, dtype)
