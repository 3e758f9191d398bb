"""The whole training of ninfer-nano on one GPU.

Three legs, each a run of tools.nano.train that starts from the shards of the one before, in DIR/leg0 to
DIR/leg2. A leg that has its evaluation.json, which is written last, is not run again. `--print` shows the
commands without running them.
"""

from __future__ import annotations

import argparse
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

# Options of each leg. The steps are an upper limit that one H200 does not reach; the seconds end a leg.
LEGS = (
    ("--steps", "6500", "--seconds", "455"),
    ("--last", "--steps", "6500", "--seconds", "480"),
    ("--last", "--peak", "0.4", "--steps", "3600", "--seconds", "262"),
)


def commands(corpus: Path, out: Path) -> list[tuple[Path, list[str]]]:
    """Each leg's folder and the command that fills it."""
    found = []
    for leg, options in enumerate(LEGS):
        resume = ["--resume", str(out / f"leg{leg - 1}")] if leg else []
        command = [sys.executable, "-m", "tools.nano.train", "--corpus", str(corpus)]
        command += ["--out", str(out / f"leg{leg}"), "--leg", str(leg), *resume, *options]
        found.append((out / f"leg{leg}", command))
    return found


def run(corpus: Path, out: Path) -> int:
    """Run the legs that are not done; the exit code of the first that fails, or 0."""
    for folder, command in commands(corpus, out):
        if (folder / "evaluation.json").exists():
            print(f"{folder} is done", flush=True)
            continue
        print(shlex.join(command), flush=True)
        if code := subprocess.run(command).returncode:
            print(
                f"error: {folder.name} ended with exit code {code}; run this again to repeat it",
                file=sys.stderr,
            )
            return code
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tools.nano.legs",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--corpus", type=Path, required=True, help="folder made by tools.nano.corpus")
    parser.add_argument("--out", type=Path, required=True, help="folder for the legs' folders")
    parser.add_argument("--print", action="store_true", help="show the commands only")
    options = parser.parse_args(arguments)
    if options.print:
        for _, command in commands(options.corpus, options.out):
            print(shlex.join(command))
        return 0
    if not (options.corpus / "manifest.json").exists():
        print(
            f"error: {options.corpus} holds no corpus; make it with python -m tools.nano.corpus --out "
            f"{options.corpus}",
            file=sys.stderr,
        )
        return 1
    return run(options.corpus, options.out)


if __name__ == "__main__":
    sys.exit(main())
