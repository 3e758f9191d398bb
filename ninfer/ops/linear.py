"""Matrix products with encoded weights (policy A16: activations are never quantized).

`W[n, k]` is what the format's formula decodes to, products and sums are float32 or better, and the result
is rounded once to the activation type. With a residual the sum `residual + x W^T` is what gets rounded; the
gate and up halves of `linear_swiglu` are not rounded before their product. Which kernel runs depends only on
the matrix and on T, and within one route a column's bits don't depend on the other columns.
"""

from __future__ import annotations

import torch

from ninfer.errors import OptionError
from ninfer.ops.dispatch import backend
from ninfer.ops.weights import Matrix


def linear(x: torch.Tensor, w: Matrix, residual: torch.Tensor | None = None) -> torch.Tensor:
    """`x [T, K]` (bf16 or float32, contiguous) times `w [N, K]` transposed, plus `residual`: `[T, N]`."""
    _check(x, w)
    return backend(x.device.type).linear(x, w, residual)


def linear_swiglu(x: torch.Tensor, gate_up: Matrix) -> torch.Tensor:
    """`silu(x G^T) * (x U^T)` for `gate_up [2I, K]` whose first `I` rows are G: `[T, I]`."""
    _check(x, gate_up)
    if gate_up.rows % 2:
        raise OptionError(f"a gate/up matrix needs an even number of rows, got {gate_up.rows}")
    return backend(x.device.type).linear_swiglu(x, gate_up)


def logits(x: torch.Tensor, head: Matrix, public_rows: int) -> torch.Tensor:
    """Scores of the first `public_rows` ids: float32 `[T, public_rows]`.

    The values are those of `linear`: rounded to bf16 and widened if `x` is bf16, unrounded if it is float32.
    """
    _check(x, head)
    if not 0 < public_rows <= head.rows:
        raise OptionError(f"public rows must be 1..{head.rows}, got {public_rows}")
    return backend(x.device.type).logits(x, head, public_rows)


def _check(x: torch.Tensor, w: Matrix) -> None:
    if x.shape[-1] != w.columns or x.dim() != 2:
        raise OptionError(f"input {tuple(x.shape)} does not fit a matrix of {w.columns} columns")
