"""Content blocks as text.

The same words give the same text however they come, as a string, as one block or as several, with or without
cache marks; otherwise a conversation that is sent again would not find its prefix.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from ninfer.serve.errors import invalid
from ninfer.serve.messages.fields import Json, as_list, as_object, as_text, flag, kind
from ninfer.serve.messages.tools import Toolbox

NO_IMAGE = "[image omitted: this model has no vision]"
_BILLING = re.compile(r"x-anthropic-billing-header:(?:[ \t]*[\w.-]+=[^;\n]*;)*[ \t]*\n*")
_SAYS_ERROR = re.compile(r"\s*(?:<\w*error>|\[?error\b)", re.IGNORECASE)


def read_blocks(content: Any, where: str) -> list[Json]:
    """The blocks of a message; a string is one text block."""
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    blocks = [as_object(block, f"{where}[{index}]") for index, block in enumerate(as_list(content, where))]
    for index, block in enumerate(blocks):
        as_text(block.get("type"), f"{where}[{index}].type")
    return blocks


def system_text(value: Any) -> str:
    """The text of the request's `system`, without the billing line that Claude Code puts first: it changes
    between requests and would keep them from sharing a prefix."""
    if value is None:
        return ""
    if isinstance(value, str):
        return value[billing.end() :] if (billing := _BILLING.match(value)) else value
    blocks = read_blocks(value, "system")
    return "".join(
        block_text(block, f"system[{index}]")
        for index, block in enumerate(blocks)
        if not (index == 0 and is_billing(block))
    )


def is_billing(block: Any) -> bool:
    """Is this the system block that only says who pays?"""
    if not isinstance(block, dict) or block.get("type") != "text":
        return False
    return isinstance(text := block.get("text"), str) and text.startswith("x-anthropic-billing-header:")


def block_text(block: Json, where: str) -> str:
    """What the model reads of a block that is neither thinking nor part of a tool call.

    Pictures and files become a note, and kinds that this server doesn't know too: a conversation that holds
    one goes on.
    """
    match block["type"]:
        case "text":
            return as_text(block.get("text"), f"{where}.text")
        case "image":
            return NO_IMAGE
        case "document":
            return _document(block, where)
        case "search_result":
            head = [part for name in ("title", "source") if isinstance(part := block.get(name), str)]
            return "\n".join([*head, _inner(block.get("content"), where)])
        case unknown:
            return _inner(block.get("content"), where) or f"[{unknown[:40]} omitted]"


def _document(block: Json, where: str) -> str:
    head = [part for name in ("title", "context") if isinstance(part := block.get(name), str) and part]
    source = as_object(block.get("source"), f"{where}.source")
    if source.get("type") == "text":
        body = as_text(source.get("data"), f"{where}.source.data")
    elif source.get("type") == "content":
        body = _inner(source.get("content"), where)
    else:
        body = "[document omitted: this server reads only documents that are sent as text]"
    return "\n".join([*head, body])


def _inner(content: Any, where: str) -> str:
    """The text inside a block, as far as it has some."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        return ""
    blocks = [
        block for block in content if isinstance(block, dict) and block.get("type") in ("text", "image")
    ]
    return "".join(block_text(block, where) for block in blocks)


def result_text(block: Json, where: str, box: Toolbox) -> str:
    """What the model reads of a tool result. A failure is marked, unless the text says so itself."""
    content = block.get("content")
    text = (
        ""
        if content is None
        else "".join(_result_parts(read_blocks(content, f"{where}.content"), where, box))
    )
    if not flag(block, "is_error", f"{where}.") or _SAYS_ERROR.match(text):
        return text
    return f"Error: {text}" if text else "Error"


def _result_parts(blocks: list[Json], where: str, box: Toolbox) -> Iterator[str]:
    names: list[str] = []
    for index, block in enumerate(blocks):
        place = f"{where}.content[{index}]"
        if block["type"] == "tool_reference":
            names.append(as_text(block.get("tool_name"), f"{place}.tool_name"))
            continue
        if names:
            yield box.definitions(names)
            names = []
        if block["type"] in ("tool_use", "tool_result", "thinking", "redacted_thinking"):
            raise invalid(f"{place} is {block['type']}, which can't stand inside a tool result.", place)
        yield block_text(block, place)
    if names:
        yield box.definitions(names)


def tool_input(block: Json, where: str) -> dict[str, Any]:
    """The arguments of an earlier call, whatever the client could make of them."""
    value = block.get("input")
    if not isinstance(value, dict):
        raise invalid(f"{where}.input must be an object, not {kind(value)}.", f"{where}.input")
    return value
