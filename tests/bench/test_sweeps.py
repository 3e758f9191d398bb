"""`bench.matrix`, `bench.plot` and `bench.make_corpus` around a tiny synthetic model."""

from __future__ import annotations

import csv
import json
import shlex
from hashlib import sha256
from pathlib import Path

import pytest

from bench import make_corpus, matrix, plot
from ninfer.cli.bench import main as ninfer_bench

MODEL = "synthetic:tiny/quasar"


def test_presets():
    smoke, core, full = (matrix.runs(preset) for preset in ("smoke", "core", "full"))
    suites = list(dict.fromkeys(run.suite for run in core))
    assert [run.suite for run in smoke] == suites
    assert {run.repetitions for run in smoke} == {1}
    assert [run.suite for run in full] == [run.suite for run in core]
    assert "65536" in " ".join(full[0].command)
    assert "65536" not in " ".join(core[0].command)
    names = [(run.suite, run.case) for run in core]
    assert len(set(names)) == len(names)


def test_commands_are_what_ninfer_bench_understands(capsys: pytest.CaptureFixture[str]):
    assert matrix.main([MODEL, "--preset", "full", "--dry-run"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(matrix.runs("full"))
    for line in lines:
        arguments = shlex.split(line)[3:]
        arguments[arguments.index("--output-file") + 1] = "/nowhere/at/all"
        assert ninfer_bench(arguments) == 2
        assert "the folder /nowhere/at of --output-file" in capsys.readouterr().err


def test_a_matrix_is_run_resumed_and_drawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    short = [
        matrix.Run("prefill_length", "all", ("-p", "32,64"), 1),
        matrix.Run("depth", "all", ("-n", "3", "-d", "0,40"), 1),
    ]
    monkeypatch.setattr(matrix, "runs", lambda preset: short)
    out = tmp_path / "out"
    arguments = [MODEL, "--device", "cpu", "--out", str(out)]
    assert matrix.main(arguments) == 0
    rows = json.loads((out / "summary.json").read_text())
    assert [row["label"] for row in rows] == ["pp32", "pp64", "tg3", "tg3 @ d40"]
    assert len(list(csv.DictReader((out / "summary.csv").open()))) == 4
    assert json.loads((out / "manifest.json").read_text())["schema_version"] == 4
    report = out / "json" / "depth" / "all.json"
    stamp = report.stat().st_mtime_ns
    assert matrix.main([*arguments, "--resume"]) == 0
    assert report.stat().st_mtime_ns == stamp
    capsys.readouterr()
    pytest.importorskip("matplotlib")
    assert plot.main([str(out), "--out", str(tmp_path / "plots"), "--format", "svg"]) == 0
    drawn = [Path(line).name for line in capsys.readouterr().out.splitlines()]
    assert drawn == ["prefill_length.svg", "decode_depth.svg"]
    assert all("<svg" in (tmp_path / "plots" / name).read_text() for name in drawn)
    with pytest.raises(SystemExit):
        matrix.main([*arguments, "--suite", "nothing"])
    assert "known are prefill_length, depth" in capsys.readouterr().err


def test_a_plot_needs_a_sweep(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    report = tmp_path / "one.csv"
    options = ["-p", "32", "-r", "1", "--warmup", "0", "--device", "cpu", "--log-level", "off"]
    assert ninfer_bench([MODEL, *options, "-o", "csv", "--output-file", str(report)]) == 0
    assert plot.main([str(report), "--out", str(tmp_path)]) == 1
    assert "no sweep of two points" in capsys.readouterr().err


def test_lines_of_several_reports():
    row = {"n_prompt": 1, "n_gen": 8, "depth": 0, "concurrency": 1, "decode_path": "eager"}
    row |= {"decode_output_tok_s_mean": 5.0, "decode_output_tok_s_stddev": 1.0}
    deep = row | {"depth": 100, "decode_output_tok_s_mean": 4.0}
    sweep = next(sweep for sweep in plot.SWEEPS if sweep.name == "decode_depth")
    assert plot.series(sweep, {"a": [row, deep]}) == {"": {0: (5.0, 1.0), 100: (4.0, 1.0)}}
    assert list(plot.series(sweep, {"a": [row, deep], "b": [row, deep]})) == ["a", "b"]
    assert plot.series(sweep, {"a": [row]}) == {}


def test_a_corpus_of_the_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    text, out = tmp_path / "text.txt", tmp_path / "corpus.ids"
    text.write_text("What is this? ")
    assert make_corpus.main([MODEL, str(out), "--tokens", "40", "--text", str(text)]) == 0
    ids = out.read_text().split()
    assert len(ids) == 40
    manifest = json.loads(out.with_suffix(".json").read_text())
    assert manifest["token_count"] == 40
    assert manifest["ids_sha256"] == sha256(out.read_bytes()).hexdigest()
    options = ["-p", "32", "-r", "1", "--warmup", "0", "--device", "cpu", "--log-level", "off"]
    assert ninfer_bench([MODEL, *options, "--corpus", str(out)]) == 0
