"""Carrying out a plan: read rows, encode them, write the bytes of each parent chunk by chunk."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from ninfer import formats
from ninfer.artifact import ArtifactWriter
from ninfer.artifact.layouts import pack_rows
from ninfer.convert.catalog import Catalog
from ninfer.convert.plan import Member, Plan, Weight
from ninfer.convert.recipe import IMPORT
from ninfer.convert.views import Rows
from ninfer.errors import ConversionError, FormatError
from ninfer.formats import Planes

Progress = Callable[[str, int, int], None]
"""Called with a stage, bytes written so far and bytes in all."""

_TILE_ROWS = 128
_TILED_KINDS = ("block_float", "tile_float")


class Encoder:
    """Writes the weights and auxiliaries of a plan. Never holds more than a few chunks of `rows_per_chunk` rows."""

    def __init__(
        self, catalog: Catalog, writer: ArtifactWriter, device: torch.device, rows_per_chunk: int
    ) -> None:
        self._catalog = catalog
        self._writer = writer
        self._device = device
        self._rows = rows_per_chunk

    def run(self, plan: Plan, written: Callable[[int], None]) -> None:
        """Write everything; `written` hears of each run of bytes."""
        for weight in plan.weights:
            try:
                for offset, data in self._runs(weight):
                    self._writer.write(weight.tensor.id, offset, data)
                    written(data.nbytes)
            except FormatError as error:
                names = ", ".join(member.parameter for member in weight.members)
                raise ConversionError(
                    f"{names} cannot be encoded as {weight.tensor.format}: {error}"
                ) from error
        for tensor, words in plan.auxiliaries:
            data = words.reshape(-1).view(torch.uint8).numpy()
            self._writer.write(tensor.id, 0, data)
            written(data.nbytes)

    def _runs(self, weight: Weight) -> Iterator:
        tensor = weight.tensor
        if not isinstance(weight.members[0].view, Rows):
            yield from self._direct(weight)
            return
        divisor = self._divisor(weight)
        shape = (sum(member.end - member.begin for member in weight.members), weight.members[0].view.width)
        row = 0
        for member in weight.members:
            for begin, end in self._chunks(tensor.format, member):
                planes = self._planes(weight, member, begin, end, divisor)
                yield from pack_rows(tensor.format, shape, row, planes, q6=weight.q6)
                row += end - begin

    def _direct(self, weight: Weight) -> Iterator:
        offset = 0
        for member in weight.members:
            if isinstance(member.view, Rows):
                raise ConversionError(
                    f"'{member.parameter}' is a matrix and cannot join direct tensors in one parent"
                )
            values = member.view.read(self._catalog.sources[member.source])
            words = formats.encode(weight.tensor.format, "cast_direct", values).codes
            data = words.contiguous().reshape(-1).view(torch.uint8).numpy()
            yield offset, data
            offset += data.nbytes

    def _planes(self, weight: Weight, member: Member, begin: int, end: int, divisor: float | None) -> Planes:
        view, matrix = member.view, member.matrix
        if not isinstance(view, Rows) or matrix is None:
            raise ConversionError(f"'{member.parameter}' has no rows to encode")
        if weight.method == IMPORT:
            return view.encoded(matrix, begin, end)
        values = view.values(matrix, begin, end).to(self._device)
        if divisor is None:
            return formats.encode(weight.tensor.format, weight.method, values)
        return formats.encode(weight.tensor.format, weight.method, values, divisor=divisor)

    def _divisor(self, weight: Weight) -> float | None:
        """First of two passes for encoded NVFP4: one divisor from the largest value of all members."""
        if weight.tensor.format != "nvfp4" or weight.method == IMPORT:
            return None
        largest = 0.0
        for member in weight.members:
            view, matrix = member.view, member.matrix
            if isinstance(view, Rows) and matrix is not None:
                for begin, end in self._chunks("nvfp4", member):
                    values = view.values(matrix, begin, end).to(self._device)
                    largest = max(largest, float(torch.linalg.vector_norm(values.float(), float("inf"))))
        return formats.nvfp4_divisor(largest, weight.method)

    def _chunks(self, format: str, member: Member) -> Iterator[tuple[int, int]]:
        step = self._rows
        if formats.get(format).kind in _TILED_KINDS:
            step = max(_TILE_ROWS, step - step % _TILE_ROWS)
        for begin in range(member.begin, member.end, step):
            yield begin, min(begin + step, member.end)
