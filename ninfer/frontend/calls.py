"""Tool calls in an answer: their form, their extent while they are being written, and reading them strictly.

    <tool_call> <function=NAME> (<parameter=KEY>VALUE</parameter>)* </function> </tool_call>

with space (blank, tab, CR, LF) between the parts, one call or more up to the end of the answer. A VALUE is
free text and may spell markers itself: parameters in it nest, and others, the closing marker of the call
included, count only outside of parameters. So a call that leaves a parameter open never ends, and what
follows stays with it: only a parser that sees the whole answer can say what it was.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ninfer.frontend.callvalues import SPACE, DeclaredTool, declared_tools
from ninfer.frontend.stops import Scanner

OPEN, CLOSE = "<tool_call>", "</tool_call>"
FUNCTION, FUNCTION_CLOSE = "<function=", "</function>"
PARAMETER, PARAMETER_CLOSE = "<parameter=", "</parameter>"
MAX_NAME = 128
NAME = re.compile(rf"[A-Za-z0-9_-]{{1,{MAX_NAME}}}")
_NESTING = re.compile(f"{PARAMETER}|{PARAMETER_CLOSE}")

Failure = Literal[
    "malformed_structure", "duplicate_parameter", "invalid_tool_name", "undeclared_tool", "trailing_content"
]
"""Why text with a marker isn't a call, or isn't the end of the answer."""


class CallRegion:
    """The text of one call after its opening marker, followed in time linear in the text."""

    def __init__(self) -> None:
        self._scanner = Scanner((CLOSE, PARAMETER, PARAMETER_CLOSE))
        self._depth = 0
        self.closed = False
        """Has the closing marker come?"""

    def feed(self, piece: str) -> int:
        """How many characters of `piece` belong to the call: all, until it and the space after it end."""
        cursor = 0
        while not self.closed:
            pending = self._scanner.pending
            match = self._scanner.feed(piece[cursor:])
            if match is None:
                return len(piece)
            cursor += match.end - pending
            self._scanner.restart()
            if match.pattern == 0:
                self.closed = self._depth == 0
            else:
                self._depth = self._depth + 1 if match.pattern == 1 else max(0, self._depth - 1)
        return len(piece) - len(piece[cursor:].lstrip(SPACE))


@dataclass(frozen=True)
class Parsed:
    """An answer taken apart. `mismatches` arguments don't fit their schema."""

    content: str
    calls: tuple[tuple[str, dict[str, Any]], ...] = ()
    failure: Failure | None = None
    mismatches: int = 0


def parse_calls(text: str, tools: Sequence[Mapping[str, Any]]) -> Parsed:
    """The calls at the end of `text`, from the first marker from which all the rest is calls, strictly.

    `tools` are the declared functions, OpenAI form; without any the text is content. Where no marker begins
    calls, the failure is the first one's.
    """
    declared = declared_tools(tools)
    failure = None
    begin = text.find(OPEN) if declared else -1
    while begin >= 0:
        reader = _Reader(text, begin)
        try:
            calls = reader.calls(declared)
        except _Malformed as error:
            failure = failure or error.failure
            begin = text.find(OPEN, begin + 1)
        else:
            return Parsed(text[:begin].rstrip(SPACE), calls, None, reader.mismatches)
    return Parsed(text, failure=failure)


class _Malformed(Exception):
    """The text from a marker on isn't calls."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure)
        self.failure: Failure = failure


class _Reader:
    """Reads calls from `begin` on."""

    def __init__(self, text: str, begin: int) -> None:
        self._text, self._at = text, begin
        self.mismatches = 0

    def calls(self, declared: Mapping[str, DeclaredTool]) -> tuple[tuple[str, dict[str, Any]], ...]:
        calls = []
        while True:
            self._expect(OPEN)
            self._skip()
            calls.append(self._function(declared))
            self._skip()
            self._expect(CLOSE)
            self._skip()
            if self._at == len(self._text):
                return tuple(calls)
            if not self._text.startswith(OPEN, self._at):
                raise _Malformed("trailing_content")

    def _function(self, declared: Mapping[str, DeclaredTool]) -> tuple[str, dict[str, Any]]:
        self._expect(FUNCTION)
        name = self._until_bracket()
        if not NAME.fullmatch(name):
            raise _Malformed("invalid_tool_name")
        if name not in declared:
            raise _Malformed("undeclared_tool")
        arguments, seen = {}, set()
        self._skip()
        while not self._take(FUNCTION_CLOSE):
            self._expect(PARAMETER)
            key = self._until_bracket()
            if not key:
                raise _Malformed("malformed_structure")
            if key in seen:
                raise _Malformed("duplicate_parameter")
            seen.add(key)
            argument = declared[name].argument(key, self._value())
            self.mismatches += argument.mismatch
            if argument.json is not None:
                arguments[key] = json.loads(argument.json)
            self._skip()
        return name, arguments

    def _value(self) -> str:
        begin, depth = self._at, 1
        for match in _NESTING.finditer(self._text, begin):
            depth += 1 if match[0] == PARAMETER else -1
            if depth == 0:
                self._at = match.end()
                return self._text[begin : match.start()]
        raise _Malformed("malformed_structure")

    def _until_bracket(self) -> str:
        end = self._text.find(">", self._at)
        if end < 0:
            raise _Malformed("malformed_structure")
        begin, self._at = self._at, end + 1
        return self._text[begin:end]

    def _take(self, literal: str) -> bool:
        found = self._text.startswith(literal, self._at)
        self._at += len(literal) * found
        return found

    def _expect(self, literal: str) -> None:
        if not self._take(literal):
            raise _Malformed("malformed_structure")

    def _skip(self) -> None:
        while self._text[self._at : self._at + 1] in (*SPACE,):
            self._at += 1
