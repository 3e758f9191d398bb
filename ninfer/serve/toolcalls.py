"""Which parser reads the tool calls of an answer, in the words of `calls`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from ninfer.events import Channel
from ninfer.frontend import toolcalls
from ninfer.frontend.toolcalls import CallParser
from ninfer.serve.calls import (
    AnswerEvent,
    CallArguments,
    CallBegan,
    CallEnded,
    GenerationRequest,
    Text,
    Tool,
)
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
    tools = callable_tools(request)
    return _Calls(tools) if tools else None


class _Calls:
    """The frontend's parser, in the words of `calls`."""

    def __init__(self, tools: Iterable[Tool]) -> None:
        self._parser = CallParser([tool.declared() for tool in tools])

    @property
    def report(self) -> CallReport:
        found = self._parser.report
        return CallReport(
            found.marker_seen,
            found.structured_calls,
            found.empty_arguments_omitted,
            found.schema_mismatches,
            found.fallback,
        )

    def feed(self, channel: Channel, text: str) -> Iterable[AnswerEvent]:
        return map(_translated, self._parser.feed(channel, text))

    def close(self) -> Iterable[AnswerEvent]:
        return map(_translated, self._parser.close())


def _translated(event: toolcalls.CallEvent) -> AnswerEvent:
    match event:
        case toolcalls.ContentText(text):
            return Text("content", text)
        case toolcalls.CallBegan(index, name):
            return CallBegan(index, name)
        case toolcalls.CallArguments(index, piece):
            return CallArguments(index, piece)
        case toolcalls.CallEnded(index, name, arguments):
            return CallEnded(index, name, arguments)
