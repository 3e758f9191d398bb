"""The Program on a GPU: rounds as graphs, records that travel."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
import torch

from ninfer import models
from ninfer.artifact import Artifact
from ninfer.errors import CapacityError
from ninfer.formats import KvFormat
from ninfer.models import Model
from ninfer.ops import SamplingParams
from ninfer.runtime import Limits, Program, plan_model
from ninfer.runtime.records import Unit

from ..models.loaded import GEOMETRIES, loaded, write
from .hand import Hand, Lane, assert_same
from .toy import PUBLIC, expected_answer, expected_token
from .toy_cuda import ToyCudaModel

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"),
]
PROMPT = [(7 * i * i + 3) % PUBLIC for i in range(300)]
RECURRENT = pytest.mark.parametrize("recurrent", [True, False])


def lane_of(row: int, pages: int = 4, **changes) -> Lane:
    return Lane(range(row * pages, (row + 1) * pages), (2 * row, 2 * row + 1), count_row=row, **changes)


@RECURRENT
@pytest.mark.parametrize("length", [1, 64, 129, 300])
def test_prefill_in_chunks_then_rounds(recurrent: bool, length: int) -> None:
    model = ToyCudaModel(recurrent)
    hand, lane = Hand(model), Lane((5, 0, 7, 2, 6, 1, 3, 4), (3, 1))
    assert hand.answer(lane, PROMPT[:length], 70) == expected_answer(PROMPT[:length], 70, recurrent)
    chunks = [min(length, begin + 128) for begin in range(0, length, 128)]
    assert model.extents[: len(chunks)] == chunks
    assert set(model.extents[len(chunks) :]) == {None}
    assert len(model.extents) == len(chunks) + 2, "later rounds are replayed"


@RECURRENT
@pytest.mark.parametrize("rows", [1, 2, 4])
def test_rows_of_a_round_are_sequences_of_their_own(rows: int, recurrent: bool) -> None:
    hand = Hand(ToyCudaModel(recurrent), rows=4, context=256)
    hand.program.warm_up()
    lanes = [lane_of(row) for row in range(4)]
    prompts = [PROMPT[row : 2 * row + 50] for row in range(4)]
    answers = [[hand.feed(lane, prompt)] for lane, prompt in zip(lanes, prompts, strict=True)]
    order = [3, 0, 1, 2][:rows]
    for _ in range(20):
        drawn = hand.round([lanes[row] for row in order], [answers[row][-1:] for row in order])
        for row, [token] in zip(order, drawn, strict=True):
            lanes[row].advance(1)
            answers[row].append(token)
        order.append(order.pop(0))
    for row in range(4):
        count = 21 if row in order else 1
        assert answers[row] == expected_answer(prompts[row], count, recurrent)


@RECURRENT
def test_drafts_and_folds(recurrent: bool) -> None:
    hand, lane = Hand(ToyCudaModel(recurrent), width=4, rows=2, context=256), lane_of(0)
    hand.program.warm_up()
    first = hand.feed(lane, PROMPT[:62])
    wanted = expected_answer(PROMPT[:62], 8, recurrent)
    assert first == wanted[0]
    assert hand.round([lane], [wanted[:4]]) == [wanted[1:5]]
    hand.fold([lane], [3])
    lane.advance(3)
    assert hand.round([lane], [[wanted[3], 90, 1, 1]]) == [[wanted[4]]]


def test_control_feeds_without_drawing() -> None:
    hand = Hand(ToyCudaModel(), rows=2, context=256)
    lanes = [lane_of(0), lane_of(1)]
    for lane in lanes:
        hand.feed(lane, PROMPT[:40], draw=False)
    hand.control(lanes, [PROMPT[40:60], PROMPT[60:80]])
    for lane in lanes:
        lane.advance(20)
    drawn = hand.round(lanes, [[9], [8]])
    assert drawn == [
        [expected_token([*PROMPT[:60], 9])],
        [expected_token([*PROMPT[:40], *PROMPT[60:80], 8])],
    ]


def test_graphs_and_single_steps_agree() -> None:
    """Bit for bit, in everything that stays."""
    seen = []
    for graphs in (True, False):
        hand, lane = Hand(ToyCudaModel(), rows=2, context=256, graphs=graphs), lane_of(1)
        lane.sampling = SamplingParams(temperature=0.0, frequency_penalty=3.0)
        hand.program.warm_up()
        seen.append((hand.answer(lane, PROMPT[:90], 30), hand.memory()))
        assert bool(hand.program._rounds) == graphs
    assert seen[0][0] == seen[1][0]
    assert_same(seen[0][1], seen[1][1])


def test_a_round_allocates_nothing() -> None:
    hand = Hand(ToyCudaModel(), rows=2, context=256)
    hand.program.warm_up()
    lanes = [lane_of(0), lane_of(1)]
    for lane in lanes:
        hand.feed(lane, PROMPT[:20])
    record = hand.round_record(lanes, [[1], [2]])
    hand.program.run(record)
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    for _ in range(20):
        assert hand.program.run(record)["seconds"][0] > 0
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before


def test_only_the_masks_that_are_named_travel() -> None:
    hand, lane = Hand(ToyCudaModel(), rows=2, context=256), lane_of(0)
    hand.feed(lane, PROMPT[:20])
    record = hand.round_record([lane], [[1]])
    record["masks"][0, 0], record["masks"][0, 1] = 5, 6
    record["mask_row"][0, 0] = 0
    hand.program.run(record)
    assert hand.program._fields["masks"][:, 0].tolist() == [5, 0]


def test_warm_up_leaves_no_trace() -> None:
    hand = Hand(ToyCudaModel(), rows=4, width=3, context=256)
    hand.program.warm_up()
    wanted = {(rows, columns) for rows in range(1, 5) for columns in (1, 3)}
    assert set(hand.program._rounds) == wanted
    assert all(step.recorded for step in hand.program._rounds.values())
    assert not any(bool(tensor.any()) for tensor in hand.memory())


def test_what_does_not_fit_is_refused() -> None:
    model = ToyCudaModel(max_position_embeddings=1 << 20)
    free, _ = torch.cuda.mem_get_info()
    tokens = 2 * free // plan_model(model, Limits(1024)).kv.page_bytes * 64
    with pytest.raises(CapacityError, match="lower --kv-capacity"):
        plan_model(model, Limits(1024, kv_capacity=tokens))
    plan = plan_model(model, Limits(1024, kv_capacity="auto", headroom=free - (2 << 30)))
    assert 0 < plan.kv_bytes < 2 << 30


def test_other_units_are_refused() -> None:
    hand = Hand(ToyCudaModel())
    record = hand.empty(Unit.ROUND, 1, 1)
    record["unit"] = 9
    with pytest.raises(ValueError, match="not a unit"):
        Program.run(hand.program, record)


# Tiny models


@cache
def on_gpu(name: str) -> Model:
    with TemporaryDirectory() as folder, Artifact.open(write(name, Path(folder))) as artifact:
        return models.load(artifact, "cuda")


def told(hand: Hand, lanes: list[Lane], tokens: list[int]) -> np.ndarray:
    """A round of one column; the 20 best log-probabilities of each row by id, `[rows, 20, 2]`."""
    record = hand.round_record(lanes, [[token] for token in tokens])
    record["logprobs"][0, : len(lanes)] = 20
    out = hand.run(record)
    best = np.stack([out["top_ids"][0].astype(np.float32), out["top_logprobs"][0]], axis=-1)
    return best[: len(lanes)]


@pytest.mark.parametrize("name", GEOMETRIES)
@pytest.mark.parametrize("kv_format", [KvFormat.BF16, KvFormat.FP8, KvFormat.INT8])
def test_a_tiny_model_says_what_it_says_on_the_cpu(name: str, kv_format: KvFormat) -> None:
    generator = np.random.default_rng(5)
    ours, theirs = (Hand(model, context=512, kv_format=kv_format) for model in (on_gpu(name), loaded(name)))
    lane, other = Lane((5, 0, 7, 2, 6, 1, 3, 4)), Lane((5, 0, 7, 2, 6, 1, 3, 4))
    tokens = generator.integers(0, ours.shape.tokens, 340).tolist()
    ours.feed(lane, tokens[:300], draw=False)
    theirs.feed(other, tokens[:300], draw=False)
    for token in tokens[300:]:
        [mine], [wanted] = told(ours, [lane], [token]), told(theirs, [other], [token])
        scores = dict(wanted.tolist())
        shared = [(value, scores[best]) for best, value in mine.tolist() if best in scores]
        assert len(shared) >= 15
        assert max(abs(a - b) for a, b in shared) < 0.1
        lane.advance(1)
        other.advance(1)


@pytest.mark.parametrize("name", GEOMETRIES)
def test_a_row_does_not_depend_on_its_neighbours(name: str) -> None:
    hand = Hand(on_gpu(name), rows=4, context=256)
    hand.program.warm_up()
    generator = np.random.default_rng(6)
    lanes = [lane_of(row) for row in range(4)]
    for row, lane in enumerate(lanes):
        hand.feed(lane, generator.integers(0, hand.shape.tokens, 30 + 50 * row).tolist(), draw=False)
    tokens = generator.integers(0, hand.shape.tokens, 4).tolist()
    alone = [told(hand, [lane], [token])[0] for lane, token in zip(lanes, tokens, strict=True)]
    for order in ([0, 1], [1, 0], [3, 1, 2], [2, 3, 0, 1]):
        together = told(hand, [lanes[row] for row in order], [tokens[row] for row in order])
        for row, got in zip(order, together, strict=True):
            assert np.array_equal(got, alone[row]), (order, row)


@pytest.mark.parametrize("name", GEOMETRIES)
def test_graphs_of_a_tiny_model_and_single_steps_agree(name: str) -> None:
    seen = []
    for graphs in (True, False):
        hand, lane = Hand(on_gpu(name), rows=2, context=256, graphs=graphs), lane_of(1)
        lane.sampling = SamplingParams(temperature=1.0, frequency_penalty=0.5, seed=7)
        hand.program.warm_up()
        seen.append((hand.answer(lane, list(range(90)), 40), hand.memory()))
    assert seen[0][0] == seen[1][0]
    assert_same(seen[0][1], seen[1][1])
