"""Reading a component config: a closed set of members, each with one type."""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from typing import Any

from ninfer.errors import ModelError

_U32_MAX = 2**32 - 1


class Fields:
    """The members of one config object; `close` fails if any member was never asked for.

    `owner` names the object in error messages, e.g. `text config`.
    """

    def __init__(self, members: object, owner: str) -> None:
        if not isinstance(members, Mapping):
            raise ModelError(f"the {owner} must be an object, not {_shown(members)}")
        self._members: Mapping[str, Any] = members
        self._owner = owner
        self._known: set[str] = set()

    def __contains__(self, name: str) -> bool:
        return name in self._members

    def any(self, name: str) -> Any:
        self._known.add(name)
        if name not in self._members:
            raise ModelError(f"the {self._owner} lacks '{name}'")
        return self._members[name]

    def integer(self, name: str) -> int:
        """A positive u32."""
        value = self.any(name)
        if not _is_integer(value) or not 1 <= value <= _U32_MAX:
            raise self.error(name, "an integer from 1 to 4294967295", value)
        return value

    def real(self, name: str) -> float:
        """A positive finite number, rounded to FP32."""
        value = self.any(name)
        if isinstance(value, int | float) and not isinstance(value, bool):
            rounded = float32(value)
            if rounded is not None and rounded > 0:
                return rounded
        raise self.error(name, "a positive finite FP32 number", value)

    def boolean(self, name: str) -> bool:
        value = self.any(name)
        if not isinstance(value, bool):
            raise self.error(name, "true or false", value)
        return value

    def integers(self, name: str, count: int) -> tuple[int, ...]:
        """`count` non-negative u32."""
        value = self.any(name)
        if (
            not isinstance(value, list | tuple)
            or len(value) != count
            or not all(_is_integer(item) and 0 <= item <= _U32_MAX for item in value)
        ):
            raise self.error(name, f"{count} non-negative integers", value)
        return tuple(value)

    def strings(self, name: str, allowed: tuple[str, ...]) -> tuple[str, ...]:
        """A list whose every item is one of `allowed`."""
        value = self.any(name)
        if not isinstance(value, list | tuple):
            raise self.error(name, f"a list of {' or '.join(allowed)}", value)
        for item in value:
            if item not in allowed:
                raise self.error(name, f"a list of {' or '.join(allowed)}", item)
        return tuple(value)

    def exactly(self, name: str, expected: object) -> None:
        """A member that can have only one value."""
        value = self.any(name)
        if (list(value) if isinstance(value, tuple) else value) != expected:
            raise self.error(name, _shown(expected), value)

    def object(self, name: str) -> Fields:
        return Fields(self.any(name), f"{name} of the {self._owner}")

    def close(self) -> None:
        unknown = sorted(set(self._members) - self._known)
        if unknown:
            raise ModelError(
                f"the {self._owner} has members that this version doesn't know: {', '.join(unknown)}"
            )

    def error(self, name: str, expected: str, value: object) -> ModelError:
        return ModelError(f"'{name}' of the {self._owner} must be {expected}, not {_shown(value)}")


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def float32(value: float) -> float | None:
    """`value` rounded to FP32, or None if that is not finite."""
    try:
        rounded = struct.unpack("<f", struct.pack("<f", value))[0]
    except OverflowError:
        return None
    return rounded if math.isfinite(rounded) else None


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
