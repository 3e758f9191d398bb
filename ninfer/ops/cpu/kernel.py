"""Kernels: compiled once for a machine, kept in a cache folder, started by `launch`.

The thread pool is the one of the OpenMP library that PyTorch already loaded: entering and leaving it costs
about 1 us, and a second pool beside PyTorch's would fight it for the cores.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import platform
import struct
import tempfile
import threading
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy
import torch

from ninfer.folders import cache_folder
from ninfer.ops.cpu.block import MAX_THREADS
from ninfer.ops.cpu.launch import launch_assembly, make_launchers, openmp
from ninfer.ops.cpu.native import load, object_code, target_cpu, target_features

_lock = threading.RLock()


class Kernel:
    """A kernel function that is compiled, or loaded from the cache, when its address is first asked for.

    `function(data)` gets the address of its block (`block.py`). `bindings` replace global names of it and of
    every device function it uses, which makes one text serve many formats.
    """

    address: int

    def __init__(self, function: Callable, name: str | None = None, **bindings: Any) -> None:
        self._function, self._bindings = function, bindings
        self.name = name or function.__name__

    def __getattr__(self, attribute: str) -> Any:
        if attribute != "address":
            raise AttributeError(attribute)
        with _lock:
            symbol = f"{self.name}_{self._key()}"
            self.address = load(_cached(symbol, self._compile), symbol)
        return self.address

    def _compile(self, symbol: str) -> bytes:
        from ninfer.ops.cpu.compiler import compile_kernel

        return compile_kernel(self._function, self._bindings, symbol)  # type: ignore[arg-type]

    def _key(self) -> str:
        """A hash of all that the kernel is compiled from: its text and that of the functions and constants it
        uses."""
        digest = hashlib.sha256(_vocabulary())
        seen: set[Any] = set()
        pending: list[Any] = [self._function]
        while pending:
            text = pending.pop()
            if text in seen:
                continue
            seen.add(text)
            code = text.__code__
            digest.update(code.co_code)
            digest.update(repr((code.co_consts, code.co_names, code.co_varnames)).encode())
            for name in code.co_names:
                value = self._bindings.get(name, text.__globals__.get(name))
                if getattr(value, "__device__", False):
                    pending.append(value)
                elif isinstance(value, (bool, int, float, numpy.generic)):
                    digest.update(f"{name}={value!r}".encode())
        return digest.hexdigest()[:32]


_VOCABULARY = (
    "instructions", "simd", "functions", "codes", "amx", "block", "native", "launch", "compiler",
)  # fmt: skip
"""The files that say what a kernel's text means."""


@functools.cache
def _vocabulary() -> bytes:
    """A hash of the machine, the compiler, and the files that define instructions."""
    versions = [metadata.version(name) for name in ("numba", "llvmlite")]
    facts = (platform.python_version(), platform.platform(), target_cpu(), target_features(), *versions)
    digest = hashlib.sha256(repr(facts).encode())
    for name in _VOCABULARY:
        digest.update(Path(__file__).with_name(f"{name}.py").read_bytes())
    return digest.digest()


@functools.cache
def _folder() -> Path | None:
    """Where compiled kernels are kept; None if no such folder can be written."""
    folder = cache_folder() / "kernels"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return None
    return folder if os.access(folder, os.W_OK) else None


def _cached(name: str, make: Callable[[str], bytes]) -> bytes:
    """`make(name)`, or what an earlier process made under that name. A file holds its own hash, then the
    code."""
    folder = _folder()
    path = folder / f"{name}.o" if folder else None
    if path is not None:
        try:
            stored = path.read_bytes()
            if hashlib.sha256(stored[32:]).digest() == stored[:32]:
                return stored[32:]
        except OSError:
            pass  # not there yet, or unreadable: make it again
    code = make(name)
    if path is not None:
        try:
            with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
                file.write(hashlib.sha256(code).digest() + code)
            os.replace(file.name, path)
        except OSError:
            pass  # a full or read-only disk costs the next start its time, not this one its result
    return code


@functools.cache
def launchers() -> tuple[Callable, Callable, int]:
    """The two native functions of `launch.make_launchers`, and the most threads that they can start."""
    with _lock:
        name = f"launch_{hashlib.sha256(_vocabulary()).hexdigest()[:32]}"
        code = _cached(name, lambda _: object_code(launch_assembly()))
        team = openmp()
        return (*make_launchers(code, team), MAX_THREADS if team else 1)


_recording = threading.local()


def launch(kernel: int, threads: int, constants: int, *integers: int) -> None:
    """Run the kernel at an address on a team of threads; see `launch.make_launchers`.

    While this thread records (`recording.py`), the call is noted as well.
    """
    note = getattr(_recording, "note", None)
    if note is not None:
        note(kernel, threads, constants, integers)
    launchers()[0](kernel, threads, constants, *integers)


@contextlib.contextmanager
def noting(note: Callable[[int, int, int, tuple[int, ...]], None]) -> Iterator[None]:
    """Report every launch of this thread to `note`."""
    _recording.note = note
    try:
        yield
    finally:
        _recording.note = None


def threads() -> int:
    """How many threads a kernel may use: what PyTorch uses (`torch.set_num_threads`)."""
    return min(torch.get_num_threads(), launchers()[2])


def machine_threads() -> int:
    """How many threads this machine grants us: cores, affinity and container quota considered."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        count = min(count, -(-int(quota) // int(period)))
    except (OSError, ValueError):
        pass  # no quota, or not a Linux container
    return max(1, min(count, torch.get_num_threads()))


@functools.lru_cache(maxsize=256)
def bits(value: float) -> int:
    """A float as the 64-bit integer that carries it into a kernel (`get_f64` of the argument's address)."""
    return struct.unpack("<q", struct.pack("<d", value))[0]
