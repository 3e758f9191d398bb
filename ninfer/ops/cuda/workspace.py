"""What operators of this backend take beside their inputs: see `ninfer.ops.workspace`.

Within a recording the allocator gives out again what an operator has freed, so a recorded pass keeps no more
than the pass takes at its fullest moment.
"""

from __future__ import annotations

from ninfer.ops.delta import CHUNK

_FEW = 64
"""Columns up to which attention splits a row's keys among programs."""
_SPLITS = 64
_MIB = 1 << 20


def linear_bytes(columns: int, inputs: int, outputs: int, size: int) -> int:
    """The output and its float32 sums; for many columns also the matrix as 16-bit numbers."""
    panel = 2 * inputs * outputs if columns > _FEW else 0
    return columns * (2 * size * inputs + (size + 4) * outputs) + panel


def swiglu_bytes(columns: int, inputs: int, outputs: int, size: int) -> int:
    """The same for both halves, and the result."""
    return linear_bytes(columns, inputs, 2 * outputs, size) + columns * outputs * size


def attention_bytes(columns: int, context: int, heads: int, kv_heads: int, width: int, size: int) -> int:
    """Queries and outputs; partial results of a few columns, or keys and values as activations for many."""
    total = 3 * columns * heads * width * size
    if columns <= _FEW:
        return total + columns * heads * _SPLITS * 4 * (width + 2)
    return total + 2 * kv_heads * width * context * size


def delta_net_bytes(
    columns: int, key_heads: int, value_heads: int, key_dim: int, value_dim: int, size: int
) -> int:
    """Stages of the chunked rule in float32, the convolved input, the output, and states between chunks."""
    stages = 4 * value_heads * (2 * key_dim + 3 * value_dim + 2 * CHUNK)
    activations = size * (2 * key_heads * key_dim + 4 * value_heads * value_dim)
    states = -(-columns // CHUNK) + 1
    return columns * (stages + activations) + states * 4 * value_heads * value_dim * key_dim


def recorded_linear(columns: int, inputs: int, outputs: int, size: int) -> int:
    return linear_bytes(columns, inputs, outputs, size)


def recorded_attention(columns: int, context: int, heads: int, width: int, size: int) -> int:
    return attention_bytes(columns, context, heads, heads, width, size)


def reuses() -> bool:
    return True


def fixed_bytes() -> int:
    """Code of kernels, which is loaded at first use, and the workspace of cuBLAS."""
    return 256 * _MIB


def recording_bytes() -> int:
    """A graph of some hundred kernels, with the memory pool that it rounds up to."""
    return 32 * _MIB
