"""Is the CUDA backend right and fast here? One table, within eight minutes.

    python -m tools.gpu_check [--limit SECONDS] [--out FOLDER] [--deep] [--only STEP ...]

Kernels are compiled by several processes at once. Then operators and three 27B models (synthetic, no file)
are measured one after the other; then the tests marked `gpu` run beside compute-sanitizer's memcheck and
racecheck, if that tool is there. Every step leaves its log and its report in FOLDER as soon as it ends, so
that a run that is broken off keeps what it had. `--deep` also measures at a depth of 85,000, loads a file and
holds what ninfer-nano says against the CPU, within ten minutes. The exit code is
0 if every step passed and every figure is reached, 1 if not, 2 without a GPU.
"""

from __future__ import annotations

import argparse
import itertools
import json
import signal
import sys
import time
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tools.gpu_check.figures import figures_table
from tools.gpu_check.steps import Outcome, Step, run, steps


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--limit", type=float, help="seconds for everything (470, deep 590)")
    parser.add_argument("--out", type=Path, help="folder for logs and reports")
    parser.add_argument("--deep", action="store_true", help="also at a depth of 85,000, and more")
    parser.add_argument("--only", nargs="*", default=[], help="steps whose names begin so")
    options = parser.parse_args(argv)
    begin = time.monotonic()
    limit = options.limit or (590 if options.deep else 470)
    import torch

    if not torch.cuda.is_available():
        print("gpu_check needs a GPU, and PyTorch finds none here.", file=sys.stderr)
        return 2
    stamp = datetime.now(UTC).strftime("%Y%m%d-%H%M%S")
    folder: Path = options.out or Path("profiles", "gpu_check", stamp)
    folder.mkdir(parents=True, exist_ok=True)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}; logs in {folder}", flush=True)
    chosen = [
        step
        for step in steps(folder, deep=options.deep)
        if not options.only or any(step.name.startswith(name) for name in options.only)
    ]
    outcomes: list[Outcome] = []
    signal.signal(signal.SIGTERM, _stop)
    try:
        for _, together in itertools.groupby(chosen, key=lambda step: step.turn):
            for outcome in run(list(together), folder, begin + limit):
                outcomes.append(outcome)
                print(_line(outcome), flush=True)
            _save(folder, outcomes, reports(folder, chosen))
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
    text, reached = figures_table(reports(folder, chosen))
    print(f"\n{text}\n")
    for outcome in outcomes:
        print(_line(outcome))
    missing = [step.name for step in chosen if step.name not in {one.name for one in outcomes}]
    if missing:
        print(f"not run: {', '.join(missing)}")
    right = reached and not missing and all(one.passed for one in outcomes)
    print(f"{'all right' if right else 'NOT all right'} after {time.monotonic() - begin:.0f} s")
    return 0 if right else 1


def reports(folder: Path, chosen: list[Step]) -> dict[str, Any]:
    """The documents that steps have left so far."""
    found = {}
    for step in chosen:
        path = folder / f"{step.report}.json"
        if step.report is not None and path.is_file():
            try:
                found[step.report] = json.loads(path.read_text(encoding="utf-8"))
            except ValueError:  # broken off while it was written
                continue
    return found


def _save(folder: Path, outcomes: list[Outcome], documents: dict[str, Any]) -> None:
    text, reached = figures_table(documents)
    document = {"steps": [asdict(one) for one in outcomes], "figures_reached": reached, "table": text}
    (folder / "results.json").write_text(json.dumps(document, indent=1), encoding="utf-8")


def _line(outcome: Outcome) -> str:
    verdict = "passed" if outcome.passed else "FAILED"
    return f"{outcome.name:24}{verdict:8}{outcome.seconds:6.0f} s  {outcome.detail}".rstrip()


def _stop(_signal: int, _frame: object) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
