"""Carrying out a plan: read rows, encode them, write the bytes of each parent chunk by chunk.

Chunks go through a pool of threads that each run PyTorch single-threaded: encoders are a dozen
elementwise passes over data that fits a core's cache, and a team of threads per pass spends its time
waiting for itself (measured on two busy cores: 3.8 M weights/s with OpenMP teams, 70 M/s with one
thread).
"""

from __future__ import annotations

import contextlib
import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial

import numpy as np
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

_MAX_WORKERS = 16
_TILE_ROWS = 128
_TILED_KINDS = ("block_float", "tile_float")


def default_workers() -> int:
    """Threads for encoding: the cores that this process may use, within reason for memory."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(cores, _MAX_WORKERS)


class Encoder:
    """Writes the weights and auxiliaries of a plan.

    Holds at most three chunks of `rows_per_chunk` rows for each worker. Nothing runs any more when `run`
    returns or raises, be it by Ctrl-C.
    """

    def __init__(
        self,
        catalog: Catalog,
        writer: ArtifactWriter,
        *,
        device: torch.device,
        rows_per_chunk: int,
        workers: int,
    ) -> None:
        self._catalog = catalog
        self._writer = writer
        self._device = device
        self._rows = rows_per_chunk
        self._workers = workers

    def run(self, plan: Plan, written: Callable[[int], None]) -> None:
        """Write everything; `written` hears, in the caller's thread, of each run of bytes."""
        with single_threaded_operators(), ThreadPoolExecutor(self._workers, "ninfer-convert") as pool:
            pending: deque[Future[int]] = deque()
            try:
                for weight in plan.weights:
                    divisor = self._divisor(weight, pool)
                    for task in self._tasks(weight, divisor):
                        pending.append(pool.submit(task))
                        if len(pending) > 2 * self._workers:
                            written(pending.popleft().result())
                while pending:
                    written(pending.popleft().result())
            except BaseException:
                pool.shutdown(wait=True, cancel_futures=True)
                raise
        for tensor, words in plan.auxiliaries:
            data = words.reshape(-1).view(torch.uint8).numpy()
            self._writer.write(tensor.id, 0, data)
            written(data.nbytes)

    def _tasks(self, weight: Weight, divisor: float | None) -> Iterator[Callable[[], int]]:
        if not isinstance(weight.members[0].view, Rows):
            yield partial(self._write_direct, weight)
            return
        row = 0
        for member in weight.members:
            for begin, end in self._chunks(weight.tensor.format, member):
                yield partial(self._write_rows, weight, member, begin, end, row, divisor)
                row += end - begin

    def _write_direct(self, weight: Weight) -> int:
        with _told(weight):
            pieces = []
            for member in weight.members:
                if isinstance(member.view, Rows):
                    raise ConversionError(f"'{member.parameter}' is a matrix and cannot join direct tensors")
                values = member.view.read(self._catalog.sources[member.source])
                words = formats.encode(weight.tensor.format, "cast_direct", values).codes
                pieces.append(words.contiguous().reshape(-1).view(torch.uint8).numpy())
            return self._write(weight, [(0, np.concatenate(pieces))])

    def _write_rows(
        self, weight: Weight, member: Member, begin: int, end: int, row: int, divisor: float | None
    ) -> int:
        with _told(weight):
            planes = self._planes(weight, member, begin, end, divisor)
            shape = weight.matrix_shape
            return self._write(weight, pack_rows(weight.tensor.format, shape, row, planes, q6=weight.q6))

    def _write(self, weight: Weight, runs: Sequence[tuple[int, np.ndarray]]) -> int:
        for offset, data in runs:
            self._writer.write(weight.tensor.id, offset, data)
        return sum(data.nbytes for _, data in runs)

    def _planes(self, weight: Weight, member: Member, begin: int, end: int, divisor: float | None) -> Planes:
        view, matrix = member.rows
        if weight.method == IMPORT:
            return view.encoded(matrix, begin, end)
        values = view.values(matrix, begin, end).to(self._device)
        if divisor is None:
            return formats.encode(weight.tensor.format, weight.method, values)
        return formats.encode(weight.tensor.format, weight.method, values, divisor=divisor)

    def _divisor(self, weight: Weight, pool: ThreadPoolExecutor) -> float | None:
        """First of two passes for encoded NVFP4: one divisor from the largest value of all members."""
        if weight.tensor.format != "nvfp4" or weight.method == IMPORT:
            return None
        chunks = [(member, *span) for member in weight.members for span in self._chunks("nvfp4", member)]
        largest = max(pool.map(lambda chunk: self._largest(*chunk), chunks))
        with _told(weight):
            return formats.nvfp4_divisor(largest, weight.method)

    def _largest(self, member: Member, begin: int, end: int) -> float:
        view, matrix = member.rows
        values = view.values(matrix, begin, end).to(self._device)
        return float(torch.linalg.vector_norm(values.float(), float("inf")))

    def _chunks(self, format: str, member: Member) -> Iterator[tuple[int, int]]:
        step = self._rows
        if formats.get(format).kind in _TILED_KINDS:
            step = max(_TILE_ROWS, step - step % _TILE_ROWS)
        for begin in range(member.begin, member.end, step):
            yield begin, min(begin + step, member.end)


@contextlib.contextmanager
def _told(weight: Weight) -> Iterator[None]:
    """A codec's error, with the parameters that it is about."""
    try:
        yield
    except FormatError as error:
        names = ", ".join(f"'{member.parameter}'" for member in weight.members)
        raise ConversionError(f"{names} cannot be stored as {weight.tensor.format}: {error}") from error


@contextlib.contextmanager
def single_threaded_operators() -> Iterator[None]:
    """PyTorch operators use one thread inside; threads started inside inherit that."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
