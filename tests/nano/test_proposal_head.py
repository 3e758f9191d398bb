"""ninfer-nano with a proposal head of half its vocabulary: the same answers, and drafts that stand."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from ninfer.api import Engine, EngineOptions
from ninfer.cli.proposal import main

from .asking import NANO, ROOT, ask, held_out


@pytest.fixture(scope="module")
def drafting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    path = tmp_path_factory.mktemp("proposal") / "nano.ninfer"
    corpora = [str(ROOT / "bench" / name) for name in ("corpus", "heldout")]
    assert main([str(NANO), *corpora, "--out", str(path), "--rows", "4096", "--quiet"]) == 0
    options = EngineOptions(max_context=8192, threads=1, spec="mtp", draft_tokens=3, lm_head_draft=True)
    with Engine.load(Path(path), options) as engine:
        yield engine


@pytest.mark.parametrize("name", ["csv", "function", "story", "add2", "tool_result"])
def test_answers_are_the_same(engine: Engine, drafting: Engine, name: str) -> None:
    task = held_out(name, 0)
    plain, fast = ask(engine, task), ask(drafting, task)
    assert (fast.ids, fast.reply, fast.outcome) == (plain.ids, plain.reply, plain.outcome)
    statistics = fast.statistics
    assert statistics.drafted_tokens > 0
    assert statistics.rounds < plain.statistics.rounds or plain.statistics.generated_tokens < 8


@pytest.mark.parametrize(("name", "share"), [("jsonl32_variant", 0.6), ("story", 0.45)])
def test_most_drafts_stand(drafting: Engine, name: str, share: float) -> None:
    statistics = ask(drafting, held_out(name, 0)).statistics
    assert statistics.accepted_tokens > share * statistics.drafted_tokens


def test_sampled_and_penalized_answers_are_those_of_plain_decoding(engine: Engine, drafting: Engine) -> None:
    task = held_out("story", 1)
    chosen = {"temperature": 0.7, "presence_penalty": 1.5, "frequency_penalty": 0.1, "seed": 3}
    assert ask(drafting, task, **chosen).ids == ask(engine, task, **chosen).ids
