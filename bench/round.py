"""Where a decode round goes: every kernel of its graph, how long it takes, and what lies between kernels.

    python -m bench.round synthetic:27b/quasar [--kv-dtype int8] [--depth 0] [--rows 1] [--in-order]
    python -m bench.round synthetic:27b/quasar --columns 4              # what verifies three drafts
    python -m bench.round synthetic:27b/quasar+mtp --draft-tokens 3     # and makes the next three

The model's Program runs rounds over a cache of zeros, without an engine; their time (median) is the device's
own, copies of the records included. Then some rounds run under PyTorch's profiler, which slows kernels down a
little: compare its numbers with each other, not with the median. A kernel that starts before its predecessor
has ended (programmatic dependent launch) waits inside its own time, so `to next` says what it costs the
round. `--in-order` prints one round kernel by kernel.
"""

from __future__ import annotations

import argparse
import re
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch.autograd import DeviceType  # pyright: ignore[reportPrivateImportUsage]
from torch.profiler import ProfilerActivity, profile

from ninfer.api.loading import load_model, opened
from ninfer.formats import KvFormat
from ninfer.ops import Purpose
from ninfer.runtime import Limits, Program, plan_model
from ninfer.runtime.records import Unit


@dataclass(frozen=True)
class Kernel:
    """A kernel of a round: microseconds from the first one's start."""

    name: str
    begin: float
    end: float


def make_program(
    path: str, kv: KvFormat, context: int, rows: int, columns: int, *, drafts: bool, proposal: bool
) -> Program:
    """A model on the GPU with memory for rounds only."""
    with opened(path, None, None) as artifact:
        loaded = load_model(artifact, None, device="cuda", predictor=drafts, proposal=proposal)
    limits = Limits(
        context, 128, max_concurrency=rows, kv_capacity=rows * context, state_slots=0, width=columns
    )
    plan = plan_model(loaded.model, limits, kv_format=kv, weight_bytes=loaded.weight_bytes)
    return Program(loaded.model, plan)


def fill(program: Program, rows: int, depth: int) -> None:
    """A record of `rows` greedy requests behind `depth` tokens each."""
    record, shape = program.ingress, program.plan.shape
    pages, columns = shape.pages, shape.width
    record["unit"], record["rows"], record["columns"] = Unit.ROUND, rows, columns
    for column in range(rows * columns):
        row, place = divmod(column, columns)
        record["tokens"][0, column] = 1000 + column
        record["positions"][0, column] = record["draw_position"][0, column] = depth + place
        record["purpose"][0, column] = Purpose.DECODE
        record["top_k"][0, column], record["top_p"][0, column] = 20, 1.0
        if shape.drafts:
            record["limits"][0, row] = program.plan.max_context
            record["count_rows"][0, column] = column
    for row in range(rows):
        record["page_table"][0, row] = np.arange(pages) + row * pages
        record["source_slots"][0, row], record["target_slots"][0, row] = 2 * row, 2 * row + 1


def seconds(program: Program, rounds: int) -> list[float]:
    """Of the device, for each round."""
    return [float(program.run(program.ingress)["seconds"][0]) for _ in range(rounds)]


def kernels(program: Program, rounds: int = 3) -> list[list[Kernel]]:
    """The kernels of some rounds."""
    found = []
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(rounds):
            program.run(program.ingress)
        torch.cuda.synchronize()
    events = sorted(
        (event.time_range.start, event.time_range.end, event.name)
        for event in profiler.events() or ()
        if event.device_type == DeviceType.CUDA
    )
    each = len(events) // rounds
    for i in range(rounds):
        mine = events[i * each : (i + 1) * each]
        found.append([Kernel(name, begin - mine[0][0], end - mine[0][0]) for begin, end, name in mine])
    return found


def summary(found: Sequence[Sequence[Kernel]]) -> str:
    """A line for each kind of kernel, behind which kind it ran: number, time, start to start, a round."""
    kinds: dict[str, list[tuple[float, float, float]]] = {}
    for one in found:
        for kernel, after in zip(one, [*one[1:], None], strict=True):
            step = (after.begin if after else kernel.end) - kernel.begin
            gap = max(0.0, after.begin - kernel.end) if after else 0.0
            kinds.setdefault(kernel.name, []).append((kernel.end - kernel.begin, step, gap))
    lines = [f"{'kernel':<60} {'number':>7} {'us each':>8} {'us':>8} {'to next':>8} {'idle':>7}"]
    totals = [0.0] * 3
    for name, times in sorted(kinds.items(), key=lambda kind: -sum(t[1] for t in kind[1])):
        number = len(times) / len(found)
        each = [sum(t[i] for t in times) / len(found) for i in range(3)]
        totals = [a + b for a, b in zip(totals, each, strict=True)]
        short = re.sub(r"^void |<.*|\(.*", "", name)[:60]
        cells = f"{each[0] / number:>8.2f} {each[0]:>8.1f} {each[1]:>8.1f} {each[2]:>7.1f}"
        lines.append(f"{short:<60} {number:>7.0f} {cells}")
    number = sum(map(len, found)) / len(found)
    lines.append(f"{'all':<60} {number:>7.0f} {'':>8} {totals[0]:>8.1f} {totals[1]:>8.1f} {totals[2]:>7.1f}")
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("--kv-dtype", default="int8", choices=[str(kind) for kind in KvFormat])
    parser.add_argument("--depth", type=int, default=0)
    parser.add_argument("--rows", type=int, default=1)
    parser.add_argument("--columns", type=int, default=1, help="of each row, without drafts after them")
    parser.add_argument("--draft-tokens", type=int, default=0, help="one column more, and drafts after them")
    parser.add_argument("--lm-head-draft", action="store_true", help="drafts by the smaller head")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--in-order", action="store_true")
    options = parser.parse_args(argv)
    if not torch.cuda.is_available():
        print("bench.round measures kernels on a GPU, and PyTorch finds none here.", file=sys.stderr)
        return 2
    columns = 1 + options.draft_tokens if options.draft_tokens else options.columns
    program = make_program(
        options.model,
        KvFormat(options.kv_dtype),
        options.depth + 64,
        options.rows,
        columns,
        drafts=options.draft_tokens > 0,
        proposal=options.lm_head_draft,
    )
    fill(program, options.rows, options.depth)
    seconds(program, 5)
    median = statistics.median(seconds(program, options.rounds))
    asked = f"{options.rows} x {columns} columns at {options.depth:,}"
    print(f"{options.model}, {asked}: {median * 1e3:.3f} ms a round", flush=True)
    found = kernels(program)
    print(summary(found))
    if options.in_order:
        one = found[-1]
        for kernel, after in zip(one, [*one[1:], None], strict=True):
            step = f"{after.begin - kernel.begin:8.2f}" if after else ""
            print(f"{kernel.begin:9.2f} {kernel.end - kernel.begin:8.2f} {step}  {kernel.name[:70]}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
