"""The three legs of the training: their commands, what is repeated, what is not."""

from __future__ import annotations

import subprocess
from itertools import pairwise
from pathlib import Path

import pytest

from tools.nano import legs


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    folder = tmp_path / "corpus"
    folder.mkdir()
    (folder / "manifest.json").write_text("{}")
    return folder


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The commands that were run; each leaves what a leg leaves last, unless `fails` lies beside it."""
    found: list[list[str]] = []

    def run(command: list[str]) -> subprocess.CompletedProcess[bytes]:
        found.append(command)
        folder = Path(command[command.index("--out") + 1])
        if folder.with_name("fails").exists():
            return subprocess.CompletedProcess(command, 3)
        folder.mkdir(parents=True)
        (folder / "evaluation.json").write_text("{}")
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(legs.subprocess, "run", run)
    return found


def value(command: list[str], option: str) -> str:
    return command[command.index(option) + 1]


def test_each_leg_starts_from_the_one_before(corpus: Path, tmp_path: Path, ran: list[list[str]]) -> None:
    out = tmp_path / "out"
    assert legs.main(["--corpus", str(corpus), "--out", str(out)]) == 0
    assert [value(command, "--leg") for command in ran] == ["0", "1", "2"]
    assert "--resume" not in ran[0]
    for before, command in pairwise(ran):
        assert value(command, "--resume") == value(before, "--out")
    assert ["--last" in command for command in ran] == [False, True, True]
    assert sum(float(value(command, "--seconds")) for command in ran) <= 1_200


def test_legs_that_are_done_are_not_run_again(corpus: Path, tmp_path: Path, ran: list[list[str]]) -> None:
    out = tmp_path / "out"
    (out / "leg0").mkdir(parents=True)
    (out / "leg0" / "evaluation.json").write_text("{}")
    (out / "leg0" / "shard-0.safetensors").write_bytes(b"")
    assert legs.main(["--corpus", str(corpus), "--out", str(out)]) == 0
    assert [value(command, "--leg") for command in ran] == ["1", "2"]


def test_a_leg_that_fails_ends_the_run(
    corpus: Path, tmp_path: Path, ran: list[list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "fails").touch()
    assert legs.main(["--corpus", str(corpus), "--out", str(tmp_path / "out")]) == 3
    assert len(ran) == 1
    assert "leg0 ended with exit code 3" in capsys.readouterr().err


def test_a_missing_corpus_is_said_before_anything_runs(
    tmp_path: Path, ran: list[list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert legs.main(["--corpus", str(tmp_path / "no"), "--out", str(tmp_path / "out")]) == 1
    assert "tools.nano.corpus" in capsys.readouterr().err
    assert not ran


def test_print_shows_the_commands(
    tmp_path: Path, ran: list[list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert legs.main(["--corpus", "c", "--out", "o", "--print"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3
    assert all(" -m tools.nano.train --corpus c --out o/leg" in line for line in lines)
    assert not ran
