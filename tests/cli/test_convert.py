"""`ninfer-convert`: exit codes and what is printed where."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ninfer.artifact import Artifact
from ninfer.cli.convert import main
from tests.convert import tiny


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hf")
    tiny.write_qwen(folder, has_mtp=True)
    return folder


def test_converts(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out.ninfer"
    options = ["--recipe", "groupwise-int", "--components", "text,mtp", "--name", "tiny", "--workers", "1"]
    assert main(["--model", str(folder), "--out", str(out), *options]) == 0
    printed = capsys.readouterr()
    assert printed.out == ""
    assert f"{out}: 0.5 MB in" in printed.err
    with Artifact.open(out) as artifact:
        assert list(artifact.components) == ["text", "mtp"]
        assert artifact.metadata["name"] == "tiny"


def test_fallbacks_are_told(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--model", str(folder), "--out", str(tmp_path / "o"), "--recipe", "quasar"]) == 0
    assert "note: text/layers/0/mlp/gate is q8_g32_fp16 instead of nvfp4" in capsys.readouterr().err


def test_quiet(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--model", str(folder), "--out", str(tmp_path / "o"), "--quiet"]) == 0
    printed = capsys.readouterr()
    assert printed.out == printed.err == ""


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--recipe", "none"], "unknown recipe 'none'"),
        (["--components", "text,vision"], "component 'vision' cannot be converted by this version"),
        (["--source", "quantized"], "--source quantized is not of the form NAME=PATH"),
        (["--source", "base=x"], "--source names base twice"),
        (["--resource", "=x"], "--resource =x is not of the form ROLE=PATH"),
        (["--device", "quantum"], "--device quantum is no device"),
        (["--device", "meta"], "--device meta is not available"),
        (["--nothing"], "unknown argument: --nothing"),
    ],
)
def test_faults(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], message: str
) -> None:
    assert main(["--model", str(folder), "--out", str(tmp_path / "o"), *options]) == 1
    assert f"ninfer-convert: {message}" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_required_options(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--model", "x"]) == 1
    assert "--out" in capsys.readouterr().err


# A shell starts background commands with SIGINT ignored, which children inherit: the tests may run in one.
SLOW = """
import signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)
from ninfer.convert.encode import Encoder
planes = Encoder._planes
def slow(*call):
    print("working", flush=True)
    time.sleep(0.2)
    return planes(*call)
Encoder._planes = slow
from ninfer.cli.convert import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.skipif(os.name == "nt", reason="signals are POSIX's")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_leaves_nothing(folder: Path, tmp_path: Path, number: signal.Signals) -> None:
    command = [sys.executable, "-c", SLOW, "--model", str(folder), "--out", str(tmp_path / "out.ninfer")]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    process.stdout.readline()
    assert list(tmp_path.iterdir()) != []
    begin = time.monotonic()
    process.send_signal(number)
    _, text = process.communicate(timeout=60)
    assert process.returncode != 0
    assert "interrupted; nothing was written" in text
    assert "Traceback" not in text
    assert time.monotonic() - begin < 30
    assert list(tmp_path.iterdir()) == []
