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
    for report in compiled:
        hopper_only = report["target"] == 80 and report["kernel"].startswith(("attend_wide:", "gdn_native:"))
        assert hopper_only or 0 < report["registers"] <= 255, report
    skipped = sorted({report["skipped"] for report in reports} - {""})
    if skipped:
        with capsys.disabled():
            print(f"\n{len(reports) - len(compiled)} kernels not compiled: {', '.join(skipped)}")


BROKEN = """
import triton
import triton.language as tl

from ninfer.ops.cuda.specimens import Specimen

@triton.jit
def fine(x, N: tl.constexpr):
    tl.store(x + tl.arange(0, N), tl.zeros((N,), tl.float32))

def specimens():
    yield Specimen(fine, {"x": "*fp32"}, {"N": 64})
    yield Specimen(fine, {"x": "*fp32"}, {"N": 63})
    yield Specimen(fine, {"x": "*fp32"}, {})
"""


def test_a_kernel_that_does_not_compile_is_named(tmp_path: Path) -> None:
    folder = tmp_path / "made"
    folder.mkdir()
    (folder / "__init__.py").touch()
    (folder / "broken.py").write_text(BROKEN)
    code = "from tools import compile_kernels as c; c.PACKAGE = 'made'; print(c.main(['--processes', '1']))"
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join((str(tmp_path), environment.get("PYTHONPATH", "")))
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True, check=True
    )
    lines = done.stdout.splitlines()
    for number, failed in enumerate((False, True, True)):
        for target in (80, 90):
            line = next(x for x in lines if x.startswith(f"broken.fine[{number}]") and f"sm_{target}" in x)
            assert ("FAILED" in line) == failed
    assert any("lacks ['N']" in line for line in lines)
    assert lines[-1] == "1"
