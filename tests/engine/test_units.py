"""The records of rounds: what is left as it stood is what would have been written."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any, cast

import pytest

from ninfer.engine.request import Ticket
from ninfer.engine.units import UnitWriter
from ninfer.ops import PAGE, SamplingParams
from ninfer.runtime.records import DRAW_FIELDS, Shape


class Row:
    """A ticket as the writer sees one; pages beyond the frontier are other ones each time."""

    def __init__(self, rng: random.Random) -> None:
        self.rng, self.pages = rng, []
        penalty = rng.choice((0.0, 0.5))
        sampling = SamplingParams(rng.random(), presence_penalty=penalty, seed=rng.getrandbits(64))
        self.request = SimpleNamespace(sampling=sampling, logprobs=rng.choice((None, 3)))
        self.budget = SimpleNamespace(context=rng.randrange(500, 1000))
        self.frontier, self.ledger = rng.randrange(1, 300), range(1000)
        self.recurrent, self.source, self.target = True, rng.randrange(9), rng.randrange(9)
        self.sequence = self

    def map_to(self, end: int) -> None:
        del self.pages[-(-self.frontier // PAGE) :]
        while len(self.pages) * PAGE < end:
            self.pages.append(self.rng.randrange(10_000))


def live(record: Any, rows: list[Row], width: int, masked: object) -> list[object]:
    """All that a unit of these rows reads."""
    one, count = record[0], len(rows) * width
    used = [one["tokens"][:count], one["positions"][:count]]
    used += [one["limits"][: len(rows)]] if width > 1 else []
    tables = [one["page_table"][row, : len(ticket.pages)].tolist() for row, ticket in enumerate(rows)]
    drawing = [column for column in range(count) if one["purpose"][column] >= 0]
    draws = [[one[name][column] for column in drawing] for name, _ in DRAW_FIELDS]
    slots = [one[name][: len(rows)].tolist() for name in ("source_slots", "target_slots")]
    names = [one[name].item() for name in ("unit", "rows", "columns", "copy_source", "copy_target")]
    counts = one["count_rows"][:count].tolist()
    return [[part.tolist() for part in used], tables, draws, slots, names, masked, counts]


@pytest.mark.parametrize("drafts", [0, 3])
def test_a_round_does_not_depend_on_the_one_before(drafts: int) -> None:
    rng, shape = random.Random(drafts), Shape(4, 1 + drafts, 64, 8, 20, 100, drafts)
    every = [Row(rng) for _ in range(4)]
    kept, tickets = UnitWriter(shape), every[:]
    for _ in range(200):
        if rng.random() < 0.1:
            every.append(Row(rng))  # and none is dropped, so that no two are taken for one
            tickets[rng.randrange(4)] = every[-1]
        rows = tickets if rng.random() < 0.8 else rng.sample(tickets, rng.randrange(1, 5))
        guesses = [[rng.randrange(100) for _ in range(rng.randrange(drafts + 1))] for _ in rows]
        for ticket, guess in zip(rows, guesses, strict=True):
            ticket.map_to(ticket.frontier + 1 + len(guess) + rng.randrange(60))
        masked = [(row, 1 + len(guess)) for row, guess in enumerate(guesses) if rows[row].request.logprobs]
        lanes = [tickets.index(ticket) for ticket in rows]
        given = lanes, cast(list[Ticket], rows), guesses, masked
        records = [writer.round(*given) for writer in (kept, UnitWriter(shape))]
        found = [live(record, rows, 1 + drafts, masked) for record in records]
        assert found[0] == found[1]
        if rng.random() < 0.1:
            kept.fold([1] * len(rows))
        for ticket, guess in zip(rows, guesses, strict=True):
            ticket.frontier = min(ticket.frontier + rng.randrange(2 + len(guess)), 900)
            ticket.source, ticket.target = ticket.target, ticket.source
