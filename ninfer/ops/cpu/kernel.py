"""Compiling kernels and running them on all cores.

A kernel is a Python function of one argument, the address of a block of 64-bit integers, that Numba compiles to
a C function. `launch` fills such a block on the stack and has the OpenMP library that PyTorch already loaded run
the kernel on its thread pool (entering and leaving costs about 1 us; a second pool beside PyTorch's would fight it
for the cores). There is no other machinery: a kernel shares out its work by atomic counters in the block, so it is
complete with whatever number of threads turns up, one included.

Compiled kernels are kept in Numba's cache, beside this package or in the user's cache folder. A kernel's name there
includes a hash of this folder's source, because Numba alone would miss a change in a function that it calls.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import inspect
import os
import struct
from collections.abc import Callable
from pathlib import Path
from types import FunctionType
from typing import Any

import numba
import torch
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from ninfer.ops.cpu.simd import fetch_add, get_i64, pointer, put_i64, stack

# The block: 32 arguments, then one cache line with the arrivals, the team's size and a shared counter, then one line
# with a counter for each thread.
ARGUMENTS = 32
DYNAMIC = 12
_ARRIVALS = ARGUMENTS * 8
_THREADS = _ARRIVALS + 8
_SHARED = _ARRIVALS + 16
_COUNTERS = _ARRIVALS + 64
MAX_THREADS = 64


device = njit(forceinline=True, error_model="numpy")
"""Decorator of functions that kernels inline."""


@device
def argument(data, index):
    return get_i64(data + 8 * index)


@device
def arrive(data):
    """This thread's number in the team: 0, 1, ... in order of arrival."""
    return fetch_add(data + _ARRIVALS, 1)


@device
def team_size(data):
    return get_i64(data + _THREADS)


@device
def next_shared(data, step):
    """Claim the next `step` items of one common list."""
    return fetch_add(data + _SHARED, step)


@device
def next_of(data, member, step):
    """Claim the next `step` items of a member's own list: one's own first, then what others left."""
    return fetch_add(data + _COUNTERS + 64 * member, step)


@intrinsic
def _call_kernel(typing, kernel, data):
    def emit(context, builder, signature, args):
        kind = ir.FunctionType(ir.VoidType(), [ir.IntType(64)])
        builder.call(pointer(builder, args[0], kind), [args[1]])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), emit


@intrinsic
def _call_parallel(typing, parallel, kernel, data, threads):
    def emit(context, builder, signature, args):
        byte = ir.IntType(8).as_pointer()
        i32 = ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [byte, byte, i32, i32])
        function = pointer(builder, args[0], kind)
        values = [builder.inttoptr(args[1], byte), builder.inttoptr(args[2], byte)]
        builder.call(function, [*values, builder.trunc(args[3], i32), i32(0)])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64, types.int64), emit


@device
def _begin(data, threads):
    put_i64(data + _ARRIVALS, 0)
    put_i64(data + _THREADS, threads)
    put_i64(data + _SHARED, 0)
    for i in range(threads):
        put_i64(data + _COUNTERS + 64 * i, 0)


@device
def _run(parallel, kernel, data, threads):
    if threads > 1:
        _call_parallel(parallel, kernel, data, threads)
    else:
        _call_kernel(kernel, data)


@device
def _put_twelve(data, a, b, c, d, e, f, g, h, i, j, k, m):
    put_i64(data, a)
    put_i64(data + 8, b)
    put_i64(data + 16, c)
    put_i64(data + 24, d)
    put_i64(data + 32, e)
    put_i64(data + 40, f)
    put_i64(data + 48, g)
    put_i64(data + 56, h)
    put_i64(data + 64, i)
    put_i64(data + 72, j)
    put_i64(data + 80, k)
    put_i64(data + 88, m)


def _launch(parallel, kernel, threads, constants, a, b, c, d, e, f, g, h, i, j, k, m):
    data = stack(_COUNTERS + 64 * threads)
    _put_twelve(data, a, b, c, d, e, f, g, h, i, j, k, m)
    if constants != 0:
        for n in range(ARGUMENTS - DYNAMIC):
            put_i64(data + 8 * (DYNAMIC + n), get_i64(constants + 8 * n))
    _begin(data, threads)
    _run(parallel, kernel, data, threads)


def _launch_many(
    parallel, kernel, threads,
    a, b, c, d, e, f, g, h, i, j, k, m, n, o, p, q, r, s, t, u, v, w, x, y, aa, bb, cc, dd,
):  # fmt: skip
    data = stack(_COUNTERS + 64 * threads)
    _put_twelve(data, a, b, c, d, e, f, g, h, i, j, k, m)
    _put_twelve(data + 96, n, o, p, q, r, s, t, u, v, w, x, y)
    put_i64(data + 192, aa)
    put_i64(data + 200, bb)
    put_i64(data + 208, cc)
    put_i64(data + 216, dd)
    _begin(data, threads)
    _run(parallel, kernel, data, threads)


@functools.cache
def _source_hash() -> str:
    digest = hashlib.sha256(numba.__version__.encode())
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


def _renamed(
    function: Callable, name: str, helpers: tuple[Callable, ...] = (), bindings: dict[str, Any] | None = None
) -> FunctionType:
    """A copy under another name, in which `bindings` replace global names; so do its `helpers` see them."""
    assert isinstance(function, FunctionType)
    names = {**function.__globals__, **(bindings or {})}
    for helper in helpers:
        text = helper.py_func  # type: ignore[attr-defined]
        names[text.__name__] = device(FunctionType(text.__code__, names, text.__name__))
    copy = FunctionType(function.__code__, names, name)
    copy.__qualname__ = f"{name}_{_source_hash()}"
    copy.__module__ = function.__module__
    return copy


def _compile(decorator: Callable, function: FunctionType) -> Any:
    try:
        return decorator(cache=True)(function)
    except RuntimeError as error:
        if "no locator available" not in str(error):
            raise
        return decorator(cache=False)(function)  # no folder can be written: compile in every process


class Kernel:
    """A kernel that is compiled, or loaded from the cache, when its address is first asked for.

    `bindings` replace global names of `function` and of the device functions `helpers`, which makes one text serve
    many formats.
    """

    address: int

    def __init__(
        self, function: Callable, name: str | None = None, helpers: tuple[Callable, ...] = (), **bindings: Any
    ) -> None:
        self._function, self._name = function, name or function.__name__
        self._helpers, self._bindings = helpers, bindings

    def __getattr__(self, attribute: str) -> Any:
        if attribute != "address":
            raise AttributeError(attribute)
        function = _renamed(self._function, self._name, self._helpers, self._bindings)
        decorator = functools.partial(
            numba.cfunc, types.void(types.int64), nopython=True, error_model="numpy"
        )
        self._compiled = _compile(decorator, function)
        self.address = self._compiled.address
        return self.address


@functools.cache
def _parallel() -> int:
    """The address of OpenMP's entry in this process, or 0: kernels then run on the calling thread."""
    try:
        return ctypes.cast(ctypes.CDLL(None).GOMP_parallel, ctypes.c_void_p).value or 0
    except (AttributeError, OSError, TypeError):
        return 0


def _entry(function: Callable, name: str) -> Callable:
    count = len(inspect.signature(function).parameters)
    decorator = functools.partial(numba.njit, types.void(*[types.int64] * count), error_model="numpy")
    entry, parallel = _compile(decorator, _renamed(function, name)), _parallel()
    if not parallel:
        return lambda kernel, threads, *rest: entry(0, kernel, 1, *rest)
    return functools.partial(entry, parallel)


@functools.cache
def launcher() -> Callable:
    """`launch(kernel address, threads, address of constants or 0, *12 integers)`."""
    return _entry(_launch, "launch")


@functools.cache
def long_launcher() -> Callable:
    """`launch(kernel address, threads, *28 integers)`."""
    return _entry(_launch_many, "launch_many")


def threads() -> int:
    """How many threads a kernel may use: what PyTorch uses (`torch.set_num_threads`)."""
    return min(torch.get_num_threads(), MAX_THREADS)


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
