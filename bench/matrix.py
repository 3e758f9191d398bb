"""Whole sweeps with `ninfer-bench`: one report for each case, a summary at the end.

    python -m bench.matrix MODEL [--preset smoke|core|full] [--suite NAME ...] [--device cuda] [--resume]
                           [--dry-run] [--out FOLDER] [--kv-dtype int8]

The folder (`profiles/bench/ninfer-<preset>-<UTC>`) gets `commands.sh`, `manifest.json`,
`json/<suite>/<case>.json`, `logs/<suite>.<case>.stderr.txt`, `summary.csv` and `summary.json`; draw it with
`python -m bench.plot FOLDER`. `--resume` skips cases whose report is there. Cases that need speculative
decoding wait for it.
"""

from __future__ import annotations

import argparse
import csv
import json
import shlex
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

SCHEMA = 4
_PATHS = {"graph": (), "eager": ("--no-cuda-graph",)}
_SUMMARY = (
    "suite", "case", "label", "prefill_chunk", "decode_path", "kv_cache", "n_prompt", "n_gen", "depth",
    "concurrency", "prefill_tok_s_mean", "prefill_tok_s_stddev", "decode_output_tok_s_mean",
    "decode_output_tok_s_stddev", "ms_per_round_mean", "decode_host_share_mean", "average_batch_mean",
    "workspace_peak_bytes",
)  # fmt: skip


@dataclass(frozen=True)
class Run:
    """One call of `ninfer-bench`; its tests share a load of the model."""

    suite: str
    case: str
    arguments: tuple[str, ...]
    repetitions: int = 3

    @property
    def command(self) -> tuple[str, ...]:
        return (*self.arguments, "-r", str(self.repetitions), "--warmup", "1")


def runs(preset: str) -> list[Run]:
    """The cases of a preset: `smoke` is the first of each suite and short, `full` adds the long ones."""
    found = list(_core(full=preset == "full"))
    if preset != "smoke":
        return found
    first = {run.suite: run for run in reversed(found)}
    return [Run(run.suite, run.case, run.arguments, 1) for run in reversed(first.values())]


def _core(*, full: bool) -> Iterator[Run]:
    lengths = [128, 256, 512, 1024, 2048, 4096, 8192, 16_384, *([32_768, 65_536] if full else ())]
    yield Run("prefill_length", "all", ("-p", ",".join(map(str, lengths)), "--prefill-chunk", "4096"))
    for chunk in (128, 256, 512, 1024, 2048, 4096):
        yield Run("prefill_chunk", f"chunk{chunk}", ("-p", "8192", "--prefill-chunk", str(chunk)))
    for path, option in _PATHS.items():
        yield Run("pure_decode", path, ("-n", "16,64,128,512,2048", *option), 5)
    pairs = ["512,512", "2048,512", "8192,512", *(["32768,256", "65536,128"] if full else ())]
    for path, option in _PATHS.items():
        yield Run("context_decode", path, ("-pg", ";".join(pairs), "--prefill-chunk", "4096", *option))
    depths = ["0", "2048", "8192", "32768", *(["85000"] if full else ())]
    yield Run("depth", "all", ("-n", "128", "-d", ",".join(depths), "--prefill-chunk", "4096"))
    yield Run("concurrency", "all", ("-n", "128", "--concurrency", "1,2,4,8"))
    for path, option in _PATHS.items():
        tail = ("-pg", "8174,12;8170,12", "--max-ctx", "8192", "--prefill-chunk", "4096")
        yield Run("tail_stress", path, (*tail, *option))


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", help="as for ninfer-bench")
    parser.add_argument("--preset", choices=("smoke", "core", "full"), default="core")
    parser.add_argument("--suite", action="append", help="only this one (repeatable)")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--kv-dtype", default="int8")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--resume", action="store_true", help="skip cases whose report is there")
    parser.add_argument("--dry-run", action="store_true", help="print the commands")
    options = parser.parse_args(argv)
    chosen = [run for run in runs(options.preset) if not options.suite or run.suite in options.suite]
    if not chosen:
        known = ", ".join(dict.fromkeys(run.suite for run in runs(options.preset)))
        parser.error(f"no suite is called {', '.join(options.suite)}; known are {known}")
    stamp = datetime.now(UTC).strftime("%Y%m%d-%H%M%S")
    folder: Path = options.out or Path("profiles", "bench", f"ninfer-{options.preset}-{stamp}")
    shared = ("--device", options.device, "--kv-dtype", options.kv_dtype)
    commands = [_command(options.model, run, shared, _report(folder, run)) for run in chosen]
    if options.dry_run:
        print("\n".join(map(shlex.join, commands)))
        return 0
    _prepare(folder, options, chosen, commands)
    failed = []
    for run, command in zip(chosen, commands, strict=True):
        if options.resume and _read(_report(folder, run)) is not None:
            continue
        print(f"{run.suite}/{run.case} ...", flush=True)
        with (folder / "logs" / f"{run.suite}.{run.case}.stderr.txt").open("wb") as log:
            if subprocess.run(command, stderr=log).returncode != 0:
                failed.append(f"{run.suite}/{run.case}")
                _report(folder, run).unlink(missing_ok=True)
        _summarize(folder, chosen)
    _summarize(folder, chosen)
    if failed:
        print(f"failed: {', '.join(failed)}; see {folder / 'logs'}", file=sys.stderr)
    print(folder)
    return 1 if failed else 0


def _command(model: str, run: Run, shared: Sequence[str], report: Path) -> tuple[str, ...]:
    out = ("-o", "json", "--output-file", str(report))
    return (sys.executable, "-m", "ninfer.cli.bench", model, *run.command, *shared, *out)


def _report(folder: Path, run: Run) -> Path:
    return folder / "json" / run.suite / f"{run.case}.json"


def _prepare(
    folder: Path, options: argparse.Namespace, chosen: Sequence[Run], commands: Sequence[Sequence[str]]
) -> None:
    (folder / "logs").mkdir(parents=True, exist_ok=True)
    for run in chosen:
        _report(folder, run).parent.mkdir(parents=True, exist_ok=True)
    lines = ["#!/bin/sh", *map(shlex.join, commands), ""]
    (folder / "commands.sh").write_text("\n".join(lines), encoding="utf-8")
    manifest = {
        "artifact_type": "ninfer_bench_matrix",
        "schema_version": SCHEMA,
        "created": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "preset": options.preset,
        "model": options.model,
        "cases": [{"suite": run.suite, "case": run.case, "arguments": list(run.command)} for run in chosen],
    }
    (folder / "manifest.json").write_text(json.dumps(manifest, indent=1), encoding="utf-8")


def _read(path: Path) -> dict[str, Any] | None:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def _summarize(folder: Path, chosen: Sequence[Run]) -> None:
    """All tests of all reports so far, in a table and in JSON."""
    rows = []
    for run in chosen:
        report = _read(_report(folder, run))
        for test in [] if report is None else report["tests"]:
            values = {"suite": run.suite, "case": run.case} | report["config"] | test  # type: ignore[index]
            rows.append({name: values[name] for name in _SUMMARY})
    (folder / "summary.json").write_text(json.dumps(rows, indent=1), encoding="utf-8")
    with (folder / "summary.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, _SUMMARY, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


if __name__ == "__main__":
    sys.exit(main())
