"""Elementwise control: the attention gate, and decay and strength of the delta rule."""

from __future__ import annotations

import math

import torch

from ninfer.errors import OptionError
from ninfer.ops.checks import check_controls
from ninfer.ops.cpu.access import FLOAT32, kind_of, read_row, size_of, write_row
from ninfer.ops.cpu.block import argument, next_shared
from ninfer.ops.cpu.functions import sigmoid
from ninfer.ops.cpu.kernel import Kernel, launch, threads
from ninfer.ops.cpu.plan import plan_of
from ninfer.ops.cpu.products import product
from ninfer.ops.cpu.simd import get_f32, load_f32, mul, put_f32, stack, store_f32
from ninfer.ops.weights import Matrix

_BLOCK = 1024
_PARALLEL = 1 << 13  # elements


def sigmoid_mul_kernel(data):
    """Arguments: 0 a, 1 gate, 2 out, 3 rows, 4 width, 5 kind, 6 row stride of gate in elements."""
    a, gate, out, rows = argument(data, 0), argument(data, 1), argument(data, 2), argument(data, 3)
    width, kind, stride = argument(data, 4), argument(data, 5), argument(data, 6)
    size = size_of(kind)
    values, gates = stack(4 * _BLOCK), stack(4 * _BLOCK)
    blocks = (width + _BLOCK - 1) // _BLOCK
    while True:
        item = next_shared(data, 1)
        if item >= rows * blocks:
            break
        row, begin = item // blocks, item % blocks * _BLOCK
        count = min(_BLOCK, width - begin)
        at = size * (row * width + begin)
        read_row(a + at, kind, count, values)
        read_row(gate + size * (row * stride + begin), kind, count, gates)
        for start in range(0, count, 16):
            value = mul(load_f32(values + 4 * start), sigmoid(load_f32(gates + 4 * start)))
            store_f32(values + 4 * start, value)
        write_row(values, out + at, kind, count)


def gating_kernel(data):
    """Arguments: 0 x A^T, 1 x B^T (both float32, replaced by g and beta), 2 a_log, 3 dt_bias, 4 columns, 5
    heads."""
    a, b, a_log, dt_bias = argument(data, 0), argument(data, 1), argument(data, 2), argument(data, 3)
    columns, heads = argument(data, 4), argument(data, 5)
    while True:
        t = next_shared(data, 1)
        if t >= columns:
            break
        for head in range(heads):
            at = 4 * (t * heads + head)
            # In double precision: softplus(s) = max(s, 0) + log1p(e^-|s|).
            s = get_f32(a + at) * 1.0 + get_f32(dt_bias + 4 * head)
            softplus = max(s, 0.0) + math.log1p(math.exp(-abs(s)))
            put_f32(a + at, -math.exp(get_f32(a_log + 4 * head) * 1.0) * softplus)
            put_f32(b + at, 1.0 / (1.0 + math.exp(-1.0 * get_f32(b + at))))


_sigmoid_mul = Kernel(sigmoid_mul_kernel)
_gating = Kernel(gating_kernel)


def sigmoid_mul(a: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    if gate.numel() != a.numel() or gate.dtype != a.dtype:
        raise OptionError(f"a gate {tuple(gate.shape)} {gate.dtype} does not fit {tuple(a.shape)} {a.dtype}")
    a = a.contiguous()
    rows = a.shape[0]
    width = a.numel() // rows
    stride = gate.stride(0)
    if not gate[0].is_contiguous():
        gate, stride = gate.contiguous(), width
    out = torch.empty_like(a)
    team = threads() if rows * width > _PARALLEL else 1
    launch(
        _sigmoid_mul.address, team, 0, a.data_ptr(), gate.data_ptr(), out.data_ptr(), rows, width, kind_of(a),
        stride,
    )  # fmt: skip
    return out


def gdn_gating(
    x: torch.Tensor, a: Matrix, b: Matrix, a_log: torch.Tensor, dt_bias: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    heads = a.rows
    check_controls(a, b, a_log, dt_bias)
    g, beta = (torch.empty((x.shape[0], heads), dtype=torch.float32) for _ in range(2))
    product(x, plan_of(a), g, FLOAT32, None, heads, exact=True)
    product(x, plan_of(b), beta, FLOAT32, None, heads, exact=True)
    team = threads() if g.numel() > 256 else 1
    launch(
        _gating.address, team, 0, g.data_ptr(), beta.data_ptr(), a_log.data_ptr(), dt_bias.data_ptr(),
        x.shape[0], heads,
    )  # fmt: skip
    return g, beta
