"""A Chat Completions conversation as the frontend takes it: text only, one form for equal contents."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ninfer.serve.errors import ApiError
from ninfer.serve.fields import Fields, spelled
from ninfer.serve.tools import arguments_of

ROLES = ("system", "developer", "user", "assistant", "tool", "function")
_TEXT_PARTS = ("text", "input_text", "output_text")
_IMAGES = ("image_url", "input_image", "image", "video_url", "input_video", "video")


def read_messages(body: Fields) -> list[dict[str, Any]]:
    """The messages of a request, in the form of `frontend.messages`. Raises `ApiError` 400."""
    messages = body.array("messages")
    if not messages:
        body.refuse("messages", "must be a non-empty array")
    return [_message(fields) for fields in body.objects("messages")]


def _message(fields: Fields) -> dict[str, Any]:
    role = fields.get("role")
    if not isinstance(role, str) or role not in ROLES:
        fields.refuse("role", f"must be one of {', '.join(ROLES)}, not {spelled(role)}")
    name = fields.string("name")
    if role == "function":
        if not name:
            fields.refuse("name", "must be the name of the function")
        role = "tool"
    elif name and role != "tool":
        fields.refuse("name", "is not supported in a message of this role", "message_name_not_supported")
    content = _text(fields, role)
    message: dict[str, Any] = {"role": role, "content": content}
    reasoning = _reasoning(fields)
    if role == "assistant":
        if fields.get("audio") is not None:
            fields.refuse("audio", "is not supported; send the text", "modality_not_supported")
        message["content"] += fields.string("refusal") or ""
        if reasoning:
            message["reasoning_content"] = reasoning
        if calls := _calls(fields):
            message["tool_calls"] = calls
        return message
    if reasoning:
        fields.refuse("reasoning_content", "belongs to assistant messages only")
    if fields.get("role") == "tool":
        message["tool_call_id"] = fields.string("tool_call_id", required=True)
    return message


def _text(fields: Fields, role: str) -> str:
    content = fields.get("content")
    if isinstance(content, str):
        return content
    if content is None:
        if role in ("assistant", "tool"):
            return ""
        fields.refuse("content", "must be a string or an array of parts")
    if not isinstance(content, list):
        fields.refuse("content", f"must be a string or an array of parts, not {spelled(content)}")
    return "".join(_part(part, role) for part in fields.objects("content"))


def _part(part: Fields, role: str) -> str:
    kind = part.get("type")
    breakpoint_ = part.get("prompt_cache_breakpoint")
    if breakpoint_ is not None and breakpoint_ != {"mode": "explicit"}:
        part.refuse("prompt_cache_breakpoint", 'must be {"mode": "explicit"}', "invalid_cache_breakpoint")
    if kind in _TEXT_PARTS:
        return part.string("text", required=True) or ""
    if kind == "refusal" and role == "assistant":
        return part.string("refusal", required=True) or ""
    if kind not in _IMAGES or role not in ("user", "tool"):
        part.refuse(
            "type",
            f"must be text in a message of role {role}, not {spelled(kind)}",
            "modality_not_supported",
        )
    raise ApiError(
        400,
        f"{part.at('type')} is {kind}, but this server runs without vision; send text only.",
        param=part.at("type"),
        code="vision_disabled",
    )


def _reasoning(fields: Fields) -> str:
    """The two fields by which clients send reasoning back."""
    one, other = fields.string("reasoning_content") or "", fields.string("reasoning") or ""
    if one and other and one != other:
        fields.refuse("reasoning", "differs from reasoning_content; send one of them")
    return one or other


def _calls(fields: Fields) -> list[dict[str, Any]]:
    calls = []
    legacy = fields.object("function_call")
    if legacy is not None:
        calls.append(_call(legacy, None))
    for call in fields.objects("tool_calls"):
        call_id = call.string("id")
        kind = call.get("type") or "function"
        if kind == "custom":
            custom = call.object("custom") or call
            calls.append(_made(_name(custom), {"input": custom.string("input") or ""}, call_id))
        elif kind == "function":
            calls.append(_call(call.object("function") or call, call_id))
        else:
            call.refuse("type", f"must be function or custom, not {spelled(kind)}")
    return calls


def _call(function: Fields, call_id: str | None) -> dict[str, Any]:
    arguments = function.get("arguments")
    if arguments is not None and not isinstance(arguments, str | Mapping):
        function.refuse("arguments", f"must be a string that encodes an object, not {spelled(arguments)}")
    return _made(_name(function), arguments_of(arguments), call_id)


def _name(function: Fields) -> str:
    name = function.string("name", required=True)
    if not name:
        function.refuse("name", "must not be empty")
    return name


def _made(name: str, arguments: dict[str, Any], call_id: str | None) -> dict[str, Any]:
    call: dict[str, Any] = {"type": "function", "function": {"name": name, "arguments": arguments}}
    if call_id is not None:
        call["id"] = call_id
    return call
