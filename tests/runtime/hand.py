"""Records written by hand, and a Program to give them to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ninfer.formats import KvFormat
from ninfer.models import Model
from ninfer.ops import PAGE, Purpose, SamplingParams
from ninfer.runtime import Limits, Program, plan_model
from ninfer.runtime.records import Shape, Unit, ingress

GREEDY = SamplingParams(temperature=0.0)
NOTHING = -9
"""Stands for a token where none was to be drawn."""


@dataclass
class Lane:
    """A sequence as whoever writes records sees it: `frontier` tokens in memory, the state in `source`."""

    pages: Sequence[int]
    slots: tuple[int, int] = (0, 1)
    frontier: int = 0
    source: int = -1
    sampling: SamplingParams = GREEDY
    count_row: int = -1

    @property
    def target(self) -> int:
        return self.slots[1] if self.source == self.slots[0] else self.slots[0]

    def advance(self, count: int) -> None:
        self.frontier += count
        self.source = self.target


def planes(record: object) -> list[torch.Tensor]:
    """The tensors that a record holds."""
    return [value for value in vars(record).values() if isinstance(value, torch.Tensor)]


def assert_same(left: Sequence[torch.Tensor], right: Sequence[torch.Tensor], what: object = "") -> None:
    """Bit for bit."""
    for mine, other in zip(left, right, strict=True):
        assert mine.shape == other.shape
        assert torch.equal(mine.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8)), what


class Hand:
    """Writes every record anew; what a unit doesn't need is filled with numbers that would do harm."""

    def __init__(
        self,
        model: Model,
        *,
        rows: int = 1,
        width: int = 1,
        context: int = 512,
        chunk: int = 128,
        snapshots: int = 4,
        kv_format: KvFormat = KvFormat.BF16,
        graphs: bool = True,
    ) -> None:
        limits = Limits(
            context,
            chunk,
            max_concurrency=rows,
            kv_capacity=rows * context,
            state_slots=snapshots,
            width=width,
        )
        self.plan = plan_model(model, limits, kv_format=kv_format)
        self.program = Program(model, self.plan, graphs=graphs)

    @property
    def shape(self) -> Shape:
        return self.plan.shape

    def run(self, record: np.ndarray) -> np.ndarray:
        """A copy of what came out."""
        before = record.tobytes()
        out = self.program.run(record).copy()
        assert record.tobytes() == before, "a Program doesn't write to its caller's record"
        return out

    def prefill(
        self,
        lane: Lane,
        tokens: Sequence[int],
        *,
        draw: bool = False,
        purpose: int = Purpose.PREFILL,
        copy: tuple[int, int] = (-1, -1),
    ) -> int:
        """Feed tokens after the frontier; `advance` commits them, without it the unit is dropped."""
        record = self.empty(Unit.PREFILL, 1, len(tokens))
        self._columns(record, 0, lane, tokens)
        self._row(record, 0, lane)
        record["copy_source"], record["copy_target"] = copy
        record["purpose"][0, 0] = -1
        if draw:
            self._draw(record, 0, lane, lane.frontier + len(tokens), purpose)
        out = self.run(record)
        return int(out["tokens"][0, 0]) if draw else NOTHING

    def round(
        self, lanes: Sequence[Lane], tokens: Sequence[Sequence[int]], purpose: int = Purpose.DECODE
    ) -> list[list[int]]:
        """A round of as many columns as the longest row has; the rest of a row is masked. What stands."""
        width = max(map(len, tokens))
        out = self.run(self.round_record(lanes, tokens, purpose))
        drawn = out["tokens"][0, : len(lanes) * width].reshape(len(lanes), width)
        return [row[:count].tolist() for row, count in zip(drawn, out["produced"][0], strict=False)]

    def round_record(
        self, lanes: Sequence[Lane], tokens: Sequence[Sequence[int]], purpose: int = Purpose.DECODE
    ) -> np.ndarray:
        width = max(map(len, tokens))
        record = self.empty(Unit.ROUND, len(lanes), width)
        for row, (lane, fed) in enumerate(zip(lanes, tokens, strict=True)):
            begin = row * width
            self._row(record, row, lane)
            self._columns(record, begin, lane, fed)
            for column in range(len(fed)):
                self._draw(record, begin + column, lane, lane.frontier + column, purpose)
                if column:
                    record["count_rows"][0, begin + column] = -1
            for column in range(begin + len(fed), begin + width):
                record["tokens"][0, column], record["positions"][0, column] = 0, -1
                record["purpose"][0, column], record["count_rows"][0, column] = -1, -1
        return record

    def control(self, lanes: Sequence[Lane], tokens: Sequence[Sequence[int]]) -> None:
        record = self.empty(Unit.CONTROL, len(lanes), len(tokens[0]))
        for row, (lane, fed) in enumerate(zip(lanes, tokens, strict=True)):
            self._row(record, row, lane)
            self._columns(record, row * len(fed), lane, fed)
            record["count_rows"][0, row] = lane.count_row
        self.run(record)

    def fold(self, lanes: Sequence[Lane], counts: Sequence[int]) -> None:
        record = self.empty(Unit.FOLD, len(lanes), 0)
        for row, lane in enumerate(lanes):
            self._row(record, row, lane)
        record["counts"][0, : len(lanes)] = counts
        self.run(record)

    def decode(self, lane: Lane, token: int, count: int) -> list[int]:
        """`count` tokens after `token`, in rounds of one row and one column."""
        output = []
        for _ in range(count):
            [[token]] = self.round([lane], [[token]])
            lane.advance(1)
            output.append(token)
        return output

    def feed(self, lane: Lane, tokens: Sequence[int], *, draw: bool = True) -> int:
        """A whole prompt in chunks."""
        chunk, token = self.shape.chunk, NOTHING
        for begin in range(0, len(tokens), chunk):
            part = tokens[begin : begin + chunk]
            token = self.prefill(lane, part, draw=draw and begin + chunk >= len(tokens))
            lane.advance(len(part))
        return token

    def answer(self, lane: Lane, prompt: Sequence[int], count: int) -> list[int]:
        first = self.feed(lane, prompt)
        return [first, *self.decode(lane, first, count - 1)]

    def empty(self, unit: Unit, rows: int, columns: int) -> np.ndarray:
        record = ingress(self.shape)
        for name in record.dtype.names or ():
            if record[name].ndim > 1:
                record[name] = -77 if record[name].dtype.kind == "i" else np.nan
        record["unit"], record["rows"], record["columns"] = unit, rows, columns
        return record

    def memory(self) -> list[torch.Tensor]:
        """Every tensor that outlives a unit."""
        cache, records = self.program._cache, self.program._records
        tensors = [plane for pages in cache.kv for plane in planes(pages)]
        tensors += [*cache.conv, *cache.recurrent, self.program._counts]
        if cache.hidden is not None:
            tensors.append(cache.hidden)
        if records is not None:
            tensors += records.conv
            tensors += [plane for layer in records.delta for plane in planes(layer)]
        return tensors

    def committed(self, lane: Lane) -> list[torch.Tensor]:
        """Copies of all that counts of a sequence: its KV up to the frontier and its state."""
        cache, at = self.program._cache, torch.arange(lane.frontier)
        pages = torch.tensor(lane.pages)[at // PAGE]
        tensors = [plane[pages, at % PAGE] for layer in cache.kv for plane in planes(layer)]
        return tensors + [states[lane.source].clone() for states in (*cache.conv, *cache.recurrent)]

    def _columns(self, record: np.ndarray, begin: int, lane: Lane, tokens: Sequence[int]) -> None:
        end = begin + len(tokens)
        record["tokens"][0, begin:end] = tokens
        record["positions"][0, begin:end] = np.arange(lane.frontier, lane.frontier + len(tokens))

    def _row(self, record: np.ndarray, row: int, lane: Lane) -> None:
        assert max(lane.pages) < self.plan.pages + self.plan.copies
        assert not self.plan.slots or max(lane.slots) < self.plan.slots
        record["page_table"][0, row, : len(lane.pages)] = lane.pages
        record["source_slots"][0, row], record["target_slots"][0, row] = lane.source, lane.target

    def _draw(self, record: np.ndarray, column: int, lane: Lane, position: int, purpose: int) -> None:
        sampling = lane.sampling
        values = {
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "min_p": sampling.min_p,
            "presence": sampling.presence_penalty,
            "frequency": sampling.frequency_penalty,
            "seed": np.uint64(sampling.seed).view(np.int64),
            "top_k": sampling.top_k,
            "draw_position": position,
            "purpose": purpose,
            "count_rows": lane.count_row,
            "mask_row": -1,
            "logprobs": -1,
        }
        for name, value in values.items():
            record[name][0, column] = value
