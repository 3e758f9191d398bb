"""What operators of this backend take beside their inputs: see `ninfer.ops.workspace`.

Within a recording the allocator gives out again what an operator has freed, so a recorded pass keeps no more
than the pass takes at its fullest moment; recordings of one pool share that.
"""

from __future__ import annotations

import torch

from ninfer.ops.cuda import attend, attend_wide, gdn_chunked, wide
from ninfer.ops.cuda.linear import SMALL

_FEW = 16
"""Columns of a request up to which attention splits its keys among blocks; each request may have as many."""
_ROWS = 8
_MIB = 1 << 20


def linear_bytes(columns: int, inputs: int, outputs: int, size: int) -> int:
    """The output; of few columns perhaps a copy of x, of many what their products take."""
    out = columns * outputs * size
    if columns <= SMALL:
        return out + 2 * columns * (inputs + 8)
    return out + wide.scratch_bytes(columns, inputs, outputs)


def swiglu_bytes(columns: int, inputs: int, outputs: int, size: int) -> int:
    """The same for both halves; sums of some whole columns if their formats differ."""
    apart = columns if columns <= SMALL else min(columns, wide.columns_apart(2 * outputs))
    both = linear_bytes(columns, inputs, 2 * outputs, size)
    return both - columns * outputs * size + 8 * apart * outputs


def attention_bytes(columns: int, context: int, heads: int, kv_heads: int, width: int, size: int) -> int:
    """Queries and outputs; partial results of few columns, or decoded keys and values for many."""
    total = 3 * columns * heads * width * size
    device = torch.device("cuda", torch.cuda.current_device())
    few = min(columns, _ROWS * _FEW)
    scratch = attend.attention_bytes(device, few, context, heads, kv_heads, width)
    if columns > _FEW:
        scratch = max(scratch, attend_wide.wide_attention_bytes(columns, context, heads, kv_heads, width))
    return total + scratch


def delta_net_bytes(
    columns: int, key_heads: int, value_heads: int, key_dim: int, value_dim: int, size: int
) -> int:
    """The convolved input, gates, the result before and after its norm, and tiles of whole chunks."""
    activations = size * (2 * key_heads * key_dim + 3 * value_heads * value_dim) + 8 * value_heads
    return columns * activations + gdn_chunked.delta_net_bytes(
        columns, key_heads, value_heads, key_dim, value_dim
    )


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
