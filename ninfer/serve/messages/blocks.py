"""Content blocks as text.

The same words give the same text however they come, as a string, as one block or as several, with or without
cache marks; otherwise a conversation that is sent again would not find its prefix.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from ninfer.serve.fields import Fields, spelled
from ninfer.serve.messages.tools import Toolbox

NO_IMAGE = "[image omitted: this model has no vision]"
NO_FILE = "[document omitted: this server reads only documents that are sent as text]"
_BILLING = re.compile(r"x-anthropic-billing-header:(?:[ \t]*[\w.-]+=[^;\n]*;)*[ \t]*\n*")
_SAYS_ERROR = re.compile(r"\s*(?:<\w*error>|\[?error\b)", re.IGNORECASE)


def read_blocks(owner: Fields, name: str = "content") -> list[Fields]:
    """The blocks in a member, each with a type; a string is one text block."""
    value = owner.get(name)
    if isinstance(value, str):
        return [Fields({"type": "text", "text": value}, owner.at(name))]
    if not isinstance(value, list):
        owner.refuse(name, f"must be a string or an array of blocks, not {spelled(value)}")
    blocks = list(owner.objects(name))
    for block in blocks:
        block.string("type", required=True)
    return blocks


def system_text(body: Fields) -> str:
    """The text of the request's `system`, without the billing line that Claude Code puts first: it changes
    between requests and would keep them from sharing a prefix."""
    value = body.get("system")
    if value is None:
        return ""
    if isinstance(value, str):
        return value[billing.end() :] if (billing := _BILLING.match(value)) else value
    return "".join(block_text(block) for block in system_blocks(body))


def system_blocks(body: Fields) -> list[Fields]:
    """The blocks of `system`, without the one that only says who pays."""
    blocks = read_blocks(body, "system")
    first = blocks[0].members if blocks else {}
    billing = first.get("type") == "text" and str(first.get("text")).startswith("x-anthropic-billing-header:")
    return blocks[1:] if billing else blocks


def block_text(block: Fields) -> str:
    """What the model reads of a block that is neither thinking nor part of a tool call.

    Pictures and files become a note, and kinds that this server doesn't know too: a conversation that holds
    one goes on.
    """
    match block.get("type"):
        case "text":
            return block.string("text", required=True) or ""
        case "image":
            return NO_IMAGE
        case "document":
            return _document(block)
        case "search_result":
            head = (block.string("title"), block.string("source"))
            return "\n".join(part for part in (*head, _inner(block)) if part)
        case kind:
            return _inner(block) or f"[{kind:.40} omitted]"


def _document(block: Fields) -> str:
    source = block.object("source") or Fields({}, block.at("source"))
    match source.get("type"):
        case "text":
            content = source.string("data", required=True)
        case "content":
            content = _inner(source)
        case _:
            content = NO_FILE
    parts = (block.string("title"), block.string("context"), content)
    return "\n".join(part for part in parts if part)


def _inner(owner: Fields) -> str:
    """The text inside a block, as far as it has some."""
    content = owner.get("content")
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        return ""
    blocks = (Fields(block, owner.at("content")) for block in content if isinstance(block, Mapping))
    return "".join(block_text(block) for block in blocks if block.get("type") in ("text", "image"))


def result_text(block: Fields, box: Toolbox) -> str:
    """What the model reads of a tool result. A failure is marked, unless the text says so itself."""
    text = "" if block.get("content") is None else "".join(_result_parts(read_blocks(block), box))
    if not block.boolean("is_error") or _SAYS_ERROR.match(text):
        return text
    return f"Error: {text}" if text else "Error"


def _result_parts(blocks: list[Fields], box: Toolbox) -> Iterator[str]:
    names: list[str] = []
    for block in blocks:
        kind = block.get("type")
        if kind == "tool_reference":
            names.append(block.string("tool_name", required=True) or "")
            continue
        if names:
            yield box.definitions(names)
            names.clear()
        if kind in ("tool_use", "tool_result", "thinking", "redacted_thinking"):
            block.refuse("type", f"is {kind}, which can't stand inside a tool result")
        yield block_text(block)
    if names:
        yield box.definitions(names)
