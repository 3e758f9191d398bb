"""Walking a matrix in pieces that stay in the cache while a dozen passes run over them."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ninfer.errors import FormatError

_TARGET = 1 << 17


def row_chunks(rows: int, columns: int, device: torch.device) -> Iterator[tuple[int, int]]:
    """Row ranges of about 131,072 elements (on a GPU: 64 times that)."""
    target = _TARGET if device.type == "cpu" else _TARGET << 6
    step = max(1, target // columns)
    for begin in range(0, rows, step):
        yield begin, min(rows, begin + step)


def absolute_maximum(x: torch.Tensor) -> torch.Tensor:
    """Largest magnitude along the last axis, never -0; NaN if there is one."""
    return torch.maximum(x.amax(-1), -x.amin(-1)).abs_()


def require_finite(largest: torch.Tensor, method: str) -> None:
    """`largest`: absolute maxima `[rows, ...]`; a NaN or an infinity among them is an error."""
    finite = torch.isfinite(largest)
    if not bool(finite.all()):
        row = int((~finite).reshape(len(largest), -1).any(1).nonzero()[0, 0])
        raise FormatError(f"'{method}' cannot encode a non-finite value (row {row} has one)")
