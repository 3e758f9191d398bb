"""JSON as the format wants it: no duplicate members, no NaN or infinity, exact integers, UTF-8 text."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from ninfer.errors import ArtifactError

MAX_DEPTH = 100


def loads(data: bytes, owner: str) -> Any:
    """The value of UTF-8 JSON text; ArtifactError, beginning with `owner`, on anything else."""
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ArtifactError(f"{owner} is not UTF-8 (byte {error.start})") from None
    try:
        return json.loads(
            text, object_pairs_hook=_members, parse_constant=_constant, parse_float=_real, parse_int=_integer
        )
    except _Refused as error:
        raise ArtifactError(f"{owner} is not valid: {error}") from None
    except json.JSONDecodeError as error:
        raise ArtifactError(
            f"{owner} is not valid JSON: {error.msg} (line {error.lineno}, column {error.colno})"
        ) from None
    except RecursionError:
        raise ArtifactError(f"{owner} is nested too deeply") from None
    except MemoryError:
        raise ArtifactError(f"{owner} does not fit in memory ({len(data)} bytes of JSON)") from None


def dumps(value: Any, owner: str) -> bytes:
    """Compact UTF-8 JSON, members in the order given; ArtifactError on what JSON cannot say."""
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
        return text.encode("utf-8")
    except (TypeError, ValueError, RecursionError) as error:
        raise ArtifactError(f"{owner} cannot be written as JSON: {error}") from None


def check_open(value: Any, owner: str) -> None:
    """Check a free-form value (`config`, `metadata`, `provenance`): depth and text."""
    level, depth = [value], 0
    while level:
        depth += 1
        if depth > MAX_DEPTH:
            raise ArtifactError(f"{owner} is nested more than {MAX_DEPTH} levels deep")
        below: list[Any] = []
        for item in level:
            if isinstance(item, str):
                check_text(item, owner)
            elif isinstance(item, Mapping):
                for name in item:
                    check_text(name, owner)
                below.extend(item.values())
            elif isinstance(item, list | tuple):
                below.extend(item)
        level = below


def check_text(text: str, owner: str) -> None:
    """A string that UTF-8 can hold: JSON's escapes can spell half a surrogate pair."""
    if text.isascii():
        return
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise ArtifactError(f"{owner} has a string with an unpaired surrogate: {text!a}") from None


def show(value: Any) -> str:
    """A value from a file for an error message: short, on one line, strings in quotes."""
    if isinstance(value, dict):
        return "an object"
    if isinstance(value, list):
        return "an array"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    text = f"'{value}'" if isinstance(value, str) and value.isprintable() else ascii(value)
    return text if len(text) <= 80 else text[:77] + "..."


class _Refused(Exception):
    """Raised inside the JSON parser; never leaves this module."""


def _members(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) != len(pairs):
        seen: set[str] = set()
        for name, _ in pairs:
            if name in seen:
                raise _Refused(f"duplicate member {name!a}")
            seen.add(name)
    return members


def _constant(name: str) -> Any:
    raise _Refused(f"{name} is no JSON number")


def _real(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise _Refused(f"the number {text[:40]} is out of range")
    return value


def _integer(text: str) -> int:
    if len(text) > 40:
        raise _Refused(f"the integer {text[:40]}... is out of range")
    return int(text)
