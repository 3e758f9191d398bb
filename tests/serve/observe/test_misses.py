"""When a prefill miss is worth a dump, and what the dump holds."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from threading import Event
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ninfer.errors import OptionError
from ninfer.events import FinishReason
from ninfer.frontend import Frontend
from ninfer.serve.errors import ApiError
from ninfer.serve.observe.misses import Context, MissDump, common_prefix, find_miss, reading
from ninfer.serve.observer import Outcome
from tests.serve.observe.made import outcome, record, statistics


def ids(*spans: tuple[int, int]) -> np.ndarray:
    """The spans one after the other, each (first id, how many)."""
    return np.concatenate([np.arange(first, first + n, dtype=np.int32) for first, n in spans])


def context(tokens: np.ndarray, prompt: int, request: int = 1, ended: int = 1) -> Context:
    return Context(request, tokens, prompt, ended)


def found(prompt: np.ndarray, reused: int, *contexts: Context, match: float = 0.5) -> Any:
    return find_miss(9, prompt, reused, contexts, min_tokens=100, min_match=match)


OLD = context(ids((0, 400)), 350)


def test_recomputing_what_was_there_is_a_miss() -> None:
    miss = found(ids((0, 400), (5000, 50)), 0, OLD)
    assert (miss.common, miss.recomputed, miss.recomputed_shared, miss.old_after) == (400, 450, 400, 0)
    assert found(ids((0, 400), (5000, 50)), 300, OLD).recomputed_shared == 100
    assert found(ids((0, 400), (5000, 50)), 301, OLD) is None  # 99 tokens are not worth it


def test_a_conversation_that_was_changed_early_is_a_miss() -> None:
    # 250 in common, all of them reused; 150 of the old context lie behind.
    miss = found(ids((0, 250), (5000, 150)), 250, OLD)
    assert (miss.common, miss.recomputed_shared, miss.old_after) == (250, 0, 150)
    # Much is new, but the old context ends soon after they part: nothing was lost.
    assert found(ids((0, 390), (5000, 150)), 390, OLD) is None


def test_too_little_work_or_another_conversation_is_none() -> None:
    assert found(ids((0, 400)), 301, OLD) is None
    assert found(ids((0, 150), (5000, 151)), 0, OLD) is None
    assert found(ids((0, 150), (5000, 150)), 0, OLD) is not None
    assert found(ids((0, 150), (5000, 151)), 0, OLD, match=0.4) is not None
    assert found(ids((7, 400)), 0, OLD) is None
    assert found(ids((0, 400)), 0) is None


def test_the_best_context_is_the_one_with_most_in_common_then_the_newest() -> None:
    twins = [context(ids((0, 300)), 300, request, ended=request) for request in (3, 4)]
    assert found(ids((0, 400)), 0, context(ids((0, 200)), 100), *twins).old.request == 4
    assert found(ids((0, 400)), 0, OLD, *twins).old.request == 1


@given(st.lists(st.integers(0, 2), max_size=6), st.lists(st.integers(0, 2), max_size=6))
def test_common_prefix(a: list[int], b: list[int]) -> None:
    expected = 0
    while expected < min(len(a), len(b)) and a[expected] == b[expected]:
        expected += 1
    assert common_prefix(np.array(a, np.int32), np.array(b, np.int32)) == expected


def test_reading_says_where_they_part() -> None:
    def says(prompt: np.ndarray, reused: int = 0) -> str:
        return " ".join(reading(found(prompt, reused, OLD)))

    assert "computed again although request 1 had the same ones" in says(ids((0, 400), (5000, 1)))
    assert "continues the earlier context without a change" in says(ids((0, 400), (5000, 1)))
    assert "a beginning of the earlier context" in says(ids((0, 300)))
    assert "part at token 250 of the old prompt's 350" in says(ids((0, 250), (5000, 150)), 250)
    assert "again" not in says(ids((0, 250), (5000, 150)), 250)
    assert "parts from the old answer 20 tokens after" in says(ids((0, 370), (5000, 150)))


# The observer


@pytest.fixture
def dumped(tmp_path: Path, qwen: Frontend) -> Any:
    """Tells a dump of requests (prompt, output, reused) one after the other; its folders."""

    def run(*requests: tuple[Sequence[int], Sequence[int], int], **changes: Any) -> list[Path]:
        folder = tmp_path / "new" / "dumps"
        misses = MissDump(folder, qwen, min_tokens=20, min_match=0.5)
        for number, (prompt, output, reused) in enumerate(requests, 1):
            told = record(number, prompt)
            misses.started(told)
            answer = statistics(
                prompt_tokens=len(prompt), reused_tokens=reused, token_ids=tuple(output), **changes
            )
            misses.done(told, outcome(answer))
        misses.close()
        return sorted(folder.iterdir()) if folder.exists() else []

    return run


def test_a_dump_holds_both_texts_and_what_they_mean(
    dumped: Any, qwen: Frontend, caplog: pytest.LogCaptureFixture
) -> None:
    start = qwen.render([{"role": "user", "content": "The quick brown fox " * 40}]).tokens
    answer = qwen.encode("jumps over the lazy dog")
    changed = start[:180] + qwen.encode(" and something else, it is not the same any more ") + start[180:]
    [folder] = dumped((start, answer, 0), (changed, answer, 10))
    assert re.fullmatch(r"\d{8}T\d{6}Z-001", folder.name)
    assert folder.stat().st_mode & 0o777 == 0o700
    old = [*start, *answer]
    assert sorted(f.name for f in folder.iterdir()) == [
        "new_prompt.tokens.json", "new_prompt.txt", "old_context.tokens.json", "old_context.txt",
        "summary.json",
    ]  # fmt: skip
    assert json.loads((folder / "new_prompt.tokens.json").read_text()) == changed
    assert json.loads((folder / "old_context.tokens.json").read_text()) == old
    assert (folder / "new_prompt.txt").read_text() == qwen.decode(changed, keep_special=True)
    assert "<|im_start|>user" in (folder / "old_context.txt").read_text()
    summary = json.loads((folder / "summary.json").read_text())
    common = summary["common_prefix_tokens"]
    assert summary == {
        "new_request": 2,
        "new_prompt_tokens": len(changed),
        "reused_tokens": 10,
        "recomputed_tokens": len(changed) - 10,
        "old_request": 1,
        "old_context_tokens": len(old),
        "old_prompt_tokens": len(start),
        "common_prefix_tokens": common,
        "recomputed_shared_tokens": common - 10,
        "old_tokens_after_divergence": len(old) - common,
        "divergence": {
            "token_index": common,
            "inside_old_prompt": True,
            "shared_before": qwen.decode(changed[max(common - 96, 0) : common], keep_special=True),
            "new_after": qwen.decode(changed[common : common + 96], keep_special=True),
            "old_after": qwen.decode(old[common : common + 96], keep_special=True),
        },
        "reading": summary["reading"],
    }
    assert common >= 180
    assert len(summary["reading"]) == 2
    [line] = [r for r in caplog.records if r.levelname == "WARNING"]
    assert line.getMessage().startswith("req#2 prefill miss | computed ")
    assert "fox" not in line.getMessage()


def test_a_conversation_that_goes_on_is_no_miss(dumped: Any) -> None:
    prompt, answer = list(range(100)), list(range(200, 240))
    again = [*prompt, *answer, 1, 2, 3]
    assert dumped((prompt, answer, 0), (again, answer, 140)) == []
    assert len(dumped((prompt, answer, 0), (again, answer, 0))) == 1


def test_cancelled_requests_count_as_contexts(dumped: Any) -> None:
    prompt = list(range(100))
    requests = (prompt, [], 0), (prompt, [], 0)
    gone = {"finish_reason": FinishReason.CANCELLED, "first_token_seconds": None}
    assert len(dumped(*requests, **gone)) == 1
    # But not those that were cancelled before anything was computed.
    assert len(dumped(*requests, **gone, prefill_seconds=0.0)) == 1  # the one from before


def test_only_the_last_sixteen_contexts_are_kept(dumped: Any) -> None:
    first = (list(range(100)), [1], 0)
    others = [(list(range(1000 * i, 1000 * i + 100)), [1], 0) for i in range(1, 17)]
    assert dumped(first, *others, first) == []
    assert len(dumped(first, *others[:15], first)) == 1


def test_there_are_at_most_64_dumps(dumped: Any) -> None:
    assert len(dumped(*[(list(range(100)), [1], 0)] * 80)) == 64


def test_what_ended_later_could_not_be_reused(tmp_path: Path, qwen: Frontend) -> None:
    misses = MissDump(tmp_path / "dumps", qwen, min_tokens=20, min_match=0.5)
    a, b = record(1), record(2)
    misses.started(a)
    misses.started(b)  # both at once: neither finds the other's work
    for told in (a, b):
        misses.done(told, outcome(statistics(reused_tokens=0)))
    misses.close()
    assert not (tmp_path / "dumps").exists()
    assert misses._began == {}


def test_nothing_is_kept_of_failed_requests(tmp_path: Path, qwen: Frontend) -> None:
    misses = MissDump(tmp_path / "dumps", qwen, min_tokens=20, min_match=0.5)
    misses.started(record(1))
    misses.failed(record(1), ApiError(503, "x"))
    misses.rejected(record(2), ApiError(400, "x"))
    misses.done(record(3), Outcome((), ()))
    misses.close()
    assert misses._began == {}
    assert not misses._contexts


def test_a_place_that_cannot_be_written_is_said_and_harms_nobody(
    tmp_path: Path, qwen: Frontend, caplog: pytest.LogCaptureFixture
) -> None:
    (file := tmp_path / "file").write_text("x")
    with pytest.raises(OptionError, match="is not a folder"):
        MissDump(file, qwen, min_tokens=20, min_match=0.5)
    misses = MissDump(file / "below", qwen, min_tokens=20, min_match=0.5)
    for number in (1, 2):
        misses.started(told := record(number))
        misses.done(told, outcome(statistics(reused_tokens=0)))
    misses.close()
    [line] = [r.getMessage() for r in caplog.records]
    assert line == "prefill miss not written | Not a directory"


def test_the_loop_never_waits_for_the_thread(tmp_path: Path, qwen: Frontend) -> None:
    misses = MissDump(tmp_path / "dumps", qwen, min_tokens=20, min_match=0.5)
    go = Event()
    misses._background.submit(go.wait)
    for number in range(400):  # more than it queues
        misses.started(told := record(number))
        misses.done(told, outcome())
    go.set()
    misses.close()
