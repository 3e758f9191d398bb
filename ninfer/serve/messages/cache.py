"""Cache marks: prefixes are reused without them, so they are only checked."""

from __future__ import annotations

from collections.abc import Iterator

from ninfer.serve.fields import Fields
from ninfer.serve.messages.blocks import read_blocks, system_blocks

_LIMIT = 4


def check_cache_marks(body: Fields) -> None:
    """Raises a 400 for marks that the API doesn't allow."""
    last: str | None = None  # the lifetime that the last block's mark asks for; None without one
    any_block = False
    count = 0
    for block in _blocks(body):
        lifetime = _lifetime(block)
        if block.get("type") in ("thinking", "redacted_thinking"):
            if lifetime is not None:
                block.refuse("cache_control", "can't mark a block of thinking", "invalid_cache_control")
            continue
        count += lifetime is not None
        last, any_block = lifetime, True
    whole = _lifetime(body)
    if whole is not None and any_block:
        if last not in (None, whole):
            body.refuse(
                "cache_control", f"asks for {whole}, the last block for {last}", "conflicting_cache_ttl"
            )
        count += last is None
    if count > _LIMIT:
        body.refuse(
            "cache_control",
            f"marks {count} places of the request; at most {_LIMIT} are allowed",
            "too_many_cache_breakpoints",
        )


def _blocks(body: Fields) -> Iterator[Fields]:
    """Everything that can carry a mark, in the order of the prompt; where marks have no effect left out."""
    yield from body.objects("tools")
    if body.get("system"):
        yield from system_blocks(body)
    for message in body.objects("messages"):
        blocks = read_blocks(message)
        last_call = next((block for block in reversed(blocks) if block.get("type") == "tool_use"), None)
        for block in blocks:
            if block.get("type") == "tool_result" and block.get("content"):
                yield from read_blocks(block)
            if block.get("type") != "tool_use" or block is last_call:
                yield block


def _lifetime(block: Fields) -> str | None:
    """How long the mark asks to be kept, None without a mark."""
    mark = block.object("cache_control")
    if mark is None:
        return None
    if mark.get("type") != "ephemeral":
        mark.refuse("type", "must be ephemeral", "invalid_cache_control")
    lifetime = mark.get("ttl") or "5m"
    if lifetime not in ("5m", "1h"):
        mark.refuse("ttl", "must be 5m or 1h", "invalid_cache_control")
    return lifetime
