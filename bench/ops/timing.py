"""The time of one launch: a CUDA graph of many launches, replayed; on the CPU a clock around each call."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

import torch

L2_BYTES = 60_000_000
ROTATED_BYTES = 8 * L2_BYTES


def copies(bytes_each: int, least: int = 2, most: int = 64) -> int:
    """How many sets of operands of `bytes_each` to rotate over, so that none is still in the cache (L2) when
    its turn comes again."""
    return max(least, min(most, -(-ROTATED_BYTES // max(bytes_each, 1))))


def time_graph(
    calls: Sequence[Callable[[], object]],
    *,
    launches: int = 0,
    replays: int = 15,
    budget_s: float = 0.25,
    warm: int = 2,
) -> float:
    """Median microseconds of one call, with all calls in turn in one CUDA graph.

    `calls` do the same work on different operands, which together are larger than L2 (`copies`), on the
    current device, and must be safe to capture. `launches`: calls in the graph (0: at least 20, whole turns).
    The graph is replayed `replays` times, fewer where that takes longer than `budget_s`, but at least 3
    times. Calls that can't be captured are queued one after the other instead, which is as good where a call
    takes longer than its launch. Without a GPU the calls are timed one by one, so that the same benchmark
    runs anywhere.
    """
    if not calls:
        raise ValueError("time_graph needs at least one call")
    if not torch.cuda.is_available():
        return _time_on_cpu(calls, replays, budget_s)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(warm):
            for call in calls:
                call()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    turns = -(-(launches or 20) // len(calls))

    def work() -> None:
        for _ in range(turns):
            for call in calls:
                call()

    replay = _captured(work) or work
    count = turns * len(calls)
    spent: list[float] = []
    replay()
    torch.cuda.synchronize()
    deadline = time.perf_counter() + budget_s
    while len(spent) < 3 or (len(spent) < replays and time.perf_counter() < deadline):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        replay()
        end.record()
        end.synchronize()
        spent.append(begin.elapsed_time(end) * 1e3 / count)
    return statistics.median(spent)


def _captured(work: Callable[[], None]) -> Callable[[], None] | None:
    """What replays `work` as a graph; None if it can't be captured."""
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            work()
    except RuntimeError:
        torch.cuda.synchronize()
        return None
    return graph.replay


def _time_on_cpu(calls: Sequence[Callable[[], object]], replays: int, budget_s: float) -> float:
    calls[0]()
    spent: list[float] = []
    deadline = time.perf_counter() + budget_s
    while len(spent) < 3 or (len(spent) < replays and time.perf_counter() < deadline):
        begin = time.perf_counter()
        for call in calls:
            call()
        spent.append((time.perf_counter() - begin) * 1e6 / len(calls))
    return statistics.median(spent)
