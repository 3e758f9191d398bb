"""Streaming one answer: which channel goes where, and what the history keeps."""

from types import SimpleNamespace
from typing import Any, cast

import pytest

from ninfer.api import Channel, Done, Engine, Generation, GenerationOptions, Output
from ninfer.cli.answer import Answerer

CALL = "\n\n<tool_call>\n<function=look>\n</function>\n</tool_call>"


def answer(*outputs: tuple[Channel, str]) -> dict[str, str]:
    events = [*(Output(channel, text) for channel, text in outputs), Done(cast(Any, None))]

    def chat(*_: object, **__: object) -> Generation:
        return Generation(cast(Any, events), cast(Any, None), cast(Any, None), 0.0)

    engine = cast(Engine, SimpleNamespace(chat=chat, description=None))
    answerer = Answerer(engine, GenerationOptions(), print_token_ids=False, quiet=True, chat=False)
    return answerer.answer([{"role": "user", "content": "Hi"}])


def test_a_call_is_printed_and_kept_like_content(capsys: pytest.CaptureFixture[str]) -> None:
    message = answer(
        (Channel.REASONING, "why"),
        (Channel.CONTENT, "Look."),
        (Channel.TOOL, CALL),
        (Channel.CONTENT, "Done."),
    )
    assert message == {
        "role": "assistant", "content": f"Look.{CALL}Done.", "reasoning_content": "why",
    }  # fmt: skip
    assert tuple(capsys.readouterr()) == (f"Look.{CALL}Done.\n", "why\n")


def test_a_call_right_behind_the_reasoning(capsys: pytest.CaptureFixture[str]) -> None:
    assert answer((Channel.REASONING, "why"), (Channel.TOOL, CALL[2:]))["content"] == CALL[2:]
    assert tuple(capsys.readouterr()) == (CALL[2:] + "\n", "why\n")
