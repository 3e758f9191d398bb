"""Reading members of a JSON body: the value if it is what it must be, else a 400 that names the member."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from ninfer.serve.errors import invalid

Json = dict[str, Any]


def shown(value: Any) -> str:
    """A value for a message, cut short."""
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def read_text(value: Any, param: str, *, most: int | None = None, default: str | None = None) -> str | None:
    """A string of at most `most` characters; `default` for null."""
    if value is None:
        return default
    if not isinstance(value, str):
        raise invalid(f"{param} must be a string, not {shown(value)}.", param)
    if most is not None and len(value) > most:
        raise invalid(f"{param} has {len(value)} characters; at most {most} are allowed.", param)
    return value


def read_name(value: Any, param: str) -> str:
    """A string that must be there and not be empty."""
    if not isinstance(value, str) or not value:
        raise invalid(f"{param} must be a non-empty string, not {shown(value)}.", param)
    return value


def read_choice(value: Any, param: str, allowed: Iterable[str], code: str | None = None) -> str | None:
    """One of `allowed`, or None for null."""
    if value is None:
        return None
    names = tuple(allowed)
    if not isinstance(value, str) or value not in names:
        raise invalid(f"{param} must be one of {', '.join(names)}, not {shown(value)}.", param, code)
    return value


def read_flag(value: Any, param: str, default: bool = False) -> bool:
    if value is None:
        return default
    if not isinstance(value, bool):
        raise invalid(f"{param} must be true or false, not {shown(value)}.", param)
    return value


def read_whole(value: Any, param: str, low: int, high: int) -> int | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise invalid(f"{param} must be a whole number from {low} to {high}, not {shown(value)}.", param)
    return value


def read_number(value: Any, param: str, low: float, high: float) -> float | None:
    if value is None:
        return None
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not math.isfinite(value) or not low <= value <= high:
        raise invalid(f"{param} must be a number from {low:g} to {high:g}, not {shown(value)}.", param)
    return float(value)


def read_object(value: Any, param: str) -> Json | None:
    if value is None:
        return None
    if not isinstance(value, dict):
        raise invalid(f"{param} must be an object, not {shown(value)}.", param)
    return value


def read_list(value: Any, param: str) -> list[Any]:
    """An array; null is an empty one."""
    if value is None:
        return []
    if not isinstance(value, list):
        raise invalid(f"{param} must be an array, not {shown(value)}.", param)
    return value


def refuse_unknown(body: Mapping[str, Any], known: Iterable[str], prefix: str = "") -> None:
    """400 `unknown_parameter` for a member outside `known`."""
    for name in body:
        if name not in known:
            param = prefix + name
            raise invalid(f"Unknown parameter: {param[:80]!r}.", param[:80], "unknown_parameter")
