"""What operators of this backend take beside their inputs: see `ninfer.ops.workspace`.

Within a recording the allocator gives out again what an operator has freed, so a recorded pass keeps no more
than the pass takes at its fullest moment; recordings of one pool share that.
"""

from __future__ import annotations

import torch

from ninfer.ops.cuda import attend, attend_wide, gdn_chunked, wide
from ninfer.ops.cuda.linear import SMALL

_FEW = 16
"""Columns of a request up to which attention splits its keys among blocks; eight requests may have as many."""
_ROWS = 8
_GROUPS = 8
"""Parts of a sum over a matrix's columns, at most, that blocks of the small route leave to each other."""
_MIB = 1 << 20


def linear_bytes(columns: int, inputs: int, outputs: int, size: int) -> int:
    """The output, and partial sums of few columns; for many a decoded panel, sums of two (one is still in use
    when the next one is made) and the columns' codes."""
    out = columns * outputs * size
    if columns <= SMALL:
        return out + 512 * _GROUPS * -(-outputs // 16) * -(-columns // 8)
    rows = min(outputs, max(512, wide.PRODUCT // columns))
    return out + 2 * min(wide.PANEL, inputs * (outputs + 16)) + 8 * columns * rows + columns * (inputs + 4)


def swiglu_bytes(columns: int, inputs: int, outputs: int, size: int) -> int:
    """The same for both halves; sums of whole columns if their formats differ."""
    if columns <= SMALL:
        return linear_bytes(columns, inputs, 2 * outputs, size + 4)
    apart = 4 * min(wide.PRODUCT, 2 * outputs * columns)
    return linear_bytes(columns, inputs, 2 * outputs, size) - columns * outputs * size + apart


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
