"""A minimal gated norm until the operator of that name is here."""

# pyright: reportArgumentType=false, reportIndexIssue=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ninfer.ops.cuda.bf16 import to_bf16, to_f32
from ninfer.ops.cuda.convolve import silu


@triton.jit
def gated_norm_kernel(
    o, z, z_stride, norm, order, out, rows, eps,
    HEADS: tl.constexpr, DV: tl.constexpr, WIDTH: tl.constexpr, ORDER: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    item = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    there = item < rows
    place, t = item % HEADS, item // HEADS
    head = place
    if ORDER:
        head = tl.load(order + place)
    d = tl.arange(0, WIDTH)[None, :]
    mask = there[:, None] & (d < DV)
    x = to_f32(tl.load(o + (t * HEADS + head).to(tl.int64)[:, None] * DV + d, mask, other=0.0))
    gate = tl.load(z + t.to(tl.int64)[:, None] * z_stride + head[:, None] * DV + d, mask, other=0.0)
    gain = to_f32(tl.load(norm + d, d < DV, other=0.0))
    inverse = 1.0 / tl.sqrt(tl.sum(x * x, 1) / DV + eps)
    y = x * inverse[:, None] * gain * silu(to_f32(gate))
    tl.store(out + item.to(tl.int64)[:, None] * DV + d, to_bf16(y), mask)


def gated_rms_norm(
    o: torch.Tensor, z: torch.Tensor, weight: torch.Tensor, eps: float, head_order: torch.Tensor | None
) -> torch.Tensor:
    count, heads, width = o.shape
    out = torch.empty_like(o)
    gated_norm_kernel[(triton.cdiv(count * heads, 16),)](
        o, z, z.stride(0), weight, head_order, out, count * heads, eps,
        HEADS=heads, DV=width, WIDTH=triton.next_power_of_2(width), ORDER=head_order is not None, ROWS=16,
    )  # fmt: skip
    return out
