"""What a reader gives, from files made by hand; headers, lengths, continuations."""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ninfer.artifact import Artifact, Binding, FileEntry, Part, Proposal, ResourceObject, TensorObject
from ninfer.errors import ArtifactError

from . import build


def _split(root: dict[str, Any], sizes: list[int], names: list[str]) -> dict[str, Any]:
    entries = [{"path": None, "payload_bytes": sizes[0]}]
    entries += [{"path": name, "payload_bytes": size} for name, size in zip(names, sizes[1:], strict=True)]
    return root | {"files": entries}


@pytest.fixture
def toy(tmp_path: Path) -> Path:
    path = tmp_path / "toy.ninfer"
    path.write_bytes(build.entry_bytes(build.root()))
    return path


@pytest.fixture
def parts(tmp_path: Path) -> Path:
    """The payload in three files of 300, 215 and 1 bytes, cutting objects at odd places."""
    names = ["second", "third.bin"]
    path = tmp_path / "split.ninfer"
    path.write_bytes(build.entry_bytes(_split(build.root(), [300, 215, 1], names), build.PAYLOAD[:300]))
    (tmp_path / "second").write_bytes(build.part_bytes(1, build.PAYLOAD[300:515]))
    (tmp_path / "third.bin").write_bytes(build.part_bytes(2, build.PAYLOAD[515:]))
    return path


def test_records(toy: Path) -> None:
    with Artifact.open(toy) as artifact:
        assert artifact.path == toy
        assert artifact.artifact_id == build.ID
        assert artifact.components["text"].config == {"architectures": ["Toy"]}
        assert artifact.components["text"].proposal == Proposal("full")
        assert artifact.components["mtp"].target == "text"
        assert list(artifact.objects) == ["r", "w", "s"]
        assert artifact.objects["r"] == ResourceObject("r", "raw_bytes_v1", 0, 3)
        assert artifact.tensor("w") == TensorObject("w", (4, 8), "bf16", "contiguous_le_v1", 256, 64)
        assert artifact.tensor("s").elements == 1
        assert artifact.bindings["text/w"] == Binding((Part("w", 0, 32),), whole=True)
        assert artifact.parameter("text/v") == (Part("w", 0, 8), Part("w", 24, 32))
        assert artifact.bindings["text/v"].elements == 16
        first, second = artifact.uses
        assert first.auxiliaries == {"activation_input_divisor": Binding((Part("s", 0, 1),), whole=True)}
        assert (second.activation_policy, second.auxiliaries) == (None, {})
        assert artifact.metadata == {"name": "toy"}
        assert artifact.provenance == {}
        assert artifact.files == (FileEntry(None, 516),)
        assert artifact.payload_bytes == 516
        assert artifact.file_bytes == toy.stat().st_size


@pytest.mark.parametrize("file", ["toy", "parts"])
def test_bytes(file: str, request: pytest.FixtureRequest) -> None:
    with Artifact.open(request.getfixturevalue(file)) as artifact:
        for begin in (0, 1, 255, 299, 300, 301, 514, 515, 516):
            for end in range(begin, 517, 13):
                assert artifact.read_range(begin, end - begin) == build.PAYLOAD[begin:end]
        assert artifact.object_bytes("w").tobytes() == build.PAYLOAD[256:320]
        assert artifact.object_bytes("s").tobytes() == build.PAYLOAD[512:516]
        assert artifact.resource("text", "tokenizer.json") == build.PAYLOAD[:3]


def test_objects_are_views_of_the_file_where_possible(toy: Path, parts: Path) -> None:
    with Artifact.open(toy) as artifact:
        view = artifact.object_bytes("w")
        assert not view.flags.owndata
        assert not view.flags.writeable
        assert np.shares_memory(view, artifact.object_bytes("w"))
    assert view.tobytes() == build.PAYLOAD[256:320]
    with Artifact.open(parts) as artifact:
        copied = artifact.object_bytes("w")
        assert copied.flags.owndata
        assert not copied.flags.writeable


def test_continuations_open_at_first_use(parts: Path) -> None:
    (parts.parent / "third.bin").unlink()
    with Artifact.open(parts) as artifact:
        assert artifact.object_bytes("w").tobytes() == build.PAYLOAD[256:320]
        with pytest.raises(ArtifactError, match=r"third\.bin \(part 2 of .*does not exist"):
            artifact.object_bytes("s")
        assert artifact.resource("text", "tokenizer.json")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (build.part_bytes(1, build.PAYLOAD[300:515], bytes(16)), "another artifact"),
        (build.part_bytes(2, build.PAYLOAD[300:515]), "part 2 .* part 1 is expected"),
        (build.part_bytes(1, build.PAYLOAD[300:514]), "truncated"),
        (build.part_bytes(1, build.PAYLOAD[300:516]), "damaged"),
        (build.entry_bytes(build.root()), "wrong magic"),
        (b"NINPRT\0\3" + bytes(8), "wrong magic"),
        (b"", "is empty"),
    ],
)
def test_bad_continuations(parts: Path, content: bytes, message: str) -> None:
    (parts.parent / "second").write_bytes(content)
    with Artifact.open(parts) as artifact, pytest.raises(ArtifactError, match=message):
        artifact.object_bytes("w")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty"),
        (b"NINFER", "only 6 bytes"),
        (b"NINFER\0\3" + bytes(8), "truncated"),
        (b"NINFER\0\3" + bytes(24), "0 bytes"),
        (b"NINFER\0\3" + struct.pack("<Q", 100) + bytes(60), "truncated"),
        (b"NINFER\0\3" + struct.pack("<Q", 2**64 - 1) + bytes(60), "truncated"),
        (b"NINFER\0\1" + struct.pack("<Q", 4) + b"null", "version 1.*ninfer-convert.*from 1 to 2"),
        (
            b"NINFER\0\2" + struct.pack("<Q", 4) + b"null",
            "version 2.*ninfer-convert.*upgrade_ninfer_v2_to_v3",
        ),
        (b"NINFER\0\4" + bytes(24), "version 4.*newer"),
        (build.part_bytes(1, b"x"), "continuation.*entry"),
        (b"GGUF" + bytes(100), "GGUF.*ninfer-convert"),
        (b"{" * 40, "begins with 7b7b"),
    ],
)
def test_bad_headers(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "x.ninfer"
    path.write_bytes(content)
    with pytest.raises(ArtifactError, match=message) as failure:
        Artifact.open(path)
    assert "\n" not in str(failure.value)
    assert str(path) in str(failure.value)


def test_wrong_entry_length(tmp_path: Path) -> None:
    path = tmp_path / "x.ninfer"
    whole = build.entry_bytes(build.root())
    for content, message in ((whole[:-1], "truncated"), (whole + b"\0", "damaged")):
        path.write_bytes(content)
        with pytest.raises(ArtifactError, match=message):
            Artifact.open(path)


def test_paths_that_are_no_files(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="does not exist"):
        Artifact.open(tmp_path / "missing")
    with pytest.raises(ArtifactError, match="not a regular file"):
        Artifact.open(tmp_path)
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(ArtifactError, match="not a regular file"):
        Artifact.open(tmp_path / "fifo")
    with pytest.raises(ArtifactError, match="cannot be read"):
        Artifact.open("a\0b")


def test_padding_is_ignored_and_whitespace_counts(tmp_path: Path) -> None:
    content = bytearray(build.entry_bytes(b" \n" + json.dumps(build.root()).encode() + b"\n  \t"))
    content[-len(build.PAYLOAD) - 1] = 0xFF
    path = tmp_path / "x.ninfer"
    path.write_bytes(content)
    with Artifact.open(path) as artifact:
        assert artifact.object_bytes("s").tobytes() == build.PAYLOAD[512:]


@pytest.mark.parametrize(("offset", "size"), [(-1, 1), (0, -1), (0, 517), (516, 1), (2**70, 1), (0, 2**70)])
def test_ranges_outside_the_payload(toy: Path, offset: int, size: int) -> None:
    with Artifact.open(toy) as artifact, pytest.raises(ArtifactError, match="outside the payload"):
        artifact.read_range(offset, size)


def test_unknown_names(toy: Path) -> None:
    with Artifact.open(toy) as artifact:
        for call in (
            lambda: artifact.parameter("text/z"),
            lambda: artifact.tensor("r"),
            lambda: artifact.object_bytes("z"),
            lambda: artifact.resource("vision", "tokenizer.json"),
            lambda: artifact.resource("mtp", "tokenizer.json"),
        ):
            with pytest.raises(ArtifactError, match=r"toy\.ninfer"):
                call()


def test_a_closed_artifact_says_so(toy: Path) -> None:
    artifact = Artifact.open(toy)
    artifact.close()
    artifact.close()
    with pytest.raises(ArtifactError, match="has been closed"):
        artifact.object_bytes("w")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format": "bf17"}, "unknown weight format 'bf17'"),
        ({"layout": "row_scale_v1"}, "'contiguous_le_v1', not 'row_scale_v1'"),
        ({"shape": [4, 7]}, "has 64 bytes, but bf16 .4, 7. takes 56"),
        ({"offset": 264}, "not at a multiple of 256"),
        ({"format": "q4_g64_fp16", "layout": "row_split_k128_v1", "shape": [32]}, "needs a matrix"),
        ({"format": "nvfp4", "layout": "block_scale_k16_m128x4_v1"}, "N % 128"),
        (
            {"format": "ggml_k", "layout": "ggml_k256_v1", "shape": [1, 256]},
            "takes 400 to 466 in steps of 66",
        ),
        ({"format": "ggml_k", "layout": "ggml_rows_v1", "shape": [1, 256]}, "not 'ggml_rows_v1'"),
        ({"format": "ggml_k", "layout": "ggml_k256_v1"}, "K % 256"),
    ],
)
def test_objects_are_checked_when_they_are_interpreted(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    root = build.root()
    root["objects"][1] |= changes
    root["bindings"] = {}
    root["uses"] = []
    path = tmp_path / "x.ninfer"
    path.write_bytes(build.entry_bytes(root))
    with Artifact.open(path) as artifact, pytest.raises(ArtifactError, match=f"object 'w'.*{message}"):
        artifact.object_bytes("w")


@pytest.mark.parametrize(
    ("table", "bytes_", "message"),
    [
        ([0, 144 << 1 | 1], 256 + 144 + 210, None),
        ([1, 210 << 1], 256 + 144 + 210, None),
        ([0, 144 << 1], 256 + 144 + 210, "has 610 bytes, but ggml_k .2, 256. takes 544"),
        ([0, 210 << 1 | 1], 256 + 144 + 210, "not canonical: row 1"),
        ([2, 144 << 1 | 1], 256 + 144 + 210, "not canonical: row 0"),
        ([0, 2**63 | 144 << 1 | 1], 256 + 144 + 210, "not canonical"),
        ([0, 144 << 1 | 1], 256 + 144 + 211, "in steps of 66"),
        ([0, 144 << 1 | 1], 256, "takes 544 to 676"),
    ],
)
def test_row_tables(tmp_path: Path, table: list[int], bytes_: int, message: str | None) -> None:
    record = {"id": "k", "kind": "tensor", "shape": [2, 256], "format": "ggml_k", "layout": "ggml_k256_v1"}
    root = build.root() | {"bindings": {}, "uses": []}
    root["components"] = {"text": {"config": {}}}
    root["objects"] = [record | {"offset": 0, "bytes": bytes_}]
    root["files"] = [{"path": None, "payload_bytes": bytes_}]
    path = tmp_path / "x.ninfer"
    path.write_bytes(build.entry_bytes(root, struct.pack("<2Q", *table) + bytes(bytes_ - 16)))
    with Artifact.open(path) as artifact:
        if message is None:
            assert len(artifact.object_bytes("k")) == bytes_
        else:
            with pytest.raises(ArtifactError, match=message):
                artifact.object_bytes("k")


def test_unknown_encoding_of_a_resource(tmp_path: Path) -> None:
    root = build.root()
    root["objects"][0]["encoding"] = "zstd_v1"
    path = tmp_path / "x.ninfer"
    path.write_bytes(build.entry_bytes(root))
    with Artifact.open(path) as artifact, pytest.raises(ArtifactError, match="encoding"):
        artifact.resource("text", "tokenizer.json")
