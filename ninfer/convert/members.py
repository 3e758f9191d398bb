"""Reading a checkpoint's description (`config.json`, GGUF keys): typed, checked, errors name the owner."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from ninfer.errors import ConversionError

_U32 = 2**32 - 1
_MISSING = object()


def float32(value: float) -> float:
    """The number rounded to FP32, as configs store it (may overflow to infinity)."""
    with np.errstate(over="ignore"):
        return float(np.float32(value))


class Members:
    """The members of one JSON object or GGUF key table; a null member counts as absent."""

    def __init__(self, values: Mapping[str, Any], owner: str) -> None:
        self._values = values
        self.owner = owner

    def get(self, name: str, default: Any = None) -> Any:
        value = self._values.get(name)
        return default if value is None else value

    def __contains__(self, name: str) -> bool:
        return self._values.get(name) is not None

    def integer(self, name: str, default: int | None = None) -> int:
        """A positive u32."""
        value = self._get(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= _U32:
            raise self.error(name, value, "a positive 32-bit integer")
        return value

    def count(self, name: str, default: int) -> int:
        """A u32 that may be zero."""
        value = self._get(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= _U32:
            raise self.error(name, value, "a non-negative 32-bit integer")
        return value

    def real(self, name: str, default: float | None = None) -> float:
        """A positive finite number, rounded to FP32."""
        value = self._get(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.error(name, value, "a number")
        rounded = float32(value)
        if not math.isfinite(rounded) or rounded <= 0:
            raise self.error(name, value, "positive and finite in FP32")
        return rounded

    def boolean(self, name: str, default: bool) -> bool:
        value = self._get(name, default)
        if not isinstance(value, bool):
            raise self.error(name, value, "true or false")
        return value

    def require(self, name: str, *allowed: Any) -> None:
        """If present, the member must be one of `allowed`: the only variants that the models implement."""
        value = self._values.get(name)
        if value is None:
            return
        if not any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in allowed):
            raise self.error(name, value, " or ".join(repr(one) for one in allowed))

    def object(self, name: str) -> Members:
        value = self._values.get(name)
        if value is None:
            value = {}
        if not isinstance(value, Mapping):
            raise self.error(name, value, "an object")
        return Members(value, f"'{name}' of {self.owner}")

    def keys(self) -> list[str]:
        return [name for name, value in self._values.items() if value is not None]

    def error(self, name: str, value: Any, expected: str) -> ConversionError:
        shown = repr(value)
        shown = shown if len(shown) <= 80 else shown[:77] + "..."
        return ConversionError(f"'{name}' of {self.owner} is {shown}; it must be {expected}")

    def _get(self, name: str, default: Any) -> Any:
        value = self._values.get(name)
        if value is None:
            value = default
        if value is None:
            raise ConversionError(f"{self.owner} lacks '{name}'")
        return value


def merged(owner: str, *tables: Members) -> Members:
    """Union of tables; a member that two of them state differently is an error."""
    found: dict[str, Any] = {}
    for table in tables:
        for name in table.keys():  # noqa: SIM118  (not a mapping)
            value = table.get(name)
            known = found.get(name, _MISSING)
            if known is not _MISSING and known != value:
                raise ConversionError(
                    f"{owner} states '{name}' twice: {known!r} and, in {table.owner}, {value!r}"
                )
            found[name] = value
    return Members(found, owner)
