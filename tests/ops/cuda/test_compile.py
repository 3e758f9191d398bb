"""Every kernel compiles for sm_80 and sm_90, on a machine without a GPU too."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Triton compiles on Linux only")
ROOT = Path(__file__).parents[3]


def compile_kernels(*arguments: str) -> subprocess.CompletedProcess[str]:
    """In a process of its own, because the interpreter of Triton is chosen when a module is imported."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    return subprocess.run(
        [sys.executable, "-m", "tools.compile_kernels", *arguments],
        cwd=ROOT, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip


def test_every_kernel_compiles(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    done = compile_kernels("--json", str(tmp_path / "reports.json"))
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-4000:]
    reports = json.loads((tmp_path / "reports.json").read_text())
    assert {report["target"] for report in reports} == {80, 90}
    compiled = [report for report in reports if not report["skipped"]]
    assert len(compiled) >= 12
    assert all(0 < report["registers"] <= 255 for report in compiled)
    skipped = sorted({report["skipped"] for report in reports} - {""})
    if skipped:
        with capsys.disabled():
            print(f"\n{len(reports) - len(compiled)} kernels not compiled: {', '.join(skipped)}")


def test_a_kernel_that_does_not_compile_is_named() -> None:
    code = (
        "from tools import compile_kernels as c\n"
        "from ninfer.ops.cuda import choose\n"
        "from dataclasses import replace\n"
        "s = next(iter(choose.specimens()))\n"
        "c._items = lambda *_: [replace(s, constants={'TILE': 100})]\n"
        "print(c.compile_job(c.Job('ninfer.ops.cuda.choose', 'specimens', 0, 80)))\n"
    )
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True, check=True
    )
    assert "choose._tile_kernel[0]" in done.stdout
    assert "FAILED" in done.stdout
    assert "lacks ['GROUP']" in done.stdout
