"""The language of our kernels: operations that are written in LLVM IR, and functions that kernels inline.

Kernels are Python functions that Numba compiles (`compiler.py`). Numba has no vector values, and LLVM's own
vectorizer does not see through packed weight codes. So there are two more types, 16 float32 lanes (`F32`) and
16 int32 lanes (`I32`), and operations on them, each a line or two of portable LLVM IR (`simd.py`, `codes.py`,
`functions.py`): the code generator splits the vectors on machines with shorter registers. Addresses are plain
integers (`tensor.data_ptr()`), so that a call converts nothing.

An `operation` describes code and is called inside kernels only; a `device` function is inlined into them.
Nothing here imports Numba: it is needed only when a kernel is not in the cache yet.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import Any

import numpy as np
from llvmlite import ir

LANES = 16

i8, i16, i32, i64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))
f16, f32, f64 = ir.HalfType(), ir.FloatType(), ir.DoubleType()
vi8, vi16, vi32, vf32, vf16 = (ir.VectorType(t, LANES) for t in (i8, i16, i32, f32, f16))


class Kind(Enum):
    """Types of values that operations take and give."""

    F32 = "16 float32 lanes"
    I32 = "16 int32 lanes"
    INTEGER = "int64, also an address"
    FLOAT = "float32"
    DOUBLE = "float64"
    NOTHING = "no value"


F32, I32 = Kind.F32, Kind.I32
INTEGER, FLOAT, DOUBLE, NOTHING = Kind.INTEGER, Kind.FLOAT, Kind.DOUBLE, Kind.NOTHING


class Operation:
    """An instruction of kernels: `emit(builder, *values)` writes its LLVM IR and returns the resulting
    value."""

    def __init__(self, emit: Callable, result: Kind, parameters: tuple[Kind, ...]) -> None:
        self.emit, self.result, self.parameters = emit, result, parameters
        self.__name__, self.__doc__ = emit.__name__, emit.__doc__

    def __call__(self, *args: Any) -> Any:
        raise TypeError(
            f"{self.__name__} is an instruction of compiled kernels and cannot be called from Python"
        )


def operation(result: Kind, *parameters: Kind) -> Callable[[Callable], Operation]:
    """Decorator that makes an `Operation` of this signature from its `emit` function."""
    return lambda emit: Operation(emit, result, parameters)


def device(function: Callable) -> Callable:
    """Decorator of functions that kernels inline; from Python they stay ordinary functions."""
    function.__device__ = True  # type: ignore[attr-defined]
    return function


def call(builder, name, result, *args):
    """Call an LLVM intrinsic or an external function by name."""
    function = builder.module.globals.get(name)
    if function is None:
        kind = ir.FunctionType(result, [a.type for a in args])
        function = ir.Function(builder.module, kind, name)
    return builder.call(function, args)


def has_feature(feature: str) -> bool:
    """Does the machine that kernels are compiled for have this LLVM feature?"""
    from ninfer.ops.cpu.native import target_features

    return f"+{feature}" in target_features().split(",")


def pointer(builder, address, pointee):
    return builder.inttoptr(address, ir.PointerType(pointee))


def load_value(builder, address, kind):
    return builder.load(pointer(builder, address, kind), align=1)


def store_value(builder, address, value):
    builder.store(value, pointer(builder, address, value.type), align=1)


def lanes_of(kind, values):
    return ir.Constant(kind, [values] * LANES if np.isscalar(values) else list(values))


def undefined(kind):
    return ir.Constant(kind, ir.Undefined)


def indices(values):
    values = list(values)
    return ir.Constant(ir.VectorType(i32, len(values)), values)


def splat_value(builder, scalar, kind):
    first = builder.insert_element(undefined(kind), scalar, i32(0))
    return builder.shuffle_vector(first, undefined(kind), indices([0] * LANES))
