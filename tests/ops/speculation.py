"""What happens between the passes of a round, in plain Python, and checks of a backend against it."""

from __future__ import annotations

import math
import random
from types import ModuleType

import torch

LEFT = 77
"""What stands where nothing may be written."""
VOCABULARY = 23


def ints(values: object) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32).reshape(-1)


class Round:
    """Random columns of `rows` requests: drafts are often right, draws may be -1, some columns and rows are
    masked. Lists of lists, and what must come of them."""

    def __init__(self, rng: random.Random, rows: int, width: int) -> None:
        self.rows, self.width = rows, width
        self.drawn = [[rng.randrange(-1, 3) for _ in range(width)] for _ in range(rows)]
        self.tokens = [[rng.randrange(3) for _ in range(width)] for _ in range(rows)]
        self.positions = []
        for row in range(rows):
            for column in range(1, width):
                if rng.random() < 0.7:
                    self.tokens[row][column] = max(0, self.drawn[row][column - 1])
            begin, live = rng.randrange(200), rng.choice((width, rng.randrange(width + 1)))
            self.positions.append([begin + i if i < live else -1 for i in range(width)])
        self.produced = [self._count(row) for row in range(rows)]
        live = [n if p[0] >= 0 else 0 for n, p in zip(self.produced, self.positions, strict=True)]
        self.following = [
            [max(0, t) for t in drawn[:n]] + [0] * (width - n)
            for drawn, n in zip(self.drawn, live, strict=True)
        ]
        self.kept = [p[:n] + [-1] * (width - n) for p, n in zip(self.positions, live, strict=True)]
        self.last = [p[n - 1] if n else -1 for p, n in zip(self.positions, live, strict=True)]

    def _count(self, row: int) -> int:
        drawn, tokens, positions = self.drawn[row], self.tokens[row], self.positions[row]
        count = 1
        while count < self.width and positions[count] >= 0 and drawn[count - 1] == tokens[count]:
            count += 1
        return count

    def counted(self, counts: torch.Tensor, rows: list[list[int]], *, stand: bool) -> torch.Tensor:
        """`counts` with the tokens of each column's row: up to the column, or all that stand."""
        out = counts.clone()
        for b in range(self.rows):
            for column, own in enumerate(rows[b]):
                count = self.produced[b] if stand else column + 1
                for token, position in list(zip(self.tokens[b], self.positions[b], strict=True))[:count]:
                    if own >= 0 and position >= 0:
                        out[own, token] += 1
        return out


def check_accept(module: ModuleType, device: torch.device, rng: random.Random, rows: int, width: int) -> None:
    """Without and with counts and hidden states; nothing else is written."""
    r = Round(rng, rows, width)
    fed = [ints(values).to(device) for values in (r.drawn, r.tokens, r.positions)]
    lanes = rng.sample(range(rows + 2), rows)
    each = [[-1 if rng.random() < 0.3 else lane * width] * width for lane in lanes]
    each = [[row + i if row >= 0 else -1 for i, row in enumerate(own)] for own in each]
    counts = torch.randint(0, 4, (rows + 2, 1, VOCABULARY), dtype=torch.int32)
    counts = counts.expand(rows + 2, width, VOCABULARY).reshape(-1, VOCABULARY)
    count_rows, counted = ints(each).to(device), counts.to(device).clone()
    module.count_drafts(fed[1], fed[2], count_rows, counted, rows)
    assert torch.equal(counted.cpu(), r.counted(counts, each, stand=False))
    size = rng.choice((5, 50, 1200))
    hidden, states = (torch.randn(n, size).bfloat16() for n in (rows * width, rows + 3))
    slots = rng.sample(range(rows + 3), rows)
    left = states.to(device).clone()
    for extra in (
        (),
        (count_rows, counted, hidden.to(device), left, ints(slots).to(device)),
    ):
        produced = torch.full((rows + 1,), LEFT, dtype=torch.int32, device=device)
        following, kept, last = module.accept(*fed, produced[:rows], *extra)
        assert produced.tolist() == [*r.produced, LEFT]
        assert torch.equal(following.cpu(), ints(r.following))
        assert torch.equal(kept.cpu(), ints(r.kept))
        assert last.tolist() == r.last
    assert torch.equal(counted.cpu(), r.counted(counts, each, stand=True))
    for row, slot in enumerate(slots):
        states[slot] = hidden[row * width + r.produced[row] - 1]
    assert torch.equal(left.cpu(), states)


def check_columns(
    module: ModuleType, device: torch.device, rng: random.Random, rows: int, width: int, dtype: torch.dtype
) -> None:
    """Columns that are taken, of tensors with and without gaps between rows, and one that is kept."""
    total, counts = rows * width, [rng.randrange(width + 1) for _ in range(rows)]
    wide = torch.randn(total, 2500).to(dtype)
    tensors = wide[:, 3:1400], torch.randn(total, 2, 7).to(dtype), wide[:, 2000:2001]
    places = [row * width + max(count, 1) - 1 for row, count in enumerate(counts)]
    on_device = wide.to(device)
    given = on_device[:, 3:1400], tensors[1].to(device), on_device[:, 2000:2001]
    for number in (1, 2, 3):
        taken = module.last_columns(given[:number], ints(counts).to(device))
        assert len(taken) == number
        for out, source in zip(taken, tensors[:number], strict=True):
            assert torch.equal(out.cpu(), source[places])
    hidden, states = wide[:, :1100].contiguous(), torch.randn(rows + 2, 1100).to(dtype)
    slots, left = rng.sample(range(rows + 2), rows), states.to(device).clone()
    module.keep_last(hidden.to(device), ints(counts).to(device), left, ints(slots).to(device))
    for row, slot in enumerate(slots):
        if counts[row]:
            states[slot] = hidden[places[row]]
    assert torch.equal(left.cpu(), states)


def check_drafts(
    module: ModuleType, device: torch.device, rng: random.Random, rows: int, size: int, mapped: bool
) -> None:
    """Rows of scores of many kinds, some full of ties or without a number."""
    scores = torch.randn(rows, size)
    for row in range(rows):
        kind = rng.randrange(6)
        if kind == 0:
            scores[row] = scores[row].round() * rng.choice((1.0, -1.0))
        elif kind == 1:
            scores[row] = rng.choice((0.0, -math.inf, math.nan, -1e30))
        elif kind == 2:
            scores[row, rng.randrange(size)] = rng.choice((math.nan, math.inf, 9.0))
    token_ids = torch.randperm(2 * size)[:size].int() if mapped else None
    steps = rng.randrange(1, 6)
    step, places = rng.randrange(steps), [rng.randrange(-1, 9) for _ in range(rows)]
    limits = [rng.randrange(10) for _ in range(rows)]
    drafts = torch.full((rows + 2, steps), LEFT, dtype=torch.int32, device=device)
    tokens, ahead = module.next_draft(
        scores.to(device), ints(places).to(device), ints(limits).to(device), drafts, step,
        None if token_ids is None else token_ids.to(device),
    )  # fmt: skip
    wanted = []
    for row in scores.nan_to_num(-math.inf, math.inf, -math.inf).tolist():
        token = row.index(max(row)) if math.isfinite(max(row)) else -1
        wanted.append(int(token_ids[token]) if token_ids is not None and token >= 0 else token)
    assert tokens.dtype == ahead.dtype == torch.int32
    assert tokens.tolist() == [max(0, token) for token in wanted]
    assert ahead.tolist() == [
        p + 1 if p >= 0 and p + 1 < limit else -1 for p, limit in zip(places, limits, strict=True)
    ]
    expected = torch.full((rows + 2, steps), LEFT, dtype=torch.int32)
    expected[:rows, step] = ints(wanted)
    assert torch.equal(drafts.cpu(), expected)
