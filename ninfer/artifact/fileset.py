"""The files that a payload is divided into, and the directory's text that says so."""

from __future__ import annotations

from dataclasses import replace

from ninfer.artifact import directory as directory_json
from ninfer.artifact import strict_json
from ninfer.artifact.framing import HEADER, PAGE
from ninfer.artifact.records import Directory, FileEntry, align_up
from ninfer.errors import ArtifactError

MAX_FILE_BYTES = 32_000_000_000


def divide(payload: int, start: int, entry_name: str, limit: int) -> tuple[FileEntry, ...]:
    """Files of at most `limit` bytes for a payload from `start` of the entry; all but the last are full."""
    if start >= limit:
        raise ArtifactError(
            f"the limit of {limit} bytes a file leaves no room behind the directory of {start} bytes"
        )
    if start + payload <= limit:
        return (FileEntry(None, payload),)
    entry_capacity = (limit - start) // PAGE * PAGE
    part_capacity = (limit - PAGE) // PAGE * PAGE
    if entry_capacity <= 0 or part_capacity <= 0:
        raise ArtifactError(
            f"the limit of {limit} bytes a file is too small: a file holds whole pages of {PAGE}"
        )
    files, remaining = [FileEntry(None, entry_capacity)], payload - entry_capacity
    while remaining > 0:
        size = min(remaining, part_capacity)
        files.append(FileEntry(f"{entry_name}.part-{len(files):04d}", size))
        remaining -= size
    return tuple(files)


def lay_out(directory: Directory, entry_name: str, limit: int = MAX_FILE_BYTES) -> tuple[bytes, Directory]:
    """The directory's text, padded to whole pages together with the header, and the directory with its files.

    Raises ArtifactError if the directory breaks a rule that a reader would check.
    """
    payload = directory.payload_end
    root = directory_json.render(directory)
    reserve = _reserve(_encode(root, (FileEntry(None, payload),)))
    while True:
        files = divide(payload, HEADER.size + reserve, entry_name, limit)
        text = _encode(root, files)
        if len(text) <= reserve:
            break
        reserve = _reserve(text)
    parsed = directory_json.parse(strict_json.loads(text, "the directory"), entry_name)
    if list(parsed.objects) != list(directory.objects):
        raise ArtifactError("an object is filed under another id than its own")
    _check_whole(directory, parsed)
    return text.ljust(reserve), replace(directory, files=files)


def _check_whole(given: Directory, parsed: Directory) -> None:
    """A binding that claims a whole object has exactly that part."""
    for name, binding in given.bindings.items():
        if binding.whole and binding.parts != parsed.bindings[name].parts:
            raise ArtifactError(
                f"binding {strict_json.show(name)} claims a whole object, but its parts are others"
            )


def _reserve(text: bytes) -> int:
    return align_up(HEADER.size + len(text), PAGE) - HEADER.size


def _encode(root: dict[str, object], files: tuple[FileEntry, ...]) -> bytes:
    root["files"] = [{"path": entry.path, "payload_bytes": entry.payload_bytes} for entry in files]
    return strict_json.dumps(root, "the directory")
