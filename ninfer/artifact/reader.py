"""Reading a `.ninfer` artifact: the entry is mapped and checked, everything else waits until it is wanted."""

from __future__ import annotations

import bisect
import itertools
import mmap
import os
import stat
import threading
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

from ninfer.artifact import directory as directory_json
from ninfer.artifact import framing, strict_json
from ninfer.artifact.contents import Contents
from ninfer.artifact.records import RAW_BYTES, Directory, FileEntry, ResourceObject
from ninfer.artifact.verify import check_tensor
from ninfer.errors import ArtifactError

if TYPE_CHECKING:
    import numpy as np
    import torch

_WORD = 64


class Artifact(Contents):
    """An open artifact; create it with `Artifact.open`. Safe to read from several threads.

    Arrays that it has handed out stay valid after `close`.
    """

    def __init__(
        self, path: Path, directory: Directory, artifact_id: bytes, entry: mmap.mmap, start: int
    ) -> None:
        super().__init__(path, directory, artifact_id)
        self._payload_start = start
        self._begins = [0, *itertools.accumulate(entry.payload_bytes for entry in directory.files)]
        self._maps: dict[int, mmap.mmap] = {0: entry}
        self._checked: set[str] = set()
        self._lock = threading.Lock()
        self._closed = False

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> Artifact:
        """Map and check the entry file. Raises ArtifactError naming the file and the broken rule."""
        path = Path(path)
        mapped = _map(path)
        try:
            json_bytes, artifact_id = framing.read_entry_header(
                mapped[: framing.HEADER.size], str(path), len(mapped)
            )
            start = framing.payload_start(json_bytes)
            text = mapped[framing.HEADER.size : framing.HEADER.size + json_bytes]
            root = strict_json.loads(text, f"{path}: the directory")
            try:
                directory = directory_json.parse(root, path.name)
            except ArtifactError as error:
                raise ArtifactError(f"{path}: {error}") from None
            _check_length(str(path), len(mapped), start + directory.files[0].payload_bytes)
            return cls(path, directory, artifact_id, mapped, start)
        except BaseException:
            mapped.close()
            raise

    @property
    def files(self) -> tuple[FileEntry, ...]:
        """The file set, entry first."""
        return self.directory.files

    @property
    def payload_bytes(self) -> int:
        """Size of the logical payload."""
        return self._begins[-1]

    @property
    def file_bytes(self) -> int:
        """Declared size of all files together."""
        return self.payload_bytes + self._payload_start + framing.PAGE * (len(self.files) - 1)

    def resource(self, component: str, role: str) -> bytes:
        """The bytes of a component's resource."""
        record = self.components.get(component)
        if record is None or role not in record.resources:
            owner = f"component {strict_json.show(component)}"
            raise ArtifactError(
                f"{self.path}: {owner} {'does not exist' if record is None else f'lacks {role}'}"
            )
        found = self.objects[record.resources[role]]
        if not isinstance(found, ResourceObject) or found.encoding != RAW_BYTES:
            raise ArtifactError(
                f"{self.path}: the resource {strict_json.show(found.id)} has an encoding that this version "
                f"doesn't know; it knows '{RAW_BYTES}'"
            )
        return self.read_range(found.offset, found.bytes)

    def object_bytes(self, object_id: str) -> np.ndarray:
        """All bytes of a tensor object, uint8 `[bytes]`, read-only: normally a view of the mapped file.

        A copy where the object crosses files or isn't aligned in its own. Format, layout, size and offset are
        checked at first use; unknown or inconsistent ones raise ArtifactError.
        """
        import numpy as np

        tensor = self.tensor(object_id)
        data = self._view(tensor.offset, tensor.bytes)
        if data is None:
            array = np.empty(tensor.bytes, dtype=np.uint8)
            self._read_into(array.data, tensor.offset)
            array.flags.writeable = False
        else:
            array = np.frombuffer(data, dtype=np.uint8)
        if object_id not in self._checked:
            try:
                check_tensor(tensor, array)
            except ArtifactError as error:
                raise ArtifactError(f"{self.path}: {error}") from None
            self._checked.add(object_id)
        return array

    def object_tensor(self, object_id: str, device: torch.device) -> torch.Tensor:
        """`object_bytes` as a tensor on the host."""
        del device
        import torch

        with warnings.catch_warnings():
            # Mapped files are read-only, and nobody writes to weights: PyTorch's warning has no reader.
            warnings.simplefilter("ignore", UserWarning)
            return torch.from_numpy(self.object_bytes(object_id))

    def read_range(self, offset: int, size: int) -> bytes:
        """Logical payload bytes `[offset, offset + size)`; only the files that hold them need to exist."""
        buffer = bytearray(size if 0 <= size <= self.payload_bytes else 0)
        self._require_range(offset, size)
        self._read_into(memoryview(buffer), offset)
        return bytes(buffer)

    def forget(self) -> None:
        """Let the system take back the memory of what was read so far; it can be read again."""
        with self._lock:
            for mapped in self._maps.values():
                if hasattr(mmap, "MADV_DONTNEED"):
                    mapped.madvise(mmap.MADV_DONTNEED)

    def close(self) -> None:
        """Unmap the files, except what handed-out arrays still hold."""
        with self._lock:
            self._closed = True
            for mapped in self._maps.values():
                try:
                    mapped.close()
                except BufferError:
                    continue
            self._maps.clear()

    def _require_range(self, offset: int, size: int) -> None:
        if offset < 0 or size < 0 or offset + size > self.payload_bytes:
            raise ArtifactError(
                f"{self.path}: the range [{offset}, {offset + size}) is outside the payload "
                f"of {self.payload_bytes} bytes"
            )

    def _view(self, offset: int, size: int) -> memoryview | None:
        """A view of the mapping if the range lies in one file and begins at a machine-friendly address."""
        self._require_range(offset, size)
        index = bisect.bisect_right(self._begins, offset) - 1
        start = self._start(index) + offset - self._begins[index]
        if offset + size > self._begins[index + 1] or start % _WORD:
            return None
        return memoryview(self._file(index))[start : start + size]

    def _read_into(self, target: memoryview, offset: int) -> None:
        end, position = offset + len(target), offset
        index = bisect.bisect_right(self._begins, offset) - 1
        while position < end:
            stop = min(end, self._begins[index + 1])
            start = self._start(index) + position - self._begins[index]
            with memoryview(self._file(index)) as source:
                target[position - offset : stop - offset] = source[start : start + stop - position]
            position, index = stop, index + 1

    def _start(self, index: int) -> int:
        return framing.PAGE if index else self._payload_start

    def _file(self, index: int) -> mmap.mmap:
        with self._lock:
            if self._closed:
                raise ArtifactError(f"{self.path} has been closed")
            if index not in self._maps:
                self._maps[index] = self._open_part(index)
            return self._maps[index]

    def _open_part(self, index: int) -> mmap.mmap:
        entry = self.files[index]
        path = self.path.parent / str(entry.path)
        mapped = _map(path, f"part {index} of {self.path.name}")
        try:
            framing.read_part_header(mapped[: framing.HEADER.size], _shown(path), index, self.artifact_id)
            _check_length(_shown(path), len(mapped), framing.PAGE + entry.payload_bytes)
        except BaseException:
            mapped.close()
            raise
        return mapped


def _check_length(path: str, found: int, expected: int) -> None:
    if found != expected:
        problem = "truncated" if found < expected else "damaged"
        raise ArtifactError(
            f"{path} is {problem}: it has {found} bytes, its directory says {expected}; "
            f"fetch or convert it again"
        )


def _shown(path: Path) -> str:
    """A path for an error message; the directory of a damaged file may name parts with control characters."""
    return str(path) if str(path).isprintable() else ascii(str(path))


def _map(path: Path, role: str = "") -> mmap.mmap:
    named = f"{_shown(path)} ({role})" if role else _shown(path)
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):
            raise ArtifactError(f"{named} is not a regular file")
        with open(path, "rb") as file:
            if os.fstat(file.fileno()).st_size == 0:
                raise ArtifactError(f"{named} is empty")
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except FileNotFoundError:
        raise ArtifactError(f"{named} does not exist") from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ArtifactError(f"{named} cannot be read: {reason}") from None
