"""What one choice makes of engine events."""

from __future__ import annotations

import pytest

from ninfer.engine import Output
from ninfer.events import Channel
from ninfer.serve.answer import Choice
from ninfer.serve.calls import CallArguments, CallBegan, GenerationRequest, Protocol, Tool
from ninfer.serve.toolcalls import parser_for
from tests.serve.fakes import nano_frontend

TOOL = Tool("push", {"type": "object", "properties": {"files": {"type": "array"}}})


def test_a_call_whose_argument_takes_long_says_that_it_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("ninfer.serve.answer.perf_counter", lambda: now[0])
    request = GenerationRequest(Protocol.MESSAGES, "m", [], tools=(TOOL,))
    choice = Choice(nano_frontend(), parser_for(request), False, 0.0)

    def take(text: str, seconds: float) -> list[object]:
        now[0] = seconds
        return list(choice.take(Output(Channel.TOOL, text)))

    assert take("<tool_call>\n<function=push>\n<parameter=files>\n[", 0.0) == [CallBegan(0, "push")]
    assert take('"a"', 29.0) == []
    assert take(', "b"', 31.0) == [CallArguments(0, "")]
    assert take(', "c"', 32.0) == []
    assert take(', "d"', 61.0) == [CallArguments(0, "")]
    taken = take("]\n</parameter>\n</function>\n</tool_call>", 120.0)
    assert taken[0] == CallArguments(0, '{"files":["a", "b", "c", "d"]}')
    assert take("\n", 200.0) == []
