"""Writing: the exact bytes, coverage, publication, and nothing left behind when something fails."""

from __future__ import annotations

import errno
import os
import struct
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from ninfer.artifact import Artifact, ArtifactWriter, Directory, TensorObject
from ninfer.errors import ArtifactError

from . import build


def _names(folder: Path) -> set[str]:
    return set(os.listdir(folder))


def _payload(directory: Directory, data: dict[str, bytes]) -> bytes:
    out = bytearray(directory.payload_end)
    for id, record in directory.objects.items():
        out[record.offset : record.offset + record.bytes] = data[id]
    return bytes(out)


@pytest.mark.parametrize("limit", [10**9, 16384, 12288])
@pytest.mark.parametrize("step", [None, 1000])
def test_round_trip(tmp_path: Path, limit: int, step: int | None) -> None:
    directory, path = build.directory(), tmp_path / "x.ninfer"
    data = build.contents(directory)
    written = build.write(path, directory, data, limit, step)
    with Artifact.open(path) as artifact:
        assert artifact.directory == written
        assert artifact.artifact_id == build.ID
        assert artifact.read_range(0, artifact.payload_bytes) == _payload(directory, data)
        for id, record in artifact.objects.items():
            if isinstance(record, TensorObject):
                assert artifact.object_bytes(id).tobytes() == data[id]
        assert artifact.resource("text", "tokenizer.json") == data["resource/text/tokenizer.json"]
        sizes = [(tmp_path / (entry.path or "x.ninfer")).stat().st_size for entry in artifact.files]
    assert sum(sizes) == artifact.file_bytes
    assert all(size <= limit for size in sizes)
    assert len(sizes) == len(_names(tmp_path))


def test_exact_bytes_of_the_files(tmp_path: Path) -> None:
    directory, path = build.directory(), tmp_path / "x.ninfer"
    data = build.contents(directory)
    written = build.write(path, directory, data, limit=12288)
    payload, entry = _payload(directory, data), path.read_bytes()
    assert entry[:8] == bytes.fromhex("4e494e4645520003")
    (json_bytes,) = struct.unpack("<Q", entry[8:16])
    assert (json_bytes + 32) % 4096 == 0
    assert entry[16:32] == build.ID
    assert entry[32 + json_bytes :] == payload[: written.files[0].payload_bytes]
    position = written.files[0].payload_bytes
    assert len(written.files) > 2
    for index, item in enumerate(written.files[1:], 1):
        assert item.path == f"x.ninfer.part-{index:04d}"
        content = payload[position : position + item.payload_bytes]
        assert (tmp_path / str(item.path)).read_bytes() == build.part_bytes(index, content)
        position += item.payload_bytes
    again = tmp_path / "again"
    again.mkdir()
    build.write(again / "x.ninfer", directory, data, limit=12288, step=777)
    assert (again / "x.ninfer").read_bytes() == entry


def test_header_example_of_the_specification(tmp_path: Path) -> None:
    directory = build.directory()
    build.write(tmp_path / "x", directory, build.contents(directory))
    expected = "4e494e4645520003e00f000000000000000102030405060708090a0b0c0d0e0f"
    assert (tmp_path / "x").read_bytes()[:32].hex() == expected


def test_a_fresh_id_each_time(tmp_path: Path) -> None:
    ids = set()
    for _ in range(2):
        with ArtifactWriter(tmp_path / "x", build.directory()) as writer:
            ids.add(writer.artifact_id)
            assert writer.artifact_id[6] >> 4 == 4
    assert len(ids) == 2
    with pytest.raises(ArtifactError, match="16 bytes"):
        ArtifactWriter(tmp_path / "x", build.directory(), artifact_id=b"short")


def test_writes_that_are_refused(tmp_path: Path) -> None:
    with ArtifactWriter(tmp_path / "x", build.directory()) as writer:
        writer.write("weight/3", 10, bytes(20))
        for offset, size in [(0, 11), (29, 1), (15, 2), (10, 20), (0, 70), (29, 2)]:
            with pytest.raises(ArtifactError, match=r"object 'weight/3' are written twice"):
                writer.write("weight/3", offset, bytes(size))
        writer.write("weight/3", 0, bytes(10))
        writer.write("weight/3", 30, bytes(40))
        with pytest.raises(ArtifactError, match="written twice"):
            writer.write("weight/3", 0, b"x")
        for offset, size in [(-1, 1), (69, 2), (70, 1)]:
            with pytest.raises(ArtifactError, match="has 70 bytes"):
                writer.write("weight/3", offset, bytes(size))
        writer.write("weight/4", 0, b"")
        with pytest.raises(ArtifactError, match="no object 'weight/9'"):
            writer.write("weight/9", 0, b"x")
        with pytest.raises(ArtifactError, match="contiguous"):
            writer.write("weight/4", 0, np.zeros((8, 8), np.uint8)[:, ::2])
    assert _names(tmp_path) == set()


def test_holes_are_refused_and_nothing_remains(tmp_path: Path) -> None:
    directory = build.directory()
    data = build.contents(directory)
    for begin, end, hole in [(0, 69, 69), (1, 70, 0), (0, 0, 0)]:
        with ArtifactWriter(tmp_path / "x", directory, max_file_bytes=12288) as writer:
            for id, content in data.items():
                if id == "weight/3":
                    writer.write(id, begin, content[begin:end])
                else:
                    writer.write(id, 0, content)
            with pytest.raises(ArtifactError, match=f"'weight/3' is incomplete: byte {hole} of 70"):
                writer.commit()
            with pytest.raises(ArtifactError, match="finished"):
                writer.write("weight/3", 69, b"x")
            with pytest.raises(ArtifactError, match="finished"):
                writer.commit()
        assert _names(tmp_path) == set()


def test_leaving_without_commit_or_by_an_exception_removes_everything(tmp_path: Path) -> None:
    with ArtifactWriter(tmp_path / "x", build.directory(), max_file_bytes=12288):
        assert all(name.endswith(".tmp") for name in _names(tmp_path))
        assert len(_names(tmp_path)) > 2
    assert _names(tmp_path) == set()
    with pytest.raises(KeyboardInterrupt), ArtifactWriter(tmp_path / "x", build.directory()):
        raise KeyboardInterrupt
    assert _names(tmp_path) == set()


@pytest.mark.parametrize("existing", ["x", "x.part-0002"])
def test_existing_files_are_never_touched(tmp_path: Path, existing: str) -> None:
    directory = build.directory()
    (tmp_path / existing).write_bytes(b"mine")
    with pytest.raises(ArtifactError, match=f"{existing} exists already"):
        ArtifactWriter(tmp_path / "x", directory, max_file_bytes=12288)
    (tmp_path / existing).unlink()
    # One that appears between the start and the end is as safe, and what was published before it goes again.
    with ArtifactWriter(tmp_path / "x", directory, max_file_bytes=12288) as writer:
        for id, content in build.contents(directory).items():
            writer.write(id, 0, content)
        (tmp_path / existing).write_bytes(b"mine")
        with pytest.raises(ArtifactError, match=f"{existing} exists already"):
            writer.commit()
    assert _names(tmp_path) == {existing}
    assert (tmp_path / existing).read_bytes() == b"mine"


def test_a_dangling_link_exists_too(tmp_path: Path) -> None:
    (tmp_path / "x").symlink_to(tmp_path / "nowhere")
    with pytest.raises(ArtifactError, match="exists already"):
        ArtifactWriter(tmp_path / "x", build.directory())


@pytest.mark.parametrize("links", [True, False])
def test_the_entry_is_published_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, links: bool) -> None:
    order: list[str] = []
    real_link, real_rename = os.link, os.rename

    def link(source: Path, target: Path) -> None:
        if not links:
            raise OSError(errno.EPERM, "no hard links here")
        order.append(target.name)
        real_link(source, target)

    def rename(source: Path, target: Path) -> None:
        order.append(target.name)
        real_rename(source, target)

    monkeypatch.setattr(os, "link", link)
    monkeypatch.setattr(os, "rename", rename)
    directory = build.directory()
    written = build.write(tmp_path / "x", directory, build.contents(directory), 12288)
    assert order == [entry.path for entry in written.files[1:]] + ["x"]
    assert _names(tmp_path) == set(order)


def _fail_at(real: Callable[..., object], call: int) -> Callable[..., object]:
    left = [call]

    def wrapped(*arguments: object, **options: object) -> object:
        left[0] -= 1
        if left[0] == 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(*arguments, **options)

    return wrapped


@pytest.mark.parametrize(
    "function", ["ninfer.artifact.writer.FileIO", "os.fsync", "ninfer.artifact.writer._link"]
)
@pytest.mark.parametrize("call", [1, 2, 3])
def test_every_failing_point_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, function: str, call: int
) -> None:
    module, _, name = function.rpartition(".")
    real = getattr(__import__(module, fromlist=[name]), name)
    monkeypatch.setattr(function, _fail_at(real, call))
    directory = build.directory()
    with pytest.raises(ArtifactError, match="No space left on device"):
        build.write(tmp_path / "x", directory, build.contents(directory), 12288)
    assert _names(tmp_path) == set()


@pytest.mark.parametrize("call", [1, 2, 3, 4, 5, 6, 8, 11])
def test_a_full_disk_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: int) -> None:
    from ninfer.artifact import writer

    monkeypatch.setattr(writer, "_write_all", _fail_at(writer._write_all, call))
    directory = build.directory()
    with pytest.raises(ArtifactError, match="No space left on device"):
        build.write(tmp_path / "x", directory, build.contents(directory), 12288)
    assert _names(tmp_path) == set()


def test_a_folder_that_does_not_exist(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="No such file"):
        ArtifactWriter(tmp_path / "missing" / "x", build.directory())


def test_many_threads(tmp_path: Path) -> None:
    directory = build.directory()
    data = build.contents(directory)
    pieces = [
        (id, begin, content[begin : begin + 61])
        for id, content in data.items()
        for begin in range(0, len(content), 61)
    ]
    with ArtifactWriter(tmp_path / "x", directory, max_file_bytes=12288) as writer:
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(lambda piece: writer.write(*piece), pieces))
        writer.commit()
    with Artifact.open(tmp_path / "x") as artifact:
        assert artifact.read_range(0, artifact.payload_bytes) == _payload(directory, data)
