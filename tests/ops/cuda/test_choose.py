"""Draws, counts and log-probabilities on the GPU: the same tokens as on the CPU, to the last one."""

from __future__ import annotations

import math
import random
from dataclasses import fields

import pytest
import torch

from ninfer.errors import OptionError
from ninfer.ops import CANDIDATES, Draws, SamplingParams, cpu, mask_words
from ninfer.ops.cuda.choose import clear_counts, count_tokens, draw
from ninfer.ops.cuda.likely import token_logprobs
from tests.ops.test_logprobs import LEFT, log_softmax, near
from tests.ops.test_sampling import random_params

SIZES = [1, 5, 20, 37, 511, 512, 513, 2047, 2049, 8192, 50_257, 131_072, 248_077, 262_145]


def gpu(test):
    """A test for the GPU alone."""
    return pytest.mark.gpu(pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")(test))


def on(device: torch.device, draws: Draws) -> Draws:
    return Draws(**{field.name: getattr(draws, field.name).to(device) for field in fields(draws)})


def random_scores(rng: random.Random, rows: int, size: int) -> torch.Tensor:
    """Of many kinds: full of ties, signed zeros, numbers that are none, and nothing else than one of them."""
    scores = torch.randn(rows, size, generator=torch.Generator().manual_seed(rng.getrandbits(30))) * 3
    for row in range(rows):
        kind = rng.randrange(7)
        if kind == 0:
            scores[row] = scores[row].round() * rng.choice((1.0, -1.0))
        elif kind == 1:
            scores[row] = scores[row].bfloat16().float()
        elif kind == 2:
            scores[row] = rng.choice((0.0, -math.inf, math.nan, -1e30))
        if rng.random() < 0.3:
            scores[row, rng.randrange(size)] = rng.choice((math.nan, math.inf, -math.inf, 9.0))
    return scores


def random_draws(rng: random.Random, rows: int) -> Draws:
    """Some greedy, some masked by one of 5 masks, some penalized by one of 3 rows of counts."""
    return Draws.of(
        [random_params(rng) for _ in range(rows)],
        [rng.randrange(1 << 31) for _ in range(rows)],
        [rng.choice((-1, 0, 1, 2, 3, 4, 5, 1, 1)) for _ in range(rows)],
        [rng.randrange(-1, 3) for _ in range(rows)],
        mask_row=[rng.choice((-1, -1, 0, 1, 2, 3, 4)) for _ in range(rows)],
    )


def some_masks(rng: random.Random, size: int) -> torch.Tensor:
    """Five masks that allow from nothing to everything, with bits behind the last token."""
    bits = torch.zeros(5, mask_words(size), 32, dtype=torch.int64)
    for row in bits:
        row.copy_(torch.rand(row.shape) < rng.choice((0.0, 20 / (size + 20), 0.5, 1.0)))
    words = (bits << torch.arange(32)).sum(-1)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).int()


def compare_draws(device: torch.device, rng: random.Random, rows: int, size: int, masked: bool) -> list[int]:
    scores, draws = random_scores(rng, rows, size), random_draws(rng, rows)
    counts = torch.randint(0, 4, (3, size), dtype=torch.int32)
    masks = some_masks(rng, size) if masked else None
    expected = cpu.draw(scores, draws, counts, masks)
    placed = masks.to(device) if masks is not None else None
    got = draw(scores.to(device), on(device, draws), counts.to(device), placed)
    assert got.dtype == torch.int32
    assert got.tolist() == expected.tolist()
    return expected.tolist()


@pytest.mark.parametrize("size", [5, 2500])
@pytest.mark.parametrize("masked", [False, True])
def test_a_few_draws(size: int, masked: bool, device: torch.device) -> None:
    compare_draws(device, random.Random(size + masked), 2, size, masked)


@gpu
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("rows", [1, 3, 8])
def test_draws_are_those_of_the_cpu(size: int, rows: int, device: torch.device) -> None:
    rng = random.Random(1000 * rows + size)
    trials = 120 // rows if size < 10_000 else 6
    seen = set()
    for trial in range(trials):
        seen.update(min(token, 0) for token in compare_draws(device, rng, rows, size, trial % 2 > 0))
    assert trials < 40 or {-3, -2, -1, 0} <= seen


@gpu
def test_every_number_of_candidates_and_seed(device: torch.device) -> None:
    """All uniform numbers count: one row of scores, 4,096 draws."""
    rows, size, rng = 4096, 600, random.Random(8)
    scores = torch.randn(1, size).expand(rows, size).contiguous()
    params = [
        SamplingParams(
            temperature=rng.choice((0.01, 0.7, 5.0, 1e-300)),
            top_k=row % 22,
            top_p=rng.random(),
            min_p=rng.choice((0.0, 0.01 * rng.random())),
            seed=rng.getrandbits(64),
        )
        for row in range(rows)
    ]
    positions = [rng.randrange(1 << 31) for _ in range(rows)]
    draws = Draws.of(params, positions, [row % 6 for row in range(rows)], [-1] * rows)
    counts = torch.zeros(0, size, dtype=torch.int32)
    expected = cpu.draw(scores, draws, counts)
    assert len(set(expected.tolist())) > 15
    assert draw(scores.to(device), on(device, draws), counts.to(device)).tolist() == expected.tolist()


@gpu
def test_a_row_does_not_depend_on_its_neighbours(device: torch.device) -> None:
    rng = random.Random(4)
    scores, draws = random_scores(rng, 8, 50_257), on(device, random_draws(rng, 8))
    scores, counts = scores.to(device), torch.randint(0, 3, (3, 50_257), dtype=torch.int32, device=device)
    masks = torch.randint(-(1 << 31), 1 << 31, (5, 1571), dtype=torch.int32, device=device)
    together = draw(scores, draws, counts, masks)
    for row in range(8):
        own = Draws(**{field.name: getattr(draws, field.name)[row : row + 1] for field in fields(draws)})
        assert draw(scores[row : row + 1], own, counts, masks).tolist() == [int(together[row])]


def test_a_row_that_names_a_mask_is_allowed_nothing_without_masks(device: torch.device) -> None:
    params = [SamplingParams(temperature=0.0)] * 3
    draws = on(device, Draws.of(params, [0, 1, 2], [1, 1, -1], [-1] * 3, mask_row=[-1, 0, 0]))
    counts = torch.zeros(0, 4, dtype=torch.int32, device=device)
    assert draw(torch.zeros(3, 4, device=device), draws, counts).tolist() == [0, -3, -2]


def test_tokens_go_where_they_are_wanted(device: torch.device) -> None:
    draws = on(device, Draws.of([SamplingParams(temperature=0.0)] * 2, [0, 1], [1, -1], [-1] * 2))
    counts, tokens = torch.zeros(0, 4, dtype=torch.int32, device=device), torch.full((5,), 9).int().to(device)
    out = tokens[1:3]
    assert draw(torch.eye(4, device=device)[2:], draws, counts, None, out) is out
    assert tokens.tolist() == [9, 2, -2, 9, 9]
    for wrong in (tokens, out.long(), tokens[::3]):
        with pytest.raises(OptionError, match="tokens of 2 draws"):
            draw(torch.zeros(2, 4, device=device), draws, counts, None, wrong)


def test_counting_and_clearing(device: torch.device) -> None:
    counts = torch.randint(0, 5, (4, 33), dtype=torch.int32, device=device)
    expected = counts.clone()
    tokens = torch.tensor([32, 0, 7, 7, -1, 3, -2], dtype=torch.int32, device=device)
    rows = torch.tensor([3, 0, 1, 1, 2, -1, -1], dtype=torch.int32, device=device)
    count_tokens(tokens, rows, counts)
    for token, row in ((32, 3), (0, 0), (7, 1), (7, 1)):
        expected[row, token] += 1
    assert torch.equal(counts, expected)
    clear_counts(torch.tensor([3, -1, 1], dtype=torch.int32, device=device), counts)
    expected[[1, 3]] = 0
    assert torch.equal(counts, expected)


def told(device: torch.device, scores: torch.Tensor, tokens: list[int], wanted: list[int]):
    rows = len(tokens)
    logprob = torch.full((rows,), float(LEFT), device=device)
    values = torch.full((rows, CANDIDATES), float(LEFT), device=device)
    ids = torch.full((rows, CANDIDATES), LEFT, dtype=torch.int32, device=device)
    drawn, many = (torch.tensor(numbers, dtype=torch.int32, device=device) for numbers in (tokens, wanted))
    token_logprobs(scores.to(device), drawn, many, logprob, ids, values)
    return logprob.cpu(), ids.cpu(), values.cpu()


def check_told(device: torch.device, scores: torch.Tensor, tokens: list[int], wanted: list[int]) -> None:
    size = scores.shape[1]
    logprob, ids, values = told(device, scores, tokens, wanted)
    for b, many in enumerate(wanted):
        if many < 0 or tokens[b] < 0:
            assert logprob[b] == LEFT
            many = 0
        else:
            expected = log_softmax(scores[b])
            assert near(float(logprob[b]), float(expected[tokens[b]]))
            # A stable sort of the negated scores has lower ids first.
            order = torch.sort(-scores[b], stable=True).indices[: min(many, size)].tolist()
            many = len(order)
            assert ids[b, :many].tolist() == order
            assert all(near(float(values[b, i]), float(expected[token])) for i, token in enumerate(order))
        assert (ids[b, many:] == LEFT).all()
        assert (values[b, many:] == LEFT).all()


def test_a_few_log_probabilities(device: torch.device) -> None:
    check_told(device, torch.randn(4, 700), [3, 699, -1, 4], [20, 0, 3, -1])


@gpu
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("scale", [0.1, 3.0, 40.0])
def test_log_probabilities(size: int, scale: float, device: torch.device) -> None:
    rng = random.Random(size)
    scores = torch.randn(6, size) * scale
    scores[1] = scores[1].round()  # full of ties
    tokens = [rng.randrange(size) for _ in range(5)] + [-1]
    check_told(device, scores, tokens, [20, rng.randrange(21), 0, 1, -1, 4])


def test_log_probabilities_of_scores_that_are_no_numbers(device: torch.device) -> None:
    nan, inf = math.nan, math.inf
    for row in (
        [0.0, nan, -inf, 1.0, -300.0],
        [nan] * 5,
        [-inf] * 5,
        [0.0, inf, inf, 1.0, nan],
        [nan, -inf, 7.0],
    ):
        scores = torch.tensor([row])
        got = told(device, scores, [len(row) - 1], [5])
        expected = (torch.zeros(1), torch.full((1, 20), LEFT).int(), torch.full((1, 20), float(LEFT)))
        numbers = torch.tensor([len(row) - 1], dtype=torch.int32), torch.tensor([5], dtype=torch.int32)
        cpu.token_logprobs(scores, *numbers, *expected)
        for mine, other in zip(got, expected, strict=True):
            assert torch.allclose(mine.double(), other.double(), rtol=1e-6, atol=1e-6, equal_nan=True), row


def test_tensors_that_do_not_fit_are_refused(device: torch.device) -> None:
    draws = on(device, Draws.of([SamplingParams()] * 2, [0, 1], [0, 0], [-1, -1]))
    counts = torch.zeros(1, 4, dtype=torch.int32, device=device)
    with pytest.raises(OptionError, match="temperature of 3 draws must be contiguous"):
        draw(torch.zeros(3, 4, device=device), draws, counts)
    with pytest.raises(OptionError, match=r"contiguous int32 \[rows, 5\]"):
        draw(torch.zeros(2, 5, device=device), draws, counts)
    with pytest.raises(OptionError, match="int32 of one length"):
        count_tokens(draws.position, draws.purpose.long(), counts)
    with pytest.raises(OptionError, match="count rows must be int32"):
        clear_counts(draws.seed, counts)
    scores, logprob, values = (torch.zeros(2, n, device=device) for n in (4, 1, 20))
    narrow = torch.zeros(2, 5, dtype=torch.int32, device=device)
    with pytest.raises(OptionError, match=r"top_ids of 2 rows .* \[2, 20\]"):
        token_logprobs(scores, draws.position, draws.purpose, logprob[:, 0].contiguous(), narrow, values)


@gpu
def test_a_recorded_draw_follows_its_tensors(device: torch.device) -> None:
    """One graph for any mix of rows."""
    rng, rows, size = random.Random(9), 4, 8192
    scores, draws = random_scores(rng, rows, size).to(device), on(device, random_draws(rng, rows))
    counts = torch.zeros(3, size, dtype=torch.int32, device=device)
    masks = torch.zeros(5, 256, dtype=torch.int32, device=device)
    draw(scores, draws, counts, masks)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = draw(scores, draws, counts, masks)
        count_tokens(out, draws.count_rows, counts)
    for _ in range(30):
        fresh, new = random_draws(rng, rows), random_scores(rng, rows, size)
        scores.copy_(new)
        masks.copy_(some_masks(rng, size))
        for field in fields(draws):
            getattr(draws, field.name).copy_(getattr(fresh, field.name))
        before = counts.cpu()
        graph.replay()
        expected = cpu.draw(new, fresh, before, masks.cpu())
        assert out.tolist() == expected.tolist()
        cpu.count_tokens(expected, fresh.count_rows, before)
        assert torch.equal(counts.cpu(), before)
