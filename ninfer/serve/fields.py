"""Reading members of JSON objects: each by its type, errors by the member's path."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NoReturn

from ninfer.serve.errors import invalid


class Fields:
    """The members of one object; null counts as absent. Errors are 400s that name `path.member`."""

    def __init__(self, value: Any, path: str = "") -> None:
        """Raises `ApiError` unless `value` is an object."""
        if not isinstance(value, Mapping):
            what = path or "The request body"
            raise invalid(f"{what} must be an object, not {spelled(value)}.", path or None)
        self.members: Mapping[str, Any] = value
        self.path = path

    def at(self, name: str) -> str:
        """The path of a member."""
        return f"{self.path}.{name}" if self.path else name

    def get(self, name: str) -> Any:
        return self.members.get(name)

    def refuse(self, name: str, what: str, code: str | None = None) -> NoReturn:
        """Raise a 400: `what` follows the member's path."""
        raise invalid(f"{self.at(name)} {what}.", self.at(name), code)

    def string(self, name: str, *, most: int | None = None, required: bool = False) -> str | None:
        """A string of at most `most` characters."""
        value = self.get(name)
        if value is None and not required:
            return None
        if not isinstance(value, str):
            self.refuse(name, f"must be a string, not {spelled(value)}")
        if most is not None and len(value) > most:
            self.refuse(name, f"must have at most {most} characters, not {len(value)}")
        return value

    def choice(self, name: str, choices: Sequence[str]) -> str | None:
        """One of some words."""
        value = self.string(name)
        if value is not None and value not in choices:
            self.refuse(name, f"must be one of {', '.join(choices)}, not {spelled(value)}")
        return value

    def boolean(self, name: str) -> bool | None:
        value = self.get(name)
        if value is not None and not isinstance(value, bool):
            self.refuse(name, f"must be true or false, not {spelled(value)}")
        return value

    def integer(self, name: str, low: int, high: int | None = None) -> int | None:
        """A whole number in [low, high]."""
        value = self.get(name)
        if value is None:
            return None
        if (
            not isinstance(value, int)
            or isinstance(value, bool)
            or value < low
            or (high is not None and value > high)
        ):
            limits = f"of at least {low}" if high is None else f"between {low} and {high}"
            self.refuse(name, f"must be a whole number {limits}, not {spelled(value)}")
        return value

    def number(self, name: str, low: float, high: float) -> float | None:
        """A number in [low, high]."""
        value = self.get(name)
        if value is None:
            return None
        if not isinstance(value, int | float) or isinstance(value, bool) or not low <= value <= high:
            self.refuse(name, f"must be a number between {low:g} and {high:g}, not {spelled(value)}")
        return float(value)

    def array(self, name: str) -> list[Any] | None:
        value = self.get(name)
        if value is not None and not isinstance(value, list):
            self.refuse(name, f"must be an array, not {spelled(value)}")
        return value

    def object(self, name: str) -> Fields | None:
        value = self.get(name)
        return None if value is None else Fields(value, self.at(name))

    def objects(self, name: str) -> Iterator[Fields]:
        """The objects of an array; none if it is absent."""
        for index, value in enumerate(self.array(name) or ()):
            yield Fields(value, f"{self.at(name)}[{index}]")


def spelled(value: Any) -> str:
    """A value for an error message: short, and of containers only the kind."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, Mapping):
        return "an object"
    if isinstance(value, list):
        return "an array"
    text = f"{value!r}"
    return text if len(text) <= 60 else f"{text[:57]}..."
