"""The records that go into and come out of a Program: one fixed-size buffer each way, whatever the unit.

A graph replays them, a rank broadcasts them, a test writes them by hand: they hold numbers only.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import numpy as np

from ninfer.ops import CANDIDATES, mask_words

DRAW_FIELDS = (
    ("temperature", np.float64),
    ("top_p", np.float64),
    ("min_p", np.float64),
    ("presence", np.float64),
    ("frequency", np.float64),
    ("seed", np.int64),
    ("top_k", np.int32),
    ("draw_position", np.int32),
    ("purpose", np.int32),
    ("count_rows", np.int32),
    ("mask_row", np.int32),
    ("logprobs", np.int32),
)
"""What a column's draw depends on. `seed` is the bit pattern of an unsigned number; purpose -1 draws nothing;
`count_rows` names the row of penalty counts, -1 for none; `mask_row` the row of `masks`, -1 for none;
`logprobs` says how many of the likeliest tokens are reported beside the token's own log-probability, -1 for
nothing."""


_HEADER = ("unit", "rows", "columns", "copy_source", "copy_target")


class Unit(IntEnum):
    """What a Program does in one go."""

    PREFILL = 0
    """One row, `columns` prompt tokens; draws after the last one if its purpose says so. First copies page
    `copy_source` to `copy_target` (unless -1). A draw clears the row's penalty counts."""
    ROUND = 1
    """`rows` rows of `columns` tokens: a committed token that waits to be fed, then drafts. Every column
    draws. The state goes from source to target slot, by the tokens that stand."""
    CONTROL = 2
    """`rows` rows of `columns` committed tokens that were not drawn; nothing is drawn."""
    FOLD = 3
    """After a round of several columns of which fewer are committed than stand: from the source slot to the
    target slot again, by the first `counts[row]` columns; 0 leaves the target as it is."""


@dataclass(frozen=True)
class Shape:
    """What sizes the records: `rows` requests at most, `width` columns of a row in a round, `chunk` columns
    of a prefill, `span` of a control row, `pages` of a row's table, `tokens` that can be drawn, `drafts` that
    a predictor makes for each row's next round (0: there is none)."""

    rows: int
    width: int
    chunk: int
    span: int
    pages: int
    tokens: int
    drafts: int = 0

    @property
    def words(self) -> int:
        """32-bit words of a mask."""
        return mask_words(self.tokens)

    @property
    def draws(self) -> int:
        """Columns of the largest round."""
        return self.rows * self.width

    @property
    def count_rows(self) -> int:
        """Rows of penalty counts: one a request, or with a predictor, whose drafts count as well, one a
        column."""
        return self.draws if self.drafts else self.rows

    @property
    def columns(self) -> int:
        """Columns of the largest unit."""
        return max(self.chunk, self.draws, self.rows * self.span)


def ingress(shape: Shape) -> np.ndarray:
    """An empty record, `ndarray` of one element; its fields are views.

    `tokens`, `positions` `[columns]`, row after row; position -1 masks a column. `page_table[row]` says where
    positions [64 b, 64 b + 64) are. Slots: -1 as a source is the start of a sequence. Draw fields are
    `[rows * width]`, as `tokens` in a round; in a PREFILL the first one counts. `masks` `[rows * width,
    words]`: bit i of word w allows token 32 w + i. They come last: only units that name one need them.

    With a predictor `limits` `[rows]` says below which position it may write, and `waiting` `[rows]` which
    token follows those of a CONTROL row. Each column of a request then has a row of counts of its own, and
    `count_rows` names all of them in every unit, `width` for each row.
    """
    rows = shape.rows
    predictor = (("limits", np.int32, (rows,)), ("waiting", np.int32, (rows,))) if shape.drafts else ()
    record = np.zeros(
        1,
        np.dtype(
            [
                *((name, kind, (shape.draws,)) for name, kind in DRAW_FIELDS),
                ("tokens", np.int32, (shape.columns,)),
                ("positions", np.int32, (shape.columns,)),
                ("page_table", np.int32, (rows, shape.pages)),
                ("source_slots", np.int32, (rows,)),
                ("target_slots", np.int32, (rows,)),
                ("counts", np.int32, (rows,)),
                *predictor,
                *((name, np.int32) for name in _HEADER),
                ("masks", np.int32, (shape.draws, shape.words)),
            ],
            align=True,
        ),
    )
    record["purpose"], record["count_rows"] = -1, -1
    record["mask_row"], record["logprobs"] = -1, -1
    record["copy_source"], record["copy_target"] = -1, -1
    return record


def header_of(record: np.ndarray) -> np.ndarray:
    """A view of unit, rows, columns, copy_source, copy_target: int32 `[5]`."""
    assert record.dtype.fields is not None
    begin = record.dtype.fields[_HEADER[0]][1]
    return record.view(np.uint8)[begin : begin + 4 * len(_HEADER)].view(np.int32)


def copy_record(target: np.ndarray, source: np.ndarray) -> None:
    """Copy an ingress record, its masks only as far as its draws name them."""
    assert source.dtype.fields is not None
    begin = source.dtype.fields["masks"][1]
    into, out_of = target.view(np.uint8), source.view(np.uint8)
    into[:begin] = out_of[:begin]  # field by field it would take 20 times as long
    used = int(source["mask_row"].max()) + 1
    if used > 0:
        target["masks"][0, :used] = source["masks"][0, :used]


def egress(shape: Shape) -> np.ndarray:
    """What a unit produced: `tokens` `[rows * width]` (-1: its scores weren't finite, -3: its mask allows no
    token), per row how many of them stand (`produced`: the drafts that agree, and one more), and the device's
    `seconds`. Where they were asked for: `logprob` `[rows * width]` of the tokens, `top_ids` and
    `top_logprobs` `[rows * width, 20]` of the likeliest. With a predictor `drafts` `[rows, drafts]`: what it
    proposes for the next round after a unit that drew or was CONTROL (-1: nothing)."""
    predictor = (("drafts", np.int32, (shape.rows, shape.drafts)),) if shape.drafts else ()
    return np.zeros(
        1,
        np.dtype(
            [
                ("seconds", np.float64),
                ("tokens", np.int32, (shape.draws,)),
                ("produced", np.int32, (shape.rows,)),
                ("logprob", np.float32, (shape.draws,)),
                ("top_ids", np.int32, (shape.draws, CANDIDATES)),
                ("top_logprobs", np.float32, (shape.draws, CANDIDATES)),
                *predictor,
            ],
            align=True,
        ),
    )
