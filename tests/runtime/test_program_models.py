"""Units of work on tiny models: which of them give the same bits."""

import numpy as np
import pytest

from ninfer.ops import SamplingParams
from tests.models.loaded import GEOMETRIES, loaded

from .hand import Hand, Lane, assert_same

MODELS = pytest.mark.parametrize("name", GEOMETRIES)
TOKENS = np.random.default_rng(3).integers(190, size=600).tolist()


def lane_of(row: int, pages: int = 3, **changes) -> Lane:
    return Lane(range(row * pages, (row + 1) * pages), (2 * row, 2 * row + 1), count_row=row, **changes)


def sampling(row: int) -> SamplingParams:
    if row % 3 == 0:
        return SamplingParams(temperature=0.0)
    return SamplingParams(0.8, top_k=9 * (row % 2), frequency_penalty=0.4 * (row % 4), seed=row)


@MODELS
@pytest.mark.parametrize("rows", [2, 8])
def test_rows_do_not_see_each_other(name: str, rows: int) -> None:
    """Tokens, KV and states of a row in company are those of the row alone, on other pages and slots."""
    hand, alone = (Hand(loaded(name), rows=8, context=192) for _ in range(2))
    lanes = [lane_of(row, sampling=sampling(row)) for row in range(rows)]
    prompts = [TOKENS[row * 50 : row * 50 + 40 + 17 * row] for row in range(rows)]
    answers = [[hand.feed(lane, prompt)] for lane, prompt in zip(lanes, prompts, strict=True)]
    order = list(range(rows))
    for _ in range(12):
        order.append(order.pop(0))
        drawn = hand.round([lanes[row] for row in order], [answers[row][-1:] for row in order])
        for row, tokens in zip(order, drawn, strict=True):
            lanes[row].advance(1)
            answers[row] += tokens
    assert len({tuple(answer) for answer in answers}) == rows
    for row in range(rows):
        single = Lane((20, 3, 11), (9, 4), sampling=sampling(row), count_row=5)
        assert alone.answer(single, prompts[row], 13) == answers[row]
        assert_same(hand.committed(lanes[row]), alone.committed(single), row)


@MODELS
@pytest.mark.parametrize("begin", [57, 62, 64])
def test_a_fold_gives_the_bits_of_rounds_of_one_column(name: str, begin: int) -> None:
    """One to four columns of a round are kept, across a page boundary, and more rounds follow."""
    plain, wide = (Hand(loaded(name), rows=4, width=width, context=192) for width in (1, 4))
    lanes = [lane_of(row) for row in range(4)]
    for lane in lanes:
        wide.feed(lane, TOKENS[:begin], draw=False)
    fed = TOKENS[100:104]
    out = wide.run(wide.round_record(lanes, [fed] * 4))["tokens"][0].reshape(4, 4)
    wide.fold(lanes, [1, 2, 3, 4])
    single = Lane((7, 1, 4))
    plain.feed(single, TOKENS[:begin], draw=False)
    for kept, lane in enumerate(lanes, 1):
        lane.advance(kept)
        [drawn] = plain.round([single], [[fed[kept - 1]]])
        single.advance(1)
        assert (out[:, kept - 1] == drawn).all()
        assert_same(wide.committed(lane), plain.committed(single), kept)
    assert wide.decode(lanes[3], 5, 5) == plain.decode(single, 5, 5)
    assert_same(wide.committed(lanes[3]), plain.committed(single))


@MODELS
def test_rows_that_a_fold_leaves_out_keep_their_state(name: str) -> None:
    hand = Hand(loaded(name), rows=2, width=3, context=192)
    lanes = [lane_of(row) for row in range(2)]
    for lane in lanes:
        hand.feed(lane, TOKENS[:70], draw=False)
    before = hand.committed(lanes[1])
    hand.round(lanes, [[1, 2, 3], [4]])
    hand.fold(lanes, [2, 0])
    assert_same(before, hand.committed(lanes[1]))


@MODELS
def test_a_forced_span_is_a_chunk(name: str) -> None:
    """Control gives each row the bits of a prefill of its span."""
    hand = Hand(loaded(name), rows=3, context=192)
    lanes = [lane_of(row) for row in range(3)]
    for row, lane in enumerate(lanes):
        hand.feed(lane, TOKENS[row : row + 60], draw=False)
    spans = [TOKENS[100:112], TOKENS[200:212]]
    hand.control([lanes[2], lanes[0]], spans)
    for row, span in ((2, spans[0]), (0, spans[1])):
        lanes[row].advance(12)
        other = Lane((11, 9, 10), (8, 9))
        hand.feed(other, TOKENS[row : row + 60], draw=False)
        hand.prefill(other, span)
        other.advance(12)
        assert_same(hand.committed(lanes[row]), hand.committed(other))


@MODELS
def test_a_dropped_unit_changes_nothing_that_counts(name: str) -> None:
    """Chunks, rounds and spans that nobody commits, and then the ones that count: bits of a clean run."""
    clean, hand = (Hand(loaded(name), width=3, context=256, chunk=128) for _ in range(2))
    lane, other = Lane((3, 1, 0, 2), (2, 5)), Lane((0, 1, 2, 3), (0, 1))
    for begin in (0, 128):
        hand.prefill(lane, TOKENS[300:360], draw=True)
        chunk = TOKENS[begin : min(begin + 128, 180)]
        dropped = hand.prefill(lane, chunk, draw=True)
        token = hand.prefill(lane, chunk, draw=True)
        assert token == dropped == clean.prefill(other, chunk, draw=True)
        lane.advance(len(chunk))
        other.advance(len(chunk))
        assert_same(hand.committed(lane), clean.committed(other))
    for _ in range(3):
        hand.round([lane], [[token, 8, 9]])
        hand.control([lane], [[5] * 10])
        hand.round([lane], [[6]])
        dropped = hand.round([lane], [[token]])
        assert hand.round([lane], [[token]]) == dropped == clean.round([other], [[token]])
        [[token]] = dropped
        lane.advance(1)
        other.advance(1)
        assert_same(hand.committed(lane), clean.committed(other))


@MODELS
def test_a_copied_page_has_the_tokens_before_the_copy(name: str) -> None:
    hand = Hand(loaded(name), rows=2, context=256)
    first = Lane((6, 2, 4), (0, 1))
    hand.feed(first, TOKENS[:100], draw=False)
    branch = Lane((6, 5, 3), (2, 3), frontier=100, source=first.source)
    token = hand.prefill(branch, TOKENS[200:230], draw=True, copy=(2, 5))
    branch.advance(30)
    hand.decode(first, 1, 8)
    rest = hand.decode(branch, token, 20)
    cold = Lane((0, 1, 7), (4, 5))
    hand.feed(cold, TOKENS[:100], draw=False)
    assert hand.prefill(cold, TOKENS[200:230], draw=True) == token
    cold.advance(30)
    assert hand.decode(cold, token, 20) == rest
    assert_same(hand.committed(branch), hand.committed(cold))


@MODELS
def test_warm_up_leaves_no_trace(name: str) -> None:
    warm, cold = (Hand(loaded(name), rows=2, width=2, context=192) for _ in range(2))
    warm.program.warm_up()
    assert not warm.program._counts.any()
    for hand in (warm, cold):
        lanes = [lane_of(row, sampling=SamplingParams(0.9, presence_penalty=0.5, seed=4)) for row in range(2)]
        answers = [hand.answer(lane, TOKENS[40 * row : 100 + row], 10) for row, lane in enumerate(lanes)]
        if hand is warm:
            wanted = answers, [hand.committed(lane) for lane in lanes]
    assert answers == wanted[0]
    for lane, tensors in zip(lanes, wanted[1], strict=True):
        assert_same(cold.committed(lane), tensors)
