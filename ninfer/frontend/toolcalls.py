"""Tool calls in an answer, read while it is being written: leniently, but nothing that was written gets lost.

The form is that of `calls`. A call begins once its declared name is complete, and no later text takes it
back: where it turns out malformed, the call is closed with the arguments it has, and the rest of its text is
content; so is the whole text of what never became a call. Text parameters stream while they arrive, others
are given when they are complete. An answer that ends inside a call closes it: a text parameter with what
there is of it, while another one that isn't complete is content.

Accepted beyond the strict form, because it can mean only one thing:

- no `</function>`, no `</tool_call>`, or several functions in one `<tool_call>`;
- no `</parameter>`, where an answer that ends with closing markers leaves the parameter open: it ended before
  the first of them, or before the marker of another parameter that is declared and not yet given;
- space or quotes around a name, and any name that is declared;
- the form `<tool_call>{"name": NAME, "arguments": {...}}</tool_call>` of other models.

Space before the first call, around calls and between their parts is not content.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ninfer.events import Channel
from ninfer.frontend.callevents import (
    CallArguments,
    CallBegan,
    CallEnded,
    CallEvent,
    CallReport,
    ContentText,
)
from ninfer.frontend.calls import (
    CLOSE,
    FUNCTION,
    FUNCTION_CLOSE,
    MAX_NAME,
    NAME,
    OPEN,
    PARAMETER,
    PARAMETER_CLOSE,
    CallRegion,
    Failure,
)
from ninfer.frontend.callvalues import SPACE, ArrivingValue, DeclaredTool, declared_tools, encoded

__all__ = [
    "CallArguments",
    "CallBegan",
    "CallEnded",
    "CallEvent",
    "CallParser",
    "CallReport",
    "ContentText",
]

_MAX_KEY = 1024
_MAX_SECOND_LOOKS = 32
_MARKERS = (PARAMETER, PARAMETER_CLOSE, FUNCTION_CLOSE, CLOSE)
_ANY_MARKER = re.compile("|".join(_MARKERS))
# Closing markers that may be the end of the answer. Bounded, as each new piece is matched from the beginning.
_SOME_SPACE = rf"[{SPACE}]{{0,64}}"
_CLOSERS = re.compile(f"(?:{FUNCTION_CLOSE}{_SOME_SPACE})?(?:{CLOSE}{_SOME_SPACE})?")
_CLOSED_AT_END = re.compile(rf"(?:{FUNCTION_CLOSE}|{CLOSE})[{SPACE}]*\Z")
_JSON_STRUCTURE = re.compile(r'\\.|["{}\[\]]', re.DOTALL)


class CallParser:
    """Reads one answer. Time per piece is amortised linear in its text; single-threaded."""

    def __init__(self, tools: Sequence[Mapping[str, Any]]) -> None:
        """`tools` are the declared functions, OpenAI form."""
        self._declared = declared_tools(tools)
        self._text = ""
        """Received and not yet decided."""
        self._state: Callable[[], bool] = self._content
        """Decides a part of the text; False if that needs more text."""
        self._events: list[CallEvent] = []
        self._space: list[str] = []
        self._behind_call = False
        self._raw: list[str] = []
        """What has to be content if no call begins."""
        self._region = CallRegion()
        self._tool = DeclaredTool(None)
        self._name = ""
        self._pieces: list[str] = []
        self._seen: set[str] = set()
        self._value = ArrivingValue("", streams=False)
        self._nesting, self._quoted = 0, False
        self._second_looks = 0
        self.report = CallReport()

    def feed(self, channel: Channel, text: str) -> list[CallEvent]:
        """Take in new text of the visible answer. The session knows a call only by its markers: its TOOL text
        may turn out to be content, and CONTENT to be the rest of a call, but no call begins there."""
        if channel is Channel.CONTENT and self._state == self._content and not self._text:
            self._say(text)
        else:
            self._text += text
            self._run()
        return self._take_events()

    def close(self) -> list[CallEvent]:
        """The answer is over: decide what was still open."""
        self._finish()
        self._flush_space()
        return self._take_events()

    def _run(self) -> None:
        while self._state():
            pass

    # Content

    def _content(self) -> bool:
        before, marker, after = self._text.partition(OPEN)
        if not marker:
            held = _held(self._text, (OPEN,))
            self._say(self._text[: len(self._text) - held])
            self._text = self._text[len(self._text) - held :]
            return False
        self._say(before)
        self._count(marker_seen=True)
        self._raw, self._text, self._state = [OPEN], after, self._opened
        return True

    def _say(self, text: str) -> None:
        """Publish content, except the space at its end: a call may follow."""
        if self._behind_call:
            text = text.lstrip(SPACE)
            self._behind_call = not text
        bare = text.rstrip(SPACE)
        if bare:
            if self.report.structured_calls:
                self._fall_back("trailing_content")
            self._flush_space()
            self._events.append(ContentText(bare))
        if len(bare) < len(text):
            self._space.append(text[len(bare) :])

    def _flush_space(self) -> None:
        if self._space:
            self._events.append(ContentText("".join(self._space)))
            self._space.clear()

    def _skipped(self) -> bool:
        """In the rest of something that isn't a call."""
        size = self._region.feed(self._text)
        self._say(self._text[:size])
        self._text = self._text[size:]
        if self._region.closed:
            self._state = self._content
        return bool(self._text)

    def _skip(self, failure: Failure) -> bool:
        """The rest of the region is content, whatever it spells."""
        self._fall_back(failure)
        self._say("".join(self._raw))
        self._raw, self._region, self._state = [], CallRegion(), self._skipped
        return True

    def _fall_back(self, failure: Failure) -> None:
        if self.report.fallback == "none":
            self._count(fallback=failure)

    # The beginning of a call

    def _opened(self) -> bool:
        self._keep_space()
        if self._text.startswith(FUNCTION):
            self._raw.append(FUNCTION)
            self._text, self._state = self._text[len(FUNCTION) :], self._named
            return True
        if self._text.startswith("{"):
            self._nesting, self._quoted, self._state = 0, False, self._json
            self._value = ArrivingValue("", streams=False)
            return True
        if FUNCTION.startswith(self._text):
            return False
        self._fall_back("malformed_structure")  # the marker alone: another may follow at once
        self._say("".join(self._raw))
        self._state = self._content
        return True

    def _named(self) -> bool:
        name, bracket, rest = self._text.partition(">")
        if not bracket:
            return len(name) > 2 * MAX_NAME and self._skip("invalid_tool_name")
        known = name if name in self._declared else name.strip(SPACE + "\"'")
        if known not in self._declared:
            return self._skip("undeclared_tool" if NAME.fullmatch(name) else "invalid_tool_name")
        self._begin(known)
        self._text, self._state = rest, self._parameters
        return True

    def _begin(self, name: str) -> None:
        self._space.clear()
        self._raw = []
        self._behind_call = False
        self._name, self._tool, self._pieces, self._seen = name, self._declared[name], [], set()
        self._events.append(CallBegan(self.report.structured_calls, name))
        self._count(structured_calls=self.report.structured_calls + 1)

    # Parameters

    def _parameters(self) -> bool:
        self._text = self._text.lstrip(SPACE)
        if self._text.startswith(PARAMETER):
            key, bracket, rest = self._text[len(PARAMETER) :].partition(">")
            if not bracket and len(key) <= _MAX_KEY:
                return False
            if not bracket or not key:
                return self._break_off("malformed_structure")
            if key in self._seen:
                return self._break_off("duplicate_parameter")
            self._seen.add(key)
            self._value = ArrivingValue(key, streams=self._tool.is_text(key))
            if self._value.streams:
                self._member(key, '"')
            self._text, self._state = rest, self._in_value
            return True
        if self._text.startswith(FUNCTION_CLOSE):
            self._text = self._text[len(FUNCTION_CLOSE) :]
            self._end(self._closing)
            return True
        if self._text.startswith(CLOSE):
            self._text = self._text[len(CLOSE) :]
            self._end(self._content)
            return True
        if any(marker.startswith(self._text) for marker in (PARAMETER, FUNCTION_CLOSE, CLOSE)):
            return False
        return self._break_off("malformed_structure")

    def _break_off(self, failure: Failure) -> bool:
        self._end(self._content)
        return self._skip(failure)

    def _member(self, key: str, json_piece: str) -> None:
        self._emit(("," if self._pieces else "{") + encoded(key) + ":" + json_piece)

    def _emit(self, json_piece: str) -> None:
        if json_piece:
            self._pieces.append(json_piece)
            self._events.append(CallArguments(self.report.structured_calls - 1, json_piece))

    def _end(self, then: Callable[[], bool]) -> None:
        self._emit("}" if self._pieces else "{}")
        index = self.report.structured_calls - 1
        self._events.append(CallEnded(index, self._name, "".join(self._pieces)))
        self._behind_call = True
        self._state = then

    def _closing(self) -> bool:
        """Behind `</function>`."""
        self._text = self._text.lstrip(SPACE)
        if self._text.startswith(CLOSE):
            self._text, self._state = self._text[len(CLOSE) :], self._content
            return True
        if self._text.startswith(FUNCTION):
            self._raw, self._text, self._state = [FUNCTION], self._text[len(FUNCTION) :], self._named
            return True
        if any(marker.startswith(self._text) for marker in (CLOSE, FUNCTION)):
            return False
        if not OPEN.startswith(self._text[: len(OPEN)]):
            self._fall_back("malformed_structure")
        self._state = self._content
        return True

    # Values

    def _in_value(self) -> bool:
        value, text, cursor = self._value, self._text, 0
        for match in _ANY_MARKER.finditer(text):
            marker = match[0]
            self._extend(text[cursor : match.start()])
            cursor = match.start()
            if marker == PARAMETER_CLOSE:
                value.depth -= 1
                if value.depth == 0:
                    self._text, self._state = text[match.end() :], self._parameters
                    self._settle()
                    return True
            elif value.depth == 1 and value.doubtful is None:
                ending = self._may_end(marker, text[cursor:])
                if ending is None:
                    self._text = text[cursor:]
                    return False
                if ending:
                    value.doubtful = []
            value.depth += marker == PARAMETER
            self._extend(marker)
            cursor = match.end()
        held = _held(text[cursor:], _MARKERS)
        self._extend(text[cursor : len(text) - held])
        self._text = text[len(text) - held :]
        return False

    def _may_end(self, marker: str, text: str) -> bool | None:
        """May an open value have ended, without a marker, where `text` begins with `marker`? None: that takes
        more text to say."""
        if marker == PARAMETER:
            key, bracket, _ = text[len(PARAMETER) :].partition(">")
            if not bracket and len(key) <= _MAX_KEY:
                return None
            return key not in self._seen and key in (self._tool.parameters or ())
        closers = _CLOSERS.match(text)
        rest = text[closers.end() :] if closers else text
        if any(marker.startswith(rest) for marker in (CLOSE, OPEN)):
            return None
        return rest.startswith(OPEN)

    def _extend(self, text: str) -> None:
        if self._value.doubtful is not None:
            self._value.doubtful.append(text)
        else:
            self._emit(self._value.add(text))

    def _settle(self) -> None:
        """The value is complete."""
        value = self._value
        doubtful, value.doubtful = value.doubtful, None
        if doubtful:
            self._emit(value.add("".join(doubtful)))
        if value.streams:
            self._emit(value.rest(framed=True) + '"')
            return
        argument = self._tool.argument(value.key, value.text)
        self._count(schema_mismatches=self.report.schema_mismatches + argument.mismatch)
        if argument.json is None:
            self._count(empty_arguments_omitted=self.report.empty_arguments_omitted + 1)
        else:
            self._member(value.key, argument.json)

    # A call as JSON

    def _json(self) -> bool:
        end = seen = 0
        for match in _JSON_STRUCTURE.finditer(self._text):
            seen, character = match.end(), match[0]
            if character == '"':
                self._quoted = not self._quoted
            elif not self._quoted and character in "{[":
                self._nesting += 1
            elif not self._quoted and character in "}]":
                self._nesting -= 1
                if self._nesting == 0:
                    end = seen
                    break
        if not end:
            held = len(self._text) > seen and self._text.endswith("\\")
            self._value.add(self._text[: len(self._text) - held])
            self._text = self._text[len(self._text) - held :]
            return False
        self._value.add(self._text[:end])
        call = _json_call(self._value.text)
        name = call[0] if call else ""
        if call is None or name not in self._declared:
            self._text = self._value.text + self._text[end:]
            return self._skip("undeclared_tool" if call else "malformed_structure")
        self._begin(name)
        self._pieces = [call[1]]
        self._events.append(CallArguments(self.report.structured_calls - 1, call[1]))
        self._events.append(CallEnded(self.report.structured_calls - 1, name, call[1]))
        self._behind_call = True
        self._text, self._state = self._text[end:], self._closing
        return True

    # The end of the answer

    def _finish(self) -> None:
        while self._state == self._in_value:
            self._finish_value()
        if self._state == self._parameters:
            self._fall_back("malformed_structure")
            self._end(self._content)
        elif self._state == self._json:
            self._raw.append(self._value.text)
        if self._state in (self._opened, self._named, self._json):
            self._fall_back("malformed_structure")
            self._say("".join(self._raw))
        self._say(self._text)
        self._text, self._state = "", self._content

    def _finish_value(self) -> None:
        """The answer ended inside a value. If it did so with closing markers, the value's own is missing, and
        what follows where it may have ended is read again."""
        value = self._value
        rest = "".join(value.doubtful or ()) + self._text
        if value.doubtful is None:
            ended = _CLOSERS.fullmatch(rest) is not None and rest != ""
        else:
            ended = _CLOSED_AT_END.search(rest) is not None and self._second_looks < _MAX_SECOND_LOOKS
        if ended:
            self._second_looks += 1
            value.doubtful = None
            self._settle()
            self._text, self._state = rest, self._parameters
            self._run()
            return
        self._fall_back("malformed_structure")
        if value.streams:
            self._emit(value.add(rest) + value.rest(framed=False) + '"')
            self._text = ""
        else:
            self._text = f"{PARAMETER}{value.key}>{value.text}{rest}"
        self._end(self._content)

    # Helpers

    def _keep_space(self) -> None:
        bare = self._text.lstrip(SPACE)
        self._raw.append(self._text[: len(self._text) - len(bare)])
        self._text = bare

    def _count(self, **counters: Any) -> None:
        self.report = replace(self.report, **counters)

    def _take_events(self) -> list[CallEvent]:
        """The events since the last time, neighbours of one kind joined."""
        joined: list[CallEvent] = []
        for event in self._events:
            last = joined[-1] if joined else None
            if isinstance(event, ContentText) and isinstance(last, ContentText):
                joined[-1] = ContentText(last.text + event.text)
            elif isinstance(event, CallArguments) and isinstance(last, CallArguments):
                joined[-1] = CallArguments(event.index, last.json_piece + event.json_piece)
            else:
                joined.append(event)
        self._events = []
        return joined


def _held(text: str, markers: Sequence[str]) -> int:
    """How many characters at the end of `text` may be the beginning of one of `markers`."""
    at = text.rfind("<")
    return len(text) - at if at >= 0 and any(marker.startswith(text[at:]) for marker in markers) else 0


def _json_call(text: str) -> tuple[str, str] | None:
    """Name and arguments (JSON) of a call as a JSON object; None if it is none or says more than that."""
    try:
        call = json.loads(text, object_pairs_hook=_members, parse_constant=_refuse)
        if not isinstance(call, dict) or not call.keys() <= {"name", "arguments"}:
            return None
        arguments = call.get("arguments", {})
        if not isinstance(call.get("name"), str) or not isinstance(arguments, dict):
            return None
        written = json.dumps(arguments, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
        written.encode()  # fails at halves of surrogate pairs
        return call["name"], written
    except (ValueError, RecursionError):
        return None


def _members(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) < len(pairs):
        raise ValueError("a member is given twice")
    return members


def _refuse(name: str) -> None:
    raise ValueError(f"{name} is not JSON")
