"""How often each token of a model's vocabulary stands in a corpus: files, folders, conversations.

Counting streams: a few megabytes of text are held at a time, whatever the size of the corpus.
"""

from __future__ import annotations

import codecs
import contextlib
import itertools
import json
import os
import re
import stat
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from ninfer.convert.output import temporary_of
from ninfer.errors import FrontendError, OptionError
from ninfer.frontend import Frontend

Progress = Callable[[str, int, int], None]
"""Called with a stage, bytes read so far and bytes in all."""

PIECE = 1 << 16
"""Characters of a text that are encoded as one."""
LONGEST_LINE = 64 << 20
"""Bytes that a line of a .jsonl file may have."""
_READ = 1 << 18
_BATCH = 2 << 20
# Where a text may be cut without changing a token: byte-level pre-tokenizers never join what stands on either
# side of a line break (or more) that something visible follows, or of one space behind something visible.
_CUT = re.compile(r"(?<=\n)(?=\S)|(?<=\S)(?= )")
_FORMS = '{"messages": [...]} (with or without "tools"), a list of messages, {"text": "..."} or a string'

_Piece = str | list[int]


@dataclass(frozen=True)
class Skipped:
    """A file in a folder that was left out, and why."""

    path: Path
    reason: str


@dataclass(eq=False)
class Counts:
    """int64 `[vocabulary rows]`, of how many `files` and bytes; files of folders that are no texts are
    `skipped`."""

    totals: np.ndarray
    files: int = 0
    bytes: int = 0
    skipped: list[Skipped] = field(default_factory=list)

    @property
    def tokens(self) -> int:
        return int(self.totals.sum())


class _Fault(Exception):
    """Why a file can't be counted."""


@dataclass(frozen=True)
class _File:
    path: Path
    size: int
    is_named: bool
    """Whether the user named the file itself, and not a folder that it is in."""


def count_tokens(
    frontend: Frontend, paths: Sequence[Path], rows: int, progress: Progress | None = None
) -> Counts:
    """Count the tokens of texts with a model's own tokenizer; `rows`: of its vocabulary.

    A path is a UTF-8 text, a `.jsonl` file with a conversation or a text on each line (conversations are
    rendered by the model's template, without a header for another answer), or a folder with such files at any
    depth. Nothing in a folder that begins with a dot is read, links to folders aren't followed, a file is
    counted once however often it is reached. A file that can't be counted (no UTF-8, NUL, a bad line) is an
    OptionError if it was named, and left out as a whole if it was found in a folder. OptionError also if
    there is no token at all.
    """
    result = Counts(np.zeros(rows, dtype=np.int64))
    files = _listed(paths, result.skipped)
    total, before = sum(file.size for file in files), 0
    counter = _Counter(frontend, result.totals)
    for file in files:

        def told(position: int, before: int = before) -> None:
            if progress is not None:
                progress("counting tokens", min(before + position, total), total)

        try:
            with _opened(file.path) as stream:
                counter.count(_pieces(frontend, file.path, stream, told))
        except _Fault as fault:
            if file.is_named:
                raise OptionError(f"the corpus {file.path} cannot be counted: {fault}") from None
            result.skipped.append(Skipped(file.path, str(fault)))
        else:
            result.files += 1
            result.bytes += file.size
        before += file.size
    counter.flush()
    if not result.tokens:
        first = f" (left out: {result.skipped[0].path}, {result.skipped[0].reason})" if result.skipped else ""
        raise OptionError(f"the corpus has no tokens: {', '.join(map(str, paths))}{first}")
    return result


def save_counts(path: Path, counts: np.ndarray) -> None:
    """Write a ranking file: little-endian int64, one count per vocabulary row. OptionError if it exists or
    can't be written; then nothing is left."""
    temporary = temporary_of(path)
    try:
        with open(temporary, "xb") as file:
            file.write(counts.astype("<i8").tobytes())
            file.flush()
            os.fsync(file.fileno())
        if os.path.lexists(path):
            raise OptionError(f"{path} exists already; choose another --save-counts or remove it")
        os.rename(temporary, path)
    except OSError as error:
        raise OptionError(f"{path} cannot be written: {error.strerror or error}") from None
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)


class _Counter:
    """Adds tokens to `totals`, those of a file only once all of it was read.

    Pieces are encoded many at a time, small files together: on all cores.
    """

    def __init__(self, frontend: Frontend, totals: np.ndarray) -> None:
        self._frontend, self._totals = frontend, totals
        self._waiting: list[_Piece] = []
        self._size = 0

    def count(self, pieces: Iterator[_Piece]) -> None:
        """All pieces of one file, or none of them if their iterator raises."""
        mine: np.ndarray | None = None
        first, size = len(self._waiting), self._size
        try:
            for piece in pieces:
                self._waiting.append(piece)
                self._size += len(piece)
                if self._size >= _BATCH:
                    held = self._take()
                    self._add(held[:first], self._totals)
                    mine = np.zeros_like(self._totals) if mine is None else mine
                    self._add(held[first:], mine)
                    first = size = 0
        except BaseException:
            del self._waiting[first:]
            self._size = size
            raise
        if mine is not None:
            self._add(self._take(), mine)
            self._totals += mine

    def flush(self) -> None:
        """Add what is still waiting to be encoded."""
        self._add(self._take(), self._totals)

    def _take(self) -> list[_Piece]:
        taken, self._waiting, self._size = self._waiting, [], 0
        return taken

    def _add(self, pieces: Sequence[_Piece], into: np.ndarray) -> None:
        texts = [piece for piece in pieces if isinstance(piece, str)]
        encoded = [piece for piece in pieces if not isinstance(piece, str)]
        ids = itertools.chain(*encoded, *(self._frontend.encode_batch(texts) if texts else ()))
        into += np.bincount(np.fromiter(ids, dtype=np.int64), minlength=len(into))


def _listed(paths: Sequence[Path], skipped: list[Skipped]) -> list[_File]:
    """Regular files, each once, in the order of `paths` and sorted within folders."""
    found: list[_File] = []
    seen: set[tuple[int, int]] = set()

    def add(path: Path, *, is_named: bool) -> None:
        facts = path.stat()
        if not stat.S_ISREG(facts.st_mode):
            if is_named:
                raise OptionError(f"the corpus {path} is neither a file nor a folder")
            return
        if (facts.st_dev, facts.st_ino) not in seen:
            seen.add((facts.st_dev, facts.st_ino))
            found.append(_File(path, facts.st_size, is_named))

    def unreadable(error: OSError) -> None:
        skipped.append(Skipped(Path(error.filename), error.strerror or str(error)))

    for path in paths:
        try:
            if not path.is_dir():
                add(path, is_named=True)
                continue
            os.scandir(path).close()
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            raise OptionError(f"the corpus {path} cannot be read: {reason}") from None
        for folder, inner, names in os.walk(path, onerror=unreadable):
            inner[:] = sorted(name for name in inner if not name.startswith("."))
            for name in sorted(name for name in names if not name.startswith(".")):
                try:
                    add(Path(folder, name), is_named=False)
                except OSError as error:  # a link to nowhere, or in a circle
                    unreadable(error)
    return found


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[BinaryIO]:
    try:
        with open(path, "rb") as stream:
            yield stream
    except OSError as error:
        raise _Fault(error.strerror or str(error)) from None


def _pieces(
    frontend: Frontend, path: Path, stream: BinaryIO, told: Callable[[int], None]
) -> Iterator[_Piece]:
    if path.suffix.lower() == ".jsonl":
        return _lines(frontend, stream, told)
    return _cut(_characters(stream, told))


def _characters(stream: BinaryIO, told: Callable[[int], None]) -> Iterator[str]:
    decoder = codecs.getincrementaldecoder("utf-8-sig")()
    position = 0
    while data := stream.read(_READ):
        if b"\0" in data:
            raise _Fault(f"byte {position + data.index(0)} is NUL; it is no text")
        yield _decoded(decoder, data, position, is_last=False)
        position += len(data)
        told(position)
    yield _decoded(decoder, b"", position, is_last=True)


def _decoded(decoder: codecs.IncrementalDecoder, data: bytes, position: int, *, is_last: bool) -> str:
    held = len(decoder.getstate()[0])  # bytes of a character whose end is still to come
    try:
        return decoder.decode(data, is_last)
    except UnicodeDecodeError as error:
        raise _Fault(f"it is not valid UTF-8 (byte {position - held + error.start})") from None


def _cut(characters: Iterator[str]) -> Iterator[str]:
    """Pieces of about `PIECE` characters, cut where no token is; a run of so many characters without such a
    place is cut anyway."""
    text = ""
    for more in characters:
        text += more
        while len(text) > PIECE:
            at = PIECE
            for match in _CUT.finditer(text, PIECE // 2, PIECE):
                at = match.start()
            yield text[:at]
            text = text[at:]
    if text:
        yield text


def _lines(frontend: Frontend, stream: BinaryIO, told: Callable[[int], None]) -> Iterator[_Piece]:
    number = 0
    while line := stream.readline(LONGEST_LINE + 1):
        number += 1
        if len(line) > LONGEST_LINE:
            raise _Fault(f"line {number} has more than {LONGEST_LINE} bytes")
        if line.strip():
            try:
                yield from _record(frontend, json.loads(line))
            except (ValueError, RecursionError, FrontendError) as error:
                raise _Fault(f"line {number}: {error}") from None
        told(stream.tell())


def _record(frontend: Frontend, record: Any) -> Iterator[_Piece]:
    """The text of a line, or the tokens of its conversation."""
    given = record if isinstance(record, dict) else {"text": record, "messages": record}
    messages, text = given.get("messages"), given.get("text")
    if isinstance(messages, list):
        tools = given.get("tools")
        if not isinstance(tools, list | None):
            raise ValueError("'tools' must be an array")
        yield frontend.render(messages, tools=tools, add_generation_prompt=False).tokens
    elif isinstance(text, str):
        text.encode()  # a lone surrogate is a ValueError
        yield from _cut(text[begin : begin + _READ] for begin in range(0, len(text), _READ))
    else:
        raise ValueError(f"expected {_FORMS}")
