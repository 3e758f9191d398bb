"""Work that is captured once as a CUDA graph and then launched as a whole.

A decode step is a few hundred kernels of some microseconds each; launched one by one they would wait for
Python. A graph is launched in about 10 us and keeps a microsecond or less between two kernels.

Recordings share one pool of memory: what the work allocates is free again at the end of its capture, and the
next capture takes the same memory. That is right because no two of them run at once; it is also why a
result holds only until another recording of the same pool runs, and must be used by what is launched before.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any
from weakref import WeakSet

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ninfer.errors import EngineError, NInferError


class Pool:
    """Memory for the recordings of one owner on one device, and the stream on which they are captured."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.handle = torch.cuda.graph_pool_handle()
        self.stream = torch.cuda.Stream(device)
        self._tapes: WeakSet[Tape] = WeakSet()

    def renew(self) -> None:
        """After a capture that failed, the allocator may no longer accept the old handle."""
        self.handle = torch.cuda.graph_pool_handle()

    def prepare(self) -> None:
        """Before a capture: nor does it accept a handle that no graph uses any more."""
        if not self._tapes:
            self.renew()

    def add(self, tape: Tape) -> None:
        """Note a recording that uses the memory."""
        self._tapes.add(tape)


class Tape:
    """A captured graph, ready to run again on the current stream; what it reads must stay where it is."""

    def __init__(self, graph: torch.cuda.CUDAGraph, pool: Pool) -> None:
        self._graph, self._pool = graph, pool

    def replay(self) -> None:
        self._graph.replay()


class _Watch(TorchDispatchMode):
    """Remembers the last PyTorch operator, which is the one that could not be captured."""

    def __init__(self) -> None:
        super().__init__()
        self.last: str | None = None

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing is compiled here; asked for, PyTorch would import its compiler first (2 s)."""
        return False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None) -> Any:
        self.last = func._schema.name
        return func(*args, **(kwargs or {}))


@contextmanager
def _no_collection() -> Iterator[None]:
    """No garbage is collected meanwhile: freeing what another graph or stream owns would break a capture."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def record(work: Callable[[], Any], pool: Pool | None = None) -> tuple[Any, Tape, None]:
    """Capture the work and run it once: (result, tape, None); without a pool it gets one of its own.

    The work must have run before, so that its kernels are compiled. Nothing has run where an error is raised:
    `EngineError` where the work waits for the GPU, copies to the host, or does anything else that no graph
    can hold; it names the last PyTorch operator.
    """
    pool = pool or Pool(torch.device("cuda", torch.cuda.current_device()))
    pool.prepare()
    graph = torch.cuda.CUDAGraph()
    pool.stream.wait_stream(torch.cuda.current_stream(pool.device))
    watch = _Watch()
    with torch.cuda.stream(pool.stream), _no_collection():
        # Other threads, such as those that copy prompts, may allocate meanwhile.
        graph.capture_begin(pool=pool.handle, capture_error_mode="thread_local")
        try:
            with watch:
                result = work()
        except BaseException as error:
            _abandon(graph, pool)
            if isinstance(error, NInferError) or not isinstance(error, Exception):
                raise
            raise _refusal(watch.last, error) from error
        try:
            graph.capture_end()
        except RuntimeError as error:
            pool.renew()
            raise _refusal(watch.last, error) from error
    tape = Tape(graph, pool)
    pool.add(tape)
    tape.replay()
    return result, tape, None


def _abandon(graph: torch.cuda.CUDAGraph, pool: Pool) -> None:
    with suppress(RuntimeError):
        graph.capture_end()
    pool.renew()


def _refusal(operator: str | None, error: Exception) -> EngineError:
    reason = str(error).strip().split("\n")[0]
    end = operator or "no PyTorch operator"
    return EngineError(f"work that ends with {end} cannot be captured as a CUDA graph: {reason}")
