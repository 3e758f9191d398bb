"""Machine code in this process: the target, an execution engine, and the function that starts kernels.

Everything goes through llvmlite alone, so that a start with cached kernels needs no compiler (importing Numba
and its registries costs 0.6 s, as much as all our kernels' first use costs 0.1 s).
"""

from __future__ import annotations

import ctypes
import functools
import os
import platform
import threading
from collections.abc import Callable

import llvmlite.binding as llvm
from llvmlite import ir

from ninfer.ops.cpu.block import (
    ARGUMENTS,
    ARRIVALS,
    COUNTERS,
    DYNAMIC,
    MAX_THREADS,
    SHARED,
    THREADS,
)

_lock = threading.RLock()


@functools.cache
def target_cpu() -> str:
    """LLVM's name of the processor that code is made for (`NUMBA_CPU_NAME` overrides, for Numba and us
    alike)."""
    return os.environ.get("NUMBA_CPU_NAME") or llvm.get_host_cpu_name()


@functools.cache
def target_features() -> str:
    """Its features as LLVM writes them: `+avx2,-avx512f,...`."""
    given = os.environ.get("NUMBA_CPU_FEATURES")
    return given if given is not None else llvm.get_host_cpu_features().flatten()


@functools.cache
def target_machine() -> llvm.TargetMachine:
    try:
        llvm.initialize_native_target()
        llvm.initialize_native_asmprinter()
    except RuntimeError:
        pass  # newer versions initialize themselves and say so by an error
    static = platform.machine().lower() in ("x86_64", "amd64", "i686")
    return llvm.Target.from_default_triple().create_target_machine(
        cpu=target_cpu(),
        features=target_features(),
        opt=3,
        reloc="static" if static else "default",
        codemodel="jitdefault",
        jit=True,
    )


@functools.cache
def _engine() -> llvm.ExecutionEngine:
    return llvm.create_mcjit_compiler(llvm.parse_assembly(""), target_machine())


def optimized(assembly: str) -> str:
    """A module in LLVM assembly after LLVM's usual passes; its loops are left alone, kernels are vectors
    already."""
    module = llvm.parse_assembly(assembly)
    options = llvm.create_pipeline_tuning_options(speed_level=3)
    options.loop_vectorization = options.slp_vectorization = False
    builder = llvm.create_pass_builder(target_machine(), options)
    builder.getModulePassManager().run(module, builder)
    return str(module)


def object_code(assembly: str) -> bytes:
    """Object code of a module in LLVM assembly."""
    module = llvm.parse_assembly(assembly)
    module.verify()
    return target_machine().emit_object(module)


def load(code: bytes, symbol: str) -> int:
    """Link object code into this process; the address of one of its functions."""
    with _lock:
        engine = _engine()
        engine.add_object_file(llvm.ObjectFileRef.from_data(code))
        engine.finalize_object()
        return engine.get_function_address(symbol)


def _openmp() -> int:
    """The address of `GOMP_parallel` in this process, or 0: kernels then run on the calling thread."""
    try:
        return ctypes.cast(ctypes.CDLL(None).GOMP_parallel, ctypes.c_void_p).value or 0
    except (AttributeError, OSError, TypeError):
        return 0


LAUNCH = "ninfer_launch"


def launch_assembly() -> str:
    """LLVM assembly of `launch`, a Python function of the vectorcall kind; see `launcher`."""
    i8p, i32, i64 = ir.IntType(8).as_pointer(), ir.IntType(32), ir.IntType(64)
    module = ir.Module(LAUNCH)

    def external(name, result, *args):
        return ir.Function(module, ir.FunctionType(result, args), name)

    to_integer = external("PyLong_AsLongLong", i64, i8p)
    failed = external("PyErr_Occurred", i8p)
    integer = external("PyLong_FromLong", i8p, i64)
    parallel = external("ninfer_parallel", ir.VoidType(), i8p, i8p, i32, i32)
    function = ir.Function(module, ir.FunctionType(i8p, (i8p, i8p.as_pointer(), i64)), LAUNCH)
    _, args, count = function.args
    builder = ir.IRBuilder(function.append_basic_block())
    block = builder.alloca(i64, size=i64((COUNTERS + 64 * MAX_THREADS) // 8))
    block.align = 64

    def value(index):
        return builder.call(to_integer, [builder.load(builder.gep(args, [index]))])

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

    def put(index, what):
        builder.store(what, builder.gep(block, [index]))

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
    error = builder.call(failed, [])
    with builder.if_then(builder.icmp_unsigned("!=", error, ir.Constant(i8p, None)), likely=False):
        builder.ret(ir.Constant(i8p, None))
    with builder.if_else(builder.icmp_signed(">", threads, i64(1))) as (many, one):
        with many:
            arguments = [builder.inttoptr(kernel, i8p), builder.bitcast(block, i8p)]
            builder.call(parallel, [*arguments, builder.trunc(threads, i32), i32(0)])
        with one:
            kind = ir.FunctionType(ir.VoidType(), (i64,)).as_pointer()
            builder.call(builder.inttoptr(kernel, kind), [builder.ptrtoint(block, i64)])
    builder.ret(builder.call(integer, [i64(0)]))
    return str(module)


class _MethodDef(ctypes.Structure):
    _fields_ = (
        ("name", ctypes.c_char_p),
        ("function", ctypes.c_void_p),
        ("flags", ctypes.c_int),
        ("doc", ctypes.c_char_p),
    )


_METH_FASTCALL = 0x0080


def make_launcher(code: bytes) -> tuple[Callable, int]:
    """The Python function of `launch_assembly`'s object code, and the most threads that it can start.

    `launch(kernel, threads, constants, *integers)` fills a block on the stack with the integers, zeros behind
    them (and, from argument `DYNAMIC` on, the 20 integers at address `constants` unless that is 0), runs the
    kernel on a team of threads and returns 0. It costs 0.3 us, a third of what ctypes or Numba's dispatcher
    take for as many arguments.
    """
    api = ctypes.pythonapi
    for name in ("PyLong_AsLongLong", "PyErr_Occurred", "PyLong_FromLong"):
        llvm.add_symbol(name, ctypes.cast(getattr(api, name), ctypes.c_void_p).value)
    openmp = _openmp()
    llvm.add_symbol("ninfer_parallel", openmp or ctypes.cast(api.PyErr_Occurred, ctypes.c_void_p).value)
    method = _MethodDef(b"launch", load(code, LAUNCH), _METH_FASTCALL, None)
    create = api.PyCFunction_NewEx
    create.restype = ctypes.py_object
    create.argtypes = (ctypes.POINTER(_MethodDef), ctypes.c_void_p, ctypes.c_void_p)
    launch = create(ctypes.byref(method), None, None)
    _kept.append(method)
    return launch, MAX_THREADS if openmp else 1


_kept: list[_MethodDef] = []
"""Python's function objects refer to their definition for ever."""
