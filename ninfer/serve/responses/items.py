"""Items of `input` in the one form in which they are stored and listed.

Clients leave ids, types and lists of parts out, send null for what they lack and members of their own. What
comes out of `normalize` has an id, a status and lists, and nothing else than the prompt and the store need.
"""

from __future__ import annotations

import base64
import binascii
import uuid
from collections.abc import Callable
from typing import Any

import orjson

from ninfer.serve.errors import invalid
from ninfer.serve.responses.fields import (
    Json,
    read_choice,
    read_list,
    read_name,
    read_object,
    read_text,
    shown,
)

ROLES = ("user", "assistant", "system", "developer")
SIGNATURE = "ninfer-reasoning.v1:"
"""Begins an `encrypted_content` of ours; the reasoning's UTF-8 text in Base64 follows."""

_TEXT_PARTS = ("input_text", "output_text", "text")
_PREFIXES = {
    "message": "msg_",
    "reasoning": "rs_",
    "function_call": "fc_",
    "function_call_output": "fco_",
    "custom_tool_call": "ctc_",
    "custom_tool_call_output": "ctco_",
    "tool_search_call": "tsc_",
    "tool_search_output": "tso_",
    "additional_tools": "at_",
}
# Calls of tools that have a shape of their own; the member that says what was asked.
ACTIONS = {
    "local_shell_call": "action",
    "shell_call": "action",
    "apply_patch_call": "operation",
    "computer_call": "action",
}
ACTION_OUTPUTS = tuple(f"{name}_output" for name in ACTIONS)
# What OpenAI's servers did for an earlier answer: of no use without its results, kept but not shown.
_HOSTED = (
    "web_search_call",
    "file_search_call",
    "code_interpreter_call",
    "image_generation_call",
    "mcp_call",
    "mcp_list_tools",
    "mcp_approval_request",
    "mcp_approval_response",
    "configuration_update",
    "program",
    "program_output",
)
_BREAKPOINT = "prompt_cache_breakpoint"


def new_id(prefix: str) -> str:
    """`prefix` and 32 hexadecimal digits."""
    return prefix + uuid.uuid4().hex


def normalize(raw: Any, stored: Callable[[str], Json]) -> list[Json]:
    """The items of `input`: a string is one user message, null is nothing.

    `stored` finds the item that an `item_reference` names, or raises. Raises ApiError, naming the member.
    """
    if isinstance(raw, str):
        raw = [{"role": "user", "content": raw}]
    items: list[Json] = []
    seen: set[str] = set()
    for index, entry in enumerate(read_list(raw, "input")):
        item = _normalize(entry, f"input[{index}]", stored)
        if item["id"] in seen:
            raise invalid(f"Two items of input have the id {item['id']!r:.80}.", f"input[{index}].id")
        seen.add(item["id"])
        items.append(item)
    return items


def sealed(text: str) -> str:
    """Reasoning as an `encrypted_content`, which clients return unread."""
    return SIGNATURE + base64.b64encode(text.encode()).decode()


def unsealed(content: str, param: str) -> str:
    """The reasoning in an `encrypted_content`; nothing if another server made it."""
    if not content.startswith(SIGNATURE):
        return ""
    try:
        return base64.b64decode(content[len(SIGNATURE) :], validate=True).decode()
    except (binascii.Error, ValueError) as error:
        raise invalid(f"{param} is damaged: {error}.", param, "invalid_encrypted_content") from error


def _normalize(entry: Any, where: str, stored: Callable[[str], Json]) -> Json:
    entry = read_object(entry, where) or {}
    kind = entry.get("type")
    if kind is None:
        kind = "message" if "role" in entry else "item_reference" if "id" in entry else None
    if not isinstance(kind, str):
        raise invalid(f"{where}.type must be a string, not {shown(kind)}.", f"{where}.type")
    if kind == "item_reference":
        return stored(read_name(entry.get("id"), f"{where}.id"))
    reader = _READERS.get(kind)
    if reader is not None:
        members = reader(entry, where)
    elif kind in ACTIONS or kind in ACTION_OUTPUTS or kind in _HOSTED:
        members = {name: value for name, value in entry.items() if name not in ("id", "type")}
    else:
        raise invalid(
            f"{where} has the type {shown(kind)}, which is not supported.", where, "item_type_not_supported"
        )
    given = entry.get("id")
    if given is not None and not isinstance(given, str):
        raise invalid(f"{where}.id must be a string, not {shown(given)}.", f"{where}.id")
    return {"id": given or new_id(_PREFIXES.get(kind, "item_")), "type": kind, **members}


def _status(entry: Json, where: str) -> str:
    allowed = ("completed", "in_progress", "incomplete")
    return read_choice(entry.get("status"), f"{where}.status", allowed) or "completed"


def _message(entry: Json, where: str) -> Json:
    role = read_choice(entry.get("role"), f"{where}.role", ROLES)
    if role is None:
        raise invalid(f"{where}.role is missing.", f"{where}.role")
    content = entry.get("content")
    if isinstance(content, str):
        content = [{"type": "input_text", "text": content}]
    elif content is None and role != "assistant":
        raise invalid(f"{where}.content is missing.", f"{where}.content")
    parts = [
        _message_part(part, f"{where}.content[{index}]", role)
        for index, part in enumerate(read_list(content, f"{where}.content"))
    ]
    return {"status": _status(entry, where), "role": role, "content": parts}


def _message_part(raw: Any, where: str, role: str) -> Json:
    part = read_object(raw, where) or {}
    kind = part.get("type")
    _check_breakpoint(part, where)
    if kind in _TEXT_PARTS:
        text = part.get("text")
        if not isinstance(text, str):
            raise invalid(f"{where}.text must be a string, not {shown(text)}.", f"{where}.text")
        if role == "assistant":
            return {"type": "output_text", "annotations": [], "text": text}
        return {"type": "input_text", "text": text}
    if kind == "refusal" and role == "assistant":
        return {"type": "refusal", "refusal": read_text(part.get("refusal"), f"{where}.refusal", default="")}
    if kind in ("input_image", "input_video"):
        what = kind.removeprefix("input_")
        raise invalid(
            f"{where} holds an image or a video ({what}), but this server has no vision.",
            "input",
            "vision_disabled",
        )
    code = {"input_file": "file_inputs_not_supported", "input_audio": "audio_inputs_not_supported"}
    raise invalid(
        f"{where} has the type {shown(kind)}, which is not supported.",
        where,
        code.get(kind, "content_type_not_supported") if isinstance(kind, str) else None,
    )


def _check_breakpoint(part: Json, where: str) -> None:
    mark = part.get(_BREAKPOINT)
    if mark is not None and mark != {"mode": "explicit"}:
        raise invalid(
            f'{where}.{_BREAKPOINT} must be {{"mode": "explicit"}}, not {shown(mark)}.',
            f"{where}.{_BREAKPOINT}",
            "invalid_cache_breakpoint",
        )


def _reasoning(entry: Json, where: str) -> Json:
    content, texts = entry.get("content"), []
    if isinstance(content, str):
        texts = [content]
    else:
        for index, raw in enumerate(read_list(content, f"{where}.content")):
            param = f"{where}.content[{index}]"
            part = read_object(raw, param) or {}
            texts.append(read_text(part.get("text"), f"{param}.text", default="") or "")
    sealed_text = read_text(entry.get("encrypted_content"), f"{where}.encrypted_content")
    text = "".join(texts) or unsealed(sealed_text or "", f"{where}.encrypted_content")
    members: Json = {
        "status": _status(entry, where),
        "summary": [
            {"type": "summary_text", "text": read_text(part.get("text"), f"{where}.summary", default="")}
            for part in read_list(entry.get("summary"), f"{where}.summary")
            if isinstance(part, dict)
        ],
        "content": [{"type": "reasoning_text", "text": text}] if text else [],
    }
    if sealed_text is not None:
        members["encrypted_content"] = sealed_text
    return members


def _call(entry: Json, where: str) -> Json:
    members: Json = {
        "status": _status(entry, where),
        "call_id": read_name(entry.get("call_id"), f"{where}.call_id"),
        "name": read_name(entry.get("name"), f"{where}.name"),
    }
    namespace = read_text(entry.get("namespace"), f"{where}.namespace")
    if namespace:
        members["namespace"] = namespace
    return members


def _function_call(entry: Json, where: str) -> Json:
    arguments = entry.get("arguments")
    if isinstance(arguments, dict):
        arguments = orjson.dumps(arguments).decode()
    return {
        **_call(entry, where),
        "arguments": read_text(arguments, f"{where}.arguments", default="{}"),
    }


def _custom_call(entry: Json, where: str) -> Json:
    return {**_call(entry, where), "input": read_text(entry.get("input"), f"{where}.input", default="")}


def _call_output(entry: Json, where: str) -> Json:
    output = entry.get("output")
    if isinstance(output, list):
        for index, part in enumerate(output):
            if isinstance(part, dict):
                _check_breakpoint(part, f"{where}.output[{index}]")
    elif output is None:
        output = ""
    elif not isinstance(output, str):
        output = orjson.dumps(output).decode()
    call_id = read_name(entry.get("call_id"), f"{where}.call_id")
    return {"status": _status(entry, where), "call_id": call_id, "output": output}


def _search_call(entry: Json, where: str) -> Json:
    arguments = entry.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = orjson.loads(arguments)
        except orjson.JSONDecodeError:
            arguments = {"query": arguments}
    return {
        "status": _status(entry, where),
        "call_id": read_text(entry.get("call_id"), f"{where}.call_id"),
        "execution": read_choice(entry.get("execution"), f"{where}.execution", ("client", "server"))
        or "client",
        "arguments": arguments if isinstance(arguments, dict) else {},
    }


def _search_output(entry: Json, where: str) -> Json:
    return {
        "status": _status(entry, where),
        "call_id": read_text(entry.get("call_id"), f"{where}.call_id"),
        "execution": read_choice(entry.get("execution"), f"{where}.execution", ("client", "server"))
        or "client",
        "tools": read_list(entry.get("tools"), f"{where}.tools"),
    }


def _additional_tools(entry: Json, where: str) -> Json:
    role = read_text(entry.get("role"), f"{where}.role", default="developer")
    return {"role": role, "tools": read_list(entry.get("tools"), f"{where}.tools")}


_READERS: dict[str, Callable[[Json, str], Json]] = {
    "message": _message,
    "reasoning": _reasoning,
    "function_call": _function_call,
    "custom_tool_call": _custom_call,
    "function_call_output": _call_output,
    "custom_tool_call_output": _call_output,
    "tool_search_call": _search_call,
    "tool_search_output": _search_output,
    "additional_tools": _additional_tools,
}
