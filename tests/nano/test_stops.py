"""Where an answer ends: the model's stop, stop strings and ids, limits. The task is the 32 records."""

import pytest

from bench.tasks import canonical_jsonl
from bench.tasks.run import Outcome
from ninfer.api import Channel, Engine, FinishReason

from .asking import ask, held_out

TASK = canonical_jsonl()
TEXT = TASK.answer["content"]


@pytest.mark.parametrize(
    "stop",
    [
        '{"id": 3,',  # of several tokens, at the beginning of a record
        '"warn"}\n{"id": 6',  # across records
        "0",  # inside a number
        ", ",
    ],
)
def test_a_stop_string_ends_the_answer_before_itself(engine: Engine, stop: str) -> None:
    answer = ask(engine, TASK, stop=(stop,))
    assert answer.finish is FinishReason.STOP_STRING
    assert answer.text(Channel.CONTENT) == TEXT[: TEXT.index(stop)]


def test_the_first_of_several_stops_counts(engine: Engine) -> None:
    answer = ask(engine, TASK, stop=("absent", '"id": 3', "warn"))
    assert answer.finish is FinishReason.STOP_STRING
    assert answer.text(Channel.CONTENT) == TEXT[: TEXT.index('"id": 3')]


def test_a_stop_string_that_does_not_come_costs_no_text(engine: Engine) -> None:
    """Its beginning does, and is held back until the next token decides."""
    task = held_out("function", 0)
    answer = ask(engine, task, stop=("\n\n\n", "return nothing at all"))
    assert (answer.outcome, answer.finish) == (Outcome.PASSED, FinishReason.STOP_TOKEN)
    assert answer.ids == ask(engine, task).ids


@pytest.mark.parametrize("limit", [1, 100])
def test_an_output_limit_is_exact(engine: Engine, limit: int) -> None:
    answer = ask(engine, TASK, max_new=limit)
    assert answer.finish is FinishReason.OUTPUT_LIMIT
    assert answer.statistics.generated_tokens == len(answer.ids) == limit
    text = answer.text(Channel.CONTENT)
    assert text
    assert TEXT.startswith(text)


def test_a_stop_id_ends_the_answer_and_is_not_shown(engine: Engine) -> None:
    [stop] = engine.frontend.encode('"}\n')
    answer = ask(engine, TASK, stop_token_ids=(stop,))
    assert answer.finish is FinishReason.STOP_TOKEN
    assert (answer.ids.count(stop), answer.ids[-1]) == (1, stop)
    assert answer.text(Channel.CONTENT) + '"}' == TEXT.splitlines()[0]


def test_the_models_stop_is_the_end_of_its_turn(engine: Engine) -> None:
    """It is counted, and not shown."""
    answer = ask(engine, held_out("add2", 0))
    text = answer.text(Channel.CONTENT)
    assert answer.finish is FinishReason.STOP_TOKEN
    assert engine.frontend.decode(answer.ids, keep_special=True) == text + "<|im_end|>"


def test_after_a_stop_the_same_question_is_answered_whole(engine: Engine) -> None:
    """A stop string was found behind tokens that the model had already been given; they leave no trace."""
    task = held_out("jsonl32_variant", 2)
    text = task.answer["content"]
    stop = text.splitlines()[2]
    cut = ask(engine, task, stop=(stop,), prefix_reuse=True)
    assert cut.text(Channel.CONTENT) == text[: text.index(stop)]
    whole = ask(engine, task, prefix_reuse=True)
    assert whole.reused > 0
    assert whole.reply.content == text
