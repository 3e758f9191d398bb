"""Rounds are recorded once and replayed, bit for bit what the operators give one by one."""

from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
import torch

from ninfer.models import Model
from ninfer.ops import Purpose, Recording
from ninfer.runtime.records import Unit
from tests.models import mtp
from tests.models.loaded import GEOMETRIES, loaded

from .hand import Hand, Lane, assert_same

ROWS, CONTEXT, CALLS = 8, 128, 5


class Unrecorded(Recording[tuple[torch.Tensor, torch.Tensor]]):
    """Runs its work every time."""

    def __call__(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self._work()


def fill(hand: Hand) -> None:
    """A past for every position and slot."""
    rng = np.random.default_rng(5)
    for row in range(ROWS):
        lane = Lane(range(2 * row, 2 * row + 2), (2 * row, 2 * row + 1))
        hand.feed(lane, rng.integers(190, size=CONTEXT).tolist(), draw=False)
    generator = torch.Generator().manual_seed(6)
    for states in (*hand.program._cache.conv, *hand.program._cache.recurrent):
        states.copy_(0.3 * torch.randn(states.shape, generator=generator))


def random_round(hand: Hand, rows: int, columns: int, rng: np.random.Generator) -> np.ndarray:
    """Rows anywhere in their contexts, on pages and slots of no order, some columns masked."""
    record = hand.empty(Unit.ROUND, rows, columns)
    shape = hand.shape
    pages = rng.permutation(hand.plan.pages)[: rows * shape.pages].reshape(rows, shape.pages)
    record["page_table"][0, :rows] = pages
    slots = rng.permutation(hand.plan.slots) if hand.plan.slots else np.zeros(2 * rows, np.int32)
    record["source_slots"][0, :rows] = np.where(rng.random(rows) < 0.2, -1, slots[:rows])
    record["target_slots"][0, :rows] = slots[rows : 2 * rows]
    public = hand.program._model.public_tokens
    if shape.drafts:
        record["limits"][0, :rows] = rng.integers(1, CONTEXT + 1, size=rows)
    masks = rng.integers(-(1 << 31), 1 << 31, size=record["masks"].shape)
    record["masks"] = np.where(rng.random(masks.shape) < 0.5, 0, masks)
    for row in range(rows):
        live = rng.integers(1, columns + 1)
        begin = rng.integers(0, CONTEXT - columns)
        for column in range(columns):
            at = row * columns + column
            is_live = column < live
            values = {
                "tokens": rng.integers(public) if is_live else 0,
                "positions": begin + column if is_live else -1,
                "purpose": rng.choice([Purpose.DECODE, Purpose.BONUS]) if is_live else -1,
                "draw_position": begin + column,
                "count_rows": row if column == 0 and rng.random() < 0.5 else -1,
                "seed": rng.integers(-(1 << 63), 1 << 63),
                "temperature": rng.choice([0.0, 0.7, 2.0]),
                "top_p": rng.uniform(0.5, 1.0),
                "min_p": rng.uniform(0.0, 0.2),
                "top_k": rng.integers(0, 21),
                "presence": rng.choice([0.0, 1.0]),
                "frequency": rng.choice([0.0, 0.5]),
                "mask_row": rng.integers(-1, shape.draws),
                "logprobs": rng.integers(-1, 21),
            }
            for name, value in values.items():
                record[name][0, at] = value
    return record


@pytest.mark.parametrize(
    ("model", "columns"),
    [
        *((partial(loaded, name), columns) for name in GEOMETRIES for columns in (1, 4)),
        *((partial(mtp.loaded, name), columns) for name in ("mixed", "all-full") for columns in (2, 4)),
    ],
)
def test_replayed_rounds_are_bit_for_bit_those_of_the_operators(
    model: Callable[[], Model], columns: int
) -> None:
    replayed, plain = (Hand(model(), rows=ROWS, width=columns, context=CONTEXT) for _ in range(2))
    for hand in (replayed, plain):
        fill(hand)
    rng = np.random.default_rng(7)
    for rows in range(1, ROWS + 1):
        program = plain.program
        step = partial(program._step, rows, columns)
        program._rounds[rows, columns] = Unrecorded(step, torch.device("cpu"))
        for call in range(CALLS):
            record = random_round(replayed, rows, columns, rng)
            mine, other = replayed.run(record), plain.run(record)
            mine["seconds"] = other["seconds"] = 0
            assert mine.tobytes() == other.tobytes(), (rows, call)
            assert_same(replayed.memory(), plain.memory(), (rows, call))
    for (rows, _), step in replayed.program._rounds.items():
        # More columns than that are products of PyTorch, where there are no matrix tiles.
        assert step.recorded or rows * columns > 16, (rows, step.obstacle)
