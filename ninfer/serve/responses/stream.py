"""From the events of an answer to the events of the Responses API, and the output's items on the way."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import orjson

from ninfer.events import FinishReason
from ninfer.serve.calls import AnswerEvent, CallArguments, CallBegan, CallEnded, Finished, Text, TokenLogprob
from ninfer.serve.custom import InputText
from ninfer.serve.errors import ApiError
from ninfer.serve.responses import response
from ninfer.serve.responses.items import Json, new_id
from ninfer.serve.responses.tools import Declared, Toolbox

_CALL_PREFIXES = {"function": "fc_", "custom": "ctc_", "search": "tsc_"}


@dataclass
class _OpenText:
    """A reasoning or message item that is being written."""

    channel: str
    id: str
    index: int
    pieces: list[str] = field(default_factory=list)
    logprobs: list[Json] = field(default_factory=list)


@dataclass
class _OpenCall:
    """A call's item that is being written."""

    tool: Declared
    id: str
    call_id: str
    index: int
    pieces: list[str] = field(default_factory=list)
    input: InputText = field(default_factory=InputText)


class ResponseStream:
    """Events of one response in order, each a dict with `type` and `sequence_number`.

    `begun` is the response object at the start. `encrypted`: reasoning items carry their text in a form to
    be returned. `logprobs`: text parts carry log-probabilities. After the last event, `response` is final.
    """

    def __init__(self, begun: Json, toolbox: Toolbox, *, encrypted: bool, logprobs: bool) -> None:
        self.response = begun
        self._toolbox, self._encrypted, self._logprobs = toolbox, encrypted, logprobs
        self._sequence = 0
        self._output: dict[int, Json] = {}  # finished items by their place
        self._places = 0
        self._text: _OpenText | None = None
        self._calls: dict[int, _OpenCall] = {}

    @property
    def output(self) -> list[Json]:
        """The items that are complete, in order."""
        return [self._output[index] for index in sorted(self._output)]

    def begin(self) -> Iterator[Json]:
        yield self._event("response.created", response=self.response)
        yield self._event("response.in_progress", response=self.response)

    def feed(self, event: AnswerEvent) -> Iterator[Json]:
        """The events that one event of the answer makes; `Finished` goes to `finish`."""
        match event:
            case Text(channel=channel, text=text, logprobs=logprobs):
                if not text and (self._text is None or self._text.channel != channel):
                    return  # log-probabilities alone open no item
                if self._text is None or self._text.channel != channel:
                    yield from self._close_text("completed")
                    yield from self._open_text(channel)
                yield from self._write(text, logprobs)
            case CallBegan(index=index, name=name):
                yield from self._close_text("completed")
                yield from self._open_call(index, name)
            case CallArguments(index=index, json=piece, cut=False):
                yield from self._argue(self._calls[index], piece)
            case CallEnded(index=index, cut=True):
                yield from self._close_cut_call(self._calls.pop(index))
            case CallEnded(index=index, arguments=arguments):
                yield from self._close_call(self._calls.pop(index), arguments, "completed")
            case _:
                pass

    def finish(self, event: Finished) -> Iterator[Json]:
        """Close what is open. Then `response` is final; the terminal event is `terminal`'s."""
        whole = event.reason in (FinishReason.STOP_TOKEN, FinishReason.STOP_STRING)
        status = "completed" if whole else "incomplete"
        yield from self._close_text(status)
        for index in list(self._calls):
            yield from self._close_cut_call(self._calls.pop(index))
        if whole and not self._places:
            yield from self._open_text("content")
            yield from self._close_text(status)
        self.response = response.finished(self.response, self.output, event.reason, event.usage)

    def fail(self, error: ApiError) -> None:
        """The answer broke off; items that were open are left out."""
        self.response = response.failed(self.response, self.output, error)

    def terminal(self) -> Json:
        """The last event."""
        status = self.response["status"]
        name = "incomplete" if status == "cancelled" else status
        return self._event(f"response.{name}", response=self.response)

    def _event(self, kind: str, **members: Any) -> Json:
        event = {"type": kind, "sequence_number": self._sequence, **members}
        self._sequence += 1
        return event

    def _place(self) -> int:
        self._places += 1
        return self._places - 1

    def _open_text(self, channel: str) -> Iterator[Json]:
        reasoning = channel == "reasoning"
        text = self._text = _OpenText(channel, new_id("rs_" if reasoning else "msg_"), self._place())
        yield self._event(
            "response.output_item.added", output_index=text.index, item=self._item(text, "in_progress", [])
        )
        yield self._about(text, "response.content_part.added", part=self._part(text, ""))

    def _write(self, piece: str, logprobs: tuple[TokenLogprob, ...]) -> Iterator[Json]:
        text = self._text
        assert text is not None
        text.pieces.append(piece)
        if text.channel == "reasoning":
            yield self._about(text, "response.reasoning_text.delta", delta=piece)
            return
        entries = response.logprob_objects(logprobs) if self._logprobs else []
        text.logprobs += entries
        yield self._about(text, "response.output_text.delta", delta=piece, logprobs=entries)

    def _close_text(self, status: str) -> Iterator[Json]:
        text, self._text = self._text, None
        if text is None:
            return
        whole = "".join(text.pieces)
        if text.channel == "reasoning":
            yield self._about(text, "response.reasoning_text.done", text=whole)
        else:
            yield self._about(text, "response.output_text.done", text=whole, logprobs=text.logprobs)
        part = self._part(text, whole)
        yield self._about(text, "response.content_part.done", part=part)
        item = self._item(text, status, [part])
        yield self._done(text.index, item)

    def _part(self, text: _OpenText, whole: str) -> Json:
        if text.channel == "reasoning":
            return response.reasoning_part(whole)
        return response.text_part(whole, list(text.logprobs) if self._logprobs else None)

    def _item(self, text: _OpenText, status: str, parts: list[Json]) -> Json:
        if text.channel == "reasoning":
            whole = "".join(text.pieces)
            return response.reasoning_item(text.id, status, whole, encrypted=self._encrypted)
        return response.message_item(text.id, status, parts)

    def _about(self, item: _OpenText, kind: str, **members: Any) -> Json:
        return self._event(kind, item_id=item.id, output_index=item.index, content_index=0, **members)

    def _open_call(self, index: int, name: str) -> Iterator[Json]:
        tool = self._toolbox[name]
        call = _OpenCall(tool, new_id(_CALL_PREFIXES[tool.kind]), new_id("call_"), self._place())
        self._calls[index] = call
        empty: object = {} if tool.kind == "search" else ""
        item = response.call_item(call.id, "in_progress", call.call_id, tool, empty)
        yield self._event("response.output_item.added", output_index=call.index, item=item)

    def _argue(self, call: _OpenCall, piece: str) -> Iterator[Json]:
        if piece:
            call.pieces.append(piece)
        if call.tool.kind == "function":
            yield self._delta(call, "response.function_call_arguments", piece)
        elif call.tool.kind == "custom" and (delta := call.input.feed(piece)):
            yield self._delta(call, "response.custom_tool_call_input", delta)

    def _close_cut_call(self, call: _OpenCall) -> Iterator[Json]:
        """The answer ended inside the call. Its arguments stay broken, so that no client executes half of
        it."""
        yield from self._close_call(call, "".join(call.pieces), "incomplete")

    def _close_call(self, call: _OpenCall, arguments: str, status: str) -> Iterator[Json]:
        tool = call.tool
        value: object = arguments
        if tool.kind == "function":
            if not call.pieces and arguments:
                yield self._delta(call, "response.function_call_arguments", arguments)
            named: Json = {"name": tool.name}
            if tool.namespace is not None:
                named["namespace"] = tool.namespace
            yield self._event(
                "response.function_call_arguments.done",
                item_id=call.id,
                output_index=call.index,
                arguments=arguments,
                **named,
            )
        elif tool.kind == "custom":
            if status == "completed" and (rest := call.input.end(arguments)):
                yield self._delta(call, "response.custom_tool_call_input", rest)
            value = call.input.text
            yield self._event(
                "response.custom_tool_call_input.done",
                item_id=call.id,
                output_index=call.index,
                input=value,
            )
        else:
            value = _object(arguments)
        yield self._done(call.index, response.call_item(call.id, status, call.call_id, tool, value))

    def _delta(self, call: _OpenCall, kind: str, delta: str) -> Json:
        return self._event(f"{kind}.delta", item_id=call.id, output_index=call.index, delta=delta)

    def _done(self, index: int, item: Json) -> Json:
        self._output[index] = item
        return self._event("response.output_item.done", output_index=index, item=item)


def _object(arguments: str) -> Json:
    """A search's arguments; empty if the answer was cut off inside them."""
    try:
        value = orjson.loads(arguments)
    except orjson.JSONDecodeError:
        value = None
    return value if isinstance(value, dict) else {}
