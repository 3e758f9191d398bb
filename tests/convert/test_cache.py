"""Checkpoints given straight to a program are converted once."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ninfer.artifact import Artifact
from ninfer.convert import cache, ensure_artifact
from ninfer.errors import ConversionError
from ninfer.folders import cache_folder

from . import exporter, tiny


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base") / "tiny-model"
    folder.mkdir()
    tiny.write_llama(folder)
    return folder


def test_artifacts_are_returned_as_they_are(tmp_path: Path) -> None:
    for name, start in (("a.ninfer", b"NINFER\0\3"), ("b", b"NINFER\0\2"), ("c.txt", b"other")):
        (tmp_path / name).write_bytes(start)
        assert ensure_artifact(tmp_path / name, tmp_path / "cache") == tmp_path / name
    assert not (tmp_path / "cache").exists()


def test_conversion_happens_once(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stages = []
    first = ensure_artifact(folder, tmp_path, lambda *call: stages.append(call))
    assert stages
    assert first.is_relative_to(tmp_path)
    with Artifact.open(first) as artifact:
        assert artifact.metadata["name"] == "tiny-model"
    monkeypatch.setattr(cache, "_convert", None)  # a second conversion would fail
    assert ensure_artifact(folder, tmp_path) == first
    monkeypatch.chdir(folder.parent)
    assert ensure_artifact(Path("tiny-model"), tmp_path) == first


def test_a_changed_checkpoint_is_another(folder: Path, tmp_path: Path) -> None:
    first = ensure_artifact(folder, tmp_path)
    os.utime(folder / "model.safetensors", (1, 1))
    second = ensure_artifact(folder, tmp_path)
    assert first != second
    assert first.is_file()
    assert second.is_file()


def test_gguf(tmp_path: Path) -> None:
    exporter.write_llama(tmp_path / "m.gguf", tiny.write_llama(tmp_path / "hf"))
    found = ensure_artifact(tmp_path / "m.gguf", tmp_path / "cache")
    with Artifact.open(found) as artifact:
        assert artifact.metadata["name"] == "m"


def test_where_the_cache_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("NINFER_CACHE", str(tmp_path / "mine"))
    assert cache_folder() == tmp_path / "mine"
    monkeypatch.delenv("NINFER_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(sys, "platform", "linux")
    assert cache_folder() == tmp_path / "ninfer"


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no named pipes")
def test_a_pipe_or_device_is_refused_without_being_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", Path(os.devnull)):
        with pytest.raises(ConversionError, match="neither a folder nor a regular file"):
            ensure_artifact(path, tmp_path / "cache")


def test_failures_leave_no_folder(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "bad.gguf").write_bytes(b"GGUF")
    with pytest.raises(ConversionError, match="truncated"):
        ensure_artifact(tmp_path / "bad.gguf", tmp_path / "cache")
    with pytest.raises(ConversionError, match="does not exist"):
        ensure_artifact(tmp_path / "none", tmp_path / "cache")
    assert [path.suffix for path in (tmp_path / "cache").iterdir()] == [".lock"]
    (tmp_path / "file").write_text("")
    with pytest.raises(ConversionError, match=r"cache folder .* cannot be made"):
        ensure_artifact(folder, tmp_path / "file" / "cache")


def test_what_a_killed_process_left_is_replaced(folder: Path, tmp_path: Path) -> None:
    first = ensure_artifact(folder, tmp_path)
    partial = first.parent.with_name(first.parent.name + ".partial")
    first.parent.rename(partial)
    (partial / "rubbish").write_text("half")
    assert ensure_artifact(folder, tmp_path) == first
    assert not partial.exists()
    assert not (first.parent / "rubbish").exists()


RACE = """
import sys
from pathlib import Path
from ninfer.convert import cache
from ninfer.convert.cache import ensure_artifact
made = []
convert = cache._convert
cache._convert = lambda *call: (made.append(1), convert(*call))
print("ready", flush=True)
sys.stdin.readline()
ensure_artifact(Path(sys.argv[1]), Path(sys.argv[2]))
print(len(made))
"""


def test_two_processes_convert_once(folder: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-c", RACE, str(folder), str(tmp_path)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    racers = [subprocess.Popen(command, **pipes) for _ in range(3)]  # type: ignore[call-overload]
    for racer in racers:
        assert racer.stdout is not None
        assert racer.stdout.readline() == "ready\n"
    for racer in racers:
        assert racer.stdin is not None
        racer.stdin.write("go\n")
        racer.stdin.flush()
    counts = [int(racer.communicate(timeout=120)[0]) for racer in racers]
    assert sorted(counts) == [0, 0, 1]


def test_importing_the_room_is_light() -> None:
    code = "import sys, ninfer.convert.cache; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
