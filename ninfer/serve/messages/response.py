"""From the events of an answer to those of the Messages API, and from these to the body of a whole answer."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import orjson

from ninfer.events import FinishReason
from ninfer.serve.answer import QUIET_SECONDS
from ninfer.serve.calls import (
    AnswerEvent,
    Begun,
    CallArguments,
    CallBegan,
    CallEnded,
    Finished,
    Text,
    Usage,
)
from ninfer.serve.sealing import sealed

_STOP_REASONS = {
    FinishReason.OUTPUT_LIMIT: "max_tokens",
    FinishReason.CONTEXT_CAPACITY: "model_context_window_exceeded",
    FinishReason.STOP_STRING: "stop_sequence",
}

Event = dict[str, Any]


def new_id(prefix: str) -> str:
    """A fresh id, such as `msg_0123456789abcdef`."""
    return f"{prefix}_{secrets.token_hex(8)}"


class MessageEvents:
    """Turns an answer's events, in order, into those of its message.

    `model` is echoed. `omit_thinking`: its text goes into the signature instead. `prompt_tokens` count until
    the answer has begun. `clock` in seconds.
    """

    def __init__(
        self,
        model: str,
        *,
        prompt_tokens: int,
        omit_thinking: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.id = new_id("msg")
        self._model = model
        self._omit = omit_thinking
        self._clock = clock
        self._begun = Begun(prompt_tokens, 0)
        self._started = False
        self._index = -1  # of the last block
        self._open: str | None = None  # the last block's type, until it ends
        self._reasoning: list[str] = []
        self._input_sent = False
        self._cut = False
        self._last = 0.0

    def of(self, event: AnswerEvent) -> Iterator[Event]:
        """What `event` adds to the stream."""
        if isinstance(event, Begun):
            self._begun = event
        yield from self.start()
        match event:
            case Text(channel="reasoning", text=text) if text:
                yield from self._think(text)
            case Text(text=text) if text:
                if self._open != "text":
                    yield from self._begin({"type": "text", "text": ""})
                yield self._delta("text_delta", text=text)
            case CallBegan(name=name):
                block = {"type": "tool_use", "id": new_id("toolu"), "name": name, "input": {}}
                yield from self._begin(block)
                self._input_sent = False
            case CallArguments(json=piece, cut=False):
                self._input_sent |= piece != ""
                yield self._delta("input_json_delta", partial_json=piece)
            case CallEnded(arguments=arguments, cut=cut):
                # The input of a call that was cut stays broken, so that no client executes half of it.
                self._cut = cut
                if not self._input_sent and not cut:
                    yield self._delta("input_json_delta", partial_json=arguments)
                yield from self._end()
            case Finished():
                yield from self._finish(event)
            case _:
                pass

    def start(self) -> Iterator[Event]:
        """The message's beginning, unless it was sent."""
        if not self._started:
            self._started = True
            usage = _usage(Usage(self._begun.prompt_tokens, self._begun.cached_tokens, 0, 0))
            yield {
                "type": "message_start",
                "message": {
                    "id": self.id,
                    "type": "message",
                    "role": "assistant",
                    "model": self._model,
                    "content": [],
                    "stop_reason": None,
                    "stop_sequence": None,
                    "usage": usage,
                },
            }

    def _think(self, text: str) -> Iterator[Event]:
        if self._open != "thinking":
            yield from self._begin({"type": "thinking", "thinking": "", "signature": ""})
        if not self._omit:
            yield self._delta("thinking_delta", thinking=text)
            return
        self._reasoning.append(text)
        if self._clock() - self._last >= QUIET_SECONDS:
            yield self._delta("thinking_delta", thinking="")

    def _begin(self, block: Event) -> Iterator[Event]:
        yield from self._end()
        self._index += 1
        self._open = block["type"]
        self._last = self._clock()
        yield {"type": "content_block_start", "index": self._index, "content_block": block}

    def _end(self) -> Iterator[Event]:
        if self._open is None:
            return
        if self._open == "thinking":
            signature = sealed("".join(self._reasoning)) if self._omit else self.id
            self._reasoning.clear()
            yield self._delta("signature_delta", signature=signature)
        self._open = None
        yield {"type": "content_block_stop", "index": self._index}

    def _delta(self, kind: str, **members: str) -> Event:
        self._last = self._clock()
        return {"type": "content_block_delta", "index": self._index, "delta": {"type": kind, **members}}

    def _finish(self, event: Finished) -> Iterator[Event]:
        yield from self._end()
        reason = _STOP_REASONS.get(event.reason, "end_turn")
        if event.calls and not self._cut:
            reason = "tool_use"
        sequence = event.stop_string if reason == "stop_sequence" else None
        yield {
            "type": "message_delta",
            "delta": {"stop_reason": reason, "stop_sequence": sequence},
            "usage": _usage(event.usage),
        }
        yield {"type": "message_stop"}


def _usage(usage: Usage) -> Event:
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_creation_input_tokens": None,
        "cache_read_input_tokens": usage.cached_tokens,
        "cache_creation": None,
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"thinking_tokens": usage.reasoning_tokens},
        "server_tool_use": {"web_search_requests": 0, "web_fetch_requests": 0},
        "service_tier": None,
        "inference_geo": None,
    }


def whole_message(events: Iterable[Event]) -> Event:
    """The message that a client of the stream would have in the end."""
    message: Event = {}
    content: list[Event] = []
    pieces: list[str] = []
    for event in events:
        match event["type"]:
            case "message_start":
                message = {**event["message"], "content": content}
            case "content_block_start":
                content.append(dict(event["content_block"]))
                pieces = []
            case "content_block_delta":
                _add(content[-1], event["delta"], pieces)
            case "content_block_stop":
                block = content[-1]
                match block["type"]:
                    case "tool_use":
                        block["input"] = _parsed("".join(pieces))
                    case kind:
                        block[kind] = "".join(pieces)
            case "message_delta":
                message |= event["delta"]
                message["usage"] = event["usage"]
    return message


def _add(block: Event, delta: Event, pieces: list[str]) -> None:
    if delta["type"] == "signature_delta":
        block["signature"] = delta["signature"]
    else:
        pieces.append(next(value for name, value in delta.items() if name != "type"))


def _parsed(text: str) -> Any:
    """The input of a call; empty if the answer was cut inside it. Numbers too large and values too deep for
    the JSON writer are written as the model did."""
    try:
        value = json.loads(text)
    except RecursionError:
        return orjson.Fragment(text)
    except ValueError:
        return {}
    try:
        json.dumps(value, allow_nan=False)  # where numbers are too large for a float
        orjson.dumps([[[[value]]]])  # as deep as it will stand in the body
    except (ValueError, RecursionError, orjson.JSONEncodeError):
        return orjson.Fragment(text)
    return value
