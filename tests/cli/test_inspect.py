"""`ninfer-inspect`: fields, their order, both output forms, errors."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ninfer.cli.inspect import main
from tests.artifact import build

FIELDS = ["path", "version", "artifact_id", "name", "components", "proposal", "file_bytes", "payload_bytes"]
FIELDS += ["files", "objects", "tensors", "resources", "bindings", "uses", "formats", "layouts"]


@pytest.fixture
def artifact(tmp_path: Path) -> Path:
    path = tmp_path / "x.ninfer"
    build.write(path, build.directory(), build.contents(build.directory()), 12288)
    return path


def test_json(artifact: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(artifact), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert list(report) == FIELDS
    total = sum(path.stat().st_size for path in artifact.parent.iterdir())
    payload = build.directory().payload_end
    assert report == {
        "path": str(artifact),
        "version": 3,
        "artifact_id": build.ID.hex(),
        "name": "toy – ü",
        "components": ["text", "mtp"],
        "proposal": {"domain": "indexed", "rows": 12},
        "file_bytes": total,
        "payload_bytes": payload,
        "files": 3,
        "objects": 7,
        "tensors": 6,
        "resources": 1,
        "bindings": 6,
        "uses": 3,
        "formats": {"bf16": 1, "fp32": 1, "ggml_k": 1, "nvfp4": 1, "q4_g64_fp16": 1, "q8_g32_fp16": 1},
        "layouts": {
            "block_scale_k16_m128x4_v1": 1,
            "contiguous_le_v1": 2,
            "ggml_k256_v1": 1,
            "row_split_k128_v1": 2,
        },
    }
    assert list(report["formats"]) == sorted(report["formats"])


def test_json_records(artifact: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(artifact), "--json", "--objects", "--bindings"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert list(report) == [*FIELDS, "object_records", "binding_records", "use_records"]
    assert report["object_records"][0]["id"] == "resource/text/tokenizer.json"
    assert report["object_records"][1]["shape"] == [24, 64]
    assert report["binding_records"]["text/c"] == {"object": "weight/1"}
    assert report["use_records"][2] == {"parameter": "text/c", "input": "text/y"}


def test_text(artifact: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(artifact)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(":")[0] for line in lines] == FIELDS
    assert "components: text, mtp" in lines
    assert "formats: bf16 1, fp32 1, ggml_k 1, nvfp4 1, q4_g64_fp16 1, q8_g32_fp16 1" in lines
    assert main([str(artifact), "--objects"]) == 0
    listed = capsys.readouterr().out.splitlines()[len(FIELDS) :]
    assert len(listed) == 7
    assert listed[0].split() == ["0", "12999", "resource", "raw_bytes_v1", "resource/text/tokenizer.json"]
    assert listed[1].endswith("tensor   q4_g64_fp16/row_split_k128_v1 [24, 64] weight/0")
    assert main([str(artifact), "--bindings"]) == 0
    output = capsys.readouterr().out
    block = json.loads(output[output.index("{") :])
    assert list(block) == ["bindings", "uses"]
    assert len(block["bindings"]) == 6


def test_only_the_entry_is_needed(artifact: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for path in artifact.parent.glob("*.part-*"):
        path.unlink()
    assert main([str(artifact), "--objects", "--bindings"]) == 0
    assert capsys.readouterr().err == ""


def test_names_cannot_forge_lines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = build.root()
    root["metadata"]["name"] = "a\nversion: 9\x1b[2J"
    path = tmp_path / "x.ninfer"
    path.write_bytes(build.entry_bytes(root))
    assert main([str(path)]) == 0
    assert "name: a\\nversion: 9\\x1b[2J\n" in capsys.readouterr().out


@pytest.mark.parametrize("content", [b"", b"nonsense", b"NINFER\0\2" + bytes(40), None])
def test_errors_are_one_sentence(
    tmp_path: Path, content: bytes | None, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "x.ninfer"
    if content is not None:
        path.write_bytes(content)
    assert main([str(path)]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(f"ninfer-inspect: {path} ")
    assert captured.err.count("\n") == 1


def test_bad_options(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 1
    assert main(["x", "--nonsense"]) == 1
    assert main(["--help"]) == 0
    assert "ninfer-inspect: unknown argument: --nonsense" in capsys.readouterr().err


def test_no_numeric_library_is_loaded(artifact: Path) -> None:
    code = "import sys; from ninfer.cli.inspect import main; main(sys.argv[1:])"
    code += "; assert not {'torch', 'numba', 'numpy'} & set(sys.modules), sys.modules.keys()"
    result = subprocess.run([sys.executable, "-c", code, str(artifact)], capture_output=True, text=True)
    assert (result.returncode, result.stderr) == (0, "")


@pytest.mark.parametrize(
    ("redirection", "code", "err"),
    [
        ("| head -n 1", 0, ""),
        (">&-", 0, ""),
        (">/dev/full", 1, "ninfer-inspect: input or output failed: No space left on device\n"),
    ],
)
def test_output_that_cannot_be_written(artifact: Path, redirection: str, code: int, err: str) -> None:
    if "/dev/full" in redirection and not Path("/dev/full").exists():
        pytest.skip("needs /dev/full")
    command = f'"$0" -m ninfer.cli.inspect "$1" --json --bindings {redirection}'
    result = subprocess.run(
        ["sh", "-c", command, sys.executable, str(artifact)], capture_output=True, text=True
    )
    assert (result.returncode, result.stderr) == (code, err)


def test_names_that_are_no_unicode(artifact: Path) -> None:
    """File names are bytes: what is no UTF-8 is escaped, in JSON too."""
    odd = os.fsencode(artifact.parent) + b"/\xff.ninfer"
    try:
        os.rename(artifact, odd)
    except OSError:
        pytest.skip("the file system takes only Unicode names")
    for option, expected in (("--json", "path"), ("--objects", "path: ")):
        command = [sys.executable, "-m", "ninfer.cli.inspect", odd, option]
        output = subprocess.run(command, capture_output=True, check=True).stdout.decode()
        assert expected in output
        assert "\\udcff.ninfer" in output
    assert json.loads(subprocess.run([*command[:-1], "--json"], capture_output=True).stdout)["path"]
