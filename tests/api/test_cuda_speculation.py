"""Drafts on a GPU give the answers of plain decoding, with graphs and without, from the cache or not."""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch

import ninfer
from ninfer import models
from ninfer.artifact import Artifact
from ninfer.models import Model
from ninfer.ops import SamplingParams

from ..engine.harness import drain
from ..engine.real import Desk, Luck, differences
from ..models.mtp import GEOMETRIES, draft_with_mtp
from ..nano.asking import NANO
from ..nano.drafting import (
    PROBES,
    SAMPLED,
    Engines,
    answer,
    check_gate,
    check_pairs,
    check_replay,
    compare,
    engines,
    probe,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"),
]
SHIPPED = pytest.mark.skipif(not NANO.exists(), reason="no ninfer-nano")
TEXT = (Path(ninfer.__file__).parent / "ops" / "sampling.py").read_text(encoding="utf-8")
TASKS = (
    "csv", "function", "story", "add2", "tool_result", "logic", "to_english", "trace", "jsonl", "kv512",
)  # fmt: skip


@pytest.fixture(scope="module")
def all_() -> Iterator[Engines]:
    with engines("cuda") as found:
        yield found


@SHIPPED
@pytest.mark.parametrize("name", PROBES, ids=lambda one: one[0])
def test_the_gate(all_: Engines, name: tuple[str, int]) -> None:
    found = check_gate(all_, *name)
    print(f"{name}: {found}")
    assert len(found) <= 1


@SHIPPED
def test_two_at_a_time(all_: Engines) -> None:
    check_pairs(all_)


@SHIPPED
def test_prefix_replay(all_: Engines) -> None:
    near = check_replay(all_, TEXT)
    print(f"{near} answers part from cold ones at near-ties")
    assert near <= 2


@SHIPPED
def test_sampled_answers_are_those_of_plain_decoding(all_: Engines) -> None:
    for name in PROBES:
        prompt = probe(all_.plain, *name)
        for seed in range(3):
            changes = {**SAMPLED, "seed": seed}
            assert answer(all_.drafting, prompt, **changes).ids == answer(all_.plain, prompt, **changes).ids


@SHIPPED
def test_greedy_answers_to_tasks(record_property) -> None:
    found = compare("cuda", TASKS, [3], range(1, 9), 32) + compare("cuda", TASKS, [1, 2, 4, 5], (2, 5, 8), 24)
    record_property("answers that part at a near-tie", "; ".join(str(one) for one in found if one.count))
    assert sum(one.count for one in found) <= 4


@cache
def on_gpu(name: str, *, predictor: bool = True) -> Model:
    with TemporaryDirectory() as folder:
        path = draft_with_mtp(GEOMETRIES[name]).write(Path(folder) / "tiny.ninfer")
        with Artifact.open(path) as artifact:
            return models.load(artifact, "cuda", predictor=predictor)


@pytest.mark.parametrize(
    ("name", "drafts"), [("mixed", 1), ("mixed", 3), ("mixed", 5), ("all-full", 4), ("all-linear", 2)]
)
def test_a_tiny_model_answers_as_without_drafts(
    name: str, drafts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Greedy, sampled and with penalties, one to eight at a time, most drafts being right."""
    rng, near, compared, accepted = random.Random(drafts), 0, 0, 0
    prompts = [[rng.randrange(190) for _ in range(rng.choice((1, 30, 63, 64, 65, 150)))] for _ in range(8)]
    kinds = (
        SamplingParams(0.0),
        SamplingParams(0.8, seed=3),
        SamplingParams(0.0, presence_penalty=0.7, frequency_penalty=0.4),
        SamplingParams(1.1, top_k=8, top_p=0.9, frequency_penalty=0.6, seed=1 << 63),
    )
    chosen = [kinds[index % 4] for index in range(8)]
    with Desk(on_gpu(name, predictor=False), context=256) as plain:
        wanted = [plain.ask(p, 30, sampling=s).ids for p, s in zip(prompts, chosen, strict=True)]
    truth = {tuple(prompt): ids for prompt, ids in zip(prompts, wanted, strict=True)}
    monkeypatch.setattr("ninfer.engine.core.propose", Luck(lambda t: truth[t.request.prompt], 0.7))
    with Desk(on_gpu(name), 8, 256, width=1 + drafts, capacity=2048) as fast:
        for rows in (1, 3, 8):
            asked = list(zip(prompts, chosen, wanted, strict=True))[:rows]
            handles = [fast.submit(prompt, 30, sampling=sampling) for prompt, sampling, _ in asked]
            for handle, (prompt, sampling, expected) in zip(handles, asked, strict=True):
                ids, statistics, _ = drain(handle)
                compared += 1
                accepted += statistics.accepted_tokens
                near += differences(on_gpu(name), prompt, ids, expected, sampling=sampling)
    print(f"{name}, {drafts} drafts: {near} of {compared} answers part, {accepted} drafts stood")
    assert accepted > compared
    assert near <= 1
