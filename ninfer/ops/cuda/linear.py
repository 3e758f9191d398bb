"""The linear family on a GPU: where matrices are placed, and which route a product takes.

Up to `SMALL` columns the weights are decoded inside the product (`small.py`), and no bit depends on T; above,
a panel of them is decoded first (`wide.py`). Measured on an H200 (2026-11-30, `python -m bench.ops.wide
--small`), one token, packed bytes a second: SwiGLU [34816, 5120] Q4_K 28.8 us, 3,870 GB/s; Q6_K 39.8 us,
3,780; Q4 25.0 us, 3,790; [5120, 17408] 17.1, 21.1, 14.9 us.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ninfer.errors import OptionError
from ninfer.ops.cuda import finish, wide
from ninfer.ops.cuda import pack as packer
from ninfer.ops.cuda.compile import Module
from ninfer.ops.cuda.embedding import Table, table_of
from ninfer.ops.cuda.norms import rms_norm
from ninfer.ops.cuda.packed import Packed
from ninfer.ops.cuda.small import AMPERE, MOST_TOKENS, Mode, Norm, module, plan, small_linear
from ninfer.ops.weights import Matrix, Role, Upload

SMALL = MOST_TOKENS
"""Most columns of the small route."""


def programs() -> Iterator[Module]:
    """A small kernel of each format, as every architecture has it, for those who compile without a GPU."""
    for packing in packer.PACKINGS.values():
        if packing.kernel != "Dense":
            made = plan(packing, 16, 80, 1, 0, AMPERE)
            assert made is not None
            yield module(packing, made)


def place(matrix: Matrix, device: torch.device, role: Role, upload: Upload | None = None) -> None:
    """Pack the matrix on `device`: `Packed` for LINEAR and SWIGLU, `Table` for TABLE, for GATING the decoded
    matrix `[N, K]`, bf16. `FormatError` on formats without a kernel and bytes that don't fit."""
    if role is Role.GATING:
        matrix.placed(device, packer.dense(matrix, device, upload))
    elif role is Role.TABLE:
        packed = packer.pack(matrix, device, role, upload)
        matrix.placed(device, table_of(packed, packer.divisors(matrix, device)))
    else:
        matrix.placed(device, packer.pack(matrix, device, role, upload))


def linear(x: torch.Tensor, w: Matrix, residual: torch.Tensor | None = None) -> torch.Tensor:
    """bf16 `[T, N]`; see `ninfer.ops.linear`."""
    packed = _packed(x, w)
    if residual is not None:
        if residual.shape != (len(x), w.rows) or residual.dtype != x.dtype:
            found, shape = residual.dtype, list(residual.shape)
            raise OptionError(f"the residual must be {x.dtype} {[len(x), w.rows]}, got {found} {shape}")
        residual = residual.contiguous()
    out = torch.empty(len(x), w.rows, dtype=x.dtype, device=x.device)
    if not _small(x, packed):
        wide.linear(x, packed, w.policy, residual, out)
        return out
    return small_linear(x.contiguous(), packed, out, residual=residual)


def linear_swiglu(x: torch.Tensor, gate_up: Matrix) -> torch.Tensor:
    """bf16 `[T, I]`; see `ninfer.ops.linear`."""
    packed = _packed(x, gate_up)
    out = torch.empty(len(x), gate_up.rows // 2, dtype=x.dtype, device=x.device)
    if not _small(x, packed):
        wide.swiglu(x, packed, gate_up.policy, out)
    elif packed.interleaved:
        small_linear(x.contiguous(), packed, out, mode=Mode.SWIGLU)
    else:
        sums = torch.empty(len(x), gate_up.rows, device=x.device)
        finish.swiglu(small_linear(x.contiguous(), packed, sums, mode=Mode.RAW), out, False)
    return out


def logits(x: torch.Tensor, head: Matrix, public_rows: int) -> torch.Tensor:
    """float32 `[T, public_rows]`, the values of `linear`."""
    packed = _packed(x, head)
    if not _small(x, packed):
        return linear(x, head)[:, :public_rows].float()
    out = torch.empty(len(x), public_rows, device=x.device)
    return small_linear(x.contiguous(), packed, out, mode=Mode.LOGITS)


def norm_linear(
    x: torch.Tensor, gain: torch.Tensor, eps: float, unit_offset: bool, w: Matrix
) -> tuple[torch.Tensor, torch.Tensor]:
    """`([T, N], [T, K])`: `linear` of the normed rows, and these; see `ninfer.ops.fused`."""
    packed = _packed(x, w)
    if not _small(x, packed) or x.shape[1] % 8:
        h = rms_norm(x, gain, eps, unit_offset)
        return linear(h, w), h
    x = x.contiguous()
    h = torch.empty_like(x)
    out = torch.empty(len(x), w.rows, dtype=x.dtype, device=x.device)
    return small_linear(x, packed, out, norm=Norm(gain, eps, unit_offset, h)), h


def norm_logits(
    x: torch.Tensor, gain: torch.Tensor, eps: float, unit_offset: bool, head: Matrix, public_rows: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """`(float32 [T, public_rows], bf16 [T, K])`: `logits` of the normed rows, and these."""
    packed = _packed(x, head)
    if not _small(x, packed) or x.shape[1] % 8:
        h = rms_norm(x, gain, eps, unit_offset)
        return logits(h, head, public_rows), h
    x = x.contiguous()
    h = torch.empty_like(x)
    out = torch.empty(len(x), public_rows, device=x.device)
    norm = Norm(gain, eps, unit_offset, h)
    return small_linear(x, packed, out, mode=Mode.LOGITS, norm=norm), h


def norm_linear_swiglu(
    x: torch.Tensor, gain: torch.Tensor, eps: float, unit_offset: bool, gate_up: Matrix
) -> torch.Tensor:
    """`[T, I]`: `linear_swiglu` of the normed rows; see `ninfer.ops.fused`."""
    packed = _packed(x, gate_up)
    if not _small(x, packed) or not packed.interleaved or x.shape[1] % 8:
        return linear_swiglu(rms_norm(x, gain, eps, unit_offset), gate_up)
    out = torch.empty(len(x), gate_up.rows // 2, dtype=x.dtype, device=x.device)
    return small_linear(x.contiguous(), packed, out, mode=Mode.SWIGLU, norm=Norm(gain, eps, unit_offset))


def _small(x: torch.Tensor, packed: Packed) -> bool:
    """Is this a product for `small.py`? Rare formats have no decoder there."""
    return x.is_cuda and len(x) <= SMALL and all(s.packing.kernel != "Dense" for s in packed.segments)


def _packed(x: torch.Tensor, w: Matrix) -> Packed:
    if x.dtype != torch.bfloat16:
        raise OptionError(f"activations on a GPU are bfloat16, not {x.dtype}")
    plan = w.plan.packed if isinstance(w.plan, Table) else w.plan
    if not isinstance(plan, Packed):
        raise OptionError("a matrix must be placed on the device before it is used there")
    return plan
