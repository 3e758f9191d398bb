"""Text that remembers which of its characters the chat template wrote.

Only characters written by the template itself may become control tokens; everything that came in as data
(messages, tool definitions, arguments, keyword arguments) is plain text, whatever it spells. So every string
literal of a template is a `TemplateText`, whose `spans` cover the template's own characters, and the string
operations that templates use carry the spans along.

The scheme fails closed: data are ordinary `str`, and an operation that this class does not know returns an
ordinary `str` too. Losing track can only turn template text into plain text, never data into control tokens.
"""

from collections.abc import Iterable
from typing import Any, SupportsIndex

Span = tuple[int, int]


class TemplateText(str):
    """A string with `spans`: sorted, disjoint `(begin, end)` character ranges of template text."""

    __slots__ = ("spans",)
    spans: tuple[Span, ...]

    def __new__(cls, text: str = "", spans: tuple[Span, ...] = ()) -> "TemplateText":
        self = super().__new__(cls, text)
        self.spans = spans
        return self

    @classmethod
    def literal(cls, text: str) -> "TemplateText":
        """`text`, all of it written by the template."""
        return cls(text, ((0, len(text)),) if text else ())

    @property
    def plain(self) -> str:
        """The same characters as an ordinary string."""
        return str.__str__(self)

    def cut(self, begin: int, end: int) -> str:
        """Characters `[begin, end)` with `0 <= begin` and `end <= len`; none if `end <= begin`."""
        if end <= begin:
            return ""
        spans = tuple(
            (max(b, begin) - begin, min(e, end) - begin) for b, e in self.spans if b < end and e > begin
        )
        text = str.__getitem__(self, slice(begin, end))
        return TemplateText(text, spans) if spans else text

    def _pieces(self, pieces: Iterable[str], gap: int) -> list[str]:
        """Cut consecutive `pieces`, which stand `gap` characters apart."""
        cuts, cursor = [], 0
        for piece in pieces:
            cuts.append(self.cut(cursor, cursor + len(piece)))
            cursor += len(piece) + gap
        return cuts

    # `str(text)` and `{{ text }}` keep the spans.
    def __str__(self) -> str:
        return self

    def __getitem__(self, key: SupportsIndex | slice) -> str:
        if isinstance(key, slice):
            begin, end, step = key.indices(len(self))
            if step != 1:
                return str.__getitem__(self, key)
            return self.cut(begin, end)
        index = key.__index__()
        index += len(self) if index < 0 else 0
        if not 0 <= index < len(self):
            raise IndexError("string index out of range")
        return self.cut(index, index + 1)

    def __add__(self, other: str) -> str:
        return concatenate((self, other)) if isinstance(other, str) else NotImplemented

    def __radd__(self, other: str) -> str:
        return concatenate((other, self)) if isinstance(other, str) else NotImplemented

    def __mul__(self, count: SupportsIndex) -> str:
        return concatenate([self] * count.__index__())

    def __rmul__(self, count: SupportsIndex) -> str:
        return self * count

    def join(self, parts: Iterable[str]) -> str:
        pieces: list[str] = []
        for part in parts:
            if pieces:
                pieces.append(self)
            pieces.append(part)
        return concatenate(pieces)

    def lstrip(self, chars: str | None = None) -> str:
        return self.cut(len(self) - len(str.lstrip(self, chars)), len(self))

    def rstrip(self, chars: str | None = None) -> str:
        return self.cut(0, len(str.rstrip(self, chars)))

    def strip(self, chars: str | None = None) -> str:
        begin = len(self) - len(str.lstrip(self, chars))
        return self.cut(begin, len(str.rstrip(self, chars)))

    def removeprefix(self, prefix: str) -> str:
        return self.cut(len(prefix) if self.startswith(prefix) else 0, len(self))

    def removesuffix(self, suffix: str) -> str:
        return self.cut(0, len(self) - (len(suffix) if self.endswith(suffix) else 0))

    def split(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[str]:
        pieces = str.split(self, sep, maxsplit)
        return pieces if sep is None else self._pieces(pieces, len(sep))

    def rsplit(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[str]:
        pieces = str.rsplit(self, sep, maxsplit)
        return pieces if sep is None else self._pieces(pieces, len(sep))

    def partition(self, sep: str) -> tuple[str, str, str]:
        head, middle, tail = self._pieces(str.partition(self, sep), 0)
        return head, middle, tail

    def rpartition(self, sep: str) -> tuple[str, str, str]:
        head, middle, tail = self._pieces(str.rpartition(self, sep), 0)
        return head, middle, tail

    def splitlines(self, keepends: bool = False) -> list[str]:
        lines = self._pieces(str.splitlines(self, True), 0)
        bare = str.splitlines(self)
        return lines if keepends else [line[: len(text)] for line, text in zip(lines, bare, strict=True)]

    def replace(self, old: str, new: str, count: SupportsIndex = -1) -> str:
        if not old:
            return str.replace(self, old, new, count)
        pieces = self.split(old, count)
        return pieces[0] if len(pieces) == 1 else concatenate([p for q in pieces for p in (new, q)][1:])

    def _recased(self, text: str) -> str:
        return TemplateText(text, self.spans) if len(text) == len(self) else text

    def lower(self) -> str:
        return self._recased(str.lower(self))

    def upper(self) -> str:
        return self._recased(str.upper(self))

    def capitalize(self) -> str:
        return self._recased(str.capitalize(self))

    def title(self) -> str:
        return self._recased(str.title(self))


def spans_of(text: str) -> tuple[Span, ...]:
    """The template's own ranges in `text`; none for ordinary strings."""
    return text.spans if isinstance(text, TemplateText) else ()


def concatenate(parts: Iterable[Any]) -> str:
    """Join strings (other values through `str`), keeping and merging their spans."""
    texts: list[str] = []
    spans: list[Span] = []
    cursor = 0
    for part in parts:
        text = part if isinstance(part, str) else str(part)
        for begin, end in spans_of(text):
            if spans and spans[-1][1] == cursor + begin:
                spans[-1] = (spans[-1][0], cursor + end)
            else:
                spans.append((cursor + begin, cursor + end))
        texts.append(text)
        cursor += len(text)
    joined = "".join(texts)
    return TemplateText(joined, tuple(spans)) if spans else joined
