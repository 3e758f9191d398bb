"""Items of `input` in the one form in which they are stored and listed.

Clients leave ids, types and lists of parts out, send null for what they lack and members of their own. What
comes out of `normalize` has an id, a status and lists, and nothing else than the prompt and the store need.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable
from typing import Any

import orjson

from ninfer.serve.errors import invalid
from ninfer.serve.fields import Fields, spelled
from ninfer.serve.sealing import opened

Json = dict[str, Any]

ROLES = ("user", "assistant", "system", "developer")

_TEXT_PARTS = ("input_text", "output_text", "text")
_REFUSED: dict[str | None, str] = {
    "input_file": "file_inputs_not_supported",
    "input_audio": "audio_inputs_not_supported",
}
_ODD_PART = "content_type_not_supported"
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
    for entry in Fields({"input": raw}).objects("input"):
        item = _normalize(entry, stored)
        if item["id"] in seen:
            entry.refuse("id", f"is {item['id']!r:.80}, as of another item")
        seen.add(item["id"])
        items.append(item)
    return items


def _normalize(entry: Fields, stored: Callable[[str], Json]) -> Json:
    kind = entry.get("type")
    if kind is None:
        kind = "message" if "role" in entry.members else "item_reference" if "id" in entry.members else None
    if not isinstance(kind, str):
        entry.refuse("type", f"must be a string, not {spelled(kind)}")
    if kind == "item_reference":
        return stored(_named(entry, "id"))
    reader = _READERS.get(kind)
    if reader is not None:
        members = reader(entry)
    elif kind in ACTIONS or kind in ACTION_OUTPUTS or kind in _HOSTED:
        members = {name: value for name, value in entry.members.items() if name not in ("id", "type")}
    else:
        entry.refuse("type", f"is {spelled(kind)}, which is not supported", "item_type_not_supported")
    return {"id": entry.string("id") or new_id(_PREFIXES.get(kind, "item_")), "type": kind, **members}


def _named(entry: Fields, name: str) -> str:
    value = entry.string(name, required=True)
    return value or entry.refuse(name, "must not be empty")


def _status(entry: Fields) -> str:
    return entry.choice("status", ("completed", "in_progress", "incomplete")) or "completed"


def _message(entry: Fields) -> Json:
    entry.string("role", required=True)
    role = entry.choice("role", ROLES)
    content = entry.get("content")
    if isinstance(content, str):
        entry = Fields({**entry.members, "content": [{"type": "input_text", "text": content}]}, entry.path)
    elif content is None and role != "assistant":
        entry.refuse("content", "is missing")
    parts = [_message_part(part, role) for part in entry.objects("content")]
    return {"status": _status(entry), "role": role, "content": parts}


def _message_part(part: Fields, role: str | None) -> Json:
    kind = part.string("type", required=True)
    _check_breakpoint(part)
    if kind == "refusal" and role == "assistant":
        return {"type": "refusal", "refusal": part.string("refusal") or ""}
    if kind in ("input_image", "input_video"):
        raise invalid(
            f"{part.path} is of type {kind}, but this server has no vision.", "input", "vision_disabled"
        )
    if kind not in _TEXT_PARTS:
        part.refuse("type", f"is {spelled(kind)}, which is not supported", _REFUSED.get(kind, _ODD_PART))
    text = part.string("text", required=True)
    if role == "assistant":
        return {"type": "output_text", "annotations": [], "text": text}
    return {"type": "input_text", "text": text}


def _check_breakpoint(part: Fields) -> None:
    mark = part.get(_BREAKPOINT)
    if mark is not None and mark != {"mode": "explicit"}:
        part.refuse(_BREAKPOINT, 'must be {"mode": "explicit"}', "invalid_cache_breakpoint")


def _reasoning(entry: Fields) -> Json:
    content = entry.get("content")
    if isinstance(content, str):
        text = content
    else:
        text = "".join(part.string("text") or "" for part in entry.objects("content"))
    seal = entry.string("encrypted_content")
    if not text and seal is not None:
        try:
            text = opened(seal)
        except ValueError as error:
            entry.refuse("encrypted_content", f"is damaged: {error}", "invalid_encrypted_content")
    summary = [
        {"type": "summary_text", "text": part.string("text") or ""} for part in entry.objects("summary")
    ]
    members: Json = {
        "status": _status(entry),
        "summary": summary,
        "content": [{"type": "reasoning_text", "text": text}] if text else [],
    }
    if seal is not None:
        members["encrypted_content"] = seal
    return members


def _call(entry: Fields) -> Json:
    members: Json = {
        "status": _status(entry),
        "call_id": _named(entry, "call_id"),
        "name": _named(entry, "name"),
    }
    namespace = entry.string("namespace")
    if namespace:
        members["namespace"] = namespace
    return members


def _function_call(entry: Fields) -> Json:
    arguments = entry.get("arguments")
    if isinstance(arguments, dict):
        arguments = orjson.dumps(arguments).decode()
    elif arguments is not None:
        arguments = entry.string("arguments")
    return {**_call(entry), "arguments": "{}" if arguments is None else arguments}


def _custom_call(entry: Fields) -> Json:
    return {**_call(entry), "input": entry.string("input") or ""}


def _call_output(entry: Fields) -> Json:
    output = entry.get("output")
    if isinstance(output, list):
        for index, part in enumerate(output):
            if isinstance(part, dict):
                _check_breakpoint(Fields(part, f"{entry.at('output')}[{index}]"))
    elif output is None:
        output = ""
    elif not isinstance(output, str):
        output = orjson.dumps(output).decode()
    return {"status": _status(entry), "call_id": _named(entry, "call_id"), "output": output}


def _search(entry: Fields) -> Json:
    execution = entry.choice("execution", ("client", "server")) or "client"
    return {"status": _status(entry), "call_id": entry.string("call_id"), "execution": execution}


def _search_call(entry: Fields) -> Json:
    arguments = entry.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = orjson.loads(arguments)
        except orjson.JSONDecodeError:
            arguments = {"query": arguments}
    return {**_search(entry), "arguments": arguments if isinstance(arguments, dict) else {}}


def _search_output(entry: Fields) -> Json:
    return {**_search(entry), "tools": entry.array("tools") or []}


def _additional_tools(entry: Fields) -> Json:
    return {"role": entry.string("role") or "developer", "tools": entry.array("tools") or []}


_READERS: dict[str, Callable[[Fields], Json]] = {
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
