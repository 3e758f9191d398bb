"""Time of draws, log-probabilities and counts on the GPU, in CUDA graphs.

    python -m bench.ops.sampling [--size 248077] [--rows 1,8]

Scores rotate over 64 MB or more, so that none comes from the L2 cache ("cold"), or stay the same ("warm", as
right after the head has written them). Microseconds per call: the median of graph launches.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable

import torch

from ninfer.ops import Draws, SamplingParams
from ninfer.ops.cuda import choose, likely


def microseconds(calls: list[Callable[[], object]], launches: int = 12) -> float:
    """Per call, of a graph of all of them."""
    calls[0]()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    times = []
    for _ in range(launches):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(1e3 * begin.elapsed_time(end) / len(calls))
    return statistics.median(times[2:])


class Case:
    """Rows that all ask for the same."""

    def __init__(self, rows: int, size: int, temperature: float, wanted: int, penalty: float) -> None:
        device = torch.device("cuda")
        self.copies = max(2, -(-(64 << 20) // (4 * rows * size)))
        self.scores = torch.randn(self.copies, rows, size, device=device)
        params = [SamplingParams(temperature, seed=row, frequency_penalty=penalty) for row in range(rows)]
        self.draws = Draws.of(params, range(rows), [1] * rows, range(rows), device)
        self.counts = torch.zeros(rows, size, dtype=torch.int32, device=device)
        self.tokens = torch.zeros(rows, dtype=torch.int32, device=device)
        self.wanted = torch.full((rows,), wanted, dtype=torch.int32, device=device)
        self.reports = (
            torch.zeros(rows, device=device),
            torch.zeros(rows, 20, dtype=torch.int32, device=device),
            torch.zeros(rows, 20, device=device),
        )

    def draw(self, i: int) -> None:
        choose.draw(self.scores[i], self.draws, self.counts)

    def report(self, i: int) -> None:
        likely.token_logprobs(self.scores[i], self.tokens, self.wanted, *self.reports)

    def all(self, i: int) -> None:
        tokens = choose.draw(self.scores[i], self.draws, self.counts)
        likely.token_logprobs(self.scores[i], tokens, self.wanted, *self.reports)
        choose.count_tokens(tokens, self.draws.count_rows, self.counts)

    def count(self, i: int) -> None:
        choose.count_tokens(self.tokens, self.draws.count_rows, self.counts)

    def time(self, what: Callable[[int], None], warm: bool) -> float:
        many = max(32, self.copies)
        return microseconds([lambda i=i: what(0 if warm else i % self.copies) for i in range(many)])


def table(rows: int, size: int) -> str:
    cells = []
    for name, temperature, wanted, penalty in (
        ("greedy", 0.0, -1, 0.0), ("sampled", 1.0, -1, 0.0), ("penalized", 1.0, -1, 0.5),
        ("logprob", 1.0, 0, 0.0), ("20 logprobs", 1.0, 20, 0.0),
    ):  # fmt: skip
        case = Case(rows, size, temperature, wanted, penalty)
        pieces = [f"{case.time(what, False):6.1f}" for what in (case.draw, case.report, case.count)]
        both = f"{case.time(case.all, False):6.1f} cold {case.time(case.all, True):6.1f} warm"
        cells.append(f"  B={rows} {name:12} draw, report, count: {' '.join(pieces)}   all: {both}")
    return "\n".join(cells)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--size", type=int, default=248_077)
    parser.add_argument("--rows", default="1,8")
    options = parser.parse_args()
    for rows in options.rows.split(","):
        print(table(int(rows), options.size), flush=True)


if __name__ == "__main__":
    main()
