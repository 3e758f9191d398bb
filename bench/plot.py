"""Plots of reports: one for each sweep that they contain.

    python -m bench.plot REPORT.json|SUMMARY.csv|FOLDER ... [--out FOLDER] [--format png|svg]

Takes reports of `ninfer-bench` (JSON or CSV), summaries and folders of `bench.matrix`; several inputs become
several lines. Sweeps are: prefill by prompt length and by chunk, decode by depth, by number of tokens and by
number of requests. One with fewer than two points isn't drawn.
"""

from __future__ import annotations

import argparse
import csv
import json
import sys
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Row = Mapping[str, Any]
Series = dict[str, dict[float, tuple[float, float]]]
"""Name of a line -> x -> (mean, deviation)."""


@dataclass(frozen=True)
class Sweep:
    """`x` of the rows that `takes`; rows that differ in one of `apart` are different lines."""

    name: str
    title: str
    x: str
    y: str
    takes: Callable[[Row], bool]
    x_title: str
    y_title: str = "tokens a second"
    is_logarithmic: bool = True
    apart: tuple[str, ...] = ("decode_path",)


def _alone(row: Row) -> bool:
    return row["concurrency"] == 1


SWEEPS = (
    Sweep(
        "prefill_length", "Prefill by length of the prompt", "n_prompt", "prefill_tok_s",
        lambda r: r["n_gen"] == 0, "prompt tokens", apart=("prefill_chunk",),
    ),
    Sweep(
        "prefill_chunk", "Prefill by chunk", "prefill_chunk", "prefill_tok_s",
        lambda r: r["n_gen"] == 0, "tokens a chunk", apart=("n_prompt",),
    ),
    Sweep(
        "decode_depth", "Decode by depth", "depth", "decode_output_tok_s",
        lambda r: r["n_gen"] > 0 and _alone(r), "tokens before the first decoded one",
        is_logarithmic=False, apart=("decode_path", "n_gen"),
    ),
    Sweep(
        "decode_length", "Decode by number of tokens", "n_gen", "decode_output_tok_s",
        lambda r: r["n_gen"] > 0 and _alone(r) and r["n_prompt"] <= 1, "decoded tokens",
    ),
    Sweep(
        "concurrency", "Decode by requests at a time, all together", "concurrency", "decode_output_tok_s",
        lambda r: r["n_gen"] > 0, "requests", apart=("decode_path", "n_gen", "depth"),
    ),
)  # fmt: skip


def read(path: Path) -> list[Row]:
    """Rows of a report, a summary or a folder with one; numbers are numbers."""
    if path.is_dir():
        path = path / "summary.json"
    if path.suffix == ".csv":
        with path.open(newline="", encoding="utf-8") as file:
            return [_row({name: _number(text) for name, text in row.items()}) for row in csv.DictReader(file)]
    document = json.loads(path.read_text(encoding="utf-8"))
    if isinstance(document, list):
        return [_row(row) for row in document]
    return [_row(document["config"] | test) for test in document["tests"]]


def _row(values: dict[str, Any]) -> Row:
    """A request that prefills and decodes decodes behind its prompt."""
    if not values["depth"] and values["n_gen"] and values["n_prompt"] > 1:
        values = {**values, "depth": values["n_prompt"]}
    return values


def _number(text: str) -> Any:
    try:
        return int(text)
    except ValueError:
        try:
            return float(text)
        except ValueError:
            return text or None


def series(sweep: Sweep, inputs: Mapping[str, Sequence[Row]]) -> Series:
    """The lines of a sweep that have two points or more."""
    lines: Series = defaultdict(dict)
    for name, rows in inputs.items():
        taken = [row for row in rows if sweep.takes(row) and row.get(f"{sweep.y}_mean") is not None]
        varied = [key for key in sweep.apart if len({row.get(key) for row in taken}) > 1]
        for row in taken:
            parts = [name] * (len(inputs) > 1) + [f"{key} {row[key]}" for key in varied]
            point = (row[f"{sweep.y}_mean"], row.get(f"{sweep.y}_stddev") or 0.0)
            lines[", ".join(parts)][row[sweep.x]] = point
    return {name: points for name, points in lines.items() if len(points) > 1}


def draw(sweep: Sweep, lines: Series, out: Path) -> None:
    """One picture; the kind of file follows from the name."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot, ticker

    figure, axes = pyplot.subplots(figsize=(7, 4.2))
    for name, points in lines.items():
        xs = sorted(points)
        means, deviations = zip(*(points[x] for x in xs), strict=True)
        axes.errorbar(xs, means, deviations, marker="o", capsize=3, label=name or None)
    if sweep.is_logarithmic:
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter(ticker.FuncFormatter(lambda x, _: f"{x:,.0f}"))
    axes.set(title=sweep.title, xlabel=sweep.x_title, ylabel=sweep.y_title)
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    if any(lines):
        axes.legend()
    figure.tight_layout()
    figure.savefig(out, dpi=150)
    pyplot.close(figure)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("inputs", nargs="+", type=Path, metavar="REPORT")
    parser.add_argument("--out", type=Path, default=Path("profiles/plots"))
    parser.add_argument("--format", choices=("png", "svg"), default="png")
    options = parser.parse_args(argv)
    inputs = {path.stem if path.is_file() else path.name: read(path) for path in options.inputs}
    options.out.mkdir(parents=True, exist_ok=True)
    drawn = 0
    for sweep in SWEEPS:
        lines = series(sweep, inputs)
        if lines:
            out = options.out / f"{sweep.name}.{options.format}"
            draw(sweep, lines, out)
            print(out)
            drawn += 1
    if not drawn:
        print("these reports contain no sweep of two points or more", file=sys.stderr)
    return 0 if drawn else 1


if __name__ == "__main__":
    sys.exit(main())
