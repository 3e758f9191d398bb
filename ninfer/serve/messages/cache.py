"""Cache marks: prefixes are reused without them, so they are only checked."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ninfer.serve.errors import ApiError, invalid
from ninfer.serve.messages.blocks import is_billing
from ninfer.serve.messages.fields import Json, as_object

_LIMIT = 4
_THINKING = ("thinking", "redacted_thinking")


def check_cache_marks(body: Json) -> None:
    """Raises a 400 for marks that the API doesn't allow. Shapes of blocks have been checked before."""
    last: str | None = None  # the time to live of the last block that could carry a mark; "" without one
    count = 0
    for block, where in _blocks(body):
        lifetime = _lifetime(block, f"{where}.cache_control")
        if block.get("type") in _THINKING:
            if lifetime is not None:
                raise _refused(f"{where} can't have a cache mark, because it holds thinking.")
            continue
        count += lifetime is not None
        last = lifetime or ""
    whole = _lifetime(body, "cache_control")
    if whole is not None and last is not None:
        if last and last != whole:
            raise invalid(
                f"cache_control asks for {whole}, the last block for {last}; ask for one of them.",
                "cache_control",
                "conflicting_cache_ttl",
            )
        count += not last
    if count > _LIMIT:
        raise invalid(
            f"The request has {count} cache marks; at most {_LIMIT} are allowed.",
            "cache_control",
            "too_many_cache_breakpoints",
        )


def _blocks(body: Json) -> Iterator[tuple[Json, str]]:
    """Everything that can carry a mark, in the order of the prompt; where marks have no effect left out."""
    for index, tool in enumerate(body.get("tools") or ()):
        yield tool, f"tools[{index}]"
    system = body.get("system")
    for index, block in enumerate(system if isinstance(system, list) else ()):
        if not (index == 0 and is_billing(block)):
            yield block, f"system[{index}]"
    for index, message in enumerate(body["messages"]):
        content = message.get("content")
        if not isinstance(content, list):
            if content:
                yield {}, f"messages[{index}].content"
            continue
        calls = [block for block in content if block.get("type") == "tool_use"]
        for number, block in enumerate(content):
            where = f"messages[{index}].content[{number}]"
            inner = block.get("content") if block.get("type") == "tool_result" else None
            for part, nested in enumerate(inner if isinstance(inner, list) else ()):
                yield nested, f"{where}.content[{part}]"
            if not any(block is call for call in calls[:-1]):
                yield block, where


def _lifetime(block: Json, where: str) -> str | None:
    """How long the mark asks to be kept, None without a mark."""
    mark: Any = block.get("cache_control")
    if mark is None:
        return None
    mark = as_object(mark, where)
    lifetime = mark.get("ttl") or "5m"
    if mark.get("type") != "ephemeral":
        raise _refused(f"{where}.type must be 'ephemeral'.")
    if lifetime not in ("5m", "1h"):
        raise _refused(f"{where}.ttl must be '5m' or '1h'.")
    return lifetime


def _refused(message: str) -> ApiError:
    return invalid(message, "cache_control", "invalid_cache_control")
