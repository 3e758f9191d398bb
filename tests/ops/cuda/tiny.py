"""Every kernel in CUDA C++ once on tiny inputs, checked: a program for compute-sanitizer.

    compute-sanitizer --tool racecheck python -m tests.ops.cuda.tiny [small] [attention] [recurrence] ...

Instrumented kernels are slow, so that shapes are as small as they can be while every format, both numbers of
token tiles, clusters of two blocks, norms in front and records occur.
"""

from __future__ import annotations

import importlib
import sys
from functools import cache

import torch

from ninfer.formats import KvFormat
from ninfer.ops import Matrix
from ninfer.ops.cuda.attend import gated_attention
from ninfer.ops.cuda.attend_wide import paged_attention_wide
from ninfer.ops.cuda.compile import Module
from ninfer.ops.cuda.packed import Packing
from ninfer.ops.cuda.small import Plan
from ninfer.ops.weights import Role
from tests.ops.criteria import LINEAR
from tests.ops.cuda.attention import CRITERIA, paged, positions_of, reference
from tests.ops.cuda.test_gdn import check_mix, check_records, make
from tests.ops.weights import random_weight

products = importlib.import_module("ninfer.ops.cuda.linear")
launches = importlib.import_module("ninfer.ops.cuda.small")
MODULE = launches.module
DEVICE = torch.device("cuda")
EPS = 1e-6
SHAPES = {
    **dict.fromkeys(("q4_g64_fp16", "q5_g64_fp16", "q6_g64_fp16", "q8_g32_fp16"), (40, 299)),
    **dict.fromkeys(("ggml_q4_1", "ggml_q4_0"), (40, 224)),
    "ggml_q5_k": (40, 768),
    "ggml_k": (40, 768),
    "fp8_e4m3fn_block128_bf16": (256, 384),
    "fp8_e4m3fn_row_bf16": (72, 1096),
    "bf16": (72, 1096),
    "nvfp4": (256, 1152),
}
FEW = {**SHAPES, "fp8_e4m3fn_row_bf16": (4000, 200), "nvfp4": (4096, 192)}
"""More tiles than there are blocks, so that buffers are used again."""
CLUSTERS = {"nvfp4": (256, 2304), "fp8_e4m3fn_row_bf16": (72, 2304), "ggml_k": (40, 2304)}
"""Columns for two blocks' warps."""


def products_of(format: str, rows: int, columns: int, *, norm: bool) -> None:
    encoded, values = random_weight(format, rows, columns)
    values = values.double().to(DEVICE)
    plain, gated = Matrix.of(encoded), Matrix.of(encoded)
    products.place(plain, DEVICE, Role.LINEAR)
    products.place(gated, DEVICE, Role.SWIGLU)
    gain = torch.randn(columns, device=DEVICE).bfloat16()
    for count in (1, 9):
        x = torch.randn(count, columns, device=DEVICE).bfloat16()
        residual = torch.randn(count, rows, device=DEVICE).bfloat16()
        exact = x.double() @ values.T
        LINEAR.check(products.linear(x, plain, residual), exact + residual.double())
        if norm:
            out, h = products.norm_linear(x, gain, EPS, True, plain)
            LINEAR.check(out, h.double() @ values.T)
            gate, up = ((x / 8).double() @ values.T).chunk(2, 1)
            both = gate * torch.sigmoid(gate) * up
            LINEAR.check(products.linear_swiglu(x / 8, gated), both)


def small() -> None:
    """`small.cuh`: plain with a residual; some formats behind a norm, with SwiGLU, with many tiles."""
    for format, shape in SHAPES.items():
        products_of(format, *shape, norm=format in CLUSTERS)
        if FEW[format] != shape:
            products_of(format, *FEW[format], norm=True)


def clusters() -> None:
    """`small.cuh` in clusters of two blocks."""
    for format, shape in CLUSTERS.items():
        products_of(format, *shape, norm=True)


def attention() -> None:
    """`attend_few.cuh` over splits and with masked columns; `attend_wide.cuh`."""
    for format in KvFormat:
        for width in (128, 256):
            cache = paged(format, 2, 3, 1, width, DEVICE)
            positions = positions_of([150, 66], 2, DEVICE)
            positions[3] = -1
            q = torch.randn(4, 3, width, device=DEVICE).bfloat16()
            gate = torch.randn(4, 3 * width, device=DEVICE).bfloat16()
            exact = reference(q, cache, positions, width**-0.5)
            out = gated_attention(q, gate, cache.pages, cache.table, positions, width**-0.5)
            scale = torch.sigmoid(gate.double()).view(4, 3, width)
            CRITERIA[format].check(out.view(4, 3, width), exact * scale)
    cache = paged(KvFormat.INT8, 1, 3, 1, 256, DEVICE)
    positions = positions_of([150], 20, DEVICE)
    q = torch.randn(20, 2, 256, device=DEVICE).bfloat16()
    out = paged_attention_wide(q, cache.pages, cache.table, positions, 1 / 16, 150)
    CRITERIA[KvFormat.INT8].check(out, reference(q, cache, positions, 1 / 16))


def recurrence() -> None:
    """`gdn_step.cuh`: mixers in clusters of two and eight blocks, records and their fold."""
    for geometry in ((1, 2, 64, 32), (1, 3, 128, 128)):
        for columns in (1, 3):
            call = make(geometry, 2, columns, DEVICE, hidden=64, fresh=columns == 3)
            check_mix(call)
            if geometry[2] == 64:
                check_records(call)


@cache
def arriving(packing: Packing, plan: Plan) -> Module:
    """A small product whose lanes all arrive at barriers, as racecheck wants it."""
    made = MODULE(packing, plan)
    return Module(made.source, {**made.defines, "EVERY_LANE": 1})


def main(names: list[str]) -> None:
    torch.manual_seed(0)
    launches.__dict__["module"] = arriving
    for part in (small, attention, recurrence, clusters):
        name = part.__name__
        if not names or name in names:
            part()
            torch.cuda.synchronize()
            print(f"{name}: right", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
