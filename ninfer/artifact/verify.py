"""Interpreting an object: its format and layout are known, and its size, place and tables agree with them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ninfer.artifact.records import ALIGNMENT, TensorObject
from ninfer.artifact.sizes import encoded_bytes, k_row_bytes, k_table_bytes, matrix_shape
from ninfer.artifact.strict_json import show
from ninfer.errors import ArtifactError, FormatError

if TYPE_CHECKING:
    import numpy as np


def check_tensor(tensor: TensorObject, data: np.ndarray) -> None:
    """ArtifactError naming the object and the rule; `data` is its bytes (only a row table is looked at)."""
    owner = f"object {show(tensor.id)}"
    if tensor.offset % ALIGNMENT:
        raise ArtifactError(f"{owner} is at {tensor.offset}, not at a multiple of {ALIGNMENT}")
    try:
        if tensor.format == "ggml_k":
            matrix_shape(tensor.format, tensor.shape)
            _check_k(tensor, data, owner)
            return
        expected = encoded_bytes(tensor.format, tensor.layout, tensor.shape)
    except FormatError as error:
        raise ArtifactError(f"{owner}: {error}") from None
    _check_size(tensor, expected, owner)


def _check_size(tensor: TensorObject, expected: int, owner: str) -> None:
    if tensor.bytes != expected:
        raise ArtifactError(
            f"{owner} has {tensor.bytes} bytes, but {tensor.format} {list(tensor.shape)} takes {expected}"
        )


def _check_k(tensor: TensorObject, data: np.ndarray, owner: str) -> None:
    import numpy as np

    rows, columns = tensor.shape
    least = encoded_bytes(tensor.format, tensor.layout, tensor.shape, q6_rows=0)
    most = encoded_bytes(tensor.format, tensor.layout, tensor.shape, q6_rows=rows)
    four, six = k_row_bytes(columns)
    if not least <= tensor.bytes <= most or (tensor.bytes - least) % (six - four):
        raise ArtifactError(
            f"{owner} has {tensor.bytes} bytes; ggml_k {list(tensor.shape)} takes {least} to {most} "
            f"in steps of {six - four}"
        )
    table = data[: 8 * rows].view("<u8")
    sizes = np.where(table & np.uint64(1), np.uint64(six), np.uint64(four))
    ends = np.cumsum(sizes, dtype=np.uint64)
    if bool((table >> np.uint64(1) != ends - sizes).any()):
        row = int(np.flatnonzero(table >> np.uint64(1) != ends - sizes)[0])
        raise ArtifactError(
            f"{owner} has a row table that is not canonical: row {row} does not follow on the rows before"
        )
    _check_size(tensor, k_table_bytes(rows) + int(ends[-1]), owner)
