"""Decay and strength of the delta rule: two small products of the hidden columns, never rounded.

Roofline: 2 * 48 rows of 5,120 bf16 are 1 MB; at few columns that is 0.25 us of memory and all latency. A
column is a product of its own, in an order that depends on the width alone; many columns go through tensor
cores, a tile of columns at a time, again in one order.
"""

# pyright: reportArgumentType=false, reportIndexIssue=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl

from ninfer.errors import OptionError
from ninfer.ops.checks import check_controls
from ninfer.ops.cuda.bf16 import INTERPRETED, to_f32
from ninfer.ops.cuda.specimens import Specimen
from ninfer.ops.weights import Matrix

STEPS: tl.constexpr = tl.constexpr(4)
"""Columns of a request that go through the small product together."""
FEW = 128
"""Columns of a call up to which each is a product of its own."""
_TILE, _DEEP = 64, 64


@triton.jit
def dot(a, b, total):
    """Of 16-bit numbers; the interpreter multiplies the bits of bf16."""
    if INTERPRETED:
        result = tl.dot(to_f32(a), to_f32(b), total)
    else:
        result = tl.dot(a, b, total)
    return result


@triton.jit
def controls(a, b, a_log, bias):
    """(g, beta) of the products a and b."""
    s = a + bias
    e = tl.exp(-tl.abs(s))
    # log(1 + e) has no digits left of a small e.
    log = tl.where(e < 1e-3, e * (1.0 - e * (0.5 - e * 0.33333334)), tl.log(1.0 + e))
    return -tl.exp(a_log) * (tl.maximum(s, 0.0) + log), 1.0 / (1.0 + tl.exp(-b))


@triton.jit
def control_products(
    h, stride, a, b, head, column, count, HIDDEN: tl.constexpr, PART: tl.constexpr, STEPS: tl.constexpr
):
    """Products of STEPS columns from `column` on (of them `count` exist) with row `head` of a and b."""
    step = tl.arange(0, STEPS)[:, None]
    rows = h + column.to(tl.int64) * stride + step * stride
    sum_a = tl.zeros((STEPS, PART), tl.float32)
    sum_b = tl.zeros((STEPS, PART), tl.float32)
    for start in tl.static_range(0, HIDDEN, PART):
        i = start + tl.arange(0, PART)[None, :]
        x = to_f32(tl.load(rows + i, (i < HIDDEN) & (step < count), other=0.0))
        row_a = tl.load(a + head * HIDDEN + i, i < HIDDEN, other=0.0)
        row_b = tl.load(b + head * HIDDEN + i, i < HIDDEN, other=0.0)
        sum_a = tl.fma(x, tl.broadcast_to(to_f32(row_a), (STEPS, PART)), sum_a)
        sum_b = tl.fma(x, tl.broadcast_to(to_f32(row_b), (STEPS, PART)), sum_b)
    return tl.sum(sum_a, 1), tl.sum(sum_b, 1)


@triton.jit
def few_kernel(
    x, stride, a, b, a_log, dt_bias, g, beta, columns,
    HEADS: tl.constexpr, HIDDEN: tl.constexpr, PART: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """A program is one head of STEPS columns; grid (heads, blocks of columns)."""
    head, column = tl.program_id(0), tl.program_id(1) * STEPS
    product_a, product_b = control_products(
        x, stride, a, b, head, column, columns - column, HIDDEN, PART, STEPS
    )
    decay, strength = controls(product_a, product_b, tl.load(a_log + head), tl.load(dt_bias + head))
    t = column + tl.arange(0, STEPS)
    tl.store(g + t * HEADS + head, decay, t < columns)
    tl.store(beta + t * HEADS + head, strength, t < columns)


@triton.jit
def many_kernel(
    x, stride, a, b, a_log, dt_bias, g, beta, columns,
    HEADS: tl.constexpr, HIDDEN: tl.constexpr, TILE: tl.constexpr, DEEP: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """A program is WIDE heads of TILE columns; grid (blocks of columns, blocks of heads)."""
    t = tl.program_id(0) * TILE + tl.arange(0, TILE)
    head = tl.program_id(1) * WIDE + tl.arange(0, WIDE)
    i = tl.arange(0, DEEP)
    rows = x + t.to(tl.int64)[:, None] * stride + i[None, :]
    place = head[None, :] * HIDDEN + i[:, None]
    product_a = tl.zeros((TILE, WIDE), tl.float32)
    product_b = tl.zeros((TILE, WIDE), tl.float32)
    for start in range(0, HIDDEN, DEEP):
        inside = start + i < HIDDEN
        part = tl.load(rows + start, (t < columns)[:, None] & inside[None, :], other=0.0)
        there = (head < HEADS)[None, :] & inside[:, None]
        product_a = dot(part, tl.load(a + place + start, there, other=0.0), product_a)
        product_b = dot(part, tl.load(b + place + start, there, other=0.0), product_b)
    log = tl.load(a_log + head, head < HEADS, other=0.0)[None, :]
    bias = tl.load(dt_bias + head, head < HEADS, other=0.0)[None, :]
    decay, strength = controls(product_a, product_b, log, bias)
    out = t[:, None] * HEADS + head[None, :]
    there = (t < columns)[:, None] & (head < HEADS)[None, :]
    tl.store(g + out, decay, there)
    tl.store(beta + out, strength, there)


def gdn_gating(
    x: torch.Tensor, a: Matrix, b: Matrix, a_log: torch.Tensor, dt_bias: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    return gating(x, a, b, a_log, dt_bias, x.shape[0] <= FEW)


def gating(
    x: torch.Tensor, a: Matrix, b: Matrix, a_log: torch.Tensor, dt_bias: torch.Tensor, few: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """`gdn_gating` by the named route."""
    dense_a, dense_b = check_gating(x, a, b, a_log, dt_bias)
    count, heads = x.shape[0], a.rows
    x = x if x.stride(1) == 1 else x.contiguous()
    g, beta = (torch.empty((count, heads), dtype=torch.float32, device=x.device) for _ in range(2))
    if few:
        few_kernel[(heads, triton.cdiv(count, STEPS.value))](
            x, x.stride(0), dense_a, dense_b, a_log, dt_bias, g, beta, count,
            HEADS=heads, HIDDEN=a.columns, PART=part_of(a.columns), STEPS=STEPS, num_warps=8,
        )  # fmt: skip
    else:
        many_kernel[(triton.cdiv(count, _TILE), triton.cdiv(heads, 16))](
            x, x.stride(0), dense_a, dense_b, a_log, dt_bias, g, beta, count,
            HEADS=heads, HIDDEN=a.columns, TILE=_TILE, DEEP=_DEEP, WIDE=16, num_warps=4, num_stages=4,
        )  # fmt: skip
    return g, beta


def part_of(hidden: int) -> int:
    """Elements of a column that the small product takes at a time."""
    return min(1024, triton.next_power_of_2(hidden))


def check_gating(
    x: torch.Tensor, a: Matrix, b: Matrix, a_log: torch.Tensor, dt_bias: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The dense bf16 rows of a and b, if everything fits."""
    heads = a.rows
    check_controls(a, b, a_log, dt_bias)
    if x.dtype != torch.bfloat16:
        raise OptionError(f"activations on the GPU are bfloat16, got {x.dtype}")
    dense = []
    for matrix in (a, b):
        plan = matrix.plan
        if (
            not isinstance(plan, torch.Tensor)
            or plan.shape != (heads, x.shape[1])
            or plan.dtype != torch.bfloat16
        ):
            raise OptionError(f"a gating projection must be placed as bf16 {(heads, x.shape[1])}")
        dense.append(plan)
    return dense[0], dense[1]


def specimens() -> Iterator[Specimen]:
    signature = {"x": "*bf16", "stride": "i32", "a": "*bf16", "b": "*bf16", "columns": "i32"}
    signature |= dict.fromkeys(("a_log", "dt_bias", "g", "beta"), "*fp32")
    yield Specimen(
        few_kernel, signature, {"HEADS": 48, "HIDDEN": 5120, "PART": 1024, "STEPS": 4}, {"num_warps": 8}
    )
    yield Specimen(
        many_kernel,
        signature,
        {"HEADS": 48, "HIDDEN": 5120, "TILE": _TILE, "DEEP": _DEEP, "WIDE": 16},
        {"num_warps": 4, "num_stages": 4},
    )
