"""What an engine tells about its work: phases of the host, counts of a request, where reuse came from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import astuple
from time import perf_counter

import pytest

from ninfer.engine import Core, HostWork, Marks, Output, ReusePath, RuntimeStatistics
from ninfer.events import FinishReason, Step
from ninfer.runtime.records import Unit
from tests.engine.guesses import Guesses
from tests.engine.harness import Gate, Session, drain, request, settle

Build = Callable[..., Core]
PROMPT = [(5 * i + 1) % 97 for i in range(300)]


def phases(s: RuntimeStatistics) -> float:
    return (
        s.engine_boundary + s.program_submit + s.program_post + s.engine_commit_output + s.engine_maintenance
    )


@pytest.mark.parametrize("recurrent", [True, False])
@pytest.mark.parametrize("width", [1, 4])
def test_the_phases_are_all_of_the_hosts_time(build: Build, recurrent: bool, width: int) -> None:
    begin = perf_counter()
    gate = Gate(shut=False)
    core = build(
        recurrent=recurrent, width=width, drafts=Guesses(recurrent), concurrency=3, context=512, gate=gate
    )
    marks = Marks(boundaries=(0, 100, 180), opener=190)
    handles = [
        core.submit(
            request(PROMPT[: 200 + n], 40, marks=marks, thinking_budget=budget), Session(budget=budget)
        )
        for n, budget in ((0, None), (0, 9), (20, 5), (60, None))
    ]
    for handle in handles:
        drain(handle)
    settle(core)
    elapsed = perf_counter() - begin
    s = core.statistics()
    host = sum(
        total - device
        for total, device in (
            (s.prefill_seconds, s.prefill_device_seconds),
            (s.decode_seconds, s.decode_device_seconds),
            (s.control_seconds, s.control_device_seconds),
        )
    )
    assert phases(s) == pytest.approx(s.engine_boundary + host, rel=1e-6)
    assert min(s.engine_boundary, s.program_submit, s.program_post, s.engine_commit_output) > 0
    assert s.engine_maintenance > 0
    assert phases(s) + s.host.device_wait < elapsed
    units = [note.unit for note in gate.notes]
    assert s.prefill_units == units.count(Unit.PREFILL)
    assert s.control_units == units.count(Unit.CONTROL) > 0
    assert s.host == HostWork(
        engine_boundary=s.engine_boundary,
        program_submit=s.program_submit,
        program_post=s.program_post,
        engine_commit_output=s.engine_commit_output,
        engine_maintenance=s.engine_maintenance,
        device_wait=s.prefill_device_seconds + s.decode_device_seconds + s.control_device_seconds,
        decode_host=s.decode_seconds - s.decode_device_seconds,
        decode_device_wait=s.decode_device_seconds,
        prefill_units=s.prefill_units,
        control_units=s.control_units,
    )


def test_slow_parts_show_up_in_their_phase(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock that only they move; the Program's own seconds are real and few."""
    clock = 1000.0
    monkeypatch.setattr("ninfer.engine.core.perf_counter", lambda: clock)
    monkeypatch.setattr("ninfer.engine.stats.perf_counter", lambda: clock)

    def wait(seconds: float) -> None:
        nonlocal clock
        clock += seconds

    class Slow(Session):
        @property
        def constrained(self) -> bool:
            return True

        def fill_masks(self, drafts, masks) -> int:
            wait(3)
            return 0

        def accept(self, token_ids) -> Step:
            wait(50)
            return super().accept(token_ids)

    core = build()
    _, statistics, _ = drain(core.submit(request(PROMPT[:50], 5), Slow()))
    work = statistics.host
    assert work.program_submit == 5 * 3
    assert work.engine_commit_output == 5 * 50
    assert work.engine_boundary == work.engine_maintenance == 0
    assert work.program_post == pytest.approx(-work.device_wait)
    assert work.decode_host == pytest.approx(4 * 53 - work.decode_device_wait)
    assert work.device_wait > work.decode_device_wait > 0
    assert statistics.prefill_seconds == 3
    assert statistics.decode_seconds == 4 * 53
    assert (work.prefill_units, work.control_units) == (1, 0)


def test_a_requests_work_is_the_engines_while_it_was_there(build: Build) -> None:
    core = build(concurrency=2, context=512)
    before = core.statistics().host
    drain(core.submit(request(PROMPT[:60], 30), Session()))
    settle(core)
    middle = core.statistics().host
    _, statistics, _ = drain(core.submit(request(PROMPT[:270], 30), Session()))
    settle(core)
    after = core.statistics().host
    for mine, others, all_ in zip(
        astuple(statistics.host), astuple(after.since(middle)), astuple(after.since(before)), strict=True
    ):
        assert 0 <= mine <= others <= all_
    assert statistics.host.prefill_units == 3


def test_requests_that_never_ran_did_no_work(build: Build) -> None:
    gate = Gate()
    core = build(gate=gate)
    first = core.submit(request(PROMPT[:60], 3), Session())
    gate.arrive()
    waiting = core.submit(request(PROMPT[:60], 3), Session())
    waiting.cancel()
    gate.open()
    [done] = list(waiting)
    assert done.statistics.finish_reason is FinishReason.CANCELLED  # type: ignore[union-attr]
    assert done.statistics.host == HostWork()  # type: ignore[union-attr]
    assert done.statistics.reuse_path == "root"  # type: ignore[union-attr]
    drain(first)


@pytest.mark.parametrize("width", [1, 4])
def test_outputs_say_how_far_they_are(build: Build, width: int) -> None:
    core = build(width=width, drafts=Guesses())
    _, statistics, events = drain(core.submit(request(PROMPT, 30), Session()))
    outputs = [event for event in events if isinstance(event, Output)]
    counts = [event.generated for event in outputs]
    assert counts == sorted(counts)
    assert (counts[0], counts[-1]) == (1, 30)
    if width == 1:
        assert counts == list(range(1, 31))
    times = [event.seconds for event in outputs]
    assert times[0] == 0.0
    assert times == sorted(times)
    assert statistics.first_token_seconds is not None
    assert 0 < times[-1] <= statistics.total_seconds - statistics.first_token_seconds


def test_drafts_are_counted_for_each_request(build: Build) -> None:
    core = build(width=4, drafts=Guesses(truths=lambda tokens: tokens % 3), concurrency=2)
    handles = [core.submit(request(PROMPT[:n], 30), Session()) for n in (40, 90)]
    every = [drain(handle)[1] for handle in handles]
    s = core.statistics()
    assert sum(one.drafted_tokens for one in every) == s.drafted_tokens
    assert sum(one.accepted_tokens for one in every) == s.accepted_tokens
    assert all(0 < one.accepted_tokens < one.drafted_tokens for one in every)
    assert all(1 + one.rounds + one.accepted_tokens == one.generated_tokens for one in every)


def test_the_stop_string_is_told(build: Build) -> None:
    class Stopping(Session):
        finish: FinishReason | None
        stop_string: str | None

        def accept(self, token_ids) -> Step:
            step = super().accept(token_ids)
            self.finish, self.stop_string = FinishReason.STOP_STRING, "END"
            return Step(step.deltas, self.finish, step.committed)

    core = build()
    assert drain(core.submit(request(PROMPT, 9), Stopping()))[1].stop_string == "END"
    assert drain(core.submit(request(PROMPT, 9), Session()))[1].stop_string is None


def test_where_reuse_came_from(build: Build) -> None:
    """A conversation of a model with a recurrent state: by the kinds of the snapshots."""
    core = build(context=512, snapshots=12)
    system, question = PROMPT[:70], PROMPT[70:130]
    opener = [1, 2, 3]

    def ask(*parts: list[int], marks: Marks) -> tuple[list[int], str, int]:
        ids, s, _ = drain(
            core.submit(request([token for part in parts for token in part], 6, marks=marks), Session())
        )
        settle(core)
        return ids, s.reuse_path, s.reused_tokens

    marks = Marks(boundaries=(0, 70, 130), preamble=70, opener=130)
    ids, path, reused = ask(system, question, opener, marks=marks)
    assert (path, reused) == (ReusePath.ROOT, 0)
    assert ask(system, question, opener, marks=marks)[1:] == (ReusePath.RESPONSE_REPLAY, 130)
    # The answer is rendered anew in the next turn.
    second = [9, 9, 9, 9]
    later = Marks(boundaries=(0, 70, 130, 134, 194), preamble=70, opener=194)
    turn = PROMPT[130:190]
    assert ask(system, question, second, turn, opener, marks=later)[1:] == (ReusePath.TURN_CLOSURE, 130)
    longer = Marks(boundaries=(0, 70, 130, 139, 199), preamble=70, opener=199)
    _, path, reused = ask(system, question, opener, ids, turn, opener, marks=longer)
    assert (path, reused) == (ReusePath.ENDPOINT, 138)
    assert ask(system, question, opener, ids, [5] * 60, opener, marks=longer)[1:] == (
        ReusePath.LONG_ANCHOR,
        139,
    )
    assert ask(system, [4] * 60, opener, marks=marks)[1:] == (ReusePath.STABLE_PREFIX, 70)
    s = core.statistics()
    assert s.selections == dict.fromkeys(ReusePath, 1)
    assert s.last_frontier == 70
    assert s.reused_tokens == 130 + 130 + 138 + 139 + 70
    assert s.copied_pages == 5  # none of the frontiers is a page's end
    assert s.captures_completed == s.snapshots + s.evicted_snapshots
    assert s.used_slots == s.snapshots


def test_where_reuse_came_from_without_a_state(build: Build) -> None:
    core = build(recurrent=False, context=512)
    marks = Marks(boundaries=(0, 70, 130), preamble=70, opener=130)

    def ask(prompt: list[int]) -> str:
        _, s, _ = drain(core.submit(request(prompt, 6, marks=marks), Session()))
        settle(core)
        return s.reuse_path

    assert ask([*PROMPT[:130], 1, 2, 3]) == ReusePath.ROOT
    assert ask([*PROMPT[:130], 1, 2, 3]) == ReusePath.RESPONSE_REPLAY
    assert ask([*PROMPT[:100], *[6] * 30, 1, 2, 3]) == ReusePath.ENDPOINT
    assert ask([*PROMPT[:66], *[6] * 30, 1, 2, 3]) == ReusePath.STABLE_PREFIX
    s = core.statistics()
    assert (s.captures_completed, s.captures_aborted, s.used_slots) == (0, 0, 0)
    assert s.total_pages == core.plan.pages + core.plan.copies
    assert s.free_pages + s.active_pages < s.total_pages


def test_captures_that_find_no_slot_are_counted(build: Build) -> None:
    core = build(context=512, snapshots=1, concurrency=2)
    gate_marks = Marks(boundaries=(0, 100, 200), preamble=100, opener=210)
    for shift in range(3):
        prompt = [(token + shift) % 97 for token in PROMPT[:220]]
        drain(core.submit(request(prompt, 4, marks=gate_marks), Session()))
    settle(core)
    s = core.statistics()
    assert s.captures_completed > 1
    assert s.captures_completed == s.snapshots + s.evicted_snapshots
