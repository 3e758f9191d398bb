"""`tools.gpu_check` without a GPU: its table, its limits of time, and what a broken-off run keeps."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest
import torch

from tools.gpu_check.__main__ import main, reports
from tools.gpu_check.figures import FIGURES, figures_table
from tools.gpu_check.steps import Step, run, steps


def bench(**tests: dict[str, float | None]) -> dict:
    members = ("decode_output_tok_s_mean", "prefill_tok_s_mean", "decode_host_share_mean")
    return {
        "tests": [
            {"label": label.replace("_", " "), **dict.fromkeys(members), **values}
            for label, values in tests.items()
        ]
    }


@pytest.mark.skipif(torch.cuda.is_available(), reason="about a machine without a GPU")
def test_without_a_gpu_it_says_so(capsys: pytest.CaptureFixture[str]):
    assert main([]) == 2
    assert capsys.readouterr() == ("", "gpu_check needs a GPU, and PyTorch finds none here.\n")


def test_figures_that_are_missing_decide_nothing():
    text, reached = figures_table({})
    assert reached
    assert len(text.splitlines()) == 1 + len(FIGURES)
    assert text.count("not measured") == len(FIGURES)


def test_figures_are_held_against_what_they_must_reach():
    quasar = bench(
        tg128={"decode_output_tok_s_mean": 200.0, "decode_host_share_mean": 0.07},
        tg128_x8={"decode_output_tok_s_mean": 1000.0},
    )
    ops = {"rows": [{"name": "linear nvfp4 [34816, 5120] T=4", "share": 0.71}]}
    text, reached = figures_table({"quasar": quasar, "ops": ops})
    assert not reached  # the host's share is too large
    found = {line[:42].strip(): line for line in text.splitlines()}
    assert "200.0" in found["decode, QUASAR, depth 0"]
    assert "5.0" in found["aggregate at B = 8 against B = 1"]
    assert "71.0" in found["NVFP4 linear [34816, 5120], T = 4"]
    assert "MISSED" in found["host share of a decode round"]
    assert text.count("MISSED") == 1


def test_every_report_is_left_by_a_step(tmp_path: Path):
    left = {step.report for step in steps(tmp_path, deep=True)}
    assert left >= {"ops", "quasar", "official", "q4_k_m", "deep"}
    measuring = [step.turn for step in steps(tmp_path, deep=True) if step.report]
    assert len(set(measuring)) == len(measuring)  # one after the other


def test_steps_end_with_their_time(tmp_path: Path):
    quick = Step("quick", 0, (sys.executable, "-c", "print('done')"), 60)
    failing = Step("failing", 0, (sys.executable, "-c", "raise SystemExit('no good')"), 60)
    slow = Step("slow", 0, (sys.executable, "-c", "import time; time.sleep(600)"), 0.5)
    begin = time.monotonic()
    found = {one.name: one for one in run([quick, failing, slow], tmp_path, begin + 60)}
    assert time.monotonic() - begin < 30
    assert found["quick"].passed
    assert (found["failing"].passed, found["failing"].detail) == (False, "exit code 1; no good")
    assert "broken off" in found["slow"].detail
    preparing = Step("preparing", 0, failing.command, 60, decides=False)
    assert run([preparing], tmp_path, time.monotonic() + 60)[0].passed
    assert (tmp_path / found["quick"].log).read_text() == "done\n"


def test_what_is_left_of_a_broken_off_run(tmp_path: Path):
    chosen = [Step(name, 0, (), 1, name) for name in ("ops", "quasar", "official")]
    (tmp_path / "ops.json").write_text('{"rows": []}')
    (tmp_path / "quasar.json").write_text('{"tests": [')
    assert reports(tmp_path, chosen) == {"ops": {"rows": []}}
