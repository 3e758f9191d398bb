"""One table of all operators: microseconds, bytes, GB/s, share of the read ceiling measured in the same run.

    python -m bench.ops [--groups small,attention] [--formats nvfp4,fp8_e4m3fn_row_bf16] [--columns 1,4,8]
                        [--json FILE] [--modules]

The operators are called through `ninfer.ops`, as the engine calls them. The modules beside this one go deeper
into one operator each (`python -m bench.ops.linear --help`); `--modules` runs those, too, as they are.
"""

from __future__ import annotations

import argparse
import json
import pkgutil
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

import torch

import bench.ops
from bench.ops.operators import GROUPS, TINY, Shapes, Suite
from bench.ops.table import Row, table
from ninfer.formats import KvFormat

_OWN = {"__main__", "ceiling", "operators", "table", "timing"}


def run_modules() -> int:
    """Run the other modules' command lines without options; how many failed."""
    failed = 0
    for module in pkgutil.iter_modules(bench.ops.__path__):
        if module.name not in _OWN:
            name = f"bench.ops.{module.name}"
            print(f"\n{name}", flush=True)
            failed += subprocess.run([sys.executable, "-m", name]).returncode != 0
    return failed


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--groups", default=",".join(GROUPS), help=",".join(GROUPS))
    parser.add_argument("--formats", help="formats of the products")
    parser.add_argument("--kv", default="int8,bf16", help=",".join(KvFormat))
    parser.add_argument("--columns", default="1,4,8", help="of the small products")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="tiny shapes, to try the command itself")
    parser.add_argument("--modules", action="store_true", help="then run the modules beside this one")
    parser.add_argument("--json", type=Path, help="write the rows there too, each as soon as it is there")
    options = parser.parse_args(argv)
    device = torch.device(options.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        print("bench.ops measures kernels on a GPU, and PyTorch finds none here.", file=sys.stderr)
        return 2
    groups = options.groups.split(",")
    if unknown := set(groups) - set(GROUPS):
        parser.error(f"unknown groups {', '.join(sorted(unknown))}; known are {', '.join(GROUPS)}")
    suite = Suite(device, TINY if options.tiny else Shapes())
    suite = Suite(
        device,
        suite.shapes,
        tuple(options.formats.split(",")) if options.formats else suite.formats,
        tuple(KvFormat(name) for name in options.kv.split(",")),
        tuple(int(count) for count in options.columns.split(",")),
    )
    read, head = 0.0, f"{device}: no ceiling is measured here"
    if device.type == "cuda":
        from bench.ops import ceiling

        found = ceiling.measure(device)
        read, head = found.read, f"{torch.cuda.get_device_name(device)}: {found}"
    print(head, flush=True)
    rows: list[Row] = []

    def add(row: Row) -> None:
        rows.append(row)
        print(table([row], read).splitlines()[1], file=sys.stderr, flush=True)
        if options.json:
            _write(options.json, head, read, rows)

    failed = 0
    for group in groups:
        for part in suite.parts(group):
            try:
                for row in part.rows(group):
                    add(row)
            except Exception as error:  # one operator that fails must not take the others' figures with it
                failed += 1
                print(f"{group}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
    print(table(rows, read))
    if options.modules:
        failed += run_modules()
    return 1 if failed or not rows else 0


def _write(path: Path, head: str, read: float, rows: list[Row]) -> None:
    document = {
        "artifact_type": "ninfer_bench_ops",
        "schema_version": 1,
        "created": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "device": head,
        "read_ceiling_gb_s": read or None,
        "rows": [
            {
                "name": row.name,
                "us": row.us,
                "bytes": row.bytes,
                "gb_s": row.gb_s,
                "share": row.gb_s / read if read else None,
                "tflop_s": row.tflop_s if row.flops else None,
            }
            for row in rows
        ],
    }
    path.write_text(json.dumps(document, indent=1), encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
