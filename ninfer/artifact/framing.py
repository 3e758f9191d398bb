"""The 32-byte headers of entry and continuation files, and what a wrong one probably is."""

from __future__ import annotations

import struct

from ninfer.artifact.records import align_up
from ninfer.errors import ArtifactError

HEADER = struct.Struct("<8sQ16s")
ENTRY_MAGIC = b"NINFER\x00\x03"
PART_MAGIC = b"NINPRT\x00\x03"
PAGE = 4096
VERSION = 3
MAX_U64 = (1 << 64) - 1


def payload_start(json_bytes: int) -> int:
    """Where an entry's payload begins; a continuation's begins at `PAGE`."""
    return align_up(HEADER.size + json_bytes, PAGE)


def entry_header(json_bytes: int, artifact_id: bytes) -> bytes:
    """The entry's 32 bytes."""
    return HEADER.pack(ENTRY_MAGIC, json_bytes, artifact_id)


def part_header(index: int, artifact_id: bytes) -> bytes:
    """A continuation's 32 bytes; `index` is its place in `files`, at least 1."""
    return HEADER.pack(PART_MAGIC, index, artifact_id)


def read_entry_header(data: bytes, path: str, file_bytes: int) -> tuple[int, bytes]:
    """(json_bytes, artifact_id) of an entry's first bytes; ArtifactError says what is wrong with them."""
    _check_magic(data, path)
    if len(data) < HEADER.size:
        raise ArtifactError(f"{path} is truncated: {len(data)} bytes, less than the header's {HEADER.size}")
    _, json_bytes, artifact_id = HEADER.unpack(data[: HEADER.size])
    if json_bytes == 0:
        raise ArtifactError(f"{path} is damaged: its header says that the directory has 0 bytes")
    if HEADER.size + json_bytes > file_bytes:
        raise ArtifactError(
            f"{path} is truncated: the directory ends at byte {HEADER.size + json_bytes}, "
            f"the file at {file_bytes}; fetch or convert it again"
        )
    return json_bytes, artifact_id


def read_part_header(data: bytes, path: str, index: int, artifact_id: bytes) -> None:
    """Check a continuation's first bytes against the entry's id and the part's place."""
    if len(data) < HEADER.size or data[:8] != PART_MAGIC:
        raise ArtifactError(
            f"{path} is not a continuation of a version {VERSION} .ninfer artifact (wrong magic)"
        )
    _, found_index, found_id = HEADER.unpack(data[: HEADER.size])
    if found_id != artifact_id:
        raise ArtifactError(
            f"{path} belongs to another artifact: its id is {found_id.hex()}, the entry's {artifact_id.hex()}"
        )
    if found_index != index:
        raise ArtifactError(
            f"{path} is part {found_index} of its artifact, but part {index} is expected here"
        )


def _check_magic(data: bytes, path: str) -> None:
    magic = data[:8]
    if magic == ENTRY_MAGIC:
        return
    if magic == PART_MAGIC:
        raise ArtifactError(f"{path} is a continuation of an artifact; open its entry file instead")
    if magic[:7] == ENTRY_MAGIC[:7] and len(magic) == 8:
        raise ArtifactError(_other_version(path, magic[7]))
    if magic[:4] == b"GGUF":
        raise ArtifactError(f"{path} is a GGUF file, not a .ninfer artifact; convert it with ninfer-convert")
    if len(data) < HEADER.size:
        raise ArtifactError(f"{path} is no .ninfer artifact: it has only {len(data)} bytes")
    raise ArtifactError(
        f"{path} is no .ninfer artifact: it begins with {magic.hex()}, not {ENTRY_MAGIC.hex()}"
    )


def _other_version(path: str, version: int) -> str:
    text = f"{path} is a .ninfer artifact of version {version}, and this program reads version {VERSION}: "
    if version == 1:
        return text + (
            "convert the original checkpoint with ninfer-convert, or upgrade the file from 1 to 2 "
            "and from 2 to 3 with the upgrade tools of the project that published it"
        )
    if version == 2:
        return text + (
            "convert the original checkpoint with ninfer-convert, or upgrade the file from 2 to 3 "
            "with the upgrade tool of the project that published it (upgrade_ninfer_v2_to_v3)"
        )
    return text + "a newer NInfer may read it"
