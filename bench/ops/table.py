"""Rows of operator benchmarks and their table."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Row:
    """One measured operator: median microseconds of a launch, the bytes that it must move at least (weights,
    states and pages once, activations once), and the floating-point operations if they set its limit."""

    name: str
    us: float
    bytes: int
    flops: int = 0
    note: str = ""

    @property
    def gb_s(self) -> float:
        return self.bytes / self.us / 1e3

    @property
    def tflop_s(self) -> float:
        return self.flops / self.us / 1e6


def table(rows: Iterable[Row], read_ceiling: float) -> str:
    """Columns us, bytes, GB/s, share of `read_ceiling` (GB/s), TFLOP/s."""
    rows = list(rows)
    width = max([8, *(len(row.name) for row in rows)])
    lines = [f"{'operator':{width}} {'us':>10} {'bytes':>14} {'GB/s':>8} {'share':>7} {'TFLOP/s':>8}"]
    for row in rows:
        share = f"{row.gb_s / read_ceiling:7.1%}" if read_ceiling else f"{'-':>7}"
        flops = f"{row.tflop_s:8.1f}" if row.flops else f"{'-':>8}"
        line = (
            f"{row.name:{width}} {row.us:10.2f} {row.bytes:14,d} {row.gb_s:8.0f} {share} {flops}  {row.note}"
        )
        lines.append(line.rstrip())
    return "\n".join(lines)
