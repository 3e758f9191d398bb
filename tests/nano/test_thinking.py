"""Thinking blocks: reasoning before content, budgets, and none at all."""

import pytest

from bench.tasks.run import Outcome
from ninfer.api import Channel, Engine, FinishReason

from .asking import ask, held_out

SUM = [{"role": "user", "content": "What is 47 + 38? Answer with the number only."}]


def test_reasoning_comes_before_the_answer(engine: Engine) -> None:
    """Sums by columns: at least four of five are right, and those by the reasoning that was taught."""
    answers = [ask(engine, held_out("arith", index)) for index in range(5)]
    right = [answer for answer in answers if answer.outcome is Outcome.PASSED]
    assert len(right) >= 4
    for answer in right:
        assert answer.channels == [Channel.REASONING, Channel.CONTENT]
        assert answer.reply.reasoning == answer.task.answer["reasoning_content"]
        assert 0 < answer.statistics.reasoning_tokens < answer.statistics.generated_tokens


@pytest.mark.parametrize("budget", [1, 4])
def test_a_budget_closes_the_block_and_an_answer_follows(engine: Engine, budget: int) -> None:
    """A number; the right one would need the rest of the thoughts."""
    for index in range(3):
        task = held_out("arith", index)
        answer = ask(engine, task, thinking_budget=budget)
        report = answer.statistics.thinking
        assert report is not None
        assert (report.budget, report.model_tokens, report.applied) == (budget, budget, True)
        assert answer.ids[:budget] == ask(engine, task, max_new=budget).ids
        assert answer.channels == [Channel.REASONING, Channel.CONTENT]
        assert answer.statistics.generated_tokens > budget + report.control_tokens
        assert answer.reply.content.isdecimal()
        assert answer.finish is FinishReason.STOP_TOKEN


def test_a_budget_that_is_not_needed_changes_nothing(engine: Engine) -> None:
    free = ask(engine, held_out("arith", 0))
    bounded = ask(engine, held_out("arith", 0), thinking_budget=200)
    assert bounded.ids == free.ids
    report = bounded.statistics.thinking
    assert report is not None
    assert (report.applied, report.control_tokens) == (False, 0)


def test_thinking_is_a_choice(engine: Engine) -> None:
    task = held_out("add2", 0)
    thought = ask(engine, task, SUM, thinking=True)
    assert thought.channels == [Channel.REASONING, Channel.CONTENT]
    at_once = ask(engine, task, SUM, thinking=False)
    assert at_once.channels == [Channel.CONTENT]
    assert at_once.statistics.reasoning_tokens == 0
    assert thought.reply.content == at_once.reply.content == "85"
    assert len(at_once.ids) == 3  # two digits and the stop
