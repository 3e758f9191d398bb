"""What an answer says, in one form for all protocols, whole or as the events of a stream, complete or not."""

from __future__ import annotations

import json
from typing import Any

from tests.serve.soak.asks import CHAT, MESSAGES

Said = dict[str, str]
"""Texts by where they stand in the answer: 'i.kind'. Those of a stream that was left are beginnings."""
INPUT, END = "input", "end"
"""Kinds that can't be compared by their beginnings."""


class Events:
    """Server-sent events out of pieces of bytes."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, piece: bytes) -> list[Any]:
        """The data of the events that are complete now; `[DONE]` is left out."""
        *blocks, self._rest = (self._rest + piece).split(b"\n\n")
        found = []
        for block in blocks:
            for line in block.split(b"\n"):
                if line.startswith(b"data: ") and line != b"data: [DONE]":
                    found.append(json.loads(line[6:]))
        return found


def failure(events: list[Any]) -> Any:
    """The error that a stream tells of, if it does."""
    for event in events:
        if event.get("error") or event.get("type") in ("error", "response.failed"):
            return event
    return None


def said(path: str, body: Any) -> Said:
    """Of a JSON body."""
    made: Said = {}
    if path == CHAT:
        for choice in body["choices"]:
            _add_chat(made, choice, choice["message"])
    elif path == MESSAGES:
        for index, block in enumerate(body["content"]):
            _add_block(made, index, block)
        made["0.end"] = str(body["stop_reason"])
    else:
        _add_response(made, body)
    return made


def said_in_stream(path: str, events: list[Any]) -> Said:
    """Of a stream's events."""
    made: Said = {}
    for event in events:
        if path == CHAT:
            for choice in event["choices"]:
                _add_chat(made, choice, choice["delta"])
        elif path == MESSAGES:
            _add_messages_event(made, event)
        elif event["type"] in ("response.completed", "response.incomplete"):
            made = {}
            _add_response(made, event["response"])
        else:
            _add_responses_event(made, event)
    return made


def whole(made: Said) -> Said:
    """With tool inputs as values, which streams and bodies may write in different ways."""
    return {
        place: json.dumps(json.loads(text), sort_keys=True) if place.endswith(INPUT) else text
        for place, text in made.items()
        if text
    }


def begins(part: Said, all_: Said) -> bool:
    """Is what was read before the client left the beginning of the answer?"""
    return all(
        all_.get(place, "").startswith(text)
        for place, text in part.items()
        if not place.endswith((INPUT, END))
    )


def _add(made: Said, place: str, text: str | None) -> None:
    if text:
        made[place] = made.get(place, "") + text


def _add_chat(made: Said, choice: Any, message: Any) -> None:
    at = choice["index"]
    _add(made, f"{at}.content", message.get("content"))
    _add(made, f"{at}.reasoning", message.get("reasoning_content"))
    for number, call in enumerate(message.get("tool_calls") or ()):
        function = call["function"]
        place = f"{at}.{call.get('index', number)}"
        _add(made, f"{place}.name", function.get("name"))
        _add(made, f"{place}.arguments", function.get("arguments"))
    _add_logprobs(made, at, (choice.get("logprobs") or {}).get("content"))
    _add(made, f"{at}.{END}", choice.get("finish_reason"))


def _add_logprobs(made: Said, at: int, tokens: Any) -> None:
    for token in tokens or ():
        top = [[t["token"], t["logprob"]] for t in token.get("top_logprobs", ())]
        _add(made, f"{at}.logprobs", json.dumps([token["token"], token["logprob"], top]))


def _add_block(made: Said, index: int, block: Any) -> None:
    _add(made, f"{index}.text", block.get("text"))
    _add(made, f"{index}.thinking", block.get("thinking"))
    if block["type"] == "tool_use":
        _add(made, f"{index}.name", block["name"])
        if block["input"]:  # a stream's comes in pieces afterwards
            _add(made, f"{index}.{INPUT}", json.dumps(block["input"]))


def _add_messages_event(made: Said, event: Any) -> None:
    match event["type"]:
        case "content_block_start":
            _add_block(made, event["index"], event["content_block"])
        case "content_block_delta":
            delta, at = event["delta"], event["index"]
            _add(made, f"{at}.text", delta.get("text"))
            _add(made, f"{at}.thinking", delta.get("thinking"))
            _add(made, f"{at}.{INPUT}", delta.get("partial_json"))
        case "message_delta":
            _add(made, f"0.{END}", event["delta"]["stop_reason"])


def _add_response(made: Said, body: Any) -> None:
    for index, item in enumerate(body["output"]):
        for part in item.get("content") or ():
            _add(made, f"{index}.text", part["text"])
            _add_logprobs(made, index, part.get("logprobs"))
        _add(made, f"{index}.name", item.get("name"))
        _add(made, f"{index}.arguments", item.get("arguments"))
    _add(made, f"0.{END}", body["status"])


def _add_responses_event(made: Said, event: Any) -> None:
    kind = event["type"].removeprefix("response.")
    if kind in ("output_text.delta", "reasoning_text.delta"):
        _add(made, f"{event['output_index']}.text", event["delta"])
    elif kind == "function_call_arguments.delta":
        _add(made, f"{event['output_index']}.arguments", event["delta"])
