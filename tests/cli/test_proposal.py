"""`ninfer-proposal`: what it prints, what it leaves behind, and what it refuses before it counts."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from ninfer.artifact import Artifact
from ninfer.cli.inspect import main as inspect
from ninfer.cli.proposal import main
from ninfer.convert.proposal import Tokens, choose

NANO = Path(__file__).parents[2] / "models" / "ninfer-nano.ninfer"
ROWS = 8192


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("corpus")
    (folder / "a.txt").write_text("Once upon a time there was a king. " * 50)
    chat = [{"role": "user", "content": "Who?"}, {"role": "assistant", "content": "The king."}]
    (folder / "b.jsonl").write_text(json.dumps({"messages": chat}) + "\n")
    (folder / "c.bin").write_bytes(bytes(range(256)))
    return folder


def ids(path: Path) -> list[int]:
    with Artifact.open(path) as artifact:
        (part,) = artifact.parameter("proposal/token_ids")
        return artifact.object_bytes(part.object).view("<i4").tolist()


def test_from_a_corpus_and_from_its_counts(
    corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, again, counts = (tmp_path / name for name in ("out.ninfer", "again.ninfer", "counts"))
    assert main([str(NANO), str(corpus), "--save-counts", str(counts)]) == 0
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "counting tokens ..." in printed.err
    assert " tokens in 2 files (0.0 MB)" in printed.err
    assert f"note: 1 file was left out ({corpus / 'c.bin'}: byte 0 is NUL; it is no text)" in printed.err
    assert f"{counts}: the counts of {ROWS} vocabulary rows" in printed.err

    totals = np.fromfile(counts, "<i8")
    assert len(totals) == ROWS
    with Artifact.open(NANO) as artifact:
        roles = artifact.components["text"].resources
        tokens = Tokens.of({role: artifact.resource("text", role) for role in roles})
    expected = choose(totals, tokens, 600).tolist()

    assert main([str(NANO), str(corpus), "--out", str(out), "--rows", "600"]) == 0
    printed = capsys.readouterr().err
    assert f"{out}: {out.stat().st_size / 1e6:.1f} MB, with a proposal head of 600 of 8033 tokens" in printed
    assert ", which are 100.00 % of those counted" in printed
    never = sum(int(totals[index]) == 0 for index in expected)
    assert f"note: {never} tokens of the head were never counted" in printed
    assert ids(out) == expected

    assert main([str(NANO), "--ranking", str(counts), "--out", str(again), "--rows", "600", "--quiet"]) == 0
    assert capsys.readouterr().err == ""
    assert ids(again) == expected
    with Artifact.open(out) as one, Artifact.open(again) as other:
        assert one.read_range(0, one.payload_bytes) == other.read_range(0, other.payload_bytes)
        facts = one.provenance["proposal"]
        assert facts["corpus"] == [str(corpus)]
        assert facts["tokens"] == int(totals.sum())
        assert other.provenance["proposal"]["ranking"] == str(counts)
    assert inspect([str(out)]) == 0
    assert "proposal: domain indexed, rows 600" in capsys.readouterr().out.splitlines()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "nothing to do: pass --out for an artifact or --save-counts for the counts"),
        (["--out", "{out}"], "pass either a corpus (files or folders) or --ranking"),
        (["{corpus}", "--ranking", "x", "--out", "{out}"], "pass either a corpus"),
        (["--ranking", "x", "--out", "{out}", "--save-counts", "{out}2"], "--save-counts needs a corpus"),
        (["{corpus}", "--out", "{out}", "--save-counts", "{out}"], "name the same file"),
        (["{corpus}", "--save-counts", "{out}", "--rows", "5"], "--rows needs --out"),
        (["{corpus}", "--out", "{out}", "--rows", "-1"], "'-1' is not a whole number"),
        (["{corpus}", "--out", "{out}", "--rows", "0"], "has from 1 to 8033 rows"),
        (["{corpus}", "--out", "{out}", "--rows", "8034"], "has from 1 to 8033 rows"),
        (["{corpus}", "--out", "{out}", "--rows", "99999999999999999999"], "has from 1 to 8033 rows"),
        (["{corpus}", "--out", "{model}"], "exists already; choose another --out"),
        (["{corpus}", "--save-counts", "{model}"], "exists already; choose another --save-counts"),
        (["{corpus}", "--out", "{out}/x"], "does not exist; create it first"),
        (["{corpus}/c.bin", "--out", "{out}"], "c.bin cannot be counted: byte 0 is NUL"),
        (["{corpus}/none", "--out", "{out}"], "none cannot be read: No such file"),
        (["--ranking", "{corpus}/a.txt", "--out", "{out}"], "it must hold rows of 8192 8-byte counts"),
        (["{corpus}", "--out", "{out}", "--max-file-bytes", "5000"], "leaves no room"),
    ],
)
def test_faults(
    corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], message: str
) -> None:
    given = {"out": str(tmp_path / "out"), "corpus": str(corpus), "model": str(NANO)}
    assert main([str(NANO), *(option.format(**given) for option in options)]) == 1
    printed = capsys.readouterr().err
    assert "ninfer-proposal: " in printed
    assert message in printed
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("none.ninfer", "does not exist"),
        (".", "is a folder; make an artifact of it first"),
        ("text", "is no .ninfer artifact"),
        ("x.gguf", "is a GGUF file"),
    ],
)
def test_models_that_are_no_artifact(
    corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, message: str
) -> None:
    (tmp_path / "text").write_text("no artifact, but long enough for a header of 32 bytes")
    (tmp_path / "x.gguf").write_bytes(b"GGUF" + bytes(100))
    before = sorted(tmp_path.iterdir())
    assert main(["synthetic:tiny/quasar+mtp", str(corpus), "--out", str(tmp_path / "out")]) == 1
    assert "has no file; synthetic models have" in capsys.readouterr().err
    assert main([str(tmp_path / name), str(corpus), "--out", str(tmp_path / "out")]) == 1
    assert message in capsys.readouterr().err
    assert sorted(tmp_path.iterdir()) == before


def test_a_head_is_made_once(corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = tmp_path / "first.ninfer"
    assert main([str(NANO), str(corpus), "--out", str(first), "--rows", "60", "--quiet"]) == 0
    assert main([str(first), str(corpus), "--out", str(tmp_path / "second.ninfer")]) == 1
    assert "has a proposal head already; use the artifact that it was made from" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == [first]


@pytest.mark.skipif(sys.platform != "linux", reason="names are any bytes on Linux only")
def test_a_name_that_is_no_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    corpus, out = (Path(os.fsdecode(bytes(tmp_path) + b"/" + name)) for name in (b"b\xff.txt", b"o\xff"))
    corpus.write_text("words")
    assert main([str(NANO), str(corpus), "--out", str(out), "--rows", "60"]) == 0
    assert "o\\udcff: 25.0 MB" in capsys.readouterr().err
    with Artifact.open(out) as artifact:
        assert artifact.provenance["proposal"]["corpus"] == [f"{tmp_path}/b\\udcff.txt"]


# A shell starts background commands with SIGINT ignored, which children inherit: the tests may run in one.
SLOW = """
import signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)
from ninfer.convert import attach
from ninfer.api import token_counts
def slow(module, name):
    inner = getattr(module, name)
    def call(*given, **named):
        print("working", flush=True)
        time.sleep(0.3)
        return inner(*given, **named)
    setattr(module, name, call)
slow(*{"count": (token_counts, "_record"), "encode": (attach, "pack_rows")}[sys.argv.pop(1)])
from ninfer.cli.proposal import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.skipif(os.name == "nt", reason="signals are POSIX's")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("stage", ["count", "encode"])
def test_a_signal_leaves_nothing(corpus: Path, tmp_path: Path, number: signal.Signals, stage: str) -> None:
    lines = tmp_path / "lines.jsonl"
    lines.write_text('"a word"\n' * (200 if stage == "count" else 1))
    before = list(tmp_path.iterdir())
    options = ["--out", str(tmp_path / "out"), "--rows", "4000", "--workers", "1"]
    command = [sys.executable, "-c", SLOW, stage, str(NANO), str(lines), *options]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    process.stdout.readline()
    begin = time.monotonic()
    process.send_signal(number)
    _, text = process.communicate(timeout=60)
    assert process.returncode != 0
    assert f"interrupted before {tmp_path / 'out'} was complete" in text
    assert "Traceback" not in text
    assert time.monotonic() - begin < 30
    assert list(tmp_path.iterdir()) == before
