"""Conversations: checking messages, and reading them from a file.

A checked message is a fresh dict with `role`, `content` (a string) and, where given, `reasoning_content`,
`tool_calls` (`[{"type": "function", "function": {"name", "arguments": dict}, "id"?}]`) and `tool_call_id`:
exactly what chat templates read.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from ninfer.errors import FrontendError

ROLES = ("system", "developer", "user", "assistant", "tool")
_MEMBERS = ("role", "content", "reasoning_content", "tool_calls", "tool_call_id")
_PART_KINDS = {"text": "text", "image": "image", "image_url": "image", "video": "video", "video_url": "video"}

Message = dict[str, Any]


def parse_messages_file(data: bytes) -> tuple[list[Message], list[Any] | None]:
    """Messages and tools (None if there are none) of a messages file.

    The file is UTF-8 JSON: a non-empty array of messages, or an object with `messages` and optional `tools`.
    Raises FrontendError, naming the message and the rule.
    """
    try:
        document = json.loads(data.decode("utf-8-sig"), parse_constant=_refuse_constant)
    except UnicodeDecodeError as error:
        raise FrontendError(f"The messages file is not UTF-8 (byte {error.start}).") from error
    except (ValueError, RecursionError) as error:
        raise FrontendError(f"The messages file is not valid JSON: {error}.") from error
    tools = None
    if isinstance(document, dict):
        for name in document:
            if name not in ("messages", "tools"):
                raise FrontendError(f"The messages file contains unsupported field {name!r:.80}.")
        tools = document.get("tools")
        if tools is not None and not isinstance(tools, list):
            raise FrontendError("The messages file's tools must be an array.")
        document = document.get("messages")
    if not isinstance(document, list):
        raise FrontendError("The messages file must hold an array of messages, bare or as `messages`.")
    return check_messages(document), tools or None


def check_messages(messages: Sequence[Any]) -> list[Message]:
    """Checked copies of `messages`; checking them again changes nothing. Raises FrontendError."""
    if not messages:
        raise FrontendError("The conversation has no messages; give at least one.")
    return [_check_message(message, f"Message {number}") for number, message in enumerate(messages, 1)]


def _check_message(message: Any, where: str) -> Message:
    if not isinstance(message, Mapping):
        _refuse(where, "must be an object")
    for name in message:
        if name not in _MEMBERS:
            _refuse(where, f"contains unsupported field {name!r:.80}")
    for name in ("role", "content"):
        if name not in message:
            _refuse(where, f"lacks {name!r}")
    role = message["role"]
    if role not in ROLES:
        _refuse(where, f"has role {role!r:.80}; it must be one of {', '.join(ROLES)}")
    checked: Message = {"role": role, "content": _content(message["content"], where)}

    reasoning = message.get("reasoning_content")
    if reasoning is not None:
        if not isinstance(reasoning, str):
            _refuse(where, "has a reasoning_content that is not a string")
        if role != "assistant" and reasoning:
            _refuse(where, "has reasoning_content, which only assistant messages may have")
        if role == "assistant":
            checked["reasoning_content"] = reasoning

    calls = message.get("tool_calls")
    if calls is not None:
        if role != "assistant":
            _refuse(where, "has tool_calls, which only assistant messages may have")
        if not isinstance(calls, Sequence) or isinstance(calls, str) or not calls:
            _refuse(where, "has tool_calls that are not a non-empty array")
        checked["tool_calls"] = [_call(call, f"{where}, tool call {n}") for n, call in enumerate(calls, 1)]

    call_id = message.get("tool_call_id")
    if call_id is not None:
        if role != "tool":
            _refuse(where, "has tool_call_id, which only tool messages may have")
        if not isinstance(call_id, str):
            _refuse(where, "has a tool_call_id that is not a string")
        checked["tool_call_id"] = call_id

    if message["content"] is None and calls is None:
        _refuse(where, "has empty content")
    return checked


def _content(content: Any, where: str) -> str:
    """The text of a content: a string, null (no text), or text parts, which are joined without separator."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence) or not content:
        _refuse(where, "has content that is neither a string, null nor a non-empty array of parts")
    return "".join(_part(part, f"{where}, part {number}") for number, part in enumerate(content, 1))


def _part(part: Any, where: str) -> str:
    if not isinstance(part, Mapping):
        _refuse(where, "must be an object")
    present = [name for name in _PART_KINDS if name in part]
    declared = part.get("type")
    if declared is None:
        if len(present) != 1:
            _refuse(where, "must have a type, or exactly one of text, image, image_url, video, video_url")
        declared = present[0]
    if not isinstance(declared, str) or declared not in _PART_KINDS:
        _refuse(where, f"has type {declared!r:.80}; it must be text, image or video")
    if _PART_KINDS[declared] != "text":
        _refuse(where, f"is a {_PART_KINDS[declared]}, but Vision is disabled for this Engine")
    if not isinstance(part.get("text"), str):
        _refuse(where, "lacks its text")
    return part["text"]


def _call(call: Any, where: str) -> dict[str, Any]:
    if not isinstance(call, Mapping):
        _refuse(where, "must be an object")
    if call.get("type", "function") != "function":
        _refuse(where, f"has type {call['type']!r:.80}; it must be 'function'")
    function = call.get("function", call)
    if not isinstance(function, Mapping):
        _refuse(where, "has a function that is not an object")
    name, arguments = function.get("name"), function.get("arguments")
    if not isinstance(name, str) or not name:
        _refuse(where, "lacks the function's name")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments, parse_constant=_refuse_constant)
        except (ValueError, RecursionError) as error:
            raise FrontendError(f"{where} has arguments that are not valid JSON: {error}.") from error
    if not isinstance(arguments, Mapping):
        _refuse(where, "must have arguments: an object, or a string that encodes one")
    checked: dict[str, Any] = {
        "type": "function",
        "function": {"name": name, "arguments": dict(arguments)},
    }
    call_id = call.get("id")
    if call_id is not None:
        if not isinstance(call_id, str):
            _refuse(where, "has an id that is not a string")
        checked["id"] = call_id
    return checked


def _refuse(where: str, what: str) -> NoReturn:
    raise FrontendError(f"{where} {what}.")


def _refuse_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is not a JSON number")
