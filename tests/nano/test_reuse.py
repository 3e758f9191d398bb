"""What later requests take over from earlier ones, and requests side by side."""

from collections.abc import Iterator
from typing import Any

import pytest

from bench.tasks import canonical_jsonl
from bench.tasks.run import Outcome
from bench.tasks.task import Task
from ninfer.api import Engine, EngineOptions, FinishReason, Output

from .asking import NANO, Answer, ask, held_out, options, read

LIST = held_out("kv2048", 0)


@pytest.fixture
def fresh() -> Iterator[Engine]:
    """With an empty cache."""
    with Engine.load(NANO, EngineOptions(max_context=4096, threads=1)) as engine:
        yield engine


@pytest.fixture(scope="module")
def crowd() -> Iterator[Engine]:
    """Eight at a time."""
    choice = EngineOptions(max_context=2048, max_concurrency=8, kv_capacity=8192, threads=1)
    with Engine.load(NANO, choice) as engine:
        yield engine


def follow_up(line: int) -> tuple[list[dict[str, Any]], str]:
    """The list's question and answer, then a question about another line of it; and that line's value."""
    lines = [line for line in LIST.messages[-1]["content"].splitlines() if ": " in line]
    key, value = lines[line].split(": ")
    turn = [{"role": "assistant", **LIST.answer}, {"role": "user", "content": f"What is the value of {key}?"}]
    return [*LIST.messages, *turn], value


def assert_continued(answer: Answer, value: str) -> None:
    """Right, although all but the last turn was there already."""
    assert answer.reply.content == value
    assert 0 < answer.statistics.prompt_tokens - answer.reused < 64


def test_questions_about_one_list_compute_it_once(fresh: Engine) -> None:
    first = ask(fresh, LIST, prefix_reuse=True)
    assert (first.outcome, first.reused) == (Outcome.PASSED, 0)
    for line in (5, -8, 60):
        messages, value = follow_up(line)
        assert_continued(ask(fresh, LIST, messages, prefix_reuse=True), value)
    messages, value = follow_up(60)
    assert_continued(ask(fresh, LIST, messages, prefix_reuse=True), value)


def test_other_conversations_do_not_push_the_list_out(fresh: Engine) -> None:
    """Its last message is edited although the slots for states hold more than this conversation."""
    for index in range(4):
        ask(fresh, held_out("tool_call", index), prefix_reuse=True)
    ask(fresh, LIST, prefix_reuse=True)
    for line in (5, -8, 60):
        messages, value = follow_up(line)
        assert_continued(ask(fresh, LIST, messages, prefix_reuse=True), value)


def test_a_cancelled_answer_leaves_the_list_behind(fresh: Engine) -> None:
    messages, value = follow_up(30)
    stories = [*LIST.messages, {"role": "assistant", **LIST.answer}, canonical_jsonl().messages[0]]
    generation = fresh.chat(stories, options(LIST, max_new=500, prefix_reuse=True))
    events = []
    for event in generation:
        events.append(event)
        if isinstance(event, Output):
            generation.cancel()
    cancelled = read(events, LIST)
    assert cancelled.finish is FinishReason.CANCELLED
    assert 0 < cancelled.statistics.generated_tokens < 500
    assert_continued(ask(fresh, LIST, messages, prefix_reuse=True), value)
    whole = ask(fresh, canonical_jsonl(), stories, max_new=100, prefix_reuse=True)
    assert whole.reused > 0.9 * whole.statistics.prompt_tokens
    assert whole.ids[: len(cancelled.ids)] == cancelled.ids


def eight() -> list[tuple[Task, dict[str, Any]]]:
    """Prompts of 20 to 1,400 tokens, answers of 3 to 160; two are sampled."""
    return [
        (canonical_jsonl(), {"max_new": 160}),
        (held_out("add2", 0), {}),
        (held_out("needle", 0), {}),
        (held_out("arith", 0), {}),
        (held_out("story", 0), {"temperature": 0.9, "seed": 7, "max_new": 120}),
        (held_out("tool_call", 1), {}),
        (held_out("kv512", 0), {}),
        (held_out("story", 1), {"temperature": 0.9, "seed": 8, "max_new": 80}),
    ]


def test_eight_at_a_time_answer_as_one_by_one(crowd: Engine) -> None:
    serial = [ask(crowd, task, **changes) for task, changes in eight()]
    before = crowd.statistics()
    generations = [
        crowd.chat(task.messages, options(task, **changes), tools=task.tools or None)
        for task, changes in eight()
    ]
    together = [read(generation, task) for generation, (task, _) in zip(generations, eight(), strict=True)]
    after = crowd.statistics()
    rounds, rows = after.rounds - before.rounds, after.row_rounds - before.row_rounds
    assert rows > 1.5 * rounds  # they did run together
    assert [answer.ids for answer in together] == [answer.ids for answer in serial]
    assert [answer.pieces for answer in together] == [answer.pieces for answer in serial]
    assert [together[index].outcome for index in (1, 2, 3, 5, 6)] == [Outcome.PASSED] * 5


def test_a_seed_gives_its_text_again(crowd: Engine) -> None:
    task = held_out("story", 0)
    one, again, other = (ask(crowd, task, temperature=1.0, seed=seed, max_new=100) for seed in (3, 3, 4))
    assert one.ids == again.ids != other.ids
    assert one.pieces == again.pieces
    # By the model's own preset as well.
    assert ask(crowd, task, temperature=None, seed=3).ids == ask(crowd, task, temperature=None, seed=3).ids
