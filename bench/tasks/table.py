"""A report as a table, for a terminal and as Markdown."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ninfer.cli.common import printable

_FIGURES: tuple[tuple[str, str, Callable[[float], str]], ...] = (
    ("tokens/round", "tokens_per_round", lambda value: f"{value:.2f}"),
    ("acceptance %", "acceptance", lambda value: f"{100 * value:.1f}"),
    ("decode tok/s", "decode_tok_s", lambda value: f"{value:.1f}"),
)


def text(report: Mapping[str, Any]) -> str:
    """For a terminal: tasks below their category, then all."""
    columns = _columns(report, intervals=False)
    widths = [max(map(len, column)) for column in columns]
    lines = []
    for first, *others in zip(*columns, strict=True):
        cells = [first.ljust(widths[0])]
        cells += [cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True)]
        lines.append("  ".join(cells).rstrip())
    remarks = _remarks(report)
    return "\n".join([*lines, "", *remarks] if remarks else lines)


def markdown(report: Mapping[str, Any]) -> str:
    """`report.md`: what was run, the table with Wilson's 95 % intervals for categories, and remarks."""
    titles, labels, *rows = zip(*_columns(report, intervals=True), strict=True)
    head = [f"{title} {label}" for title, label in zip(titles, labels, strict=True)]
    options = ", ".join(f"{name} {value}" for name, value in sorted(report["options"].items()))
    lines = [
        "# Task benchmark",
        "",
        f"{report['created']}, `{report['command']}`",
        "",
        f"Greedy, to the model's own stop; {options}. Brackets: 95 % interval (Wilson). Decode tok/s: mean "
        "of the requests' own rates, beside those that ran with them.",
        "",
        _line(head),
        "|---|" + "---:|" * (len(head) - 1),
        *(_line([f"**{cell}**" if row[0][0] != " " else cell for cell in row]) for row in rows),
        "",
        "| | artifact | signature | formats | bytes | KV tokens | concurrency | threads | output tok/s |",
        "|---|---|---|---|---:|---:|---:|---:|---:|",
        *map(_identity, report["combinations"]),
    ]
    remarks = [f"- {remark}" for remark in _remarks(report)]
    return "\n".join([*lines, "", *remarks] if remarks else lines) + "\n"


def _columns(report: Mapping[str, Any], *, intervals: bool) -> list[list[str]]:
    """The table by columns, each with two lines of heading: names, passed runs of each combination, figures.
    A figure that is the same in all combinations takes one column. Names of tasks are indented."""
    parts = report["combinations"]
    labels = [printable(part["label"]) for part in parts]
    rows = [_rows(part) for part in parts]
    columns = [["task", "", *(name for name, _ in rows[0])]]
    for label, cells in zip(labels, rows, strict=True):
        columns.append(["passed", label, *(_passed(name, item, intervals) for name, item in cells)])
    for title, key, form in _FIGURES:
        figures = [["–" if item[key] is None else form(item[key]) for _, item in cells] for cells in rows]
        if all(column == figures[0] for column in figures):
            columns.append([title, "", *figures[0]])
        else:
            columns += [[title, label, *column] for label, column in zip(labels, figures, strict=True)]
    return columns


def _rows(part: Mapping[str, Any]) -> list[tuple[str, Mapping[str, Any]]]:
    rows = []
    for category in part["categories"]:
        rows.append((category["category"], category))
        rows += [
            (f"  {task['name']}", task) for task in part["tasks"] if task["category"] == category["category"]
        ]
    return [*rows, ("all", part["overall"])]


def _passed(name: str, item: Mapping[str, Any], interval: bool) -> str:
    """`57/60`, for categories with the share in per cent and its interval; then what wasn't an answer."""
    cell = f"{item['passed']}/{item['total']}"
    if name[0] != " ":
        cell += f" {100 * item['share']:.1f} %"
        if interval:
            cell += f" [{100 * item['wilson_low']:.1f}, {100 * item['wilson_high']:.1f}]"
    labelled = [
        f"{item['outcomes'][kind]} {word}"
        for kind, word in (("cut", "cut"), ("unanswered", "empty"))
        if item["outcomes"][kind]
    ]
    return ", ".join([cell, *labelled])


def _remarks(report: Mapping[str, Any]) -> list[str]:
    remarks = [
        f"{printable(pair['candidate'])} against {printable(pair['reference'])}: {pair['lost']} lost, "
        f"{pair['gained']} gained of {pair['runs']} (exact McNemar p = {pair['p']:.3f})"
        for pair in report["paired"]
    ]
    remarks += [
        f"{printable(part['label'])}: {whole['calls_formed']} of {whole['calls_expected']} "
        "answers that should call tools have well-formed calls"
        for part in report["combinations"]
        if (whole := part["overall"])["calls_expected"]
    ]
    return remarks + [
        f"{item['name']} >= {item['share']:.2%}: {'met' if item['met'] else 'NOT met'} by "
        f"{printable(item['combination'])} ({item['passed']}/{item['total']})"
        for item in report["requirements"]
    ]


def _identity(part: Mapping[str, Any]) -> str:
    artifact, engine = part["artifact"], part["engine"]
    return _line(
        [
            printable(part["label"]),
            printable(artifact["name"]),
            artifact["prefill_signature"],
            ", ".join(artifact["formats"]),
            f"{artifact['size_bytes']:,}",
            f"{engine['kv_tokens']:,}",
            str(engine["concurrency"]),
            str(engine["threads"]),
            f"{part['overall']['output_tok_s']:.1f}",
        ]
    )


def _line(cells: Sequence[str]) -> str:
    escaped = (cell.strip().replace("|", "\\|") for cell in cells)
    return "| " + " | ".join(escaped) + " |"
