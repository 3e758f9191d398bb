"""Writing a `.ninfer` artifact: every byte once, under temporary names, published whole or not at all."""

from __future__ import annotations

import bisect
import contextlib
import os
import secrets
import threading
import uuid
from collections.abc import Iterator
from io import FileIO
from itertools import accumulate
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from ninfer.artifact import framing
from ninfer.artifact.fileset import MAX_FILE_BYTES, lay_out
from ninfer.artifact.records import Directory
from ninfer.artifact.strict_json import show
from ninfer.errors import ArtifactError

if TYPE_CHECKING:
    import numpy as np

    Bytes = bytes | bytearray | memoryview | np.ndarray


class ArtifactWriter:
    """Writes the file set that a directory describes (its `files` are computed here).

        with ArtifactWriter(path, directory) as writer:
            writer.write("weight/000000", 0, data)      # any order, any chunks, every byte of an object once
            writer.commit()

    Nothing appears under the final names before `commit`; leaving the block without it removes everything.
    `write` may be called from several threads. `artifact_id` (16 bytes) is for tests: normally a fresh UUID4.
    Every error is an ArtifactError; the constructor already refuses existing files and a faulty directory.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        directory: Directory,
        *,
        max_file_bytes: int = MAX_FILE_BYTES,
        artifact_id: bytes | None = None,
    ) -> None:
        self.path = Path(path)
        self.artifact_id = uuid.uuid4().bytes if artifact_id is None else artifact_id
        if len(self.artifact_id) != 16:
            raise ArtifactError(f"an artifact id has 16 bytes, got {len(self.artifact_id)}")
        text, self.directory = lay_out(directory, self.path.name, max_file_bytes)
        self._start = framing.HEADER.size + len(text)
        self._begins = [0, *accumulate(entry.payload_bytes for entry in self.directory.files)]
        self._targets = [self.path.parent / (entry.path or self.path.name) for entry in self.directory.files]
        self._written: dict[str, list[tuple[int, int]]] = {name: [] for name in directory.objects}
        self._lock = threading.Lock()
        self._temporaries: list[Path] = []
        self._files: list[FileIO] = []
        self._published: list[Path] = []
        self._done = False
        self._refuse_existing()
        try:
            self._create(text)
        except BaseException as error:
            self.abort()
            if isinstance(error, OSError):
                raise self._failure("cannot be written", error) from None
            raise

    @property
    def paths(self) -> tuple[Path, ...]:
        """The files that `commit` makes, the entry first."""
        return tuple(self._targets)

    def write(self, object_id: str, offset: int, data: Bytes) -> None:
        """Write contiguous bytes at `offset` of an object. Overlaps and bytes outside it are refused."""
        record = self.directory.objects.get(object_id)
        if record is None:
            raise ArtifactError(f"{self.path} has no object {show(object_id)} to write")
        try:
            view = memoryview(data).cast("B")  # type: ignore[arg-type]
        except (TypeError, ValueError) as error:
            raise ArtifactError(f"object {show(object_id)} takes contiguous bytes: {error}") from None
        if offset < 0 or offset + len(view) > record.bytes:
            raise ArtifactError(
                f"object {show(object_id)} has {record.bytes} bytes; "
                f"[{offset}, {offset + len(view)}) is outside"
            )
        if not view:
            return
        with self._lock:
            if self._done:
                raise ArtifactError(f"{self.path} is finished; nothing can be written to it any more")
            self._cover(object_id, offset, offset + len(view))
            try:
                self._write_payload(record.offset + offset, view)
            except OSError as error:
                raise self._failure("cannot be written", error) from None

    def commit(self) -> None:
        """Check that every object is complete, flush, and link the files into place, the entry last."""
        try:
            with self._lock:
                self._check_complete()
                self._flush()
                self._publish()
        except BaseException as error:
            self.abort()
            if isinstance(error, OSError):
                raise self._failure("cannot be published", error) from None
            raise
        self._done = True

    def abort(self) -> None:
        """Remove everything this writer made. Harmless after `commit`."""
        if self._done:
            return
        self._done = True
        for file in self._files:
            with contextlib.suppress(OSError):
                file.close()
        for path in [*reversed(self._published), *self._temporaries]:
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)

    def __enter__(self) -> ArtifactWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.abort()

    def _failure(self, what: str, error: OSError) -> ArtifactError:
        return ArtifactError(f"{self.path} {what}: {error.strerror or error}")

    def _refuse_existing(self) -> None:
        for target in self._targets:
            if os.path.lexists(target):
                raise ArtifactError(f"{target} exists already; choose another name or remove it")

    def _create(self, text: bytes) -> None:
        token = secrets.token_hex(4)
        for index, (target, entry) in enumerate(zip(self._targets, self.directory.files, strict=True)):
            temporary = target.with_name(f".{target.name}.{token}.tmp")
            self._temporaries.append(temporary)
            file = FileIO(temporary, "xb")
            self._files.append(file)
            start = framing.PAGE if index else self._start
            file.truncate(start + entry.payload_bytes)
            if index:
                _write_all(file, 0, memoryview(framing.part_header(index, self.artifact_id)))
            else:
                _write_all(file, 0, memoryview(framing.entry_header(len(text), self.artifact_id) + text))

    def _write_payload(self, offset: int, view: memoryview) -> None:
        for index, begin, end in self._pieces(offset, offset + len(view)):
            start = (framing.PAGE if index else self._start) + begin - self._begins[index]
            _write_all(self._files[index], start, view[begin - offset : end - offset])

    def _pieces(self, begin: int, end: int) -> Iterator[tuple[int, int, int]]:
        """(file, begin, end) of the logical range, file by file."""
        index = bisect.bisect_right(self._begins, begin) - 1
        while begin < end:
            stop = min(end, self._begins[index + 1])
            yield index, begin, stop
            begin, index = stop, index + 1

    def _cover(self, object_id: str, begin: int, end: int) -> None:
        """Note that [begin, end) of an object is written; the sorted intervals never touch each other."""
        intervals = self._written[object_id]
        at = bisect.bisect_left(intervals, (begin, end))
        before = intervals[at - 1] if at else (0, -1)
        after = intervals[at] if at < len(intervals) else (end + 1, 0)
        if before[1] > begin or after[0] < end:
            raise ArtifactError(f"bytes in [{begin}, {end}) of object {show(object_id)} are written twice")
        first, last = at, at
        if before[1] == begin:
            first, begin = at - 1, before[0]
        if after[0] == end:
            last, end = at + 1, after[1]
        intervals[first:last] = [(begin, end)]

    def _check_complete(self) -> None:
        if self._done:
            raise ArtifactError(f"{self.path} is finished already")
        for identifier, intervals in self._written.items():
            size = self.directory.objects[identifier].bytes
            if intervals != [(0, size)]:
                hole = intervals[0][1] if intervals and intervals[0][0] == 0 else 0
                raise ArtifactError(
                    f"object {show(identifier)} is incomplete: byte {hole} of {size} was never written"
                )

    def _flush(self) -> None:
        for index, (file, entry) in enumerate(zip(self._files, self.directory.files, strict=True)):
            expected = (framing.PAGE if index else self._start) + entry.payload_bytes
            os.fsync(file.fileno())
            found = os.fstat(file.fileno()).st_size
            if found != expected:
                raise ArtifactError(f"{self._targets[index]} has {found} bytes instead of {expected}")
            file.close()

    def _publish(self) -> None:
        pairs = list(zip(self._temporaries, self._targets, strict=True))
        for temporary, target in [*pairs[1:], pairs[0]]:
            _link(temporary, target)
            self._published.append(target)
        for temporary in self._temporaries:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            folder = os.open(self.path.parent, os.O_RDONLY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)


def _write_all(file: FileIO, offset: int, view: memoryview) -> None:
    file.seek(offset)
    while view:
        view = view[file.write(view) or 0 :]


def _link(temporary: Path, target: Path) -> None:
    """Give a finished file its name, never over another one; by renaming where there are no hard links."""
    try:
        os.link(temporary, target)
    except FileExistsError:
        raise ArtifactError(f"{target} exists already; choose another name or remove it") from None
    except OSError:
        if os.path.lexists(target):
            raise ArtifactError(f"{target} exists already; choose another name or remove it") from None
        os.rename(temporary, target)
