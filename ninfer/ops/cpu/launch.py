"""The function that starts kernels: a Python function made of machine code.

It costs 0.3 us with a dozen arguments, a third of what ctypes or Numba's dispatcher take.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable

from llvmlite import ir

from ninfer.ops.cpu.block import ARGUMENTS, ARRIVALS, COUNTERS, DYNAMIC, MAX_THREADS, SHARED, THREADS
from ninfer.ops.cpu.native import define, load

LAUNCH, LAUNCH_RELEASED = "ninfer_launch", "ninfer_launch_released"


def launch_assembly() -> str:
    """LLVM assembly of the functions that `make_launchers` returns."""
    module = ir.Module("launch")
    _write(module, LAUNCH, released=False)
    _write(module, LAUNCH_RELEASED, released=True)
    return str(module)


def _write(module: ir.Module, name: str, released: bool) -> None:
    byte, i32, i64 = ir.IntType(8).as_pointer(), ir.IntType(32), ir.IntType(64)
    function = ir.Function(module, ir.FunctionType(byte, (byte, byte.as_pointer(), i64)), name)
    _, args, count = function.args
    builder = ir.IRBuilder(function.append_basic_block())
    block = builder.alloca(i64, size=i64((COUNTERS + 64 * MAX_THREADS) // 8))
    block.align = 64  # type: ignore[assignment]

    def call(symbol, result, *values):
        known = module.globals.get(symbol)
        if known is None:
            known = ir.Function(module, ir.FunctionType(result, [v.type for v in values]), symbol)
        return builder.call(known, values)

    def value(index):
        return call("PyLong_AsLongLong", i64, builder.load(builder.gep(args, [index])))

    def put(index, what):
        builder.store(what, builder.gep(block, [index]))

    def loop(limit, body):
        """`for i in range(limit): body(i)`."""
        index = builder.alloca(i64)
        builder.store(i64(0), index)
        head, inside, after = (function.append_basic_block() for _ in range(3))
        builder.branch(head)
        builder.position_at_end(head)
        builder.cbranch(builder.icmp_signed("<", builder.load(index), limit), inside, after)
        builder.position_at_end(inside)
        body(builder.load(index))
        builder.store(builder.add(builder.load(index), i64(1)), index)
        builder.branch(head)
        builder.position_at_end(after)

    kernel, threads, constants = value(i64(0)), value(i64(1)), value(i64(2))
    for index in range(ARGUMENTS):
        put(i64(index), i64(0))
    loop(builder.sub(count, i64(3)), lambda i: put(i, value(builder.add(i, i64(3)))))
    source = builder.inttoptr(constants, i64.as_pointer())
    with builder.if_then(builder.icmp_unsigned("!=", constants, i64(0))):
        loop(
            i64(ARGUMENTS - DYNAMIC),
            lambda i: put(builder.add(i, i64(DYNAMIC)), builder.load(builder.gep(source, [i]))),
        )
    for offset, what in ((ARRIVALS, i64(0)), (THREADS, threads), (SHARED, i64(0))):
        put(i64(offset // 8), what)
    loop(threads, lambda i: put(builder.add(builder.mul(i, i64(8)), i64(COUNTERS // 8)), i64(0)))
    error = call("PyErr_Occurred", byte)
    with builder.if_then(builder.icmp_unsigned("!=", error, ir.Constant(byte, None)), likely=False):
        builder.ret(ir.Constant(byte, None))
    state = call("PyEval_SaveThread", byte) if released else None
    with builder.if_else(builder.icmp_signed(">", threads, i64(1))) as (many, one):
        with many:
            start = builder.inttoptr(kernel, byte), builder.bitcast(block, byte)
            call("ninfer_parallel", ir.VoidType(), *start, builder.trunc(threads, i32), i32(0))
        with one:
            kind = ir.FunctionType(ir.VoidType(), (i64,)).as_pointer()
            builder.call(builder.inttoptr(kernel, kind), [builder.ptrtoint(block, i64)])
    if state is not None:
        call("PyEval_RestoreThread", ir.VoidType(), state)
    builder.ret(call("PyLong_FromLong", byte, i64(0)))


class _MethodDef(ctypes.Structure):
    _fields_ = (
        ("name", ctypes.c_char_p),
        ("function", ctypes.c_void_p),
        ("flags", ctypes.c_int),
        ("doc", ctypes.c_char_p),
    )


_METH_FASTCALL = 0x0080
_kept: list[_MethodDef] = []
"""Python's function objects refer to their definitions for ever."""


def openmp() -> dict[str, int]:
    """Addresses of the OpenMP functions of this process that we use; empty if it has none of the GNU kind."""
    try:
        process = ctypes.CDLL(None)
        names = ("GOMP_parallel", "omp_get_num_threads", "sched_yield")
        return {name: _address(getattr(process, name)) for name in names}
    except (AttributeError, OSError, TypeError):
        return {}


def make_launchers(code: bytes, team: dict[str, int]) -> tuple[Callable, Callable]:
    """The two functions of `launch_assembly`'s object code; the second one lets other Python threads run
    meanwhile.

    `launch(kernel, threads, constants, *integers)` fills a block on the stack with the integers, zeros behind
    them (and, from argument `DYNAMIC` on, the 20 integers at address `constants` unless that is 0), runs the
    kernel on a team of threads and returns 0. Without `team` (see `openmp`) no more than one thread may be
    asked for.
    """
    api = ctypes.pythonapi
    for name in (
        "PyLong_AsLongLong",
        "PyLong_FromLong",
        "PyErr_Occurred",
        "PyEval_SaveThread",
        "PyEval_RestoreThread",
    ):
        define(name, _address(getattr(api, name)))
    unused = _address(api.PyErr_Occurred)
    define("ninfer_parallel", team.get("GOMP_parallel", unused))
    define("ninfer_members", team.get("omp_get_num_threads", unused))
    define("ninfer_give_way", team.get("sched_yield", unused))
    return _python_function(load(code, LAUNCH)), _python_function(load(code, LAUNCH_RELEASED))


def _address(function: ctypes._CFuncPtr) -> int:  # type: ignore[name-defined]
    return ctypes.cast(function, ctypes.c_void_p).value or 0


def _python_function(address: int) -> Callable:
    method = _MethodDef(b"launch", address, _METH_FASTCALL, None)
    create = ctypes.pythonapi.PyCFunction_NewEx
    create.restype = ctypes.py_object
    create.argtypes = (ctypes.POINTER(_MethodDef), ctypes.c_void_p, ctypes.c_void_p)
    _kept.append(method)
    return create(ctypes.byref(method), None, None)
