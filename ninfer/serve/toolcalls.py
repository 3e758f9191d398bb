"""Which parser reads the tool calls of an answer, in the words of `calls`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from ninfer.events import Channel
from ninfer.serve.calls import AnswerEvent, GenerationRequest, Tool
from ninfer.serve.observer import CallReport


class Parser(Protocol):
    """Text of the answer behind its thinking in, `Text` and call events out; nothing is lost."""

    @property
    def report(self) -> CallReport: ...

    def feed(self, channel: Channel, text: str) -> Iterable[AnswerEvent]: ...

    def close(self) -> Iterable[AnswerEvent]: ...


def callable_tools(request: GenerationRequest) -> tuple[Tool, ...]:
    """The tools that the answer may call, in their order."""
    choice = request.tool_choice
    if choice.mode == "none":
        return ()
    if choice.names is None:
        return request.tools
    return tuple(tool for tool in request.tools if tool.name in choice.names)


def parser_for(request: GenerationRequest) -> Parser | None:
    """None if there is nothing to call: then all is text."""
    return None
