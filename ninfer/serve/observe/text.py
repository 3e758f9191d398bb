"""How logs write numbers and words of strangers."""

from __future__ import annotations

import re

_QUOTED = re.compile(r"""(?<!\w)(?P<q>["'`])(?:\\.|(?!(?P=q)).)*(?:(?P=q)|$)""", re.DOTALL)
_LONGEST_LABEL = 80
_LONGEST_MESSAGE = 400


def count(number: int) -> str:
    return f"{number:,}"


def size(number: float) -> str:
    """Bytes in IEC units, such as `1.5 GiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if number < 1024:
            return f"{number:.0f} B" if unit == "B" else f"{number:.1f} {unit}"
        number /= 1024
    return f"{number:.1f} TiB"


def duration(seconds: float) -> str:
    """Three digits or so, in the unit that suits: `850 µs`, `3.2 ms`, `312 ms`, `4.21 s`, `2m 05s`."""
    if seconds < 0.9995e-3:
        return f"{seconds * 1e6:.0f} µs"
    if seconds < 0.9995:
        return f"{seconds * 1e3:.{1 if seconds < 0.00995 else 0}f} ms"
    if seconds < 59.995:
        return f"{seconds:.2f} s"
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60}m {whole % 60:02d}s"
    return f"{whole // 3600}h {whole % 3600 // 60:02d}m"


def rate(tokens: float, seconds: float) -> str:
    """Tokens per second; `-` where nothing was measured."""
    if tokens <= 0 or seconds <= 0:
        return "-"
    value = tokens / seconds
    return f"{value:,.{0 if value >= 999.95 else 1}f} tok/s"


def percent(part: float, whole: float) -> str:
    return f"{100 * part / whole:.1f}%" if whole > 0 else "0.0%"


def groups(*parts: str | None) -> str:
    """The groups of a line; those that are None or empty are left out."""
    return " | ".join(part for part in parts if part)


def label(text: str) -> str:
    """A stranger's short word (a model, a client, a field) on one line of a log."""
    return printable(text[:_LONGEST_LABEL]) + ("…" if len(text) > _LONGEST_LABEL else "")


def printable(text: str) -> str:
    """`text` on one line: characters that steer terminals or break lines are escaped."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def unquoted(message: str) -> str:
    """An error's sentence without what it quotes: our sentences put the client's values into quotes."""
    bare = _QUOTED.sub(lambda match: f"{match['q']}…{match['q']}", message)
    return printable(bare[:_LONGEST_MESSAGE]) + ("…" if len(bare) > _LONGEST_MESSAGE else "")
