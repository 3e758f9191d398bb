"""Documents of each kind of source: `(name, text)` pairs from the files of an unpacked package."""

from __future__ import annotations

import ast
import gzip
import io
import json
import re
import struct
import tokenize
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tools.nano.pages import is_english, is_natural, plain, prose_of

Document = tuple[str, str]

_PIECE = 12_000  # characters; longer prose is cut at paragraphs, so that no document dominates a split
_WRAPPED_NOVEL = "MANSFIELD PARK"  # stays in lines as printed, so that the model has seen such text


def html(path: Path) -> Iterator[Document]:
    """Prose of a page, in pieces."""
    text = prose_of(path.read_text("utf-8", "replace"))
    for index, piece in enumerate(_pieces(text)):
        if len(piece) >= 400 and is_english(piece):
            yield str(index), piece


def novels(path: Path) -> Iterator[Document]:
    """Chapters of the novels in R's lazy-load file: four length bytes and a zlib stream per object."""
    data, at = path.read_bytes(), 0
    while at < len(data):
        stream = zlib.decompressobj()
        lines = _r_strings(stream.decompress(data[at + 4 :]))
        at = len(data) - len(stream.unused_data)
        title = lines[0].upper()
        if title in ("PERSUASION", "NORTHANGER ABBEY"):  # bench/corpus holds their first chapters
            continue
        text = "\n".join(lines)
        chapters = re.split(r"\n(?=chapter [ivxlc\d]+\.?\s*\n)", text, flags=re.IGNORECASE)
        for index, chapter in enumerate(chapters[1:]):
            if title != _WRAPPED_NOVEL:
                chapter = _unwrapped(chapter)
            yield f"{title.title()}/{index:02}", chapter.strip()


def wordnet(path: Path) -> Iterator[Document]:
    """Glosses of WordNet as entries of a dictionary, 50 neighbouring ones a document."""
    kinds = {"noun": "noun", "verb": "verb", "adj": "adjective", "adv": "adverb"}
    kind = kinds[path.suffix[1:]]
    entries = [_entry(line, kind) for line in path.read_text("utf-8").splitlines() if line[:8].isdigit()]
    for start in range(0, len(entries), 50):
        yield f"{start // 50:04}", "\n".join(filter(None, entries[start : start + 50]))


def devil(path: Path) -> Iterator[Document]:
    """The Devil's Dictionary, in pieces; verse keeps its lines."""
    text = gzip.decompress(path.read_bytes()).decode("latin-1")
    text = text[text.index("ABASEMENT, n.") :]
    paragraphs = []
    for paragraph in re.split(r"\n\s*\n", text):
        verse = paragraph.startswith("    ")
        paragraphs.append("\n".join(map(plain, paragraph.splitlines())) if verse else plain(paragraph))
    for index, piece in enumerate(_pieces("\n\n".join(paragraphs))):
        yield f"{index:03}", piece


def jargon(path: Path) -> Iterator[Document]:
    """The Jargon File's lexicon, in pieces."""
    text = gzip.decompress(path.read_bytes()).decode("utf-8")
    text = text[text.index("\n   :") :].replace("{", "").replace("}", "")
    text = re.sub(r"^   :([^:\n]+):", r"\1:", text, flags=re.MULTILINE)
    entry = re.compile(r"[^:]{1,60}: ?[^:]{0,60}$")
    paragraphs = [p for p in _unwrapped(text).split("\n\n") if entry.match(p) or is_natural(p, short=True)]
    for index, piece in enumerate(_pieces("\n\n".join(paragraphs))):
        yield f"{index:03}", piece


def factbook(path: Path) -> Iterator[Document]:
    """What the World Factbook says about a country in sentences."""
    country = json.loads(path.read_text("utf-8"))
    if not isinstance(country, dict) or "Introduction" not in country:
        return
    names = country.get("Government", {}).get("Country name", {})
    name = names.get("conventional short form", {}).get("text", "") if isinstance(names, dict) else ""
    parts = [plain(name.split(";")[0])] if name and name != "none" else []
    for section, fields in country.items():
        for field, text in _leaves(fields, ()):
            text = plain(text.replace("++", " "))
            if len(text) >= 60 and is_natural(text, short=True):
                text = text[0].upper() + text[1:]
                parts.append(text if section == "Introduction" else f"{plain(field)}: {text}")
    text = "\n\n".join(parts)
    if len(text) >= 400:
        yield "", text


def python(path: Path) -> Iterator[Document]:
    """A whole file of Python, without the licence at its top; none that is generated or data."""
    if not 400 <= path.stat().st_size <= 20_000:
        return
    try:
        text = path.read_bytes().decode("utf-8")
        tree = ast.parse(text)
    except (UnicodeDecodeError, SyntaxError, ValueError):
        return
    text = text.replace("\r\n", "\n").replace("\f", "")
    lines = text.splitlines()
    if _GENERATED.search(text[:2000]) or max(map(len, lines)) > 160 or not tree.body:
        return
    if sum(c.isascii() for c in text) < 0.99 * len(text) or sum(c.isdigit() for c in text) > 0.08 * len(text):
        return
    body = _without_licence(text)
    code = sum(1 for line in body.splitlines() if line.strip() and not line.lstrip().startswith("#"))
    if len(body) >= 300 and code >= 12:
        yield "", body.rstrip() + "\n"


def is_aside(path: str) -> bool:
    """Whether a Python file, by its path in the package, is a test, copied from others, or a table."""
    return _ASIDE.search("/" + path) is not None


READERS: dict[str, Callable[[Path], Iterator[Document]]] = {
    "html": html,
    "novels": novels,
    "wordnet": wordnet,
    "devil": devil,
    "jargon": jargon,
    "factbook": factbook,
    "python": python,
}

_ASIDE = re.compile(
    r"/(tests?|testing|test_.*|.*_test|conftest|idlelib|_vendor|vendor|extern|externals|migrations|locale|i18n"
    r"|locales|unicode|_generated|stubs?|fixtures|testdata|data)(/|\.py$)|_pb2|/_?version\.py$|/models/auto/"
)
_GENERATED = re.compile(r"(?i)auto-?\s?generated|generated by|do not edit|automatically created")
_LICENCE = re.compile(r"(?i)copyright|licen[cs]e|all rights reserved|spdx")


def _without_licence(text: str) -> str:
    """The file from after its first comments, if those speak of a licence."""
    end = 0
    try:
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if token.type not in (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE):
                break
            end = token.end[0]
    except tokenize.TokenError:
        return text
    lines = text.splitlines(keepends=True)
    if _LICENCE.search("".join(lines[:end])):
        return "".join(lines[end:]).lstrip("\n")
    return text


def _pieces(text: str) -> Iterator[str]:
    """The text cut at empty lines into pieces of at most about `_PIECE` characters."""
    held: list[str] = []
    size = 0
    for paragraph in text.split("\n\n"):
        if held and size + len(paragraph) > _PIECE:
            yield "\n\n".join(held)
            held, size = [], 0
        held.append(paragraph)
        size += len(paragraph) + 2
    if held:
        yield "\n\n".join(held)


def _unwrapped(text: str) -> str:
    paragraphs = (plain(paragraph) for paragraph in re.split(r"\n\s*\n", text))
    return "\n\n".join(paragraph for paragraph in paragraphs if paragraph)


def _r_strings(data: bytes) -> list[str]:
    """The strings of a serialized character vector (R's XDR format, version 3)."""
    if data[:2] != b"X\n" or struct.unpack(">I", data[2:6])[0] != 3:
        raise ValueError("not an R object in XDR form, version 3")
    at = 18 + struct.unpack(">I", data[14:18])[0]  # versions and the native encoding's name
    kind, count = struct.unpack(">II", data[at : at + 8])
    if kind & 0xFF != 16:
        raise ValueError(f"an R object of type {kind & 0xFF} where a character vector (16) belongs")
    at += 8
    strings = []
    for _ in range(count):
        length = struct.unpack(">i", data[at + 4 : at + 8])[0]
        strings.append(data[at + 8 : at + 8 + max(length, 0)].decode("utf-8", "replace"))
        at += 8 + max(length, 0)
    return strings


def _entry(line: str, kind: str) -> str:
    """`word, word (noun): gloss. For example: "…"` of a line of WordNet's data files."""
    fields, _, gloss = line.partition(" | ")
    parts = fields.split()
    words = [re.sub(r"\(.*\)", "", parts[4 + 2 * i]).replace("_", " ") for i in range(int(parts[3], 16))]
    gloss = plain(gloss)
    meaning, *examples = re.split(r';\s*(?=")', gloss)
    meaning = meaning.strip(" ;")
    if not meaning or not is_natural(meaning, short=True):
        return ""
    shown = f" For example: {'; '.join(e.strip(' ;') for e in examples[:2])}." if examples else ""
    return f"{', '.join(words)} ({kind}): {meaning}.{shown}"


def _leaves(value: Any, path: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    """Every text below an object, with its field's name."""
    if isinstance(value, dict):
        for name, below in value.items():
            if name == "text" and isinstance(below, str):
                yield ", ".join(path[:2]), below
            else:
                yield from _leaves(below, (*path, name))
