"""The loss curves of a training run: `python -m tools.nano.plot LOG... --out docs/nano-loss.svg`."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

_GROUPS = {
    "all": None,
    "prose": ("prose",),
    "code files": ("code-files",),
    "structured": ("jsonl", "csv", "json_schema", "sort", "copy"),
    "reasoning": ("add2", "arith", "chain", "logic", "count"),
    "retrieval": ("kv512", "kv2048", "kv8192", "kv_many", "needle"),
    "stories": ("story", "story_long"),
    "translation": ("to_orvali", "to_english", "glossary"),
    "tools": ("tool_call", "tool_result", "tool_thinking"),
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
        for line in path.read_text().splitlines():
            record: dict[str, Any] = json.loads(line)
            steps.append(first + record["step"])
            for name, sources in _GROUPS.items():
                known = [record["sources"][s] for s in sources or () if s in record["sources"]]
                value = (
                    record["loss"] if sources is None else sum(known) / len(known) if known else float("nan")
                )
                found[name].append(value)
            found["MTP layer"].append(record["mtp"])
    return steps, found, begins


def draw(logs: Sequence[Path], out: Path) -> None:
    """Write the plot; its format is that of the file's suffix."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    steps, found, begins = curves(logs)
    figure, axes = pyplot.subplots(figsize=(8, 5))
    for name, values in found.items():
        axes.plot(steps, values, label=name, linewidth=2 if name == "all" else 1)
    for step in begins:
        axes.axvline(step, color="grey", linewidth=0.8, linestyle=":")
    axes.set_yscale("log")
    axes.set_xlabel("step")
    axes.set_ylabel("loss, nats a learned token")
    axes.legend(fontsize="small", ncols=2)
    axes.set_title("ninfer-nano, training loss (dotted: a new leg)")
    figure.tight_layout()
    figure.savefig(out, metadata={"Date": None} if out.suffix == ".svg" else None)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m tools.nano.plot", description=__doc__)
    parser.add_argument("logs", type=Path, nargs="+")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    draw(options.logs, options.out)
