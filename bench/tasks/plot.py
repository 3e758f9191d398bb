"""Two panels from a report: success by category, and retrieval by depth. Needs matplotlib."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ninfer.errors import OptionError

_DEPTH = re.compile(r"kv(\d+)")


def draw(report: Mapping[str, Any], path: Path) -> None:
    """Write the plot to `path` (its suffix says how); the same report gives the same bytes.

    OptionError if matplotlib is missing.
    """
    try:
        from matplotlib import color_sequences, rc_context
        from matplotlib.figure import Figure
    except ImportError:
        raise OptionError(
            "the plot needs matplotlib, which is not installed; pip install 'ninfer[train]'"
        ) from None
    parts = report["combinations"]
    depths = retrieval(parts[0])
    with rc_context({"svg.hashsalt": "bench.tasks", "font.size": 9}):
        width = 1.2 * len(parts[0]["categories"]) * max(1.0, len(parts) / 4) + 2
        figure = Figure(figsize=(max(width, 5) + 4 * bool(depths), 4), layout="constrained")
        ratios = [max(width, 5), 4] if depths else [1]
        panels = figure.subplots(1, len(ratios), squeeze=False, width_ratios=ratios)[0]
        for panel in panels:
            panel.set_prop_cycle(color=color_sequences["tab10" if len(parts) <= 10 else "tab20"])
        _categories(panels[0], parts)
        if depths:
            _retrieval(panels[1], parts)
        figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=4)
        metadata = {"Date": None} if path.suffix == ".svg" else None
        figure.savefig(path, dpi=150, metadata=metadata)


def retrieval(part: Mapping[str, Any]) -> list[tuple[int, Mapping[str, Any]]]:
    """(tokens, aggregate) of the tasks `kvN`, ascending."""
    found = [(_DEPTH.fullmatch(task["name"]), task) for task in part["tasks"]]
    return sorted(((int(match[1]), task) for match, task in found if match), key=lambda pair: pair[0])


def _categories(panel: Any, parts: list[Mapping[str, Any]]) -> None:
    names = [item["category"] for item in parts[0]["categories"]]
    bar = 0.8 / len(parts)
    for place, part in enumerate(parts):
        items = part["categories"]
        at = [index - 0.4 + bar * (place + 0.5) for index in range(len(names))]
        panel.bar(at, [100 * item["share"] for item in items], bar * 0.9, label=part["label"])
        panel.errorbar(at, *_intervals(items), fmt="none", ecolor="0.25", elinewidth=0.8, capsize=2)
    panel.set_xticks(range(len(names)), names)
    _share_axis(panel, "Passed by category (95 % intervals)")


def _retrieval(panel: Any, parts: list[Mapping[str, Any]]) -> None:
    for place, part in enumerate(parts):
        depths, items = zip(*retrieval(part), strict=True)
        aside = 2 ** (0.25 * ((place + 0.5) / len(parts) - 0.5))  # so that intervals don't cover each other
        panel.errorbar(
            [depth * aside for depth in depths],
            *_intervals(items),
            marker="o",
            capsize=2,
            label=part["label"],
        )
    ticks = [depth for depth, _ in retrieval(parts[0])]
    panel.set_xscale("log", base=2)
    panel.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
    panel.minorticks_off()
    panel.margins(x=0.12)
    panel.set_xlabel("tokens of the document")
    _share_axis(panel, "Key–value retrieval by depth")


def _intervals(items: Any) -> tuple[list[float], list[list[float]]]:
    """Shares in per cent, and how far their intervals reach below and above."""
    shares = [100 * item["share"] for item in items]
    below = [share - 100 * item["wilson_low"] for share, item in zip(shares, items, strict=True)]
    above = [100 * item["wilson_high"] - share for share, item in zip(shares, items, strict=True)]
    return shares, [below, above]


def _share_axis(panel: Any, title: str) -> None:
    panel.set_ylim(0, 103)
    panel.set_ylabel("passed, %")
    panel.set_title(title)
    panel.grid(axis="y", alpha=0.3)
    panel.set_axisbelow(True)
