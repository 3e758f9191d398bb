"""The linear family on a GPU: where matrices are placed, and which route a product takes.

Up to `SMALL` columns the weights are decoded inside the product (`small.py`), and no bit depends on T; above,
a panel of them is decoded first (`wide.py`).
"""

from __future__ import annotations

import torch

from ninfer.errors import OptionError
from ninfer.ops.cuda import pack as packer
from ninfer.ops.cuda import wide
from ninfer.ops.cuda.embedding import Table, table_of
from ninfer.ops.cuda.packed import Packed
from ninfer.ops.weights import Matrix, Role

SMALL = 0
"""Most columns of the small route."""


def place(matrix: Matrix, device: torch.device, role: Role) -> None:
    """Pack the matrix on `device`: `Packed` for LINEAR and SWIGLU, `Table` for TABLE, for GATING the decoded
    matrix `[N, K]`, bf16 or float32. `FormatError` on formats without a kernel and bytes that don't fit."""
    if role is Role.GATING:
        matrix.placed(device, packer.dense(matrix, device))
    elif role is Role.TABLE:
        packed = packer.pack(matrix, device, role)
        matrix.placed(device, table_of(packed, packer.divisors(matrix, device)))
    else:
        matrix.placed(device, packer.pack(matrix, device, role))


def linear(x: torch.Tensor, w: Matrix, residual: torch.Tensor | None = None) -> torch.Tensor:
    """bf16 `[T, N]`; see `ninfer.ops.linear`."""
    packed = _packed(x, w)
    if residual is not None and (residual.shape != (len(x), w.rows) or residual.dtype != x.dtype):
        raise OptionError(
            f"the residual must be {x.dtype} {[len(x), w.rows]}, got {residual.dtype} {list(residual.shape)}"
        )
    out = torch.empty(len(x), w.rows, dtype=x.dtype, device=x.device)
    wide.linear(x, packed, w.policy, None if residual is None else residual.contiguous(), out)
    return out


def linear_swiglu(x: torch.Tensor, gate_up: Matrix) -> torch.Tensor:
    """bf16 `[T, I]`; see `ninfer.ops.linear`."""
    packed = _packed(x, gate_up)
    out = torch.empty(len(x), gate_up.rows // 2, dtype=x.dtype, device=x.device)
    wide.swiglu(x, packed, gate_up.policy, out)
    return out


def logits(x: torch.Tensor, head: Matrix, public_rows: int) -> torch.Tensor:
    """float32 `[T, public_rows]`, the values of `linear`."""
    return linear(x, head)[:, :public_rows].float()


def _packed(x: torch.Tensor, w: Matrix) -> Packed:
    if x.dtype != torch.bfloat16:
        raise OptionError(f"activations on a GPU are bfloat16, not {x.dtype}")
    plan = w.plan.packed if isinstance(w.plan, Table) else w.plan
    if not isinstance(plan, Packed):
        raise OptionError("a matrix must be placed on the device before it is used there")
    return plan
