"""Embedding gather from a packed table: exact in every format, without a synchronization.

Roofline: the packed bytes of T rows (each 32-byte sector holds codes of several rows) and 2 bytes a number
written; a launch is what it costs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ninfer.errors import OptionError
from ninfer.ops.cuda import decode
from ninfer.ops.cuda.packed import Packed, Segment
from ninfer.ops.weights import Matrix


@dataclass(frozen=True, eq=False)
class Table:
    """What `Matrix.plan` is for TABLE matrices.

    `lookups`: for each segment int32 `[rows]`, which of its rows a row of the table is, or -1; None where
    they stand together. `factors`: float32 of a segment's packed rows, or None."""

    packed: Packed
    lookups: tuple[torch.Tensor | None, ...]
    factors: tuple[torch.Tensor | None, ...]


def table_of(packed: Packed, divisors: torch.Tensor | None) -> Table:
    """`divisors`: float32 of nvfp4's packed rows."""
    lookups: list[torch.Tensor | None] = []
    for segment in packed.segments:
        if segment.row_map is None:
            lookups.append(None)
            continue
        device = segment.data.device
        lookup = torch.full((packed.rows,), -1, dtype=torch.int32, device=device)
        lookup[segment.row_map.long()] = torch.arange(segment.rows, dtype=torch.int32, device=device)
        lookups.append(lookup)
    factors = tuple(divisors if s.packing.kernel == "Nvfp4" else s.row_scales for s in packed.segments)
    return Table(packed, tuple(lookups), factors)


def embedding(ids: torch.Tensor, table: Matrix, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """bf16 `[T, H]`. Ids are not checked here, since that would wait for the device: one outside of the table
    gives its first or last row."""
    if dtype != torch.bfloat16:
        raise OptionError(f"activations on a GPU are bfloat16, not {dtype}")
    plan = table.plan
    if not isinstance(plan, Table):
        raise OptionError("an embedding table must be placed on the device as a TABLE first")
    out = torch.empty(len(ids), table.columns, dtype=torch.bfloat16, device=ids.device)
    for segment, lookup, factors in zip(plan.packed.segments, plan.lookups, plan.factors, strict=True):
        if segment.packing.kernel == "Dense":
            _dense(segment, lookup, ids, table.rows, out)
        else:
            decode.rows(segment, lookup, factors, ids, table.rows, out)
    return out


def _dense(
    segment: Segment, lookup: torch.Tensor | None, ids: torch.Tensor, rows: int, out: torch.Tensor
) -> None:
    at = ids.long().clamp(0, rows - 1)
    at = at - segment.first if lookup is None else lookup[at].long()
    mine = (at >= 0) & (at < segment.rows)
    values = segment.data.view(torch.float32).view(segment.rows, -1)[at.clamp(0, segment.rows - 1)]
    torch.where(mine[:, None], values.bfloat16(), out, out=out)
