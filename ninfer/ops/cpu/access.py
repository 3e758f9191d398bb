"""Reading and writing activations inside kernels: bf16 or float32, whole vectors or the first few lanes."""

from __future__ import annotations

import torch

from ninfer.errors import OptionError
from ninfer.ops.cpu.instructions import device
from ninfer.ops.cpu.simd import (
    as_bf16,
    get_bf16,
    get_f32,
    load_bf16,
    load_f32,
    put_bf16,
    put_f32,
    store_bf16,
    store_f32,
    take_even,
    take_odd,
    zeros,
)

# How a kernel is told what it reads or writes. ROUNDED is float32 whose values are rounded to bf16.
FLOAT32, BF16, ROUNDED = 0, 1, 2
_KINDS = {torch.float32: FLOAT32, torch.bfloat16: BF16}


def kind_of(tensor: torch.Tensor) -> int:
    """FLOAT32 or BF16; raises `OptionError` for any other type."""
    kind = _KINDS.get(tensor.dtype)
    if kind is None:
        raise OptionError(f"activations must be bfloat16 or float32, got {tensor.dtype}")
    return kind


@device
def size_of(kind):
    return 2 if kind == 1 else 4


@device
def load(address, kind):
    """16 activations."""
    if kind == 1:
        return load_bf16(address)
    return load_f32(address)


@device
def store(address, kind, value):
    """16 activations, rounded as the kind says."""
    if kind == 1:
        store_bf16(address, value)
    elif kind == 0:
        store_f32(address, value)
    else:
        store_f32(address, as_bf16(value))


@device
def get(address, kind):
    """One activation."""
    if kind == 1:
        return get_bf16(address)
    return get_f32(address)


@device
def put(address, kind, value):
    if kind == 1:
        put_bf16(address, value)
    else:
        put_f32(address, value)


@device
def load_some(address, kind, count, scratch):
    """The first `count` of 16 lanes, zeros behind them; `scratch` is 64 bytes."""
    if count == 16:
        return load(address, kind)
    store_f32(scratch, zeros())
    for lane in range(count):
        put_f32(scratch + 4 * lane, get(address + size_of(kind) * lane, kind))
    return load_f32(scratch)


@device
def store_some(address, kind, value, count, scratch):
    """Store the first `count` of 16 lanes."""
    if count == 16:
        store(address, kind, value)
        return
    if kind == 2:
        value = as_bf16(value)
    store_f32(scratch, value)
    for lane in range(count):
        put(address + size_of(kind) * lane, kind, get_f32(scratch + 4 * lane))


@device
def read_row(source, kind, count, target):
    """`count` activations as float32 at `target`, zero-padded to whole vectors."""
    size = size_of(kind)
    if kind == 1:
        for start in range(0, count & -16, 16):
            store_f32(target + 4 * start, load_bf16(source + 2 * start))
    else:
        for start in range(0, count & -16, 16):
            store_f32(target + 4 * start, load_f32(source + 4 * start))
    if count & 15:
        start = count & -16
        store_f32(target + 4 * start, zeros())
        for lane in range(start, count):
            put_f32(target + 4 * lane, get(source + size * lane, kind))


@device
def write_row(source, target, kind, count):
    """`count` float32 at `source`, rounded as the kind says."""
    size = size_of(kind)
    if kind == 1:
        for start in range(0, count & -16, 16):
            store_bf16(target + 2 * start, load_f32(source + 4 * start))
    else:
        for start in range(0, count & -16, 16):
            store(target + size * start, kind, load_f32(source + 4 * start))
    for lane in range(count & -16, count):
        put(target + size * lane, kind, get_f32(source + 4 * lane))


@device
def widen(source, kind, columns, target, pairs, scratch):
    """A row of activations as float32, units of 32 zero-padded; with `pairs` each unit's even lanes come
    first."""
    size = size_of(kind)
    for unit in range((columns + 31) >> 5):
        left = columns - 32 * unit
        place = source + 32 * size * unit
        if left >= 32:
            a, b = load(place, kind), load(place + 16 * size, kind)
        else:
            a = load_some(place, kind, min(left, 16), scratch)
            b = load_some(place + 16 * size, kind, max(left - 16, 0), scratch)
        if pairs:
            a, b = take_even(a, b), take_odd(a, b)
        store_f32(target + 128 * unit, a)
        store_f32(target + 128 * unit + 64, b)
