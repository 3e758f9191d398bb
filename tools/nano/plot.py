"""The loss curves of a training run: `python -m tools.nano.plot LOG... --out docs/nano-loss.svg`."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ninfer.errors import NInferError, OptionError
from tools.nano.commands import exit_code

_GROUPS = {
    "all": None,
    "prose": ("prose",),
    "code files": ("code-files",),
    "structured": ("jsonl32", "jsonl", "csv", "json_schema", "sort", "copy"),
    "reasoning": ("add2", "arith", "chain", "logic", "count"),
    "retrieval": ("kv512", "kv2048", "kv8192", "kv_many", "needle"),
    "retrieval, question first": ("kv_first",),
    "stories": ("story", "story_long"),
    "code tasks": ("function", "trace", "fix"),
    "translation": ("to_orvali", "to_english", "glossary"),
    "tools": ("tool_call", "tool_result", "tool_thinking"),
}
_STYLES: dict[str, Any] = {
    "all": {"linewidth": 2, "color": "black"},
    "MTP layer": {"linewidth": 1, "color": "black", "linestyle": "--"},
}


def curves(logs: Sequence[Path]) -> tuple[list[int], dict[str, list[float]], list[int]]:
    """Steps counted over all legs, the mean loss of each group, and the steps at which later legs begin.

    A group's loss is the mean over its sources, nats a token.
    """
    steps: list[int] = []
    found: dict[str, list[float]] = {name: [] for name in (*_GROUPS, "MTP layer")}
    begins: list[int] = []
    for index, path in enumerate(logs):
        first = steps[-1] if steps else 0
        if index:
            begins.append(first)
        for number, line in enumerate(path.read_text().splitlines(), 1):
            record = _record(line, f"{path}, line {number},")
            steps.append(first + record["step"])
            for name, sources in _GROUPS.items():
                known = [record["sources"][s] for s in sources or () if s in record["sources"]]
                value = (
                    record["loss"] if sources is None else sum(known) / len(known) if known else float("nan")
                )
                found[name].append(value)
            found["MTP layer"].append(record["mtp"])
    return steps, found, begins


def _record(line: str, place: str) -> dict[str, Any]:
    try:
        record = json.loads(line)
        return {key: record[key] for key in ("step", "loss", "mtp", "sources")}
    except (ValueError, TypeError, KeyError):
        raise NInferError(f"{place} is no record of a training's log") from None


def draw(logs: Sequence[Path], out: Path) -> None:
    """Write the plot; its format is that of the file's suffix. The same logs give the same bytes."""
    try:
        from matplotlib import rc_context
        from matplotlib.figure import Figure
    except ImportError:
        raise OptionError(
            "the plot needs matplotlib, which is not installed; pip install 'ninfer[train]'"
        ) from None
    if out.suffix not in (".svg", ".png", ".pdf"):
        raise OptionError(f"--out {out} must end in .svg, .png or .pdf")
    steps, found, begins = curves(logs)
    figure = Figure(figsize=(9, 5), layout="constrained")
    axes = figure.subplots()
    for name, values in found.items():
        style = _STYLES.get(name, {"linewidth": 1})
        axes.plot(steps, values, label=name, **style)
    for step in begins:
        axes.axvline(step, color="grey", linewidth=0.8, linestyle=":")
    axes.set_yscale("log")
    axes.set_xlabel("step")
    axes.set_ylabel("loss, nats a learned token")
    figure.legend(fontsize="small", loc="outside right upper")
    axes.set_title("ninfer-nano, training loss (dotted: a new leg)")
    with rc_context({"svg.hashsalt": "tools.nano"}):
        figure.savefig(out, metadata={"Date": None} if out.suffix == ".svg" else None)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.nano.plot", description=__doc__)
    parser.add_argument("logs", type=Path, nargs="+")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args(arguments)
    return exit_code(lambda: draw(options.logs, options.out))


if __name__ == "__main__":
    sys.exit(main())
