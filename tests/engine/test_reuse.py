"""What later requests take over from earlier ones: always exact, always counted, never lost without need."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest

from ninfer.engine import Core, Marks, Policy, Started
from ninfer.runtime.records import Unit
from tests.engine.guesses import Guesses, sometimes
from tests.engine.harness import Gate, Session, drain, request, settle
from tests.runtime.toy import expected_answer

Build = Callable[..., Core]
TEXT = [(17 * i + i // 97) % 97 for i in range(1000)]


@dataclass
class Asker:
    """Sends one request after the other; every answer must be right and every token accounted for."""

    core: Core
    recurrent: bool

    def __call__(
        self, prompt: Sequence[int], count: int | None = 6, marks: Marks | None = None, *, reuse: bool = True
    ) -> tuple[list[int], int]:
        """(ids, reused tokens)"""
        before = self.core.statistics()
        ids, statistics, _ = drain(
            self.core.submit(request(prompt, count, marks=marks, reuse=reuse), Session())
        )
        assert ids == expected_answer(prompt, len(ids), self.recurrent)
        after = self.core.statistics()
        assert after.prefill_tokens - before.prefill_tokens == len(prompt) - statistics.reused_tokens
        assert after.reused_tokens - before.reused_tokens == statistics.reused_tokens < len(prompt)
        settle(self.core)
        return ids, statistics.reused_tokens


@pytest.fixture(params=[True, False], ids=["recurrent", "plain"])
def recurrent(request: pytest.FixtureRequest) -> bool:
    return request.param


@pytest.mark.parametrize("tokens", [1, 2, 57, 58, 59, 60, 63, 64, 65, 121, 122, 123, 127, 128, 129, 200])
def test_the_next_turn_continues_where_the_last_one_ended(build: Build, recurrent: bool, tokens: int) -> None:
    ask = Asker(build(recurrent=recurrent), recurrent)
    prompt, frontier = TEXT[:tokens], 0
    for turn in range(4):
        ids, reused = ask(prompt)
        assert reused == frontier
        frontier = len(prompt) + len(ids) - 1  # the last token was said but not read
        prompt = [*prompt, *ids, 5, turn, 6]


def test_a_turn_that_begins_with_the_answer_only(build: Build, recurrent: bool) -> None:
    ask = Asker(build(recurrent=recurrent), recurrent)
    ids, _ = ask(TEXT[:100], 30)
    assert ask([*TEXT[:100], *ids])[1] == 129, "the last token was said but not read"


def test_the_same_answer_again(build: Build, recurrent: bool) -> None:
    ask = Asker(build(recurrent=recurrent), recurrent)
    marks = Marks(boundaries=(0, 130, 195), opener=195)
    for again in range(4):
        ids, reused = ask(TEXT[:199], 20, marks)
        assert reused == (0 if not again else 195 if recurrent else 198)
    # And the conversation goes on from its end all the same.
    assert ask([*TEXT[:199], *ids, 1, 2])[1] == 199 + 20 - 1


def test_an_edited_last_message_branches_at_its_beginning(build: Build, recurrent: bool) -> None:
    ask = Asker(build(recurrent=recurrent, context=1024), recurrent)
    ask(TEXT[:300], 10, Marks(boundaries=(0, 100, 217, 297), opener=297))
    for edit in range(3):
        edited = [*TEXT[:217], 50, 60 + edit, *TEXT[222:290], 1, 2, 3]
        _, reused = ask(edited, 10, Marks(boundaries=(0, 100, 217, 287), opener=287))
        assert reused == (217 if recurrent else 218 if edit else 217)


@pytest.mark.parametrize("anchors", [0, 1, 2])
def test_as_many_last_messages_branch_exactly_as_were_asked_for(build: Build, anchors: int) -> None:
    starts = [210, 140, 70]
    for index, start in enumerate(starts):
        # What branches off leaves snapshots of its own, so each has its engine.
        ask = Asker(build(context=1024, policy=Policy(turn_anchors=anchors)), True)
        ask(TEXT[:300], 10, Marks(boundaries=(0, 70, 140, 210, 297), opener=297))
        _, reused = ask([*TEXT[:start], 90 + index, 91], 3)
        assert reused == (start if index < anchors else 0)


def test_a_common_preamble_is_computed_once(build: Build, recurrent: bool) -> None:
    ask = Asker(build(recurrent=recurrent, context=1024, policy=Policy(turn_anchors=0)), recurrent)
    for talk in range(6):
        prompt = [*TEXT[:150], talk, *TEXT[300 + 40 * talk : 330 + 40 * talk]]
        ids, reused = ask(prompt, 10, Marks(boundaries=(0, 150), preamble=150, opener=None))
        assert reused == (150 if talk else 0)
        assert ask([*prompt, *ids, 9], 5)[1] == len(prompt) + 9


@pytest.mark.parametrize("off", ["engine", "request"])
def test_without_reuse_nothing_is_taken_and_nothing_is_left(build: Build, recurrent: bool, off: str) -> None:
    core = build(recurrent=recurrent, policy=Policy(reuse=off != "engine"))
    ask = Asker(core, recurrent)
    marks = Marks(boundaries=(0, 100), preamble=100, opener=195)
    if off == "request":
        ask(TEXT[:200], 6, marks)
    left = core.statistics()
    for _ in range(2):
        assert ask(TEXT[:200], 6, marks, reuse=off == "engine")[1] == 0
        assert ask(TEXT[500:600], 6, marks, reuse=off == "engine")[1] == 0
    now = core.statistics()
    assert (now.cached_blocks, now.snapshots) == (left.cached_blocks, left.snapshots)
    if off == "engine":
        assert now.cached_blocks == 0
    else:
        assert ask(TEXT[500:600], 6, marks)[1] == 0, "it has left nothing"


@pytest.mark.parametrize("tokens", [64, 100, 128, 150])
def test_the_smallest_pool_still_resumes(build: Build, recurrent: bool, tokens: int) -> None:
    # One lane that is promised all there is, and a cached tail page to be copied beside it.
    core = build(recurrent=recurrent, context=256, capacity=256)
    ask = Asker(core, recurrent)
    ids, _ = ask(TEXT[:tokens], 20)
    prompt = [*TEXT[:tokens], *ids, 3]
    for _ in range(3):
        ids, reused = ask(prompt, None)  # to the end of the context
        assert reused >= tokens + 19
        assert len(ids) == 256 - len(prompt) + 1
    assert core.plan.pages == 4


def test_a_pool_full_of_others_still_learns(build: Build, recurrent: bool) -> None:
    ask = Asker(build(recurrent=recurrent, context=256, snapshots=2), recurrent)
    for talk in range(12):
        prompt = [talk, *TEXT[:150]]
        ids, reused = ask(prompt, 20)
        assert reused == 0
        assert ask([*prompt, *ids, 7], 5)[1] == 151 + 19


def test_without_snapshots_a_recurrent_model_starts_over(build: Build) -> None:
    core = build(snapshots=0, concurrency=2)
    ask = Asker(core, True)
    for _ in range(3):
        ids, reused = ask(TEXT[:150], 6, Marks((0, 100), 100, 145))
        assert reused == 0
        assert ask([*TEXT[:150], *ids, 4])[1] == 0
    assert core.statistics().snapshots == 0


def test_one_snapshot_is_enough_for_a_conversation(build: Build) -> None:
    ask = Asker(build(snapshots=1, context=1024), True)
    prompt = TEXT[:150]
    for turn in range(6):
        ids, reused = ask(prompt, 20)
        assert turn == 0 or reused == len(prompt) - 4
        prompt = [*prompt, *ids, 1, 2, turn]


@pytest.mark.parametrize("width", [1, 4])
def test_two_go_on_from_one_end_at_the_same_time(build: Build, recurrent: bool, width: int) -> None:
    core = build(recurrent=recurrent, concurrency=4, width=width, drafts=Guesses(recurrent, sometimes))
    ask = Asker(core, recurrent)
    for tokens in (100, 122, 123, 124):
        ids, _ = ask(TEXT[tokens : 2 * tokens], 6)
        stem = [*TEXT[tokens : 2 * tokens], *ids]
        prompts = [[*stem, 40 + i] for i in range(4)]
        handles = [core.submit(request(prompt, 80), Session()) for prompt in prompts]
        for handle, prompt in zip(handles, prompts, strict=True):
            answer, statistics, _ = drain(handle)
            assert answer == expected_answer(prompt, 80, recurrent)
            assert statistics.reused_tokens >= len(stem) - 1
        settle(core)
        assert ask([*stem, 90])[1] >= len(stem) - 1, "the end is still there"


def test_what_a_running_request_has_read_is_shared(build: Build, recurrent: bool) -> None:
    gate = Gate()
    core = build(recurrent=recurrent, concurrency=3, gate=gate)
    marks = Marks(boundaries=(0, 150), preamble=150, opener=196)
    first = core.submit(request(TEXT[:200], 100, marks=marks), Session())
    while gate.arrive().unit is not Unit.ROUND:
        gate.step()
    same = core.submit(request(TEXT[:200], 40, marks=marks), Session())
    other = core.submit(request([*TEXT[:150], 77, 78], 40, marks=Marks((0, 150), 150)), Session())
    gate.open()
    answers = {}
    for name, handle in (("same", same), ("other", other), ("first", first)):
        ids, statistics, _ = drain(handle)
        answers[name] = statistics.reused_tokens
        prompt = [*TEXT[:150], 77, 78] if name == "other" else TEXT[:200]
        assert ids == expected_answer(prompt, len(ids), recurrent)
    assert answers == {"first": 0, "same": 196 if recurrent else 199, "other": 150}
    settle(core)


def test_a_prompt_that_waits_finds_what_was_learned_meanwhile(build: Build, recurrent: bool) -> None:
    gate = Gate()
    core = build(recurrent=recurrent, gate=gate)
    handles = [core.submit(request(TEXT[:150], 10), Session())]
    follow = [*TEXT[:150], *expected_answer(TEXT[:150], 10, recurrent), 3]
    handles.append(core.submit(request(follow, 10), Session()))
    gate.open()
    drain(handles[0])
    ids, statistics, _ = drain(handles[1])
    assert statistics.reused_tokens == 159
    assert ids == expected_answer(follow, 10, recurrent)
    settle(core)


def test_lanes_that_need_pages_take_cached_ones(build: Build, recurrent: bool) -> None:
    core = build(recurrent=recurrent, context=256, capacity=512, concurrency=2)
    ask = Asker(core, recurrent)
    for talk in range(4):
        ask([talk, *TEXT[:200]], 20)
    prompts = [[50 + i, *TEXT[300:530]] for i in range(2)]
    handles = [core.submit(request(prompt, None), Session()) for prompt in prompts]
    for handle, prompt in zip(handles, prompts, strict=True):
        assert drain(handle)[0] == expected_answer(prompt, 256 - 231 + 1, recurrent)
    settle(core)
    assert core._pools.cache.evicted_blocks > 0


def test_a_cleared_cache_is_a_new_one(build: Build, recurrent: bool) -> None:
    core = build(recurrent=recurrent)
    ask = Asker(core, recurrent)
    ids, _ = ask(TEXT[:150])
    core._pools.cache.clear()
    assert core.statistics().cached_blocks == core.statistics().snapshots == 0
    assert core.statistics().free_pages == core.plan.pages + core.plan.copies
    assert ask([*TEXT[:150], *ids, 3])[1] == 0


def test_started_tells_what_was_reused_before_anything_is_computed(build: Build) -> None:
    gate = Gate()
    core = build(gate=gate)
    gate.open()
    ids, _, _ = drain(core.submit(request(TEXT[:150], 10), Session()))
    handle = core.submit(request([*TEXT[:150], *ids, 3], 10), Session())
    assert next(iter(handle)) == Started(161, 159)
