"""A proposal head cut from an artifact's own output head: its rows, and that nothing else changes."""

from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from ninfer.api.synthetic import weights
from ninfer.artifact import (
    Artifact,
    ArtifactWriter,
    Binding,
    Component,
    Directory,
    Part,
    Proposal,
    ResourceObject,
    TensorObject,
    Use,
    place,
)
from ninfer.artifact.layouts import decode_rows, unpack_rows
from ninfer.convert.attach import Attachment
from ninfer.errors import ArtifactError, ConversionError
from tests.artifact import build

VOCAB, PUBLIC, SPECIAL = 256, 200, (3, 150, 199)
HEAD = "text/output_head"
CPU = torch.device("cpu")
Change = Callable[[Directory], Directory]


def _resources(public: int = PUBLIC) -> dict[str, bytes]:
    added = [{"id": index, "content": f"<{index}>", "special": True} for index in SPECIAL]
    tokenizer = {"added_tokens": added, "model": {"vocab": {f"t{i}": i for i in range(public)}}}
    return {"tokenizer.json": json.dumps(tokenizer).encode(), "tokenizer_config.json": b"{}"}


def write(
    path: Path, format: str = "bf16", hidden: int = 256, *, change: Change | None = None, limit: int = 1 << 30
) -> Path:
    """An artifact with an output head in a format, an MTP component, odd gaps and a format nobody knows."""
    q6 = np.arange(VOCAB) % 3 == 0 if format == "ggml_k" else None
    texts = _resources()
    names = {role: f"resource/text/{role}" for role in texts}
    head = build.tensor("weight/000007", format, (VOCAB, hidden), None if q6 is None else int(q6.sum()))
    objects = place(
        [
            *(ResourceObject(names[role], "raw_bytes_v1", 0, len(text)) for role, text in texts.items()),
            build.tensor("weight/000002", "bf16", (7, 5)),
            head,
            TensorObject("weight/new", (3, 3), "q1_of_tomorrow", "unheard_of_v9", 0, 77),
        ]
    )
    last = objects["weight/new"]
    objects["weight/new"] = replace(last, offset=last.offset + 512)
    directory = Directory(
        components={
            "text": Component(
                {"architectures": ["Toy"], "vocab_size": VOCAB, "hidden_size": hidden},
                resources=names,
            ),
            "vision": Component({}, target="text"),
            "mtp": Component({}, target="text"),
        },
        objects=objects,
        bindings={
            "text/token_embedding": Binding.to(head),
            HEAD: Binding.to(head),
            "text/final_norm": Binding((Part("weight/000002", 3, 20),)),
        },
        uses=(Use(HEAD, "text/final_hidden", "A16Only"), Use(HEAD, "mtp/final_hidden", "AllowA8")),
        metadata={"name": "toy – ü"},
        provenance={"converter": "by hand", "nested": {"list": [1, None, True, 0.1]}},
    )
    directory = directory if change is None else change(directory)
    generator = np.random.default_rng(5)
    with ArtifactWriter(path, directory, max_file_bytes=limit) as writer:
        for record in objects.values():
            if isinstance(record, ResourceObject):
                data = np.frombuffer(texts[record.id.removeprefix("resource/text/")], dtype=np.uint8)
            elif record.id == head.id:
                data = weights.encoded(head, 0.3, CPU, 1, q6).numpy()
            else:
                data = generator.integers(0, 256, record.bytes, dtype=np.uint8)
            writer.write(record.id, 0, data)
        writer.commit()
    return path


def attach(source: Path, out: Path, ids: np.ndarray, **options: Any) -> int:
    with Artifact.open(source) as artifact:
        attachment = Attachment(artifact, len(ids), out, **options)
        return attachment.write(ids, {"ranking": "some file"}, workers=2)


def q4(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Codes and FP16 scales of the spec's `grouped_absmax`, word for word in float64."""
    rows, columns = values.shape
    codes = np.zeros((rows, columns), dtype=np.int8)
    scales = np.zeros((rows, -(-columns // 64)), dtype=np.float16)
    for row, group in itertools.product(range(rows), range(scales.shape[1])):
        x = values[row, 64 * group : 64 * group + 64].astype(np.float32).astype(np.float64)
        a = np.abs(x).max()
        if a == 0:
            continue
        scale = np.float16(np.float32(a / 7))
        scale = np.float16(2.0**-24) if scale == 0 else scale
        inverse = np.float64(np.float32(1 / np.float64(scale)))
        scales[row, group] = scale
        codes[row, 64 * group : 64 * group + 64] = np.clip(np.rint(np.float32(x * inverse)), -8, 7)
    return codes, scales


FORMATS = ["bf16", "fp32", "q8_g32_fp16", "q6_g64_fp16", "nvfp4", "fp8_e4m3fn_row_bf16"]
FORMATS += ["fp8_e4m3fn_block128_bf16", "ggml_q8_0", "ggml_k"]


@pytest.mark.parametrize("format", FORMATS)
def test_rows_are_the_heads_in_four_bits(tmp_path: Path, format: str) -> None:
    source = write(tmp_path / "in.ninfer", format)
    ids = np.random.default_rng(2).permutation(PUBLIC)[:70]
    size = attach(source, tmp_path / "out.ninfer", ids)
    assert size == (tmp_path / "out.ninfer").stat().st_size
    with Artifact.open(source) as before, Artifact.open(tmp_path / "out.ninfer") as after:
        (part,) = before.parameter(HEAD)
        record = before.tensor(part.object)
        values = decode_rows(format, record.shape, before.object_bytes(part.object), 0, VOCAB).numpy()
        codes, scales = q4(values[ids])
        (part,) = after.parameter("proposal/head")
        record = after.tensor(part.object)
        assert (record.format, record.layout, record.shape) == ("q4_g64_fp16", "row_split_k128_v1", (70, 256))
        found = unpack_rows(record.format, record.shape, after.object_bytes(record.id), 0, 70)
        assert np.array_equal(found.codes.numpy(), codes)
        assert found.scales is not None
        assert np.array_equal(found.scales.numpy(), scales)
        (part,) = after.parameter("proposal/token_ids")
        record = after.tensor(part.object)
        assert (record.format, record.layout, record.shape) == ("int32", "contiguous_le_v1", (70,))
        assert after.object_bytes(record.id).view("<i4").tolist() == ids.tolist()


def test_nothing_else_changes(tmp_path: Path) -> None:
    source = write(tmp_path / "in.ninfer", "q8_g32_fp16")
    attach(source, tmp_path / "out.ninfer", np.arange(9))
    with Artifact.open(source) as before, Artifact.open(tmp_path / "out.ninfer") as after:
        added = {name: after.objects[name] for name in ("weight/000008", "weight/000009")}
        assert dict(after.objects) == {**before.objects, **added}
        for record in before.objects.values():
            assert after.read_range(record.offset, record.bytes) == before.read_range(
                record.offset, record.bytes
            )
        assert list(after.bindings)[:-2] == list(before.bindings)
        assert list(after.bindings)[-2:] == ["proposal/head", "proposal/token_ids"]
        assert all(after.bindings[name] == binding for name, binding in before.bindings.items())
        assert after.bindings["proposal/head"].whole
        # One use for what drafts, none for what sees.
        assert after.uses == (*before.uses, Use("proposal/head", "mtp/final_hidden", "A16Only"))
        text = replace(before.components["text"], proposal=Proposal("indexed", 9))
        assert after.components == {**before.components, "text": text}
        assert after.metadata == before.metadata
        facts = {"rows": 9, "artifact_id": before.artifact_id.hex(), "ranking": "some file"}
        assert after.provenance == {**before.provenance, "proposal": facts}
        assert after.artifact_id != before.artifact_id


def test_files_of_limited_size_and_a_head_across_them(tmp_path: Path) -> None:
    whole, parts = write(tmp_path / "a.ninfer"), write(tmp_path / "b.ninfer", limit=40_000)
    assert len(list(tmp_path.glob("b.ninfer.part-*"))) > 2
    ids = np.arange(PUBLIC)[::-1].copy()
    attach(whole, tmp_path / "a2.ninfer", ids)
    size = attach(parts, tmp_path / "b2.ninfer", ids, max_file_bytes=60_000)
    assert size == sum(path.stat().st_size for path in tmp_path.glob("b2.ninfer*"))
    with Artifact.open(tmp_path / "a2.ninfer") as one, Artifact.open(tmp_path / "b2.ninfer") as other:
        assert len(other.files) > 2
        assert one.objects == other.objects
        assert one.read_range(0, one.payload_bytes) == other.read_range(0, one.payload_bytes)


def test_a_head_in_several_objects_and_a_partial_group(tmp_path: Path) -> None:
    """Rows [0, 100) are the stored ones from 156 on, rows [100, 256) those from 0 on; 96 columns."""

    def split(directory: Directory) -> Directory:
        parts = (Part("weight/000007", 156 * 96, 256 * 96), Part("weight/000007", 0, 156 * 96))
        return replace(directory, bindings={**directory.bindings, HEAD: Binding(parts)})

    ids = np.array([0, 99, 100, 101, 42, 199])
    attach(write(tmp_path / "in.ninfer", hidden=96, change=split), tmp_path / "out.ninfer", ids)
    with Artifact.open(tmp_path / "out.ninfer") as artifact:
        stored = decode_rows("bf16", (VOCAB, 96), artifact.object_bytes("weight/000007"), 0, VOCAB).numpy()
        codes, scales = q4(np.concatenate((stored[156:], stored[:156]))[ids])
        found = unpack_rows("q4_g64_fp16", (6, 96), artifact.object_bytes("weight/000008"), 0, 6)
        assert np.array_equal(found.codes.numpy(), codes)
        assert found.scales is not None
        assert np.array_equal(found.scales.numpy(), scales)


def _without_mtp(directory: Directory) -> Directory:
    components = {name: one for name, one in directory.components.items() if name != "mtp"}
    return replace(directory, components=components, uses=directory.uses[:1])


def _with_proposal(directory: Directory) -> Directory:
    text = replace(directory.components["text"], proposal=Proposal("full"))
    return replace(directory, components={**directory.components, "text": text})


def _with_short_head(directory: Directory) -> Directory:
    part = Binding((Part("weight/000007", 0, 255 * 256),))
    return replace(directory, bindings={**directory.bindings, HEAD: part})


def _with_ragged_head(directory: Directory) -> Directory:
    part = Binding((Part("weight/000007", 1, 255 * 256),))
    return replace(directory, bindings={**directory.bindings, HEAD: part})


def _with_small_config(directory: Directory) -> Directory:
    config = {**directory.components["text"].config, "vocab_size": 100}
    text = replace(directory.components["text"], config=config)
    return replace(directory, components={**directory.components, "text": text})


@pytest.mark.parametrize(
    ("change", "rows", "message"),
    [
        (None, 0, "from 1 to 200 rows, as many as the tokenizer has tokens, not 0"),
        (None, 201, "from 1 to 200 rows, as many as the tokenizer has tokens, not 201"),
        (_without_mtp, 5, "serves a draft component"),
        (_with_proposal, 5, "has a proposal head already"),
        (_with_short_head, 5, "has 255 rows instead of 256"),
        (_with_ragged_head, 5, "isn't stored in rows of 256"),
        (_with_small_config, 5, "has 200 tokens, but its vocabulary only 100 rows"),
    ],
)
def test_what_cannot_be(tmp_path: Path, change: Change | None, rows: int, message: str) -> None:
    source = write(tmp_path / "in.ninfer", change=change)
    with Artifact.open(source) as artifact, pytest.raises(ConversionError, match=message):
        Attachment(artifact, rows, tmp_path / "out.ninfer")
    assert list(tmp_path.iterdir()) == [source]


def test_the_usual_size_is_clipped_to_the_vocabulary(tmp_path: Path) -> None:
    with Artifact.open(write(tmp_path / "in.ninfer")) as artifact:
        assert Attachment(artifact, None, tmp_path / "out.ninfer").rows == PUBLIC


def test_where_nothing_can_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write(tmp_path / "in.ninfer")
    (tmp_path / "mine").write_text("mine")
    (tmp_path / "loop.ninfer").symlink_to("loop.ninfer")
    with Artifact.open(source) as artifact:
        for out, message in [
            ("in.ninfer", "exists already"),
            ("mine", "exists already"),
            ("loop.ninfer", "exists already"),
            ("none/out", "does not exist; create it first"),
            ("x" * 250, "cannot be written: File name too long; choose another --out"),
            ("/proc/out", "cannot be written: |does not exist"),
        ]:
            with pytest.raises(ConversionError, match=message):
                Attachment(artifact, 5, tmp_path / out)

        class Usage(NamedTuple):
            total: int
            used: int
            free: int

        monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(10**9, 10**9, 1000))
        with pytest.raises(ConversionError, match=r"out needs 0.00 GB, but .* make room"):
            Attachment(artifact, 5, tmp_path / "out")


@pytest.mark.parametrize("stage", ["encoding the proposal head", "writing the artifact"])
def test_interruption_leaves_nothing(tmp_path: Path, stage: str) -> None:
    source = write(tmp_path / "in.ninfer")

    def interrupt(now: str, *_: int) -> None:
        if now == stage:
            raise KeyboardInterrupt

    with Artifact.open(source) as artifact:
        attachment = Attachment(artifact, 5, tmp_path / "out.ninfer")
        with pytest.raises(KeyboardInterrupt):
            attachment.write(np.arange(5), {}, progress=interrupt)
    assert list(tmp_path.iterdir()) == [source]


@pytest.mark.parametrize("name", ["_write_payload", "_flush", "_publish"])
def test_a_full_disk_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    source = write(tmp_path / "in.ninfer")

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(ArtifactWriter, name, fail)
    with pytest.raises(ArtifactError, match="No space left on device"):
        attach(source, tmp_path / "out.ninfer", np.arange(5))
    assert list(tmp_path.iterdir()) == [source]


def test_values_that_are_no_numbers_are_told(tmp_path: Path) -> None:
    source = write(tmp_path / "in.ninfer")
    data = bytearray(source.read_bytes())
    with Artifact.open(source) as artifact:
        at = artifact._payload_start + artifact.tensor("weight/000007").offset
    data[at : at + 2] = b"\x80\x7f"  # infinity
    source.write_bytes(data)
    with pytest.raises(ConversionError, match="no proposal head can be cut from 'text/output_head': "):
        attach(source, tmp_path / "out.ninfer", np.arange(5))
    assert list(tmp_path.iterdir()) == [source]
