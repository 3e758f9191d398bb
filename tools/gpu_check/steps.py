"""The steps: commands with a limit of time each, and what their outcome says."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from xml.etree import ElementTree

_MODEL = "synthetic:qwen3_8_27b"
_SANITIZER = "compute-sanitizer"
_ONE_THREAD = {"OMP_NUM_THREADS": "1"}
"""Steps beside each other share the processors."""
_FOUND = 77
"""Exit code by which the sanitizer says that it found something."""


_RACED = {"small": "small_linear", "attention": "attend", "recurrence": "gdn_", "clusters": "small_linear"}
"""Parts of `tests/ops/cuda/tiny.py`, and what the names of their kernels in CUDA C++ have in common."""
_NOT_UNDERSTOOD = ("clusters",)
"""racecheck doesn't know that a barrier which counts the bytes of `st.async` orders them, and reports every
sum that another block sent: what it says there is shown, and decides nothing."""
_WORKERS = 12


@dataclass(frozen=True)
class Step:
    """A command, at most `seconds` long. `report`: the JSON document that it leaves. Steps of one `turn` run
    side by side; those that measure have a turn of their own. `detail` reads what is to be shown from the
    step's folder. `decides` off: it only prepares, and its failure isn't one of the check."""

    name: str
    turn: int
    command: tuple[str, ...]
    seconds: float
    report: str | None = None
    environment: dict[str, str] = field(default_factory=dict)
    detail: Callable[[Path], str] | None = None
    decides: bool = True


@dataclass(frozen=True)
class Outcome:
    """How a step went: passed, failed (`code`) or broken off for time; where its output is."""

    name: str
    passed: bool
    detail: str
    seconds: float
    log: str


def steps(folder: Path, *, deep: bool) -> list[Step]:
    """All steps in order; documents and logs go to `folder`."""
    python = sys.executable
    found = [
        *_compiling(),
        Step(
            "operators",
            1,
            (
                *(python, "-m", "bench.ops", "--groups", "small,ends,attention,recurrence"),
                *("--formats", "nvfp4,fp8_e4m3fn_row_bf16"),
                *("--json", str(folder / "ops.json")),
            ),
            100,
            "ops",
        ),
        _bench(folder, "quasar", 110, "-n", "128", "--concurrency", "1,8", "-pg", "8192,128", "-r", "3"),
        _bench(folder, "official", 70, "-n", "128", "-p", "8192", "-r", "3"),
        _bench(folder, "q4_k_m", 60, "-n", "128", "-r", "3"),
    ]
    if deep:
        found.append(
            _bench(folder, "quasar", 110, "-pg", "85000,128", "-r", "1", "--warmup", "0", report="deep")
        )
    last = 1 + max(step.turn for step in found)
    workers = ("-n", str(_WORKERS), "--dist", "worksteal") if importlib.util.find_spec("xdist") else ()
    junit = folder / "tests.xml"
    found.append(
        Step(
            "gpu tests",
            last,
            (python, "-m", "pytest", "-m", "gpu", "-q", *workers, f"--junitxml={junit}", *marked_files()),
            240,
            environment=_ONE_THREAD,
            detail=lambda folder: _counted(folder / "tests.xml"),
        )
    )
    sanitizer = shutil.which(_SANITIZER) or shutil.which(_SANITIZER, path="/usr/local/cuda/bin")
    if sanitizer is not None:
        found += _sanitized(sanitizer, last)
    return found


def _bench(folder: Path, profile: str, seconds: float, *arguments: str, report: str | None = None) -> Step:
    name = report or profile
    out = ("-o", "json", "--output-file", str(folder / f"{name}.json"))
    how = ("--kv-dtype", "int8", "--prefill-chunk", "4096", "--device", "cuda")
    command = (sys.executable, "-m", "ninfer.cli.bench", f"{_MODEL}/{profile}", *arguments, *how, *out)
    turn = {"quasar": 2, "official": 3, "q4_k_m": 4, "deep": 5}[name]
    return Step(f"bench {name}", turn, command, seconds, name)


def _compiling() -> list[Step]:
    """Everything that the measuring steps will need, compiled by several processes at once; what is in the
    caches already takes a few seconds."""
    operators = (sys.executable, "-m", "bench.ops", "--kv", "int8", "--columns", "1,8", "--groups")
    found = [
        Step(f"compile {group} {format}", 0, (*operators, group, "--formats", format), 75, decides=False)
        for group, format in (
            ("small", "nvfp4"),
            ("small", "fp8_e4m3fn_row_bf16"),
            ("small", "ggml_k"),
            ("ends,attention,recurrence", "nvfp4"),
            ("wide", "nvfp4,fp8_e4m3fn_row_bf16"),
            ("prefill", "nvfp4"),
        )
    ]
    short = ("-n", "2", "-p", "4096", "--concurrency", "1,8", "-r", "1", "--warmup", "0")
    how = ("--kv-dtype", "int8", "--prefill-chunk", "4096", "--device", "cuda")
    model = (sys.executable, "-m", "ninfer.cli.bench", f"{_MODEL}/quasar", *short, *how)
    return [*found, Step("compile model", 0, model, 75, decides=False)]


def marked_files() -> list[str]:
    """Test files with tests for a GPU: others may need packages that a machine for measuring hasn't."""
    found = sorted(path.as_posix() for path in Path("tests").rglob("test_*.py"))
    return [path for path in found if "mark.gpu" in Path(path).read_text(encoding="utf-8")]


def _sanitized(sanitizer: str, turn: int) -> list[Step]:
    """A short answer of the tiny model under memcheck, without the caching allocator, which would hide what
    lies beyond a tensor; and kernels in CUDA C++ under racecheck."""
    # What a library asks the driver for in vain is no fault of a kernel.
    checked = (sanitizer, "--error-exitcode", str(_FOUND), "--report-api-errors", "no", "--tool")
    answer = ("-m", "ninfer.cli.main", "synthetic:tiny/quasar", "--prompt", "hello", "--max-new", "4")
    short = ("--device", "cuda", "--no-cuda-graph", "--max-context", "256", "--prefill-chunk", "128")
    found = [
        Step(
            "memcheck, tiny model",
            turn,
            (*checked, "memcheck", sys.executable, *answer, *short),
            200,
            environment={"PYTORCH_NO_CUDA_MEMORY_CACHING": "1", **_ONE_THREAD},
            detail=lambda folder: _last(folder, "memcheck, tiny model", "ERROR SUMMARY"),
        )
    ]
    for part, kernels in _RACED.items():
        name = f"racecheck, {part}"
        of_kernels = ("--kernel-name", f"kernel_substring={kernels}")
        found.append(
            Step(
                name,
                turn,
                (*checked, "racecheck", *of_kernels, sys.executable, "-m", "tests.ops.cuda.tiny", part),
                200,
                environment=_ONE_THREAD,
                detail=partial(_races, name=name),
                decides=part not in _NOT_UNDERSTOOD,
            )
        )
    return found


def _races(folder: Path, name: str) -> str:
    """The summary, and which pairs of lines it is about."""
    text = log_of(folder, name).read_text(errors="replace")
    ends = re.findall(r"(Write|Read) Thread .* in (\S+:\d+)$", text, re.MULTILINE)
    pairs = Counter(f"{a[1]} and {b[1]}" for a, b in zip(ends[::2], ends[1::2], strict=False))
    shown = "; ".join(f"{count} between {pair}" for pair, count in pairs.most_common(3))
    return f"{_last(folder, name, 'RACECHECK SUMMARY')}{': ' * bool(shown)}{shown}"


def run(todo: Sequence[Step], folder: Path, deadline: float) -> list[Outcome]:
    """Run steps side by side until all have ended, or their time (`deadline`: monotonic) is over."""
    started = time.monotonic()
    running = []
    for step in todo:
        log = log_of(folder, step.name)
        environment = {**os.environ, "PYTHONUNBUFFERED": "1", **step.environment}
        with log.open("wb") as out:
            running.append(
                subprocess.Popen(
                    step.command,
                    stdout=out,
                    stderr=subprocess.STDOUT,
                    env=environment,
                    start_new_session=True,
                )
            )
    try:
        return [
            _outcome(step, process, folder, started, min(deadline, started + step.seconds))
            for step, process in zip(todo, running, strict=True)
        ]
    finally:
        for process in running:
            end(process)


def end(process: subprocess.Popen[bytes]) -> None:
    """End a step and what it started."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def log_of(folder: Path, name: str) -> Path:
    return folder / f"{''.join(c if c.isalnum() else '-' for c in name)}.log"


def _outcome(
    step: Step, process: subprocess.Popen[bytes], folder: Path, started: float, limit: float
) -> Outcome:
    try:
        code: int | None = process.wait(max(limit - time.monotonic(), 0.1))
    except subprocess.TimeoutExpired:
        code = None
        end(process)
    log = log_of(folder, step.name)
    detail = step.detail(folder) if step.detail is not None else ""
    if code is None:
        detail = f"broken off after {time.monotonic() - started:.0f} s; {detail}".rstrip("; ")
    elif code != 0:
        detail = f"exit code {code}; {detail or _tail(log)}"
    return Outcome(step.name, code == 0 or not step.decides, detail, time.monotonic() - started, log.name)


def _counted(junit: Path) -> str:
    """How many tests there were, from pytest's report."""
    try:
        suite = next(ElementTree.parse(junit).getroot().iter("testsuite"))
    except (OSError, ElementTree.ParseError, StopIteration):
        return "no report of the tests"
    total, skipped = int(suite.get("tests", 0)), int(suite.get("skipped", 0))
    bad = int(suite.get("failures", 0)) + int(suite.get("errors", 0))
    return f"{total - skipped - bad} passed, {bad} failed, {skipped} skipped"


def _last(folder: Path, name: str, words: str) -> str:
    """The last line of a log with these words."""
    lines = log_of(folder, name).read_text(errors="replace").splitlines()
    found = [line.strip("= ") for line in lines if words in line]
    return found[-1] if found else "no summary"


def _tail(log: Path) -> str:
    """The last line that says something."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1][:160] if lines else "no output"
