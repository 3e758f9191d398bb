"""The Program through its records, written by hand."""

import numpy as np
import pytest
import torch

from ninfer.ops import Purpose, SamplingParams, sample
from ninfer.runtime.records import Unit, egress, ingress

from .hand import NOTHING, Hand, Lane
from .toy import PUBLIC, ToyModel, expected_answer, expected_token

PROMPT = [(7 * i * i + 3) % PUBLIC for i in range(300)]
SCATTERED = (5, 0, 7, 2, 6, 1, 3, 4)
RECURRENT = pytest.mark.parametrize("recurrent", [True, False])


def lane_of(row: int, pages: int = 2, **changes) -> Lane:
    """Lanes that share nothing."""
    return Lane(range(row * pages, (row + 1) * pages), (2 * row, 2 * row + 1), count_row=row, **changes)


@RECURRENT
@pytest.mark.parametrize("length", [1, 63, 64, 65, 128, 129, 300])
def test_prefill_in_chunks_then_rounds(recurrent: bool, length: int) -> None:
    model = ToyModel(recurrent)
    hand, lane = Hand(model), Lane(SCATTERED, (3, 1))
    assert hand.answer(lane, PROMPT[:length], 70) == expected_answer(PROMPT[:length], 70, recurrent)
    assert lane.frontier == length + 69
    assert model.widths == [min(128, length - begin) for begin in range(0, length, 128)] + [1] * 69


def test_a_prefill_that_draws_nothing_produces_nothing() -> None:
    hand, lane = Hand(ToyModel()), Lane(SCATTERED)
    assert hand.prefill(lane, PROMPT[:100], draw=True) == expected_token(PROMPT[:100])
    assert hand.prefill(lane, PROMPT[:100]) == NOTHING


def test_the_last_position_of_the_context_can_be_fed() -> None:
    hand = Hand(ToyModel(), context=130)
    lane = Lane((2, 0, 1))
    assert hand.answer(lane, PROMPT[:100], 31) == expected_answer(PROMPT[:100], 31)
    assert lane.frontier == 130
    full = Lane((2, 0, 1))
    assert hand.feed(full, PROMPT[:130]) == expected_token(PROMPT[:130])


@RECURRENT
@pytest.mark.parametrize("rows", [1, 2, 5, 8])
def test_rows_of_a_round_are_sequences_of_their_own(rows: int, recurrent: bool) -> None:
    hand = Hand(ToyModel(recurrent), rows=8, context=128)
    lanes = [lane_of(row) for row in range(8)]
    prompts = [PROMPT[row : 2 * row + 50] for row in range(8)]
    tokens = [hand.feed(lane, prompt) for lane, prompt in zip(lanes, prompts, strict=True)]
    answers = [[token] for token in tokens]
    order = [3, 7, 0, 1, 6, 2, 5, 4][:rows]
    for _ in range(20):
        drawn = hand.round([lanes[row] for row in order], [answers[row][-1:] for row in order])
        for row, [token] in zip(order, drawn, strict=True):
            lanes[row].advance(1)
            answers[row].append(token)
        order.append(order.pop(0))
    for row in range(8):
        count = 21 if row in order else 1
        assert answers[row] == expected_answer(prompts[row], count, recurrent)


@RECURRENT
@pytest.mark.parametrize("span", [1, 20, 64])
def test_control_feeds_without_drawing(span: int, recurrent: bool) -> None:
    hand = Hand(ToyModel(recurrent), rows=3, context=192)
    lanes = [lane_of(row, 3) for row in range(3)]
    ledgers = []
    for row, lane in enumerate(lanes):
        ledgers.append(PROMPT[row : row + 60])
        hand.feed(lane, ledgers[row], draw=False)
    chosen = [2, 0]
    forced = [PROMPT[100 * i : 100 * i + span] for i in (1, 2)]
    hand.control([lanes[row] for row in chosen], forced)
    for row, tokens in zip(chosen, forced, strict=True):
        lanes[row].advance(span)
        ledgers[row] = ledgers[row] + tokens
    drawn = hand.round(lanes, [[9]] * 3)
    assert drawn == [[expected_token([*ledger, 9], recurrent)] for ledger in ledgers]


@RECURRENT
@pytest.mark.parametrize("kept", [1, 2, 3, 4])
def test_fold_commits_a_prefix_of_a_round(kept: int, recurrent: bool) -> None:
    hand, lane = Hand(ToyModel(recurrent), width=4), Lane(SCATTERED, (4, 2))
    first = hand.feed(lane, PROMPT[:62])  # the drafts cross a page boundary
    wanted = expected_answer(PROMPT[:62], 8, recurrent)
    assert first == wanted[0]
    assert hand.round([lane], [wanted[:4]]) == [wanted[1:5]]
    hand.fold([lane], [kept])
    lane.advance(kept)
    # A stop inside the round: what follows is another text than the drafts.
    rest = [3, 1, 4]
    ledger = PROMPT[:62] + wanted[:kept]
    assert hand.prefill(lane, rest, draw=True) == expected_token(ledger + rest, recurrent)


@RECURRENT
def test_drafts_stand_up_to_the_first_wrong_one(recurrent: bool) -> None:
    hand = Hand(ToyModel(recurrent), rows=5, width=4, context=128)
    lanes = [lane_of(row) for row in range(5)]
    answers = []
    for row, lane in enumerate(lanes):
        prompt = PROMPT[row : row + 61]
        answers.append(expected_answer(prompt, 6, recurrent))
        assert hand.feed(lane, prompt) == answers[row][0]
    fed = [list(answer[:4]) for answer in answers]
    fed[1][1] += 1  # wrong from the first draft on, though later ones are right
    fed[2][3] += 1
    fed[3] = fed[3][:2]  # fewer drafts than columns
    fed[4] = fed[4][:1]
    stand = [4, 1, 3, 2, 1]
    drawn = hand.round(lanes, fed)
    assert drawn == [answer[1 : 1 + count] for answer, count in zip(answers, stand, strict=True)]
    # Row 4 is not committed at all; the next round then gives it the same.
    hand.fold(lanes, [*stand[:4], 0])
    for lane, count in zip(lanes[:4], stand, strict=False):
        lane.advance(count)
    again = hand.round(
        lanes, [[answer[count]] for answer, count in zip(answers, [*stand[:4], 0], strict=True)]
    )
    assert again == [[answer[1 + count]] for answer, count in zip(answers, [*stand[:4], 0], strict=True)]


def test_a_masked_draft_never_stands() -> None:
    """Token 0 stands in a masked column; the draw before it being 0 doesn't make it a draft."""
    hand, lane = Hand(ToyModel(), rows=2, width=2, context=128), lane_of(0)
    prompt = next(PROMPT[:n] for n in range(1, 200) if expected_token([*PROMPT[:n], 5]) == 0)
    other = lane_of(1)
    hand.feed(lane, prompt, draw=False)
    hand.feed(other, PROMPT[:9], draw=False)
    assert hand.round([lane, other], [[5], [5, 96]])[0] == [0]


@RECURRENT
def test_a_page_is_copied_before_the_first_unit(recurrent: bool) -> None:
    """Two sequences part in the middle of a page; each goes on undisturbed."""
    hand = Hand(ToyModel(recurrent), rows=2, context=256)
    first = Lane((6, 2, 4), (0, 1))
    hand.feed(first, PROMPT[:100], draw=False)
    other = Lane((6, 5, 3), (2, 3), frontier=100, source=first.source)
    tail = [9, 9, 9]
    token = hand.prefill(other, tail, draw=True, copy=(2, 5))
    assert token == expected_token(PROMPT[:100] + tail, recurrent)
    other.advance(3)
    assert hand.decode(first, 1, 5) == expected_answer([*PROMPT[:100], 1], 5, recurrent)
    expected = expected_answer([*PROMPT[:100], *tail, 8], 5, recurrent)
    assert hand.decode(other, 8, 5) == expected


@RECURRENT
def test_a_dropped_unit_changes_nothing_that_counts(recurrent: bool) -> None:
    hand = Hand(ToyModel(recurrent), width=3)
    lane = Lane(SCATTERED, (2, 3))
    expected = expected_answer(PROMPT[:150], 12, recurrent)
    for _ in range(2):
        assert hand.prefill(lane, PROMPT[:100]) == NOTHING
    lane.advance(100)
    for tokens in ([1, 2, 3], PROMPT[100:150], PROMPT[100:150]):
        token = hand.prefill(lane, tokens, draw=True)
    assert token == expected[0]
    lane.advance(50)
    for drafts in ([5], [5, 6], [expected[1]], [expected[1], 90], [expected[1]]):
        assert hand.round([lane], [[expected[0], *drafts]])[0][0] == expected[1]
    hand.control([lane], [[7, 7, 7]])
    assert hand.round([lane], [[expected[0]]]) == [[expected[1]]]
    lane.advance(1)
    assert hand.decode(lane, expected[1], 10) == expected[2:]


@RECURRENT
def test_an_interrupted_unit_changes_nothing_that_counts(recurrent: bool) -> None:
    model = ToyModel(recurrent)
    hand, lane = Hand(model), Lane(SCATTERED)
    hand.prefill(lane, PROMPT[:128])
    lane.advance(128)
    model.fail_at = 200
    with pytest.raises(KeyboardInterrupt):
        hand.prefill(lane, PROMPT[128:256])
    model.fail_at = None
    expected = expected_answer(PROMPT[:256], 4, recurrent)
    assert hand.prefill(lane, PROMPT[128:256], draw=True) == expected[0]
    lane.advance(128)
    model.fail_at = 256
    with pytest.raises(KeyboardInterrupt):
        hand.round([lane], [expected[:1]])
    model.fail_at = None
    assert hand.decode(lane, expected[0], 3) == expected[1:]


def test_warm_up_leaves_no_trace() -> None:
    hand, lane = Hand(ToyModel(), rows=4, width=3, context=128), lane_of(0)
    hand.program.warm_up()
    wanted = {(rows, columns) for rows in range(1, 5) for columns in (1, 3)}
    assert set(hand.program._rounds) == wanted
    assert not hand.program._counts.any()
    assert all(not plane.any() for pages in hand.program._cache.kv for plane in (pages.k, pages.v))
    lane.sampling = SamplingParams(temperature=0.0, frequency_penalty=9.0)
    first = hand.feed(lane, PROMPT[:60])
    assert first == expected_token(PROMPT[:60])
    lane.sampling = SamplingParams(temperature=0.0)
    assert hand.decode(lane, first, 9) == expected_answer(PROMPT[:60], 10)[1:]


# Draws


def scores(tokens: list[int]) -> torch.Tensor:
    """The toy's scores after these tokens."""
    row = torch.zeros(1, PUBLIC)
    row[0, expected_token(tokens)] = 5.0
    return row


def test_draws_are_keyed_by_position_and_purpose() -> None:
    hand = Hand(ToyModel(), rows=2, width=3, context=256)
    hot = [
        SamplingParams(3.0, seed=(1 << 64) - 5),
        SamplingParams(2.0, top_k=7, top_p=0.9, min_p=0.1, seed=4),
    ]
    lanes = [lane_of(row, 4, sampling=sampling) for row, sampling in enumerate(hot)]
    seen = set()
    for purpose in Purpose:
        for row in range(2):
            got = hand.prefill(lanes[row], PROMPT[:90], draw=True, purpose=purpose)
            assert [got] == sample(scores(PROMPT[:90]), [hot[row]], [90], purpose)
            seen.add(got)
    assert len(seen) > 3
    for lane in lanes:
        hand.feed(lane, PROMPT[:90], draw=False)
    fed = [[3, 1, 4], [1, 5]]
    out = hand.run(hand.round_record(lanes, fed, Purpose.DECODE))["tokens"][0].reshape(2, 3)
    for row, tokens in enumerate(fed):
        for column in range(len(tokens)):
            before = PROMPT[:90] + tokens[: column + 1]
            wanted = sample(scores(before), [hot[row]], [90 + column], Purpose.DECODE)
            assert [out[row, column]] == wanted
    assert out[1, 2] == -2


def test_penalties_go_by_the_tokens_that_were_fed() -> None:
    """The toy's favourite is 5.0 ahead: one generation of it is forgiven, the second isn't."""
    hand = Hand(ToyModel(), rows=3, context=128)
    penalized = SamplingParams(temperature=0.0, frequency_penalty=3.0)
    lanes = [lane_of(row, sampling=penalized) for row in range(2)]
    lanes.append(lane_of(2))
    lanes[2].count_row = -1
    counts = hand.program._counts
    for lane in lanes:
        assert hand.feed(lane, PROMPT[:10]) == expected_token(PROMPT[:10])
    assert not counts.any()  # prompts don't count, nor what is drawn but not fed
    hand.round(lanes, [[11], [12], [13]])
    assert counts.nonzero().tolist() == [[0, 11], [1, 12]]
    for lane in lanes:
        lane.advance(1)
    hand.control(lanes, [[7, 7]] * 3)
    for lane in lanes:
        lane.advance(2)
    assert counts[0, 7] == counts[1, 7] == 2
    assert not counts[2].any()
    # What has been generated twice is no longer the favourite: the lowest other id wins.
    ledger = [*PROMPT[:10], 11, 7, 7]
    favourite = expected_token([*ledger, 50])
    counts[0, favourite] = 2
    other = 0 if favourite else 1
    assert hand.round(lanes[:1], [[50]]) == [[other]]
    assert hand.round(lanes[1:2], [[50]])[0] == [expected_token([*PROMPT[:10], 12, 7, 7, 50])]
    # Another request in the same row starts from nothing, and doesn't touch the other rows.
    before = counts[1].clone()
    fresh = lane_of(0, sampling=penalized)
    assert hand.feed(fresh, PROMPT[:20]) == expected_token(PROMPT[:20])
    assert not counts[0].any()
    assert torch.equal(counts[1], before)


def test_scores_that_are_not_finite_give_minus_one() -> None:
    model = ToyModel()
    hand = Hand(model, rows=2, width=2, context=128)
    lanes = [lane_of(row) for row in range(2)]
    for lane in lanes:
        hand.feed(lane, PROMPT[:5], draw=False)
    wanted = expected_token([*PROMPT[:5], 1])

    def damaged(hidden: torch.Tensor) -> torch.Tensor:
        scores = hidden.float().clone()
        scores[2:] = float("nan")
        return scores

    model.logits = damaged  # type: ignore[method-assign]
    assert hand.round(lanes, [[1, 2], [1, 2]]) in ([[wanted], [-1]], [[wanted, 0], [-1]])
    model.logits = lambda hidden: torch.full((len(hidden), PUBLIC), float("inf"))  # type: ignore[method-assign]
    assert hand.prefill(Lane(range(2)), [1], draw=True) == -1


# Records


@pytest.mark.parametrize("rows", [1, 8])
def test_records_are_plain_bytes(rows: int) -> None:
    shape = Hand(ToyModel(), rows=rows, width=3, context=128).shape
    record, out = ingress(shape), egress(shape)
    copy = np.frombuffer(record.tobytes(), record.dtype)
    assert copy.tobytes() == record.tobytes()
    assert record.nbytes == record.dtype.itemsize
    assert not record.dtype.hasobject
    assert not out.dtype.hasobject
    assert record["tokens"].shape == (1, max(128, rows * 64))
    assert record["temperature"].shape == out["tokens"].shape == (1, rows * 3)


def test_a_unit_of_another_number_is_refused() -> None:
    hand = Hand(ToyModel())
    record = hand.empty(Unit.PREFILL, 1, 1)
    record["unit"] = 9
    with pytest.raises(ValueError, match="9"):
        hand.run(record)


# Masks and log-probabilities


def mask_of(tokens: set[int], words: int) -> np.ndarray:
    mask = np.zeros(words, np.uint32)
    for token in tokens:
        mask[token // 32] |= np.uint32(1 << token % 32)
    return mask.view(np.int32)


def test_masked_draws_of_a_prefill_and_of_rounds() -> None:
    hand, lanes = Hand(ToyModel(), rows=2, width=3, context=128), [lane_of(0), lane_of(1)]
    words = hand.shape.words
    assert words == 4
    record = hand.empty(Unit.PREFILL, 1, 20)
    hand._columns(record, 0, lanes[0], PROMPT[:20])
    hand._row(record, 0, lanes[0])
    hand._draw(record, 0, lanes[0], 20, Purpose.PREFILL)
    record["copy_source"], record["copy_target"] = -1, -1
    best = expected_token(PROMPT[:20])
    for allowed, wanted in (({best, 0}, best), ({96, 95}, 95), (set(), -3), ({97, 127}, -3)):
        record["mask_row"][0, 0], record["masks"][0, 4] = 4, mask_of(allowed, words)
        assert hand.run(record)["tokens"][0, 0] == wanted
    record["mask_row"][0, 0] = -1
    assert hand.run(record)["tokens"][0, 0] == best
    lanes[0].advance(20)
    hand.feed(lanes[1], PROMPT[5:40], draw=False)
    fed = [[best], [1]]
    record = hand.round_record(lanes, fed)
    expected = [expected_token([*PROMPT[:20], best]), expected_token([*PROMPT[5:40], 1])]
    record["mask_row"][0, 1], record["masks"][0, 3] = 3, mask_of({90}, words)
    record["logprobs"][0, :2] = 2, 1
    out = hand.run(record)
    assert out["tokens"][0, :2].tolist() == [expected[0], 90]
    # Of the raw scores, of which the toy gives 5 to its token and 0 to all others.
    mass = np.log(np.exp(5.0) + PUBLIC - 1)
    assert out["logprob"][0, :2] == pytest.approx([5 - mass, (5 if expected[1] == 90 else 0) - mass])
    assert [out["top_ids"][0, row, 0] for row in range(2)] == expected
    assert out["top_ids"][0, 0, 1] == (0 if expected[0] else 1)
    assert out["top_logprobs"][0, 0, :2] == pytest.approx([5 - mass, -mass])


def test_masks_are_copied_only_where_a_draw_names_them() -> None:
    hand, lane = Hand(ToyModel(), rows=2, width=3, context=128), lane_of(0)
    first = hand.feed(lane, PROMPT[:20])
    own = hand.program.ingress["masks"][0]
    own[:] = 5
    record = hand.round_record([lane], [[first]])
    assert (record["masks"] == -77).all()
    hand.run(record)
    assert (own == 5).all()
    record["mask_row"][0, 0] = 2
    hand.run(record)
    assert (own[:3] == -77).all()
    assert (own[3:] == 5).all()
    # Whoever shares the Program's record has written them in place.
    hand.program.ingress["mask_row"][0, 0] = 4
    own[4] = mask_of({13}, hand.shape.words)
    assert hand.program.run(hand.program.ingress)["tokens"][0, 0] == 13
