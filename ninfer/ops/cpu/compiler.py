"""From kernel functions to machine code, by Numba. Imported only when a kernel is not in the cache."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from types import FunctionType
from typing import Any

import numba
from llvmlite import ir
from numba import types
from numba.core import config
from numba.extending import intrinsic, models, register_model

from ninfer.ops.cpu.instructions import LANES, Kind, Operation
from ninfer.ops.cpu.native import object_code, optimized


class _Vector(types.Type):
    def __init__(self, name: str, element: ir.Type) -> None:
        self.element = element
        super().__init__(name=name)


@register_model(_Vector)
class _VectorModel(models.PrimitiveModel):
    def __init__(self, manager, fe_type):
        super().__init__(manager, fe_type, ir.VectorType(fe_type.element, LANES))


_TYPES = {
    Kind.F32: _Vector("ninfer_f32x16", ir.FloatType()),
    Kind.I32: _Vector("ninfer_i32x16", ir.IntType(32)),
    Kind.INTEGER: types.int64,
    Kind.FLOAT: types.float32,
    Kind.DOUBLE: types.float64,
    Kind.NOTHING: types.void,
}

# What compiled kernels may call: the C library, and what `native` defines.
_EXTERNALS = {"exp", "log1p", "memset", "memcpy", "memmove", "ninfer_members", "ninfer_give_way"}

_operations: dict[Operation, Any] = {}
_functions: dict[Any, Any] = {}


def _intrinsic(operation: Operation) -> Any:
    made = _operations.get(operation)
    if made is None:
        signature = _TYPES[operation.result](*(_TYPES[p] for p in operation.parameters))

        def generate(context, builder, _signature, args):
            value = operation.emit(builder, *args)
            return context.get_dummy_value() if value is None else value

        by_arity = (
            lambda typing: (signature, generate),
            lambda typing, a: (signature, generate),
            lambda typing, a, b: (signature, generate),
            lambda typing, a, b, c: (signature, generate),
            lambda typing, a, b, c, d: (signature, generate),
            lambda typing, a, b, c, d, e: (signature, generate),
        )
        function = by_arity[len(operation.parameters)]
        function.__name__ = function.__qualname__ = operation.__name__
        made = _operations[operation] = intrinsic(function)
    return made


def _touched(function: Any, bindings: dict[str, Any]) -> bool:
    """Does the function, or one that it calls, use a bound name?"""
    names = function.__code__.co_names
    called = (function.__globals__.get(name) for name in names)
    return any(name in bindings for name in names) or any(
        _touched(f, bindings) for f in called if getattr(f, "__device__", False)
    )


def _translate(function: FunctionType, bindings: dict[str, Any], bound: dict[Any, Any]) -> FunctionType:
    """The function with operations replaced by intrinsics, device functions by inlined ones, and names bound.

    Device functions without bound names are compiled once for all kernels, the others go to `bound`.
    """
    names = dict(function.__globals__)
    for name in function.__code__.co_names:
        value: Any = bindings.get(name, names.get(name))
        if isinstance(value, Operation):
            value = _intrinsic(value)
        elif getattr(value, "__device__", False):
            known = bound if _touched(value, bindings) else _functions
            if value not in known:
                text = _translate(value, bindings, bound)
                known[value] = numba.njit(text, forceinline=True, error_model="numpy")
            value = known[value]
        if name in names or name in bindings:
            names[name] = value
    return FunctionType(function.__code__, names, function.__name__)


def compile_kernel(function: FunctionType, bindings: dict[str, Any], symbol: str) -> bytes:
    """Object code that defines `symbol`, a kernel `f(data: int64) -> None`."""
    text = _translate(function, bindings, {})
    with _unoptimized():
        compiled = numba.cfunc(types.void(types.int64), error_model="numpy")(text)
        assembly = compiled.inspect_llvm()
    return object_code(_without_python(optimized(assembly), symbol))


@contextlib.contextmanager
def _unoptimized() -> Iterator[None]:
    """Keep Numba from optimizing every function by itself: once at the end is enough, and takes a third less
    time."""
    level = getattr(config, "OPT")  # noqa: B009
    setattr(config, "OPT", type(level)(0))  # noqa: B010
    try:
        yield
    finally:
        setattr(config, "OPT", level)  # noqa: B010


def _without_python(assembly: str, symbol: str) -> str:
    """Replace Numba's C wrapper, which reports exceptions to Python, by a bare one: kernels raise none."""
    wrapper = re.search(r"^define \S+ @\"?cfunc\..*?^}\n", assembly, re.MULTILINE | re.DOTALL)
    inner = wrapper and re.search(r"call i32 @(\S+?)\(", wrapper[0])
    if not wrapper or not inner:
        raise RuntimeError(f"Numba's code for kernel {symbol} has an unexpected form")
    body = f"""
define void @{symbol}(i64 %data) {{
  %nothing = alloca ptr
  %status = call i32 @{inner[1]}(ptr %nothing, ptr null, i64 %data)
  ret void
}}
"""
    assembly = assembly[: wrapper.start()] + body + assembly[wrapper.end() :]
    if set(re.findall(r"^  ret i32 (.*?)(?:,.*)?$", assembly, re.MULTILINE)) != {"0"}:
        raise RuntimeError(f"kernel {symbol} can raise an exception")
    declared = set(re.findall(r"^declare .*?@\"?([\w.$]+)\"?\(", assembly, re.MULTILINE))
    called = set(re.findall(r"(?:call|invoke)[^@\n]*@\"?([\w.$]+)\"?\(", assembly))
    foreign = {f for f in declared & called if not f.startswith("llvm.")} - _EXTERNALS
    if foreign:
        raise RuntimeError(f"kernel {symbol} needs {sorted(foreign)}, which only Numba can resolve")
    return assembly
