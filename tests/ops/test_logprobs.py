"""Log-probabilities against a float64 softmax."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
import torch

from ninfer.errors import OptionError
from ninfer.events import MOST_LOGPROBS
from ninfer.ops import CANDIDATES, token_logprobs

LEFT = -77
"""Stands where nothing may be written."""
SUM_ERROR = (64 + 4 + 4) * 2.0**-24
"""Relative, of a sum: 64 additions to each of 16 lanes, 4 to put these together, and exponentials that are
off by up to 2 units in the last place. The absolute error of its logarithm."""


def told(scores: torch.Tensor, tokens: list[int], wanted: list[int]) -> tuple[torch.Tensor, ...]:
    rows = len(tokens)
    logprob, values = torch.full((rows,), float(LEFT)), torch.full((rows, CANDIDATES), float(LEFT))
    ids = torch.full((rows, CANDIDATES), LEFT, dtype=torch.int32)
    drawn, many = (torch.tensor(numbers, dtype=torch.int32) for numbers in (tokens, wanted))
    token_logprobs(scores, drawn, many, logprob, ids, values)
    return logprob, ids, values


def log_softmax(scores: torch.Tensor) -> np.ndarray:
    """float64, of one row; a NaN is no score."""
    x = scores.double().numpy()
    best = np.nanmax(x)
    return x - best - math.log(math.fsum(math.exp(value - best) for value in x if value == value))


def near(got: float, wanted: float) -> bool:
    return got == wanted or abs(got - wanted) <= SUM_ERROR + 2.0**-24 * abs(wanted)


@pytest.mark.parametrize("rows", [1, 2, 7])
@pytest.mark.parametrize("size", [1, 2, 15, 16, 17, 20, 21, 1023, 1025, 40_000])
@pytest.mark.parametrize("scale", [0.1, 3.0, 40.0])
def test_values_and_order(rows: int, size: int, scale: float) -> None:
    rng = random.Random(size)
    scores = torch.randn(rows, size) * scale
    scores[rows // 2] = scores[rows // 2].round()  # full of ties
    tokens = [rng.randrange(size) for _ in range(rows)]
    wanted = [rng.choice((0, 1, 5, 19, 20)) for _ in range(rows)]
    before = scores.clone()
    logprob, ids, values = told(scores, tokens, wanted)
    assert torch.equal(scores, before)
    for b in range(rows):
        expected = log_softmax(scores[b])
        assert near(float(logprob[b]), float(expected[tokens[b]]))
        row = scores[b].tolist()
        order = sorted(range(size), key=lambda i: (-row[i], i))[: wanted[b]]
        assert ids[b, : len(order)].tolist() == order
        assert all(near(float(values[b, i]), float(expected[token])) for i, token in enumerate(order))
        assert (ids[b, len(order) :] == LEFT).all()
        assert (values[b, len(order) :] == LEFT).all()


def test_rows_that_do_not_ask_are_left_alone() -> None:
    scores = torch.randn(5, 3000)
    logprob, ids, values = told(scores, [3, -1, 5, -3, 7], [-1, 4, 2, 0, -77])
    alone = told(scores[2:3].contiguous(), [5], [2])
    for row in (0, 1, 3, 4):
        assert logprob[row] == LEFT
        assert (ids[row] == LEFT).all()
        assert (values[row] == LEFT).all()
    assert torch.equal(logprob[2:3], alone[0])
    assert torch.equal(ids[2:3], alone[1])
    assert torch.equal(values[2:3], alone[2])


def test_scores_that_are_no_numbers_and_the_unlikeliest() -> None:
    scores = torch.tensor([[0.0, math.nan, -math.inf, 1.0, -300.0]])
    logprob, ids, values = told(scores, [4], [5])
    expected = log_softmax(scores[0])
    assert near(float(logprob[0]), float(expected[4]))
    assert ids[0, :5].tolist() == [3, 0, 4, 2, -1]
    assert [math.isinf(value) for value in values[0, :5].tolist()] == [False, False, False, True, True]
    assert math.isnan(told(torch.full((1, 40), math.nan), [1], [3])[0][0])


def test_probabilities_of_equals_are_their_share() -> None:
    logprob, ids, values = told(torch.full((1, 100_000), 7.0), [99_999], [2])
    assert abs(float(logprob[0]) + math.log(100_000)) < 1e-6
    assert ids[0, :2].tolist() == [0, 1]
    assert values[0, 0] == values[0, 1] == logprob[0]


def test_one_number_of_alternatives_everywhere() -> None:
    assert MOST_LOGPROBS == CANDIDATES


def test_tensors_that_do_not_fit_are_refused() -> None:
    scores = torch.zeros(2, 8)
    with pytest.raises(OptionError, match="contiguous float32"):
        told(scores.double(), [0, 1], [1, 1])
    with pytest.raises(OptionError, match="tokens of 2 rows must be contiguous"):
        told(scores, [0], [1])
    numbers = torch.zeros(2, dtype=torch.int32)
    with pytest.raises(OptionError, match=r"top_ids of 2 rows .* \[2, 20\]"):
        token_logprobs(scores, numbers, numbers, torch.zeros(2), torch.zeros(2, 5).int(), torch.zeros(2, 20))
