"""What happens between the passes of a round, in plain Python; the GPU's versions run here on CPU tensors."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch

from ninfer import ops
from ninfer.ops.cpu import speculation as cpu

ROWS, V = 5, 23


def implementations() -> list[ModuleType]:
    found = [cpu]
    try:
        from ninfer.ops.cuda import speculation as cuda
    except ImportError:  # no Triton here
        return found
    return [*found, cuda]


IMPLEMENTATIONS = pytest.mark.parametrize("module", implementations(), ids=lambda m: m.__name__.split(".")[2])


def ints(values: object) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32).reshape(-1)


def random_round(width: int, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Drawn, fed and positions `[rows, width]`; drafts are often right, some columns and rows are masked."""
    g = torch.Generator().manual_seed(seed)
    drawn = torch.randint(-1, 3, (ROWS, width), generator=g, dtype=torch.int32)
    tokens = torch.randint(0, 3, (ROWS, width), generator=g, dtype=torch.int32)
    right = torch.rand((ROWS, width - 1), generator=g) < 0.7
    tokens[:, 1:] = torch.where(right, drawn[:, :-1].clamp(min=0), tokens[:, 1:])
    live = torch.randint(1, width + 1, (ROWS, 1), generator=g)
    begin = torch.randint(0, 200, (ROWS, 1), generator=g)
    positions = torch.where(torch.arange(width) < live, begin + torch.arange(width), -1).int()
    if seed % 3 == 0:
        positions[seed % ROWS] = -1
    return drawn, tokens, positions


@IMPLEMENTATIONS
@pytest.mark.parametrize("width", [2, 4, 6])
def test_drafts_stand_up_to_the_first_that_differs(module: ModuleType, width: int) -> None:
    for seed in range(40):
        drawn, tokens, positions = random_round(width, seed)
        produced = torch.full((ROWS,), -9, dtype=torch.int32)
        following, kept, last = module.accept(
            drawn.reshape(-1), tokens.reshape(-1), positions.reshape(-1), produced
        )
        for row in range(ROWS):
            count = 1
            while (
                count < width and positions[row, count] >= 0 and drawn[row, count - 1] == tokens[row, count]
            ):
                count += 1
            assert produced[row] == count
            live = count if positions[row, 0] >= 0 else 0
            padding = [0] * (width - live)
            columns = slice(row * width, (row + 1) * width)
            assert following[columns].tolist() == [max(0, t) for t in drawn[row, :live].tolist()] + padding
            assert kept[columns].tolist() == positions[row, :live].tolist() + [-1] * (width - live)
            assert last[row] == (positions[row, 0] + count - 1 if live else -1)


@IMPLEMENTATIONS
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("width", [1, 4])
def test_the_last_kept_column_is_taken(module: ModuleType, dtype: torch.dtype, width: int) -> None:
    columns = torch.randn(3 * width, 50).to(dtype)
    states = torch.randn(7, 50).to(dtype)
    before, counts, slots = states.clone(), ints([width, 0, 1]), ints([4, 2, 6])
    out = module.keep_last(columns, counts, states, slots)
    wanted = columns[[width - 1, width, 2 * width]]
    assert torch.equal(out, wanted)
    before[4], before[6] = wanted[0], wanted[2]
    assert torch.equal(states, before)
    assert torch.equal(module.keep_last(columns, counts, None, None), wanted)


@IMPLEMENTATIONS
def test_drafts_go_on_up_to_their_limits(module: ModuleType) -> None:
    drafts = torch.full((6, 3), 77, dtype=torch.int32)
    drawn, positions, limits = ints([5, -1, 9, 0]), ints([10, 11, 12, -1]), ints([12, 13, 13, 99])
    tokens, ahead = module.next_draft(drawn, positions, limits, drafts, 1)
    assert (tokens.tolist(), ahead.tolist()) == ([5, 0, 9, 0], [11, 12, -1, -1])
    assert drafts.tolist() == [[77, value, 77] for value in (5, -1, 9, 0, 77, 77)]


@IMPLEMENTATIONS
def test_rows_of_a_proposal_head_become_tokens(module: ModuleType) -> None:
    drafts = torch.zeros((2, 1), dtype=torch.int32)
    tokens, _ = module.next_draft(ints([2, -1]), ints([1, 1]), ints([9, 9]), drafts, 0, ints([30, 10, 20]))
    assert (tokens.tolist(), drafts.tolist()) == ([20, 0], [[20], [-1]])


@IMPLEMENTATIONS
@pytest.mark.parametrize("width", [2, 4])
def test_counts_follow_drafts_and_then_what_stands(module: ModuleType, width: int) -> None:
    for seed in range(20):
        drawn, tokens, positions = (x.reshape(-1) for x in random_round(width, 3 * seed + 1))
        stand = torch.zeros(ROWS, dtype=torch.int32)
        module.accept(drawn, tokens, positions, stand)
        rows = ints([[-1] * width if b == 2 else range(b * width, (b + 1) * width) for b in range(ROWS)])
        counts = torch.randint(0, 4, (ROWS, 1, V), dtype=torch.int32).expand(ROWS, width, V).reshape(-1, V)
        counts = counts.contiguous()
        before = counts.clone()
        module.count_drafts(tokens, positions, rows, counts, ROWS, None)
        expected = before.clone()
        for b in range(ROWS):
            for column in range(width if b != 2 else 0):
                for token in range(b * width, b * width + column + 1):
                    expected[b * width + column, tokens[token]] += int(positions[token] >= 0)
        assert torch.equal(counts, expected)
        module.count_drafts(tokens, positions, rows, counts, ROWS, stand)
        for b in range(ROWS):
            for column in range(width if b != 2 else 0):
                for token in tokens[b * width : b * width + int(stand[b])]:
                    before[b * width + column, token] += 1
        assert torch.equal(counts, before)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("rows", [1, 3, 40])
@pytest.mark.parametrize("width", [50, 384])
def test_two_norms_stand_side_by_side(dtype: torch.dtype, rows: int, width: int) -> None:
    a, b = (torch.randn(rows, width).to(dtype) for _ in range(2))
    gains = torch.randn(width).bfloat16(), torch.randn(width).bfloat16()
    wanted = [ops.rms_norm(x, gain, 1e-6, True) for x, gain in zip((a, b), gains, strict=True)]
    assert torch.equal(ops.norm_pair(a, b, *gains, 1e-6), torch.cat(wanted, 1))
