"""MTP layers with weights: greedy answers are those of plain decoding, drafts are those of the formula,
sampled answers have the target's distribution."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy import stats

from ninfer import models, ops
from ninfer.artifact import Artifact
from ninfer.engine import Handle, Marks, Policy, Request
from ninfer.engine.request import State
from ninfer.models import Batch, Model
from ninfer.ops import PAGE, SamplingParams
from ninfer.runtime.memory import allocate
from ninfer.runtime.records import Unit
from tests.models.conftest import one_thread  # noqa: F401
from tests.models.mtp import GEOMETRIES, add_proposal, draft_with_mtp, loaded

from .harness import GREEDY, Session, drain
from .real import Desk, Luck, differences

NAMES = pytest.mark.parametrize("name", ["mixed", "all-full", "all-linear"])


def prompts(count: int, seed: int) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(190) for _ in range(rng.choice((1, 30, 63, 64, 65, 150)))] for _ in range(count)]


def check_company(
    monkeypatch: pytest.MonkeyPatch, name: str, drafts: int, several: Sequence[int], seed: int, count: int
) -> str:
    """Greedy, sampled and penalized requests, `several` at a time, most drafts being right. On the CPU more
    than 16 columns take the route of prefill chunks, whose bits are others: only there may a near-tie fall
    the other way."""
    asked = prompts(8, seed)
    parted = compared = wide = accepted = 0
    with Desk(loaded(name, predictor=False), context=256) as plain:
        wanted = {
            (tuple(prompt), one): plain.ask(prompt, count, sampling=one).ids
            for prompt in asked
            for one in SAMPLED_TOO
        }
    luck = Luck(lambda ticket: wanted[ticket.request.prompt, ticket.request.sampling], 0.7)
    monkeypatch.setattr("ninfer.engine.core.propose", luck)
    for rows in several:
        with Desk(loaded(name), rows, 256, width=1 + drafts, capacity=2048) as fast:
            turns = [(prompt, SAMPLED_TOO[(rows + i) % 4]) for i, prompt in enumerate(asked[:rows])]
            handles = [fast.submit(prompt, count, sampling=one) for prompt, one in turns]
            for handle, (prompt, one) in zip(handles, turns, strict=True):
                ids, statistics, _ = drain(handle)
                compared += 1
                accepted += statistics.accepted_tokens
                parts = differences(loaded(name), prompt, ids, wanted[tuple(prompt), one], sampling=one)
                assert parts == 0 or rows * (1 + drafts) > 16
                parted += parts
                wide += rows * (1 + drafts) > 16
    assert accepted > compared
    assert parted <= wide // 2  # scores of random weights are nearly the same, and answers long
    return f"{name}, {drafts} drafts: {parted} of {compared} answers part, of {wide} in wide rounds"


SAMPLED_TOO = (
    GREEDY,
    SamplingParams(0.8, seed=3),
    SamplingParams(0.0, presence_penalty=0.7, frequency_penalty=0.4),
    SamplingParams(1.1, top_k=8, top_p=0.9, frequency_penalty=0.6, seed=1 << 63),
)


@NAMES
@pytest.mark.parametrize("drafts", range(1, 6))
def test_answers_are_those_of_plain_decoding(
    name: str, drafts: int, monkeypatch: pytest.MonkeyPatch, record_property
) -> None:
    several = {1: (1, 8), 2: (5,), 3: (2, 4), 4: (3,), 5: (1, 8)}[drafts]
    told = check_company(monkeypatch, name, drafts, several, drafts, 24)
    record_property("compared", told)
    print(told)


@pytest.mark.soak
@NAMES
@pytest.mark.parametrize("drafts", range(1, 6))
@pytest.mark.parametrize("seed", range(100, 104))
def test_more_answers_are_those_of_plain_decoding(
    name: str, drafts: int, seed: int, monkeypatch: pytest.MonkeyPatch, record_property
) -> None:
    told = check_company(monkeypatch, name, drafts, range(1, 9), seed, 60)
    record_property("compared", told)
    print(told)


def test_a_proposal_head_drafts_only_its_tokens(tmp_path: Path) -> None:
    ids = list(range(20, 80))[::-1]
    path = add_proposal(draft_with_mtp(GEOMETRIES["mixed"]), ids).write(tmp_path / "tiny.ninfer")
    with Artifact.open(path) as artifact:
        model = models.load(artifact, predictor=True, proposal=True)
    proposed: set[int] = set()
    with (
        Desk(loaded("mixed", predictor=False), context=256) as plain,
        Desk(model, 2, 256, width=4, capacity=512) as fast,
    ):
        fast.on_unit = lambda unit: proposed.update(fast.program._egress["drafts"].reshape(-1).tolist())
        for prompt in prompts(4, 6):
            assert fast.ask(prompt, 30).ids == plain.ask(prompt, 30).ids
    assert len(proposed) > 5
    assert proposed <= {0, *ids}  # the row of a lane that was never used holds zeros


def formula(model: Model, ledger: list[int], count: int) -> tuple[list[list[float]], torch.Tensor]:
    """Scores from which the first `count` drafts after `ledger` are chosen, and the predictor's keys and
    values before, everything fed at once."""
    assert model.predictor is not None
    total = len(ledger)
    places = -(-(total + count) // PAGE)
    memory = allocate(model.kv_layout(), model.state_layout(), pages=places, slots=1, device=model.device)
    table, slot = torch.arange(places, dtype=torch.int32)[None], torch.zeros(1, dtype=torch.int32)

    def batch(tokens: list[int], begin: int) -> Batch:
        positions = torch.arange(begin, begin + len(tokens), dtype=torch.int32)
        return Batch(torch.tensor(tokens, dtype=torch.int32), positions, 1, table, slot - 1, slot)

    with torch.inference_mode():
        hidden = model.forward(batch(ledger[:-1], 0), memory)
        x = model.predictor.forward(batch(ledger[1:], 0), hidden, memory.kv[-1])[-1:]
        found, pages = [], memory.kv[-1]
        known = torch.stack([plane.flatten(0, 1)[: total - 1].clone() for plane in (pages.k, pages.v)])
        for step in range(count):
            scores, m = model.predictor.score(x)
            assert torch.equal(scores, model.logits(m))
            found.append(scores[0].tolist())
            x = model.predictor.forward(batch([int(scores.argmax())], total - 1 + step), m, memory.kv[-1])
        return found, known


@NAMES
def test_drafts_are_those_of_the_formula(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In every unit that proposes, over chunks, reused prefixes, closing texts and rounds, in which most
    drafts stand, for one request and for several, and behind a stop inside a round; all keys and values too.
    One prefix ends with a page, whose last row differs from request to request."""
    model, drafts = loaded(name, dtype=torch.float32), 5
    checked: Counter[str] = Counter()
    truth: dict[tuple[int, ...], list[int]] = {}
    monkeypatch.setattr("ninfer.engine.core.propose", Luck(lambda t: truth[t.request.prompt], 0.7))
    turns = {Unit.PREFILL: State.PREFILL, Unit.ROUND: State.DECODE_READY, Unit.CONTROL: State.CONTROL_READY}
    rng = random.Random(4)
    base = [rng.randrange(190) for _ in range(201)]
    prompts_of = [[*base[:cut], 5, index] for index, cut in enumerate((201, 64, 90, 201, 190))]
    plain = Desk(loaded(name, predictor=False, dtype=torch.float32), context=512)

    def ask(desk: Desk, prompt: list[int], stop: int | None = None) -> Handle:
        budget = 4 if prompt == prompts_of[3] else None
        asked = Request(tuple(prompt), GREEDY, 16, budget, Marks(preamble=64, boundaries=(90,)))
        if asked.prompt not in truth:
            truth[asked.prompt] = []
            truth[asked.prompt] = drain(ask(plain, prompt))[0]
        return desk.core.submit(asked, Session(stop=stop, budget=budget))

    with Desk(model, 3, 512, capacity=1536, width=1 + drafts, snapshots=6) as desk:

        def check(unit: Unit) -> None:
            if unit is Unit.FOLD or (unit is Unit.PREFILL and desk.program.ingress["purpose"][0, 0] < 0):
                return
            egress = desk.program._egress
            rows = [t for t in desk.core._lanes if t is not None and t.state is turns[unit]]
            for row, ticket in enumerate(rows):
                assert ticket.sequence is not None
                stand = 0 if unit is Unit.CONTROL else int(egress["produced"][0, row])
                begin = row * (1 + drafts)
                ledger = [*ticket.sequence.ledger, *egress["tokens"][0, begin : begin + stand].tolist()]
                live = min(drafts, ticket.budget.context - len(ledger) + 1)
                wanted, known = formula(model, ledger, live)
                own, at = desk.program._cache.kv[-1], torch.arange(len(ledger) - 1)
                places = torch.tensor(ticket.sequence.pages)[at // PAGE] * PAGE + at % PAGE
                seen = torch.stack([plane.flatten(0, 1)[places] for plane in (own.k, own.v)])
                assert (seen.float() - known.float()).abs().max() < 0.02, (unit, row)
                for step, scores in enumerate(wanted):
                    proposed = int(egress["drafts"][0, row, step])
                    assert scores[proposed] >= max(scores) - 1e-3, (unit, row, step)
                    checked[unit.name] += 1
                checked["after drafts that stand"] += stand > 1
                checked["beside others"] += row > 0

        desk.on_unit = check
        for prompt in prompts_of[:4]:
            drain(ask(desk, prompt))
        for handle in [ask(desk, prompts_of[index]) for index in (4, 3, 0)]:
            drain(handle)
        cut = 0
        for index in range(5, 12):
            prompt = [*base[: 91 + index], 7]
            drain(ask(plain, prompt))
            ids, statistics, _ = drain(ask(desk, prompt, stop=truth[tuple(prompt)][index]))
            cut += statistics.rounds + statistics.accepted_tokens - len(ids) + 1
            drain(ask(desk, [*prompt, *ids, 11, 12]))
        assert cut > 0 or name == "all-full", "no stop was inside a round"  # that one repeats itself
    plain.core.stop()
    assert min(checked[unit.name] for unit in turns) >= 5
    assert checked["after drafts that stand"] > 10
    assert checked["beside others"] > 5


def test_a_replayed_turn_gives_the_same_ids_and_counters() -> None:
    prompt = prompts(1, 11)[0] * 3
    marks = Marks(opener=len(prompt) - 3)
    seen = []
    with Desk(loaded("mixed"), context=1024, width=4) as desk:
        for _ in range(3):
            ids, statistics, _ = drain(desk.submit(prompt, 40, marks=marks))
            speculation = statistics.speculation
            seen.append((ids, speculation.lengths, speculation.per_position, statistics.reused_tokens > 0))
    assert seen[1] == seen[2]
    assert seen[0][:3] == seen[1][:3]
    assert [one[3] for one in seen] == [False, True, True]


SAMPLINGS = {
    "plain": SamplingParams(1.0),
    "filtered": SamplingParams(1.3, top_k=5, top_p=0.9),
    "penalized": SamplingParams(1.0, presence_penalty=0.8, frequency_penalty=0.5),
    "both": SamplingParams(0.9, top_k=4, top_p=0.95, presence_penalty=0.6),
}
PROMPT = [3, 1, 4, 1, 5]
DRAWS, TOGETHER = 20_000, 500


@cache
def target() -> dict[tuple[int, ...], list[float]]:
    """Scores after the prompt and every continuation of up to two tokens."""
    model = loaded("few-words", predictor=False)
    found = {}
    for length in range(3):
        for said in itertools.product(range(7), repeat=length):
            memory = allocate(model.kv_layout(), model.state_layout(), pages=1, slots=1, device=model.device)
            tokens = torch.tensor([*PROMPT, *said], dtype=torch.int32)
            zero = torch.zeros(1, dtype=torch.int32)
            batch = Batch(tokens, torch.arange(len(tokens), dtype=torch.int32), 1, zero[None], zero - 1, zero)
            with torch.inference_mode():
                found[said] = model.logits(model.forward(batch, memory)[-1:])[0].tolist()
    return found


def processed(scores: list[float], said: tuple[int, ...], s: SamplingParams) -> np.ndarray:
    """The distribution of the next token, written from section 9 of the specification."""
    counts = np.bincount(said, minlength=7)
    x = np.array(scores) - s.presence_penalty * (counts > 0) - s.frequency_penalty * counts
    order = np.lexsort((np.arange(7), -x))[: s.candidates]
    weights = np.exp((x[order] - x[order[0]]) / s.temperature)
    kept = np.searchsorted(weights.cumsum(), s.top_p * weights.sum()) + 1 if s.top_p < 1 else len(order)
    out = np.zeros(7)
    out[order[:kept]] = weights[:kept] / weights[:kept].sum()
    return out


def expected(s: SamplingParams) -> np.ndarray:
    """Of all continuations of three tokens."""
    out = np.zeros((7, 7, 7))
    for a, b, c in itertools.product(range(7), repeat=3):
        p = 1.0
        for said, token in (((), a), ((a,), b), ((a, b), c)):
            p *= processed(target()[said], said, s)[token]
        out[a, b, c] = p
    return out.reshape(-1)


def p_value(counts: np.ndarray, wanted: np.ndarray) -> float:
    """Of the chi-square test; rare continuations count together, impossible ones must not occur."""
    assert counts[wanted == 0].sum() == 0
    goal = wanted * counts.sum()
    rare = goal < 5
    seen = np.append(counts[~rare], counts[rare].sum())
    goal = np.append(goal[~rare], goal[rare].sum())
    return float(stats.chisquare(seen[goal > 0], goal[goal > 0]).pvalue)


@dataclass(frozen=True)
class Rules:
    """Which drafts stand; do penalties know of drafts before them; has each column its own random number?"""

    accept: Callable[..., object] = ops.accept
    overlay: bool = True
    own_numbers: bool = True


def continuations(sampling: SamplingParams, rules: Rules) -> np.ndarray:
    """How often each continuation of four tokens but the last was said: a prefill, then rounds of up to two
    drafts, with the scores of a model. Drafts are drawn beside the truth, so that some stand."""
    rng, out, width = np.random.default_rng(7), np.zeros((7, 7, 7)), 3
    count_rows = torch.arange(TOGETHER * width, dtype=torch.int32)
    counts = torch.zeros((TOGETHER * width, 7), dtype=torch.int32)
    likely = np.exp(np.array(target()[()]))
    for batch in range(DRAWS // TOGETHER):
        seeds = 1000 + batch * TOGETHER + np.arange(TOGETHER)
        params = [replace(sampling, seed=int(seed)) for seed in seeds]
        counts.zero_()
        first = ops.Draws.of(params, [5] * TOGETHER, [ops.Purpose.PREFILL] * TOGETHER, [-1] * TOGETHER)
        scores = torch.tensor([target()[()]] * TOGETHER)
        said = [[token] for token in ops.draw(scores, first, counts).tolist()]
        every = [one for one in params for _ in range(width)]
        while any(len(one) < 3 for one in said):
            drafts = rng.choice(7, size=(TOGETHER, width - 1), p=likely / likely.sum())
            tokens, places, keys, rows, purposes = [], [], [], [], []
            for one, guess in zip(said, drafts.tolist(), strict=True):
                begin, live = len(one), max(3 - len(one), 0)  # columns; nothing beyond the budget
                tokens += [one[-1], *guess]
                places += [4 + begin + i if i < live else -1 for i in range(width)]
                keys += [4 + begin + i * rules.own_numbers for i in range(width)]
                purposes += [ops.Purpose.DECODE if i < live else -1 for i in range(width)]
                rows += [target().get((*one, *guess[:i]), [0.0] * 7) for i in range(width)]
            fed, positions = (torch.tensor(x, dtype=torch.int32) for x in (tokens, places))
            ops.count_drafts(fed, positions, count_rows, counts, TOGETHER)
            known = counts if rules.overlay else counts[::width].repeat_interleave(width, 0)
            draws = ops.Draws.of(every, keys, purposes, count_rows.tolist())
            drawn = ops.draw(torch.tensor(rows), draws, known)
            stand = torch.zeros(TOGETHER, dtype=torch.int32)
            rules.accept(drawn, fed, positions, stand, count_rows, counts)
            for row, one in enumerate(said):
                if len(one) < 3:
                    one += drawn[row * width : row * width + int(stand[row])].tolist()
        for a, b, c in said:
            out[a, b, c] += 1
    return out.reshape(-1)


def too_kind(
    drawn: torch.Tensor,
    tokens: torch.Tensor,
    positions: torch.Tensor,
    produced: torch.Tensor,
    *_: torch.Tensor,
) -> None:
    """A wrong rule: a draft stands if the draw came near it. Counts are left alone."""
    rows = len(produced)
    drawn, tokens, positions = (x.view(rows, -1) for x in (drawn, tokens, positions))
    agree = ((drawn[:, :-1] - tokens[:, 1:]).abs() <= 1) & (positions[:, 1:] >= 0)
    drawn[:, :-1] = torch.where(agree, tokens[:, 1:], drawn[:, :-1])
    produced.copy_(agree.int().cumprod(1).sum(1) + 1)


def rarely_kind(
    drawn: torch.Tensor,
    tokens: torch.Tensor,
    positions: torch.Tensor,
    produced: torch.Tensor,
    *counting: torch.Tensor,
) -> None:
    """A wrong rule: in one of eight rows the first draft stands, whatever was drawn."""
    rows = len(produced)
    chosen = (torch.arange(rows) % 8 == 0) & (positions.view(rows, -1)[:, 1] >= 0)
    drawn.view(rows, -1)[chosen, 0] = tokens.view(rows, -1)[chosen, 1]
    ops.accept(drawn, tokens, positions, produced, *counting)


@pytest.mark.parametrize("name", SAMPLINGS)
def test_sampled_continuations_have_the_targets_distribution(name: str) -> None:
    seen, wanted = continuations(SAMPLINGS[name], Rules()), expected(SAMPLINGS[name])
    assert seen.sum() == DRAWS
    assert p_value(seen, wanted) > 0.01


@pytest.mark.parametrize(
    ("rules", "name"),
    [
        (Rules(too_kind), "plain"),
        (Rules(rarely_kind), "plain"),
        (Rules(own_numbers=False), "plain"),
        (Rules(overlay=False), "penalized"),
    ],
)
def test_a_wrong_rule_is_noticed(rules: Rules, name: str) -> None:
    assert p_value(continuations(SAMPLINGS[name], rules), expected(SAMPLINGS[name])) < 1e-6


@pytest.mark.soak
@pytest.mark.parametrize("name", SAMPLINGS)
def test_continuations_of_the_engine_have_the_targets_distribution(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of whole requests, eight at a time, with drafts that are drawn beside the truth."""
    out, sampling, dice = np.zeros((7, 7, 7)), SAMPLINGS[name], random.Random(3)
    likely = np.exp(np.array(target()[()])).tolist()
    monkeypatch.setattr(
        "ninfer.engine.core.propose", Luck(lambda ticket: dice.choices(range(7), likely, k=3), 1.0)
    )
    with Desk(loaded("few-words"), 8, 64, width=3, capacity=512, policy=Policy(reuse=False)) as desk:
        for begin in range(0, DRAWS, 8):
            each = [replace(sampling, seed=5000 + begin + index) for index in range(8)]
            for handle in [desk.submit(PROMPT, 3, sampling=one) for one in each]:
                a, b, c = drain(handle)[0]
                out[a, b, c] += 1
        assert desk.core.statistics().accepted_tokens > DRAWS // 20
    assert out.sum() == DRAWS
    assert p_value(out.reshape(-1), expected(sampling)) > 0.01
