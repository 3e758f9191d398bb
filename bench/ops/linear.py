"""Small products on the GPU: microseconds, GB/s, and the share of the read ceiling measured in the same run.

    python -m bench.ops.linear [--tokens 1,4,8] [--formats nvfp4,fp8,bf16] [--chain] [--warm]

Weights are random bytes, in copies that together exceed the L2 cache; a graph of launches is replayed, and
medians count.
"""

from __future__ import annotations

import argparse
import ctypes
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing import get_context
from statistics import median

import torch

from ninfer.ops.cuda import small
from ninfer.ops.cuda.compile import Module, architecture, compile_source
from ninfer.ops.cuda.packed import Order, Packed, Packing, Segment
from ninfer.ops.cuda.small import Mode, Norm, small_linear

PACKINGS = {
    "nvfp4": Packing("Nvfp4", Order.OWNED, 576, row_scaled=True),
    "fp8": Packing("Fp8Row", Order.OWNED, 1024, row_scaled=True),
    "bf16": Packing("Bf16", Order.OWNED, 2048),
}
CACHE = 128 << 20
"""Bytes that no weight comes back within."""


@dataclass(frozen=True)
class Case:
    rows: int
    columns: int
    mode: Mode = Mode.PLAIN
    residual: bool = False
    norm: bool = False

    @property
    def outputs(self) -> int:
        return self.rows // 2 if self.mode == Mode.SWIGLU else self.rows

    @property
    def name(self) -> str:
        parts = [f"[{self.rows},{self.columns}]"]
        parts += (
            ["norm"] * self.norm
            + [self.mode.name.lower()] * (self.mode != Mode.PLAIN)
            + ["+"] * self.residual
        )
        return " ".join(parts)


ATTENTION_IN, ATTENTION_OUT = Case(16384, 5120), Case(5120, 6144, residual=True)
GATE_UP, DOWN = Case(34816, 5120, Mode.SWIGLU), Case(5120, 17408, residual=True)
HEAD = Case(248320, 5120, Mode.LOGITS)
LAYER = (ATTENTION_IN, ATTENTION_OUT, GATE_UP, DOWN)


def weights(packing: Packing, case: Case) -> Packed:
    """Random bytes that decode to finite numbers of about one."""
    tiles, units = case.rows // 16, -(-case.columns // packing.unit_columns)
    data = torch.randint(0, 256, (tiles * units * packing.unit_bytes,), dtype=torch.uint8, device="cuda")
    if packing.kernel == "Bf16":
        data.view(torch.bfloat16).normal_()
    elif packing.kernel == "Nvfp4":
        scales = data.view(-1, packing.unit_bytes)[:, 512:]
        scales.copy_((scales & 15) + 22 * 8)
    elif packing.kernel == "Fp8Row":
        data &= 0xBF
    scales = torch.full((case.rows,), 0.01, device="cuda") if packing.row_scaled else None
    segment = Segment(packing, "random", 0, case.rows, case.columns, data, scales)
    return Packed(case.rows, case.columns, (segment,), case.mode == Mode.SWIGLU)


def timed(run: Callable[[], None], per_replay: int, replays: int = 15) -> float:
    """Median microseconds of one of `per_replay` launches."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    graph.replay()
    times = []
    for _ in range(replays):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1000 / per_replay)
    return median(times)


def ceiling() -> float:
    """GB/s of reading 4 GB."""
    data = torch.empty(1 << 30, dtype=torch.int32, device="cuda")
    data.random_()
    never = torch.zeros(1, dtype=torch.int32, device="cuda")
    function = Module("probe.cuh").function("read_all", data.device)
    count = ctypes.c_int64(data.numel() // 4)
    grid = 132 * 4
    micros = timed(lambda: function.launch((grid,), (512,), (data, count, never)), 1, 9)
    return data.numel() * 4 / micros / 1000


def measure(packing: Packing, case: Case, tokens: int, copies: Sequence[Packed]) -> float:
    """Microseconds of one product."""
    x = torch.randn((tokens, case.columns), device="cuda").bfloat16()
    gain = torch.ones(case.columns, device="cuda", dtype=torch.bfloat16)
    dtype = torch.float32 if case.mode == Mode.LOGITS else torch.bfloat16
    out = torch.zeros((tokens, case.outputs), dtype=dtype, device="cuda")
    norm = Norm(gain, 1e-6, False) if case.norm else None
    launches = max(len(copies), 16 // len(copies) * len(copies)) if case.rows < 100_000 else len(copies)

    def run() -> None:
        for i in range(launches):
            residual = out if case.residual else None
            small_linear(x, copies[i % len(copies)], out, mode=case.mode, residual=residual, norm=norm)

    return timed(run, launches)


def rotated(packing: Packing, case: Case) -> list[Packed]:
    one = weights(packing, case)
    more = 1 if one.bytes > 1 << 30 else -(-CACHE // one.bytes)
    return [one, *(weights(packing, case) for _ in range(more))]


def layer_chain(packing: Packing, tokens: int, fused: bool, layers: int = 4) -> float:
    """Microseconds of a layer's four products, each depending on the one before, in one graph."""
    stack = [[weights(packing, case) for case in LAYER] for _ in range(layers)]
    hidden = torch.randn((tokens, 5120), device="cuda").bfloat16()
    gain = torch.ones(5120, device="cuda", dtype=torch.bfloat16)
    norm = Norm(gain, 1e-6, False) if fused else None
    projected = torch.zeros((tokens, 16384), device="cuda", dtype=torch.bfloat16)
    mixed = torch.zeros((tokens, 6144), device="cuda", dtype=torch.bfloat16)
    middle = torch.zeros((tokens, 17408), device="cuda", dtype=torch.bfloat16)

    def run() -> None:
        for a, b, c, d in stack:
            small_linear(hidden, a, projected, norm=norm)
            small_linear(mixed, b, hidden, residual=hidden)
            small_linear(hidden, c, middle, mode=Mode.SWIGLU, norm=norm)
            small_linear(middle, d, hidden, residual=hidden)

    return timed(run, layers)


def kernels(packing: Packing, case: Case, tokens: Sequence[int]) -> list[dict[str, int | str]]:
    """Constants of the kernels that these products take."""
    device, units = small.device_of(0), case.columns // packing.unit_columns
    slices = small.divide(case.rows // 16, units, device)
    norms = (0, 1) if case in (ATTENTION_IN, GATE_UP) else (0,)
    made = [small.plan(packing, slices, units, t, norm, device) for t in tokens for norm in norms]
    return [small.module(packing, plan).defines for plan in made if plan is not None]


def _compile(job: tuple[dict, str]) -> None:
    compile_source("small.cuh", *job)


def compile_all(found: Sequence[dict[str, int | str]]) -> None:
    """Compile kernels in parallel."""
    jobs = [(defines, architecture(0)) for i, defines in enumerate(found) if defines not in found[:i]]
    with ProcessPoolExecutor(10, mp_context=get_context("spawn")) as pool:
        list(pool.map(_compile, jobs))
    print(f"{len(jobs)} kernels compiled")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", default="1,4,8")
    parser.add_argument("--formats", default="nvfp4,fp8,bf16")
    parser.add_argument("--chain", action="store_true")
    parser.add_argument("--head", action="store_true")
    parser.add_argument("--norm", action="store_true")
    parser.add_argument("--warm", action="store_true", help="only compile")
    options = parser.parse_args()
    tokens = [int(t) for t in options.tokens.split(",")]
    formats = options.formats.split(",")
    if options.warm:
        cases = (*LAYER, HEAD)
        compile_all([d for name in formats for case in cases for d in kernels(PACKINGS[name], case, tokens)])
        return
    peak = ceiling()
    print(f"read ceiling {peak:.0f} GB/s")

    def report(name: str, what: str, size: int, times: list[float]) -> None:
        cells = [f"{t:8.2f} us {size / t / 1000:5.0f} GB/s {size / t / peak / 10:5.1f} %" for t in times]
        print(f"{name:6} {what:28} {size / 1e6:7.1f} MB " + " |".join(cells), flush=True)

    for name in formats:
        packing = PACKINGS[name]
        cases = [*LAYER, *((replace(GATE_UP, norm=True),) if options.norm else ())]
        for case in [*cases, *((HEAD,) if options.head and name == "fp8" else ())]:
            copies = rotated(packing, case)
            size = copies[0].bytes
            report(name, case.name, size, [measure(packing, case, t, copies) for t in tokens])
            del copies
        if options.chain:
            total = sum(weights(packing, case).bytes for case in LAYER)
            for fused in (False, True):
                what = "layer" + (" with norms" if fused else "")
                report(name, what, total, [layer_chain(packing, t, fused) for t in tokens])


if __name__ == "__main__":
    main()
