"""What operators of this backend take beside their inputs: see `ninfer.ops.workspace`."""

from __future__ import annotations

import torch

from ninfer.ops.delta import CHUNK

_PANEL = 2048
"""Rows of a matrix that are decoded at a time."""
_KEYS = 512
"""Keys that a thread of PyTorch's fused attention looks at in one go."""


def linear_bytes(columns: int, inputs: int, outputs: int, size: int) -> int:
    """Inputs as float32, a panel of the matrix, its product in two types, the output; where the processor has
    matrix tiles, inputs in tiles of both orders and the threads' decoded panels instead, if that is more."""
    from ninfer.ops.cpu.wide import scratch_bytes

    part = min(_PANEL, outputs)
    panels = columns * (4 * inputs + 6 * part) + 4 * part * inputs
    tiles = torch.get_num_threads() * scratch_bytes(columns) + 2 * -(-columns // 16) * 1024 * -(-inputs // 32)
    return max(panels, tiles) + columns * size * outputs


def swiglu_bytes(columns: int, inputs: int, outputs: int, size: int) -> int:
    """The same with three products at a time, or both whole halves as float32 if their formats differ."""
    part = min(_PANEL, outputs)
    panels = columns * (4 * inputs + 12 * part + size * outputs) + 4 * part * inputs
    return max(panels, columns * size * outputs + linear_bytes(columns, inputs, 2 * outputs, 4))


def attention_bytes(columns: int, context: int, heads: int, kv_heads: int, width: int, size: int) -> int:
    """Queries and outputs. Where PyTorch's attention is used, also all keys and values in order and once more
    packed, the mask as bits and as numbers, and a block of scores for each thread."""
    from ninfer.ops.cpu import amx

    total = columns * 3 * heads * width * size
    if size == 4 or not amx.available():
        few = columns * kv_heads < 4 * torch.get_num_threads()
        return total + (_partial_results(columns, context, heads, width) if few else 0)
    block = 256 if columns >= 768 else 64 if columns >= 192 else 32
    return (
        total
        + 4 * kv_heads * width * context * size
        + (columns * context * (1 + size) if context > columns else 0)
        + torch.get_num_threads() * block * (_KEYS * (4 + size) + 4 * width)
    )


def delta_net_bytes(
    columns: int, key_heads: int, value_heads: int, key_dim: int, value_dim: int, size: int
) -> int:
    """Stages of the chunked rule in float32, the convolved input, the output, and the state four times."""
    stages = 4 * value_heads * (6 * key_dim + 5 * value_dim + 6 * CHUNK)
    activations = size * (2 * key_heads * key_dim + 3 * value_heads * value_dim)
    return columns * (stages + activations) + 16 * value_heads * value_dim * key_dim


def recorded_linear(columns: int, inputs: int, outputs: int, size: int) -> int:
    """Inputs as float32, and the output."""
    return columns * (4 * (inputs + 31) + size * outputs)


def recorded_attention(columns: int, context: int, heads: int, width: int, size: int) -> int:
    """Queries, outputs, and what several threads find in the runs of keys."""
    return 2 * columns * heads * width * size + _partial_results(columns, context, heads, width)


def _partial_results(columns: int, context: int, heads: int, width: int) -> int:
    from ninfer.ops.cpu.attend_pages import runs_of

    if torch.get_num_threads() == 1:
        return 0
    return columns * heads * (4 * runs_of(context + 63) * (width + 31) + 8)


def reuses() -> bool:
    """A tape's launches have addresses of their own each."""
    return False


def fixed_bytes() -> int:
    """Code is mapped from files."""
    return 0


def recording_bytes() -> int:
    """Blocks of a few hundred launches: nothing beside the rest."""
    return 0
