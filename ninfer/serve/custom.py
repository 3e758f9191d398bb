"""The text of a custom tool's input inside its JSON arguments, while they come."""

from __future__ import annotations

import json
import re

_OPENING = re.compile(r'\s*\{\s*"input"\s*:\s*"')
_HIGH, _LOW = r"\\u[dD][89abAB][0-9a-fA-F]{2}", r"\\u[dD][c-fC-F][0-9a-fA-F]{2}"
# What can be decoded already: whole characters and escapes; the first half of a surrogate pair waits.
_WHOLE = re.compile(
    rf'(?:[^"\\]|\\["\\/bfnrt]|{_HIGH}{_LOW}|{_HIGH}(?=[^\\]|\\[^u])|\\u(?![dD][89abAB])[0-9a-fA-F]{{4}})*'
)


class InputText:
    """Fed with the pieces of `{"input": "..."}`, gives the string's text as far as it is known."""

    def __init__(self) -> None:
        self._raw = ""
        self._open = False
        self._given: list[str] = []

    def feed(self, piece: str) -> str:
        """What the piece adds to the text."""
        self._raw += piece
        if not self._open:
            opening = _OPENING.match(self._raw)
            if opening is None:
                return ""
            self._open = True
            self._raw = self._raw[opening.end() :]
        whole = _WHOLE.match(self._raw)
        assert whole is not None
        self._raw = self._raw[whole.end() :]
        return self._give(_sound(json.loads(f'"{whole.group()}"', strict=False)))

    def end(self, arguments: str) -> str:
        """What is still missing when the arguments are complete: of the input, or of them if they aren't
        an object with an input."""
        given, text = "".join(self._given), arguments
        try:
            value = json.loads(arguments, strict=False)["input"]
            text = _sound(value) if isinstance(value, str) else arguments
        except (ValueError, KeyError, TypeError, RecursionError):
            pass
        if not given:
            return self._give(text)
        return self._give(text[len(given) :]) if text.startswith(given) else ""

    @property
    def text(self) -> str:
        return "".join(self._given)

    def _give(self, text: str) -> str:
        if text:
            self._given.append(text)
        return text


def _sound(text: str) -> str:
    """Halves of surrogate pairs, which escapes can spell but UTF-8 can't, replaced."""
    return text.encode("utf-8", "surrogatepass").decode("utf-8", "replace")
