"""Sampling against a scalar reading of the rules."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import numpy as np
import pytest
import torch

from ninfer.errors import OptionError
from ninfer.ops import (
    Draws,
    Purpose,
    SamplingParams,
    clear_counts,
    count_tokens,
    mask_words,
    sample,
    uniform,
)
from ninfer.ops import draw as draw_rows

MASK = (1 << 64) - 1


def mix(x: int) -> int:
    x = (x + 0x9E3779B97F4A7C15) & MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


def draw(seed: int, position: int, purpose: int) -> float:
    key = mix(seed ^ ((position % 2**32) * 0xD1B54A32D192ED03 & MASK))
    return (mix(key ^ (purpose << 21)) >> 40) / 2**24


def choose(
    scores: list[float],
    p: SamplingParams,
    position: int,
    purpose: int,
    counts: list[int],
    allowed: set[int] | None = None,
) -> int:
    if allowed is not None and not allowed & set(range(len(scores))):
        return -3
    adjusted = []
    for x, c in zip(scores, counts, strict=True):
        penalty = np.float32(p.presence_penalty) * np.float32(c > 0)
        penalty = penalty + np.float32(p.frequency_penalty) * np.float32(c)
        adjusted.append(float(np.float32(x) - penalty))
    takes_part = [i for i in range(len(adjusted)) if allowed is None or i in allowed]
    order = sorted((i for i in takes_part if adjusted[i] == adjusted[i]), key=lambda i: (-adjusted[i], i))
    if not order or not math.isfinite(adjusted[order[0]]):
        return -1
    if p.temperature <= 0:
        return order[0]
    order = order[: p.top_k if 1 <= p.top_k <= 19 else 20]
    weights = [math.exp((adjusted[i] - adjusted[order[0]]) / p.temperature) for i in order]
    kept: list[tuple[int, float]] = []
    for token, weight in zip(order, weights, strict=True):
        if kept and p.min_p > 0 and weight < p.min_p * weights[0]:
            break
        kept.append((token, weight))
        if p.top_p < 1 and sum(w for _, w in kept) >= p.top_p * sum(weights):
            break
    goal = draw(p.seed, position, purpose) * sum(w for _, w in kept)
    reached = 0.0
    for token, weight in kept:
        reached += weight
        if reached > goal:
            return token
    return kept[-1][0]


def test_the_draw_is_the_specified_one() -> None:
    assert mix(0) == 0xE220A8397B1DCDAF  # the first number of SplitMix64
    rng = random.Random(1)
    for _ in range(200):
        seed, position, purpose = rng.getrandbits(64), rng.getrandbits(34), rng.randrange(6)
        assert uniform(seed, position, purpose) == draw(seed, position, purpose)
    assert uniform(0, 5, Purpose.PREFILL) != uniform(0, 5, Purpose.DECODE)
    assert uniform(0, 5, Purpose.DECODE, sub=1) != uniform(0, 5, Purpose.DECODE)


@pytest.mark.parametrize("size", [1, 5, 16, 17, 20, 21, 33, 1000])
@pytest.mark.parametrize("coarse", [False, True])
def test_choices_follow_the_rules(size: int, coarse: bool) -> None:
    rng = random.Random(size)
    for trial in range(60):
        scores = torch.randn(2, size) * 3
        # Coarse scores are full of ties, and both zeros occur.
        scores = (
            (scores.round() * random.Random(trial).choice((1.0, -1.0)))
            if coarse
            else scores.bfloat16().float()
        )
        counts = torch.randint(0, 3, (2, size), dtype=torch.int32)
        params = [random_params(rng) for _ in range(2)]
        positions = [rng.randrange(10_000), rng.randrange(10_000)]
        got = sample(scores, params, positions, Purpose.DECODE, counts)
        for b in range(2):
            expected = choose(scores[b].tolist(), params[b], positions[b], 1, counts[b].tolist())
            assert got[b] == expected


def random_params(rng: random.Random) -> SamplingParams:
    return SamplingParams(
        temperature=rng.choice((0.0, 0.3, 1.0, 2.0)),
        top_k=rng.choice((0, 1, 2, 19, 20, 50)),
        top_p=rng.choice((0.0, 0.3, 0.9, 1.0)),
        min_p=rng.choice((0.0, 0.05, 0.5, 1.0)),
        presence_penalty=rng.choice((0.0, 1.5, -0.7)),
        frequency_penalty=rng.choice((0.0, 0.4)),
        seed=rng.getrandbits(64),
    )


@pytest.mark.parametrize("rows", range(1, 9))
@pytest.mark.parametrize("size", [17, 3000])
def test_rows_draw_for_themselves(rows: int, size: int) -> None:
    """Own options, position, purpose and counts for every row; some draw nothing."""
    rng = random.Random(rows)
    for _ in range(20 if size < 100 else 6):
        scores = (torch.randn(rows, size) * 3).round()
        counts = torch.randint(0, 3, (5, size), dtype=torch.int32)
        before = counts.clone()
        params = [random_params(rng) for _ in range(rows)]
        positions = [rng.randrange(1 << 31) for _ in range(rows)]
        purposes = [rng.choice((-1, 0, 1, 2, 3, 4, 5)) for _ in range(rows)]
        count_rows = [rng.randrange(-1, 5) for _ in range(rows)]
        got = draw_rows(scores, Draws.of(params, positions, purposes, count_rows), counts)
        assert got.dtype == torch.int32
        assert torch.equal(counts, before)
        none = [0] * size
        for b, row in enumerate(count_rows):
            own = counts[row].tolist() if row >= 0 else none
            wanted = choose(scores[b].tolist(), params[b], positions[b], purposes[b], own)
            assert got[b] == (-2 if purposes[b] < 0 else wanted)


def random_masks(rng: random.Random, rows: int, size: int) -> tuple[torch.Tensor, list[set[int]]]:
    """Masks that allow from nothing to everything, with bits behind the last token; and what they allow."""
    masks, allowed = torch.zeros(rows, mask_words(size), dtype=torch.int32), []
    for row in masks:
        share = rng.choice((0.0, 0.02, 0.5, 1.0))
        chosen = {i for i in range(32 * len(row)) if rng.random() < share}
        words = [sum(1 << i % 32 for i in chosen if i // 32 == word) for word in range(len(row))]
        row.copy_(torch.from_numpy(np.array(words, np.uint32).view(np.int32)))
        allowed.append(chosen)
    return masks, allowed


@pytest.mark.parametrize("rows", [1, 3, 8])
@pytest.mark.parametrize("size", [1, 5, 16, 20, 31, 32, 33, 50, 1000])
def test_forbidden_tokens_take_no_part(rows: int, size: int) -> None:
    rng = random.Random(100 * rows + size)
    seen = set()
    for _ in range(160 // rows):
        scores = torch.randn(rows, size) * 3
        scores = scores.round() if rng.random() < 0.5 else scores
        scores[:, rng.randrange(size)] = rng.choice((math.nan, math.inf, -math.inf, 9.0))
        counts = torch.randint(0, 3, (2, size), dtype=torch.int32)
        masks, allowed = random_masks(rng, 5, size)
        params = [random_params(rng) for _ in range(rows)]
        positions = [rng.randrange(1 << 31) for _ in range(rows)]
        purposes = [rng.choice((-1, 0, 1)) for _ in range(rows)]
        count_rows = [rng.randrange(-1, 2) for _ in range(rows)]
        mask_row = [rng.randrange(-1, 5) for _ in range(rows)]
        draws = Draws.of(params, positions, purposes, count_rows, mask_row=mask_row)
        got = draw_rows(scores, draws, counts, masks).tolist()
        for b in range(rows):
            own = counts[count_rows[b]].tolist() if count_rows[b] >= 0 else [0] * size
            mask = allowed[mask_row[b]] if mask_row[b] >= 0 else None
            wanted = choose(scores[b].tolist(), params[b], positions[b], purposes[b], own, mask)
            assert got[b] == (-2 if purposes[b] < 0 else wanted)
            seen.add(min(got[b], 0))
    assert {-3, -2, -1, 0} <= seen


def test_a_masked_row_of_a_large_vocabulary() -> None:
    size, rng = 248_077, random.Random(4)
    scores, masks = torch.randn(2, size), torch.zeros(2, mask_words(size), dtype=torch.int32)
    chosen = sorted(rng.sample(range(size), 30))
    for token in chosen:
        masks[1, token // 32] |= (1 << token % 32) - (1 << 32 if token % 32 == 31 else 0)
    params = [SamplingParams(temperature=0.0), SamplingParams(seed=8)]
    draws = Draws.of(params, [5, 6], [1, 1], [-1, -1], mask_row=[1, 1])
    counts = torch.zeros(0, size, dtype=torch.int32)
    expected = [choose(scores[b].tolist(), params[b], 5 + b, 1, [0] * size, set(chosen)) for b in range(2)]
    assert draw_rows(scores, draws, counts, masks).tolist() == expected


def test_a_row_that_names_a_mask_is_allowed_nothing_without_masks() -> None:
    draws = Draws.of([SamplingParams()] * 2, [0, 1], [1, 1], [-1, -1], mask_row=[-1, 0])
    drawn = draw_rows(torch.zeros(2, 4), draws, torch.zeros(0, 4, dtype=torch.int32)).tolist()
    assert drawn[0] >= 0
    assert drawn[1] == -3


def test_counting_and_clearing() -> None:
    counts = torch.randint(0, 5, (4, 33), dtype=torch.int32)
    expected = counts.clone()
    tokens = torch.tensor([32, 0, 7, 7, -1, 3, -2], dtype=torch.int32)
    rows = torch.tensor([3, 0, 1, 1, 2, -1, -1], dtype=torch.int32)
    count_tokens(tokens, rows, counts)
    for token, row in ((32, 3), (0, 0), (7, 1), (7, 1)):
        expected[row, token] += 1
    assert torch.equal(counts, expected)
    clear_counts(torch.tensor([3, -1, 1], dtype=torch.int32), counts)
    expected[[1, 3]] = 0
    assert torch.equal(counts, expected)


def test_large_vocabulary_and_no_counts() -> None:
    scores = torch.randn(1, 248_077).bfloat16().float()
    for seed in range(2):
        params = SamplingParams(temperature=1.0, seed=seed)
        expected = choose(scores[0].tolist(), params, 7, 0, [0] * 248_077)
        assert sample(scores, [params], [7], Purpose.PREFILL) == [expected]


def test_greedy_takes_the_lowest_id_of_equals() -> None:
    greedy = SamplingParams(temperature=0.0)
    scores = torch.full((1, 50), -1.0)
    scores[0, [11, 30]] = 0.0
    scores[0, 11] = -0.0
    assert sample(scores, [greedy], [0], Purpose.DECODE) == [11]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_scores_that_are_not_finite(temperature: float) -> None:
    params = [SamplingParams(temperature=temperature)]
    nan, inf = math.nan, math.inf
    cases = [([nan] * 40, -1), ([1.0, inf, 0.0], -1), ([-inf] * 3, -1), ([-inf, nan, 2.0, nan], 2)]
    for scores, expected in cases:
        assert sample(torch.tensor([scores]), params, [0], Purpose.DECODE) == [expected]


def test_frequencies_follow_the_weights() -> None:
    scores = torch.tensor([[0.0, 1.0, 2.0, -1.0]])
    weights = torch.softmax(scores[0].double(), 0)
    counts = torch.zeros(4)
    for position in range(4000):
        counts[sample(scores, [SamplingParams(seed=3)], [position], Purpose.DECODE)[0]] += 1
    assert ((counts / 4000 - weights).abs() < 4 * (weights / 4000).sqrt()).all()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": math.nan}, "temperature must be finite"),
        ({"top_p": 1.5}, "top_p must be between 0 and 1, got 1.5"),
        ({"min_p": -0.1}, "min_p must be between 0 and 1"),
        ({"top_k": -1}, "top_k must not be negative"),
        ({"seed": -1}, "unsigned 64-bit"),
        ({"presence_penalty": math.inf}, "presence_penalty must be finite"),
    ],
)
def test_bad_parameters_are_refused(options: dict, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        SamplingParams(**options)


def test_shapes_that_do_not_fit_are_refused() -> None:
    params = [SamplingParams(presence_penalty=1.0)]
    with pytest.raises(OptionError, match="2 rows of scores need"):
        sample(torch.zeros(2, 4), params, [0], Purpose.DECODE)
    with pytest.raises(OptionError, match="contiguous float32"):
        sample(torch.zeros(1, 4).double(), params, [0], Purpose.DECODE)
    with pytest.raises(OptionError, match="counts"):
        sample(torch.zeros(1, 4), params, [0], Purpose.DECODE, torch.zeros(1, 5, dtype=torch.int32))


def test_tensors_that_do_not_fit_are_refused() -> None:
    draws = Draws.of([SamplingParams()] * 2, [0, 1], [0, 0], [-1, -1])
    counts = torch.zeros(1, 4, dtype=torch.int32)
    with pytest.raises(OptionError, match="temperature of 3 draws must be contiguous"):
        draw_rows(torch.zeros(3, 4), draws, counts)
    with pytest.raises(OptionError, match="seed of 2 draws"):
        draw_rows(torch.zeros(2, 4), replace(draws, seed=draws.seed.int()), counts)
    with pytest.raises(OptionError, match=r"contiguous int32 \[rows, 5\]"):
        draw_rows(torch.zeros(2, 5), draws, counts)
    wide = torch.zeros(4, 2, dtype=torch.int32)
    for masks in (wide.float(), wide[:, :1], wide[0], wide[:, 0], wide[::2]):
        with pytest.raises(OptionError, match=r"masks of 33 tokens must be contiguous int32 \[rows, 2\]"):
            draw_rows(torch.zeros(2, 33), draws, torch.zeros(2, 33, dtype=torch.int32), masks)
    with pytest.raises(OptionError, match="int32 of one length"):
        count_tokens(draws.position, draws.purpose.long(), counts)
    with pytest.raises(OptionError, match="count rows must be int32"):
        clear_counts(draws.seed, counts)
