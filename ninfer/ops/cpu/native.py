"""Machine code in this process: the target, the optimizer, and the linker.

Everything goes through llvmlite alone, so that a start with cached kernels needs no compiler (importing Numba
and its registries costs 0.6 s, as much as all our kernels' first use costs 0.1 s).
"""

from __future__ import annotations

import functools
import os
import platform
import threading

import llvmlite.binding as llvm

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


def define(symbol: str, address: int) -> None:
    """Let code that is loaded from now on find something by name."""
    llvm.add_symbol(symbol, address)
