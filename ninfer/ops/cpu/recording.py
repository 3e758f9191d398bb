"""Launches that are noted once and then run again without Python.

A decode step streams the model's weights through the caches, so that the interpreter and PyTorch's dispatcher
come back to cold ones: a norm of 3 us takes 12 us in a step, and a step of 240 operators 17 ms instead of 6.
A recording keeps the blocks of all launches of a step; `replay` runs them inside one parallel region, with a
barrier wherever threads have to wait for each other (about 0.3 us, where entering and leaving a region costs
1 us).
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ninfer.ops.cpu.block import (
    ARGUMENTS,
    ARRIVALS,
    COUNTERS,
    DYNAMIC,
    SHARED,
    THREADS,
    argument,
    arrive,
)
from ninfer.ops.cpu.kernel import Kernel, launchers, noting
from ninfer.ops.cpu.simd import call_kernel, fetch_add, get_i64, get_shared, give_way, members, pause, put_i64

_RECORD = 32
_PATIENCE = 2000


def replay_kernel(data):
    """Run noted launches one after the other.

    Arguments: 0 records, 1 how many. A record is the kernel's address, its block, whether all threads run it,
    and whether they wait for each other afterwards. Blocks are left with their counters at zero.
    """
    records, count = argument(data, 0), argument(data, 1)
    me, team, meetings = arrive(data), members(), 0
    for i in range(count):
        record = records + 32 * i
        kernel, block = get_i64(record), get_i64(record + 8)
        shared, meet = get_i64(record + 16), get_i64(record + 24)
        if shared or me == 0:
            call_kernel(kernel, block)
        if meet and team > 1:
            meetings += 1
            fetch_add(data + SHARED, 1)
            waited = 0
            while get_shared(data + SHARED) < meetings * team:
                pause()
                waited += 1
                if waited > _PATIENCE:
                    give_way()
        if me == 0 and (meet or not shared):
            put_i64(block + ARRIVALS, 0)
            put_i64(block + SHARED, 0)
            for member in range(get_i64(block + THREADS)):
                put_i64(block + COUNTERS + 64 * member, 0)


_replay = Kernel(replay_kernel)


class Tape:
    """The launches of some work, ready to run again. Owns their blocks and every tensor made meanwhile."""

    def __init__(
        self, launches: list[tuple[int, int, int, tuple[int, ...]]], made: list[torch.Tensor]
    ) -> None:
        self._made = made
        self._threads = max((threads for _, threads, _, _ in launches), default=1)
        stride = COUNTERS + 64 * self._threads
        memory = np.zeros(len(launches) * stride // 8 + 8, dtype=np.int64)
        start = -memory.ctypes.data % 64 // 8
        self._memory = memory
        self._records = np.zeros((len(launches), _RECORD // 8), dtype=np.int64)
        for i, (kernel, threads, constants, integers) in enumerate(launches):
            block = memory[start + i * stride // 8 : start + (i + 1) * stride // 8]
            block[: len(integers)] = integers
            if constants:
                source = (ctypes.c_int64 * (ARGUMENTS - DYNAMIC)).from_address(constants)
                block[DYNAMIC:ARGUMENTS] = source
            block[THREADS // 8] = threads
            follows = i + 1 < len(launches) and launches[i + 1][1] > 1
            self._records[i] = (kernel, block.ctypes.data, threads > 1, threads > 1 or follows)

    def __len__(self) -> int:
        return len(self._records)

    def replay(self) -> None:
        """Run all launches again; other Python threads may run meanwhile."""
        launchers()[1](_replay.address, self._threads, 0, self._records.ctypes.data, len(self._records))


class _Watch(TorchDispatchMode):
    """Keeps what is allocated, and remembers the first PyTorch operator that computes something."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[torch.Tensor] = []
        self.computed: str | None = None

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing is compiled here; asked for, PyTorch would import its compiler first (2 s)."""
        return False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func._schema.name
        if name in _ALLOCATIONS:
            self.made.append(result)
        elif not _is_view(func):
            self.computed = self.computed or name
        return result


_ALLOCATIONS = {"aten::empty", "aten::empty_like", "aten::empty_strided", "aten::zeros", "aten::new_empty"}


def _is_view(func) -> bool:
    """Does every result alias an argument without writing to it?"""
    returns = func._schema.returns
    return bool(returns) and all(r.alias_info is not None and not r.alias_info.is_write for r in returns)


def record(work: Callable[[], Any], pool: None = None) -> tuple[Any, Tape | None, str | None]:
    """Do the work; (result, tape, reason): a tape, or the PyTorch operator because of which there is none."""
    launches: list[tuple[int, int, int, tuple[int, ...]]] = []
    with _Watch() as watch, noting(lambda *launch: launches.append(launch)):
        result = work()
    if watch.computed is not None:
        return result, None, watch.computed
    return result, Tape(launches, watch.made), None
