"""What a predictor's pass begins with: a row of the embedding table, and a hidden state, each normed.

Roofline: a launch, about 2 us. A program is one of both halves of a column; it decodes a row of the table as
`embedding` does, rounds it, and has all of it in registers. Like `embedding` it lets nobody in (see
`dependent`).
"""

# pyright: reportArgumentType=false, reportIndexIssue=false, reportAttributeAccessIssue=false
# pyright: reportCallIssue=false, reportOperatorIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl

from ninfer.errors import OptionError
from ninfer.ops.cuda.bf16 import to_bf16, to_f32
from ninfer.ops.cuda.decode import quad
from ninfer.ops.cuda.dependent import start, wait_for_previous
from ninfer.ops.cuda.embedding import Table, embedding
from ninfer.ops.cuda.norms import norm_pair
from ninfer.ops.cuda.packed import Order
from ninfer.ops.cuda.specimens import Specimen
from ninfer.ops.weights import Matrix

_WIDEST = 1 << 15


@triton.jit
def _gains(gain, column, inside):
    return (
        1.0 + to_f32(tl.load(gain + column, mask=inside, other=0.0)),
        1.0 + to_f32(tl.load(gain + column + 1, mask=inside, other=0.0)),
        1.0 + to_f32(tl.load(gain + column + 2, mask=inside, other=0.0)),
        1.0 + to_f32(tl.load(gain + column + 3, mask=inside, other=0.0)),
    )


@triton.jit
def _rounded(value, inside):
    return tl.where(inside, to_f32(to_bf16(value)), 0.0)


@triton.jit
def _put(target, v0, v1, v2, v3, w0, w1, w2, w3, eps, inside, WIDTH: tl.constexpr):
    """Four neighbouring numbers of a row for each lane, normed."""
    inverse = 1.0 / tl.sqrt(tl.sum(v0 * v0 + v1 * v1 + v2 * v2 + v3 * v3, axis=0) / WIDTH + eps)
    tl.store(target, to_bf16(v0 * inverse * w0), mask=inside)
    tl.store(target + 1, to_bf16(v1 * inverse * w1), mask=inside)
    tl.store(target + 2, to_bf16(v2 * inverse * w2), mask=inside)
    tl.store(target + 3, to_bf16(v3 * inverse * w3), mask=inside)


@triton.jit
def _stem_kernel(
    ids, data, factors, hidden, gain, hidden_gain, out, units, table, eps,
    WIDTH: tl.constexpr, KERNEL: tl.constexpr, UNIT_BYTES: tl.constexpr, STEPPED: tl.constexpr,
    BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    g, t = tl.arange(0, BLOCK), tl.program_id(0).to(tl.int64)
    column, inside = 4 * g, 4 * g < WIDTH
    if tl.program_id(1) == 0:
        w0, w1, w2, w3 = _gains(gain, column, inside)
        unit = tl.minimum(g // 16, units - 1)
        if STEPPED:
            j, q = (g // 4) % 4, g % 4
        else:
            j, q = g % 4, (g // 4) % 4
        wait_for_previous(EARLY)
        row = tl.minimum(tl.maximum(tl.load(ids + t).to(tl.int32), 0), table - 1)
        base = ((row // 16).to(tl.int64) * units + unit) * UNIT_BYTES
        v0, v1, v2, v3 = quad(data, factors, base, tl.zeros_like(g) + row, j, q, KERNEL, -1)
        v0, v1 = _rounded(v0, inside), _rounded(v1, inside)
        v2, v3 = _rounded(v2, inside), _rounded(v3, inside)
        _put(out + 2 * t * WIDTH + column, v0, v1, v2, v3, w0, w1, w2, w3, eps, inside, WIDTH)
    else:
        w0, w1, w2, w3 = _gains(hidden_gain, column, inside)
        wait_for_previous(EARLY)
        source = hidden + t * WIDTH + column
        v0, v1 = tl.load(source, mask=inside, other=0.0), tl.load(source + 1, mask=inside, other=0.0)
        v2, v3 = tl.load(source + 2, mask=inside, other=0.0), tl.load(source + 3, mask=inside, other=0.0)
        v0, v1, v2, v3 = to_f32(v0), to_f32(v1), to_f32(v2), to_f32(v3)
        _put(out + (2 * t + 1) * WIDTH + column, v0, v1, v2, v3, w0, w1, w2, w3, eps, inside, WIDTH)


def embedding_pair(
    ids: torch.Tensor,
    table: Matrix,
    hidden: torch.Tensor,
    gain: torch.Tensor,
    hidden_gain: torch.Tensor,
    eps: float,
) -> torch.Tensor:
    """`ninfer.ops.embedding_pair` for bf16; in one launch where the table's rows are of one format."""
    plan, (rows, width) = table.plan, hidden.shape
    if hidden.dtype != torch.bfloat16 or width != table.columns or len(ids) != rows:
        raise OptionError(
            f"hidden states {tuple(hidden.shape)} {hidden.dtype} do not fit {len(ids)} rows of a table of "
            f"{table.columns} columns; activations on a GPU are bf16"
        )
    if not gain.numel() == hidden_gain.numel() == width:
        raise OptionError(f"norms of {gain.numel()} and {hidden_gain.numel()} weights do not fit {width}")
    segment = factors = None
    if isinstance(plan, Table) and len(plan.packed.segments) == 1 and plan.lookups[0] is None:
        [segment], [factors] = plan.packed.segments, plan.factors
    if segment is None or segment.packing.kernel == "Dense" or width % 4 or width > _WIDEST:
        return norm_pair(embedding(ids, table), hidden, gain, hidden_gain, eps)
    packing, block = segment.packing, triton.next_power_of_2(width // 4)
    out = torch.empty((rows, 2 * width), dtype=hidden.dtype, device=hidden.device)
    start(
        _stem_kernel, (rows, 2), hidden.device,
        ids, segment.data, segment.data if factors is None else factors, hidden.contiguous(), gain,
        hidden_gain, out, segment.units, table.rows, eps,
        WIDTH=width, KERNEL=packing.kernel, UNIT_BYTES=packing.unit_bytes,
        STEPPED=packing.order == Order.STEPPED, BLOCK=block, num_warps=max(1, min(8, block // 128)),
    )  # fmt: skip
    return out


def specimens() -> Iterator[Specimen]:
    from ninfer.ops.cuda.pack import PACKINGS

    types = dict.fromkeys(("hidden", "gain", "hidden_gain", "out"), "*bf16")
    types |= {"ids": "*i32", "data": "*u8", "factors": "*fp32", "units": "i32", "table": "i32", "eps": "fp32"}
    for packing in PACKINGS.values():
        if packing.kernel != "Dense":
            constants = {
                "WIDTH": 5120, "KERNEL": packing.kernel, "UNIT_BYTES": packing.unit_bytes,
                "STEPPED": packing.order == Order.STEPPED, "BLOCK": 2048,
            }  # fmt: skip
            yield Specimen(_stem_kernel, types, constants, {"num_warps": 8})
