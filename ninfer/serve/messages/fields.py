"""Reading members of JSON objects: each function returns a checked value or raises a 400 naming the place.

Places are written `messages[3].content[0]`: clients look for other spellings in errors to decide what to drop
from their next request.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ninfer.serve.errors import invalid

Json = Mapping[str, Any]


def as_object(value: Any, where: str) -> Json:
    if not isinstance(value, dict):
        raise invalid(f"{where} must be an object, not {kind(value)}.", where)
    return value


def as_list(value: Any, where: str) -> list[Any]:
    if not isinstance(value, list):
        raise invalid(f"{where} must be an array, not {kind(value)}.", where)
    return value


def as_text(value: Any, where: str) -> str:
    if not isinstance(value, str):
        raise invalid(f"{where} must be a string, not {kind(value)}.", where)
    return value


def optional_text(body: Json, name: str, where: str) -> str | None:
    value = body.get(name)
    return None if value is None else as_text(value, f"{where}{name}")


def flag(body: Json, name: str, where: str = "") -> bool | None:
    value = body.get(name)
    if value is not None and not isinstance(value, bool):
        raise invalid(f"{where}{name} must be true or false, not {kind(value)}.", f"{where}{name}")
    return value


def number(body: Json, name: str, low: float, high: float) -> float | None:
    value = body.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        raise invalid(f"{name} must be a number between {low:g} and {high:g}, not {shown(value)}.", name)
    return float(value)


def whole(body: Json, name: str, low: int, high: int | None = None, where: str = "") -> int | None:
    value = body.get(name)
    if value is None:
        return None
    if (
        isinstance(value, bool)
        or not isinstance(value, int)
        or value < low
        or (high is not None and value > high)
    ):
        limits = f"of at least {low}" if high is None else f"between {low} and {high}"
        raise invalid(f"{where}{name} must be a whole number {limits}, not {shown(value)}.", f"{where}{name}")
    return value


def kind(value: Any) -> str:
    """What a JSON value is, without showing it: errors may reach logs."""
    match value:
        case None:
            return "null"
        case bool():
            return "a boolean"
        case int() | float():
            return "a number"
        case str():
            return "a string"
        case list():
            return "an array"
    return "an object"


def shown(value: Any) -> str:
    """A number as it was sent, anything else by its kind."""
    if isinstance(value, float) or (isinstance(value, int) and abs(value) < 1 << 64):
        return str(value).lower()
    return kind(value)
