"""Writing the records of units of work from the requests that take part."""

from __future__ import annotations

from collections.abc import Sequence as Items
from typing import TYPE_CHECKING

import numpy as np

from ninfer.ops import Purpose
from ninfer.runtime.records import Shape, Unit, ingress

if TYPE_CHECKING:
    from ninfer.engine.request import Request, Ticket
    from ninfer.engine.sequence import Sequence
    from ninfer.ops import SamplingParams

_UNSIGNED = 1 << 64


def penalized(sampling: SamplingParams) -> bool:
    """Does the choice depend on how often each token was generated?"""
    return sampling.presence_penalty != 0 or sampling.frequency_penalty != 0


class UnitWriter:
    """Owns the ingress record and fills it for one unit after the other.

    `lane` numbers of tickets choose the rows of penalty counts. What a round repeats from the round before is
    left as it stands.
    """

    def __init__(self, shape: Shape, record: np.ndarray | None = None) -> None:
        """`record`: write there instead of into an own one."""
        self._shape = shape
        self._record = ingress(shape) if record is None else record
        only = self._record[0]
        self._fields = {name: only[name] for name in only.dtype.names or ()}
        # Single numbers through NumPy cost a multiple of that.
        self._tokens, self._positions = only["tokens"].data, only["positions"].data
        self._places, self._purposes = only["draw_position"].data, only["purpose"].data
        self._sources, self._targets = only["source_slots"].data, only["target_slots"].data
        self._round: tuple[int, ...] = ()
        """What the record's round is: its width, and whose rows it has."""
        self._pages: list[list[int]] = []
        """Of these rows."""
        self._masked: Items[tuple[int, int]] = ()

    def masks(self, row: int, drafts: int) -> np.ndarray:
        """Where the masks of a row of the next unit are to be written: int32 `[1 + drafts, words]`."""
        begin = row * self._shape.width
        return self._fields["masks"][begin : begin + 1 + drafts]

    def prefill(self, lane: int, ticket: Ticket, end: int, *, masked: bool = False) -> np.ndarray:
        """Feed the prompt up to `end`; draw the first token if that is all of it (`masked`: by the first mask
        of row 0)."""
        sequence, f = self._sequence(ticket), self._fields
        count = end - sequence.frontier
        self._header(Unit.PREFILL, 1, count)
        f["tokens"][:count] = sequence.ledger[sequence.frontier : end]
        f["positions"][:count] = np.arange(sequence.frontier, end)
        if sequence.copy is not None:
            self._record["copy_source"], self._record["copy_target"] = sequence.copy
        self._row(0, sequence)
        if end == len(ticket.request.prompt):
            self._draw(0, ticket.request)
            self._counts(0, lane, ticket.request)
            f["mask_row"][0] = 0 if masked else -1
            f["purpose"][0], f["draw_position"][0] = Purpose.PREFILL, end
            if self._shape.drafts:
                f["limits"][0] = self.limit(ticket, end)
        else:
            f["purpose"][0] = -1
        return self._record

    def control(self, lanes: Items[int], tickets: Items[Ticket], span: int) -> np.ndarray:
        """Feed `span` committed tokens of each request."""
        f = self._fields
        self._header(Unit.CONTROL, len(tickets), span)
        for row, (lane, ticket) in enumerate(zip(lanes, tickets, strict=True)):
            sequence = self._sequence(ticket)
            begin, end = sequence.frontier, sequence.frontier + span
            f["tokens"][row * span : (row + 1) * span] = sequence.ledger[begin:end]
            f["positions"][row * span : (row + 1) * span] = np.arange(begin, end)
            self._counts(row, lane, ticket.request)
            if self._shape.drafts:
                f["limits"][row], f["waiting"][row] = self.limit(ticket, end), sequence.ledger[end]
            self._row(row, sequence)
        return self._record

    def limit(self, ticket: Ticket, fed: int) -> int:
        """Below which position a unit writes that feeds up to `fed`: a predictor feeds its own drafts on, as
        far as they may be of use."""
        return min(fed + max(self._shape.drafts - 1, 0), max(ticket.budget.context, fed))

    def round(
        self,
        lanes: Items[int],
        tickets: Items[Ticket],
        drafts: Items[Items[int]],
        masked: Items[tuple[int, int]] = (),
    ) -> np.ndarray:
        """Feed each request's waiting token and its drafts, and draw after every column.

        `masked`: the rows of constrained requests, and how many of their columns have masks.
        """
        f = self._fields
        width = self.width(drafts)
        same = (width, *map(id, tickets))
        if same != self._round:
            self._header(Unit.ROUND, len(tickets), width)
            for row, (lane, ticket) in enumerate(zip(lanes, tickets, strict=True)):
                for column in range(row * width, (row + 1) * width):
                    self._draw(column, ticket.request)
                    f["count_rows"][column] = -1
                self._counts(row, lane, ticket.request, width)
                f["purpose"][row * width] = Purpose.DECODE
            self._round, self._pages, self._masked = same, [[] for _ in tickets], ()
        self._record["unit"] = Unit.ROUND  # a fold of the round before may stand there
        for row, (ticket, draft) in enumerate(zip(tickets, drafts, strict=True)):
            sequence = self._sequence(ticket)
            begin, frontier = row * width, sequence.frontier
            if sequence.recurrent:
                self._sources[row], self._targets[row] = sequence.source, sequence.target
            if sequence.pages != self._pages[row]:
                self._pages[row] = list(sequence.pages)
                self._table(row, sequence)
            self._tokens[begin] = sequence.ledger[frontier]
            self._positions[begin] = self._places[begin] = frontier
            if width == 1:
                continue
            if self._shape.drafts:
                f["limits"][row] = self.limit(ticket, frontier + 1 + len(draft))
            for place, token in enumerate(draft, 1):
                column = begin + place
                self._tokens[column] = token
                self._positions[column] = self._places[column] = frontier + place
                self._purposes[column] = Purpose.DECODE
            for column in range(begin + 1 + len(draft), begin + width):
                self._tokens[column], self._positions[column], self._purposes[column] = 0, -1, -1
        if masked or self._masked:
            for row, _ in self._masked:
                f["mask_row"][row * width : (row + 1) * width] = -1
            for row, columns in masked:
                mask = row * self._shape.width
                f["mask_row"][row * width : row * width + columns] = np.arange(mask, mask + columns)
            self._masked = masked
        return self._record

    def width(self, drafts: Items[Items[int]]) -> int:
        """Columns of a row in a round; a predictor takes part in each one, so it has only one number."""
        return self._shape.width if self._shape.drafts or any(drafts) else 1

    def fold(self, counts: Items[int]) -> np.ndarray:
        """After a round of several columns: commit only the first `counts[row]` of them (0: leave the
        row)."""
        self._record["unit"] = Unit.FOLD
        self._fields["counts"][: len(counts)] = counts
        return self._record

    def _header(self, unit: Unit, rows: int, columns: int) -> None:
        record = self._record
        record["unit"], record["rows"], record["columns"] = unit, rows, columns
        record["copy_source"] = record["copy_target"] = -1
        self._round = ()

    def _row(self, row: int, sequence: Sequence) -> None:
        f = self._fields
        f["source_slots"][row], f["target_slots"][row] = sequence.source, sequence.target
        self._table(row, sequence)

    def _table(self, row: int, sequence: Sequence) -> None:
        self._fields["page_table"][row, : len(sequence.pages)] = sequence.pages

    def _counts(self, row: int, lane: int, request: Request, width: int = 1) -> None:
        """Name a row's counts: one of the lane, or with a predictor one of the lane for each column."""
        each = self._shape.width if self._shape.drafts else 1
        begin = row * max(each, width)
        for column in range(each):
            counts = lane * each + column if penalized(request.sampling) else -1
            self._fields["count_rows"][begin + column] = counts

    def _draw(self, column: int, request: Request) -> None:
        f, sampling = self._fields, request.sampling
        f["temperature"][column], f["top_p"][column] = sampling.temperature, sampling.top_p
        f["min_p"][column], f["top_k"][column] = sampling.min_p, sampling.top_k
        f["presence"][column], f["frequency"][column] = (
            sampling.presence_penalty,
            sampling.frequency_penalty,
        )
        f["seed"][column] = sampling.seed - (_UNSIGNED if sampling.seed >> 63 else 0)
        f["logprobs"][column] = -1 if request.logprobs is None else request.logprobs
        f["mask_row"][column] = -1

    @staticmethod
    def _sequence(ticket: Ticket) -> Sequence:
        assert ticket.sequence is not None, "only admitted requests take part in units"
        return ticket.sequence
