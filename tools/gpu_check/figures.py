"""What the CUDA backend has to reach on one H200, and where each figure is found in the reports."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

Reports = Mapping[str, Any]
"""Report name (`quasar`, `ops`, ...) to its JSON document, as far as there is one."""


@dataclass(frozen=True)
class Figure:
    """`at_least` decides (`most`: the figure must not be above it instead); `aim` is only shown."""

    name: str
    unit: str
    at_least: float
    aim: float
    find: Callable[[Reports], float | None]
    most: bool = False

    def holds(self, value: float) -> bool:
        return value <= self.at_least if self.most else value >= self.at_least


def _test(report: str, label: str, member: str, factor: float = 1.0) -> Callable[[Reports], float | None]:
    def find(reports: Reports) -> float | None:
        for test in reports.get(report, {}).get("tests", ()):
            if test["label"] == label and test[member] is not None:
                return factor * test[member]
        return None

    return find


def _share(name: str) -> Callable[[Reports], float | None]:
    """Percent of the read ceiling measured in the same run."""

    def find(reports: Reports) -> float | None:
        for row in reports.get("ops", {}).get("rows", ()):
            if row["name"] == name and row["share"] is not None:
                return 100 * row["share"]
        return None

    return find


def _aggregate(reports: Reports) -> float | None:
    alone = _test("quasar", "tg128", "decode_output_tok_s_mean")(reports)
    together = _test("quasar", "tg128 x8", "decode_output_tok_s_mean")(reports)
    return together / alone if alone and together else None


_DECODE, _PREFILL = "decode_output_tok_s_mean", "prefill_tok_s_mean"

FIGURES = (
    Figure("decode, QUASAR, depth 0", "tok/s", 165, 224, _test("quasar", "tg128", _DECODE)),
    Figure("decode, QUASAR, depth 8,192", "tok/s", 160, 215, _test("quasar", "pp8192+tg128", _DECODE)),
    Figure("decode, QUASAR, depth 85,000", "tok/s", 130, 180, _test("deep", "pp85000+tg128", _DECODE)),
    Figure("decode, official mix, depth 0", "tok/s", 135, 175, _test("official", "tg128", _DECODE)),
    Figure("decode, Q4_K_M, depth 0", "tok/s", 145, 190, _test("q4_k_m", "tg128", _DECODE)),
    Figure("prefill 8,192, QUASAR", "tok/s", 9000, 11_500, _test("quasar", "pp8192+tg128", _PREFILL)),
    Figure("prefill 8,192, official mix", "tok/s", 9000, 13_000, _test("official", "pp8192", _PREFILL)),
    Figure("prefill 85,000, QUASAR", "tok/s", 5500, 7500, _test("deep", "pp85000+tg128", _PREFILL)),
    *(
        Figure(
            f"NVFP4 linear [34816, 5120], T = {count}",
            "% of ceiling",
            70,
            80,
            _share(f"linear nvfp4 [34816, 5120] T={count}"),
        )
        for count in (1, 4, 8)
    ),
    Figure(
        "FP8-row linear [34816, 5120], T = 1",
        "% of ceiling",
        75,
        88,
        _share("linear fp8_e4m3fn_row_bf16 [34816, 5120] T=1"),
    ),
    *(
        Figure(
            f"INT8 attention at 85K, T = {count}",
            "% of ceiling",
            65,
            80,
            _share(f"attention int8 depth 85000 T={count}"),
        )
        for count in (1, 4)
    ),
    Figure(
        "host share of a decode round",
        "%",
        6,
        3,
        _test("quasar", "tg128", "decode_host_share_mean", 100.0),
        most=True,
    ),
    Figure("aggregate at B = 8 against B = 1", "x", 4.5, 6, _aggregate),
)


def figures_table(reports: Reports) -> tuple[str, bool]:
    """The figures that were measured, and whether all of those reach what they must."""
    lines = [f"{'figure':42}{'found':>10}{'at least':>10}{'aim':>10}  unit"]
    right = True
    for figure in FIGURES:
        value = figure.find(reports)
        bound = f"{'<= ' if figure.most else ''}{figure.at_least:,g}"
        found, verdict = ("-", "not measured") if value is None else (f"{value:,.1f}", "")
        if value is not None and not figure.holds(value):
            right, verdict = False, "MISSED"
        lines.append(
            f"{figure.name:42}{found:>10}{bound:>10}{figure.aim:>10,g}  {figure.unit}  {verdict}".rstrip()
        )
    return "\n".join(lines), right
