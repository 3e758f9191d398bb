"""The benchmarks of operators on tiny shapes on the CPU: every row is measured, the report parses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from bench.ops import operators
from bench.ops.__main__ import main
from bench.ops.table import Row, table
from bench.ops.timing import copies, time_graph


def test_all_groups(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(operators, "_BUDGET", 0.001)
    monkeypatch.setattr(operators, "copies", lambda *_, **__: 1)  # no cache is to be outgrown
    out = tmp_path / "ops.json"
    formats = "nvfp4,ggml_k,q5_g64_fp16"
    assert main(["--device", "cpu", "--tiny", "--formats", formats, "--json", str(out)]) == 0
    document = json.loads(out.read_text())
    names = [row["name"] for row in document["rows"]]
    assert len(names) == len(set(names))
    for begin in (
        "linear nvfp4",
        "norm + linear_swiglu ggml_k",
        "logits",
        "draw",
        "attention int8",
        "gdn_mix",
    ):
        assert any(name.startswith(begin) for name in names)
    assert all(row["us"] > 0 and row["bytes"] > 0 for row in document["rows"])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 + len(names)


@pytest.mark.skipif(torch.cuda.is_available(), reason="about a machine without a GPU")
def test_without_a_gpu_it_says_so(capsys: pytest.CaptureFixture[str]):
    assert main([]) == 2
    assert capsys.readouterr().err == "bench.ops measures kernels on a GPU, and PyTorch finds none here.\n"


def test_table():
    text = table([Row("a", 2.0, 4_000_000), Row("wide", 10.0, 10, 10**9, "note")], 4000.0)
    assert text.splitlines()[1].split() == ["a", "2.00", "4,000,000", "2000", "50.0%", "-"]
    assert text.splitlines()[2].split()[-2:] == ["100.0", "note"]


def test_copies_fill_more_than_the_cache():
    assert copies(100_000_000) == 5
    assert copies(2_000_000_000) == 2
    assert copies(1) == 64


def test_a_clock_needs_calls():
    with pytest.raises(ValueError, match="at least one call"):
        time_graph([])
    assert time_graph([lambda: torch.zeros(10)], budget_s=0.01) > 0
