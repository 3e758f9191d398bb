"""What graphs really take: the plan's allowance against what the device lost while a model warmed up.

    python -m tools.gpu_check.memory [MODEL] [--concurrency 8] [--max-context 4096] [--kv-dtype int8]

Prints, for each round that is recorded, the device's free memory and PyTorch's reserved memory before and
after; then the plan beside what was taken. Other programs on the GPU spoil the figures. The exit code is 0
if graphs and code took no more than the plan allows, 1 if not.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Sequence
from typing import Any
from unittest import mock


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", nargs="?", default="synthetic:27b/quasar")
    parser.add_argument("--concurrency", type=int, default=8)
    parser.add_argument("--max-context", type=int, default=4096)
    parser.add_argument("--prefill-chunk", type=int, default=1024)
    parser.add_argument("--kv-dtype", default="int8")
    options = parser.parse_args(argv)
    import torch

    from ninfer.api import Engine, EngineOptions
    from ninfer.runtime import Program

    def taken() -> tuple[float, float]:
        """MiB: of the device, and of PyTorch's allocator."""
        torch.cuda.synchronize()
        free, total = torch.cuda.mem_get_info()
        return (total - free) / 2**20, torch.cuda.memory_reserved() / 2**20

    marks: list[tuple[str, tuple[float, float]]] = []
    begin, prefills, round_ = Program.__init__, Program._warm_prefills, Program._round

    def noted_begin(self: Program, *args: Any, **kwargs: Any) -> None:
        marks.append(("weights loaded", taken()))
        begin(self, *args, **kwargs)
        marks.append(("pages, states, buffers", taken()))

    def noted_prefills(self: Program) -> None:
        prefills(self)
        marks.append(("prefills", taken()))

    calls: dict[tuple[int, int], int] = {}

    def noted_round(self: Program, rows: int, columns: int) -> torch.Tensor:
        drawn = round_(self, rows, columns)
        calls[rows, columns] = calls.get((rows, columns), 0) + 1
        if calls[rows, columns] <= 2:
            what = "round", "graph"
            marks.append((f"{what[calls[rows, columns] - 1]} of {rows} x {columns}", taken()))
        return drawn

    torch.cuda.init()
    marks.append(("context", taken()))
    choice = EngineOptions(
        device="cuda",
        max_context=options.max_context,
        max_concurrency=options.concurrency,
        prefill_chunk=options.prefill_chunk,
        kv_dtype=options.kv_dtype,
    )
    with (
        mock.patch.object(Program, "__init__", noted_begin),
        mock.patch.object(Program, "_warm_prefills", noted_prefills),
        mock.patch.object(Program, "_round", noted_round),
        Engine.load(options.model, choice) as engine,
    ):
        plan = engine.plan
        marks.append(("warm", taken()))
    before = marks[0][1]
    for name, (device, reserved) in marks:
        print(f"{name:24} device {device:9,.1f} MiB ({device - before[0]:+8.1f})  "
              f"reserved {reserved:9,.1f} ({reserved - before[1]:+8.1f})")  # fmt: skip
        before = device, reserved
    found = dict(marks)
    held, warm = found["pages, states, buffers"], found["warm"]
    took = warm[0] - held[0]
    outside = took - (warm[1] - held[1])
    planned = (plan.workspace_bytes + plan.graph_bytes) / 2**20
    graphs = sum(
        after[1][0] - earlier[1][0]
        for earlier, after in itertools.pairwise(marks)
        if after[0].startswith("graph")
    )
    print(
        f"workspace, code and graphs: {took:,.1f} MiB taken ({outside:,.1f} of them outside PyTorch's "
        f"allocator; the {sum(name.startswith('graph') for name, _ in marks)} graphs {graphs:,.1f}); "
        f"planned {planned:,.1f} (workspace "
        f"{plan.workspace_bytes / 2**20:,.1f}, graphs and code {plan.graph_bytes / 2**20:,.1f})"
    )
    return 0 if took <= planned else 1


if __name__ == "__main__":
    sys.exit(main())
