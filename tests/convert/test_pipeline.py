"""A conversion as a whole: all or nothing, files of limited size, the report, little memory."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from ninfer.artifact import Artifact
from ninfer.convert import convert
from ninfer.convert.encode import Encoder
from ninfer.errors import ArtifactError, ConversionError

from . import tiny
from .logical import everything

REAL = Path(__file__).parents[2] / "models" / "SmolLM2-135M-Instruct.Q4_1.gguf"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hf")
    tiny.write_qwen(folder, tiny.TILED)
    return folder


def test_progress_counts_every_byte(folder: Path, tmp_path: Path) -> None:
    calls: list[tuple[str, int, int]] = []
    report = convert(
        folder, tmp_path / "out.ninfer", recipe="groupwise-int", progress=lambda *call: calls.append(call)
    )
    done = [done for _, done, _ in calls]
    assert done == sorted(done)
    assert {total for *_, total in calls} == {report.payload_bytes}
    assert report.payload_bytes - done[-1] < 256 * len(calls)  # alignment gaps are nobody's bytes


@pytest.mark.parametrize("after", [1, 7, 30])
def test_interruption_leaves_nothing(folder: Path, tmp_path: Path, after: int) -> None:
    calls = 0

    def interrupt(*_: object) -> None:
        nonlocal calls
        calls += 1
        if calls == after:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert(folder, tmp_path / "out.ninfer", recipe="quasar", progress=interrupt)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("at", ["run", "encode", "commit", "report"])
def test_failure_leaves_nothing(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: str
) -> None:
    """Whatever step fails, and with whatever error."""
    error = OSError(28, "No space left on device")

    def fail(*_: object, **__: object) -> None:
        raise error

    from ninfer.artifact import ArtifactWriter
    from ninfer.convert import pipeline

    owner, name = {
        "run": (Encoder, "run"),
        "encode": (Encoder, "_planes"),
        "commit": (ArtifactWriter, "_publish"),
        "report": (pipeline.os, "replace"),
    }[at]
    monkeypatch.setattr(owner, name, fail)
    with pytest.raises((OSError, ConversionError, ArtifactError)):
        convert(folder, tmp_path / "out.ninfer", max_file_bytes=120_000)
    assert list(tmp_path.iterdir()) == []


def test_free_space_is_checked_first(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Usage(NamedTuple):
        total: int
        used: int
        free: int

    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(10**9, 10**9, 1000))
    with pytest.raises(
        ConversionError, match=r"out.ninfer needs 0.00 GB, but .* has only 0.00 GB free; make room"
    ):
        convert(folder, tmp_path / "out.ninfer")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["out.ninfer", "out.ninfer.conversion.json"])
def test_existing_outputs_are_refused(folder: Path, tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("mine")
    with pytest.raises(ConversionError, match=f"{name} exists already"):
        convert(folder, tmp_path / "out.ninfer")
    assert [path.read_text() for path in tmp_path.iterdir()] == ["mine"]


def test_existing_continuation_is_refused(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "out.ninfer.part-0001").write_text("mine")
    with pytest.raises(ArtifactError, match="exists already"):
        convert(folder, tmp_path / "out.ninfer", max_file_bytes=120_000)
    assert [path.read_text() for path in tmp_path.iterdir()] == ["mine"]


@pytest.mark.parametrize(
    ("out", "options", "message"),
    [
        ("none/out.ninfer", {}, "does not exist; create it first"),
        ("out.ninfer", {"rows_per_chunk": 0}, "must be positive"),
        ("out.ninfer", {"name": ""}, "the model name is empty"),
        ("out.ninfer", {"max_file_bytes": 100}, "leaves no room"),
    ],
)
def test_bad_arguments(folder: Path, tmp_path: Path, out: str, options: dict, message: str) -> None:
    with pytest.raises((ConversionError, ArtifactError), match=message):
        convert(folder, tmp_path / out, **options)
    assert list(tmp_path.iterdir()) == []


def test_files_of_limited_size(folder: Path, tmp_path: Path) -> None:
    convert(folder, tmp_path / "whole.ninfer", recipe="bf16")
    convert(folder, tmp_path / "out.ninfer", recipe="bf16", max_file_bytes=200_000)
    parts = sorted(tmp_path.glob("out.ninfer.part-*"))
    assert len(parts) > 5
    assert all(part.stat().st_size <= 200_000 for part in parts)
    with Artifact.open(tmp_path / "out.ninfer") as split, Artifact.open(tmp_path / "whole.ninfer") as whole:
        found = everything(split)
        for name, values in everything(whole).items():
            assert torch.equal(found[name], values)


def test_report(folder: Path, tmp_path: Path) -> None:
    report = convert(folder, tmp_path / "out.ninfer", recipe="groupwise-int", name="tiny", rows_per_chunk=256)
    document = json.loads((tmp_path / "out.ninfer.conversion.json").read_text())
    assert document == report.document
    with Artifact.open(tmp_path / "out.ninfer") as artifact:
        assert document["artifact_id"] == artifact.artifact_id.hex() == report.artifact_id
        assert document["payload_bytes"] == artifact.payload_bytes
        assert document["counts"] == {
            "parameters": len(artifact.bindings),
            "uses": len(artifact.uses),
            "objects": len(artifact.objects),
        }
        assert document["name"] == artifact.metadata["name"] == "tiny"
        assert document["provenance"] == artifact.provenance
        assert artifact.provenance["converter"] == "ninfer-v3"
        methods = {entry["object"]: entry for entry in document["methods"]}
        for name in artifact.bindings:
            for part in artifact.parameter(name):
                entry, tensor = methods[part.object], artifact.tensor(part.object)
                assert name in entry["parameters"]
                assert (entry["format"], entry["layout"], entry["shape"]) == (
                    tensor.format,
                    tensor.layout,
                    list(tensor.shape),
                )
    assert document["formats"]["q4_g64_fp16"] == 4
    assert document["components"] == ["text"]
    assert document["rows_per_chunk"] == 256
    assert document["torch_version"] == torch.__version__
    assert document["device"] == "cpu"
    assert document["files"] == [{"path": None, "payload_bytes": report.payload_bytes}]
    assert 0 < document["preparation_seconds"] <= document["seconds"]


def test_threads_of_pytorch_are_as_before(folder: Path, tmp_path: Path) -> None:
    before = torch.get_num_threads()
    convert(folder, tmp_path / "out.ninfer")
    assert torch.get_num_threads() == before


def test_object_order_and_ids(folder: Path, tmp_path: Path) -> None:
    convert(folder, tmp_path / "out.ninfer")
    with Artifact.open(tmp_path / "out.ninfer") as artifact:
        names = list(artifact.objects)
    roles = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json")
    assert names[:4] == [f"resource/text/{role}" for role in roles]
    assert names[4:] == [f"weight/{index:06d}" for index in range(len(names) - 4)]


@pytest.mark.skipif(not REAL.exists(), reason="needs the model that `make demo` fetches")
def test_the_real_model(tmp_path: Path) -> None:
    report = convert(REAL, tmp_path / "out.ninfer")
    assert report.document["formats"] == {"bf16": 61, "ggml_q4_1": 120, "ggml_q8_0": 1}
    with Artifact.open(tmp_path / "out.ninfer") as artifact:
        assert artifact.parameter("text/output_head") == artifact.parameter("text/token_embedding")
        assert artifact.components["text"].config["max_position_embeddings"] == 8192


MEMORY = """
import resource, sys
from pathlib import Path
from ninfer.convert import convert
import ninfer.convert.pipeline
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
convert(Path(sys.argv[1]), Path(sys.argv[2]), recipe="bf16")
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads the peak as Linux counts it")
@pytest.mark.skipif(not REAL.exists(), reason="needs the model that `make demo` fetches")
def test_memory_does_not_grow_with_the_model(tmp_path: Path) -> None:
    """98 MB in, 270 MB out, through chunks; neither the file's pages nor whole matrices stay."""
    command = [sys.executable, "-c", MEMORY, str(REAL), str(tmp_path / "out.ninfer")]
    peak = int(subprocess.run(command, capture_output=True, check=True, text=True).stdout)
    assert peak < 90e6, peak
