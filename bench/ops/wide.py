"""Products of many columns on the GPU, decoding by itself, and small products of the integer formats.

    python -m bench.ops.wide [--small] [--decode] [--wide] [--limits] [--warm]

Weights are random bytes in copies beyond the L2 cache; graphs or loops of launches, medians.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from statistics import median

import torch

from bench.ops.linear import Case, _compile, _use, measure, rotated
from ninfer.ops.cuda import decode, small, wide
from ninfer.ops.cuda.compile import architecture
from ninfer.ops.cuda.pack import PACKINGS
from ninfer.ops.cuda.packed import Packed, Packing, Segment
from ninfer.ops.cuda.small import Division, Mode
from ninfer.ops.weights import ActivationPolicy

GATE_UP, DOWN = Case(34816, 5120, Mode.SWIGLU), Case(5120, 17408, residual=True)
SMALL = (Case(16384, 5120), Case(5120, 6144, residual=True), GATE_UP, DOWN)
PEAK = 750e12
"""bf16 operations a second of a library product here."""


def divisions(packing: Packing, case: Case) -> Iterator[Division]:
    """Candidates: warps, groups, KB of rings, blocks a multiprocessor."""
    units = -(-case.columns // packing.unit_columns)
    for warps, groups, kilobytes, blocks in (
        (8, 1, 94, 2), (8, 2, 94, 2), (10, 1, 180, 1), (20, 1, 180, 1), (16, 1, 180, 1), (12, 1, 180, 1),
        (24, 1, 180, 1), (17, 2, 180, 1), (17, 4, 180, 1), (12, 2, 180, 1), (10, 2, 94, 2), (16, 2, 180, 1),
    ):  # fmt: skip
        length = -(-units // (groups * warps))
        if length * packing.unit_columns > 768 or length * groups * warps > 1.34 * units:
            continue
        copy = max(1, min(length, 4096 // packing.unit_bytes))
        copy = -(-length // -(-length // copy))
        copies = min(16, (kilobytes << 10) // (warps * copy * packing.unit_bytes))
        if copies > 1:
            yield Division(groups, warps, length, copy, copies, 2, blocks)


def elapsed(run: Callable[[], None], repeats: int = 5) -> float:
    """Median microseconds of a call."""
    run()
    times = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1000)
    return median(times)


def segment(packing: Packing, rows: int, columns: int) -> Segment:
    tiles, units = -(-rows // 16), -(-columns // packing.unit_columns)
    data = torch.randint(0, 60, (tiles * units * packing.unit_bytes,), dtype=torch.uint8, device="cuda")
    scales = torch.full((16 * tiles,), 0.01, device="cuda") if packing.row_scaled else None
    return Segment(packing, "random", 0, rows, columns, data, scales)


def small_products(names: list[str], tokens: list[int], variants: bool) -> None:
    for name, case in itertools.product(names, SMALL):
        packing = PACKINGS[name]
        copies = rotated(packing, case)
        size = copies[0].bytes
        times = [measure(packing, case, t, copies) for t in tokens]
        cells = " ".join(f"{t:7.1f}us {size / t / 1000:5.0f}GB/s" for t in times)
        print(f"{name:6} {case.name:24} {size / 1e6:6.1f}MB {cells}", flush=True)
        best = []
        for division in divisions(packing, case) if variants else ():
            _use(division)
            try:
                us = measure(packing, case, tokens[0], copies)
            except Exception as error:
                print("   ", division, type(error).__name__, str(error)[:80])
                continue
            finally:
                _use(None)
            d = division
            best.append(
                (us, f"w{d.warps} g{d.groups} ku{d.slice_units} c{d.copy_units}x{d.copies} b{d.blocks}")
            )
        print(
            "    " + "; ".join(f"{text} {size / us / 1000:.0f}" for us, text in sorted(best)[:6]), flush=True
        )
        del copies


def decoding() -> None:
    for packing in PACKINGS.values():
        if packing.kernel == "Dense":
            continue
        one = segment(packing, 34816, 5120)
        line = f"{packing.kernel:8}"
        for form in (
            (decode.Form.WHOLE, decode.Form.CODES) if packing.kernel == "Fp8Row" else (decode.Form.WHOLE,)
        ):
            kind = torch.bfloat16 if form is decode.Form.WHOLE else torch.uint8
            out = torch.empty(34816, 5120, dtype=kind, device="cuda")
            us = elapsed(lambda o=out, f=form: decode.panel(one, 0, one.tiles, o, f))
            size = out.numel() * out.element_size()
            line += f" {us:7.1f}us written {size / us / 1e3:5.0f} GB/s"
        print(line, flush=True)


def wide_products(names: list[str], limits: bool) -> None:
    for name in names:
        for case in (GATE_UP, DOWN):
            one = segment(PACKINGS[name], case.rows, case.columns)
            packed = Packed(case.rows, case.columns, (one,), case.mode is Mode.SWIGLU)
            policy = ActivationPolicy.A8 if name == "Fp8Row" else ActivationPolicy.A16
            for tokens in (128, 512, 1024, 4096):
                x = torch.randn(tokens, case.columns, device="cuda").bfloat16()
                out = torch.empty(tokens, case.outputs, dtype=torch.bfloat16, device="cuda")
                residual = torch.zeros_like(out) if case.residual else None

                def run(x=x, out=out, residual=residual, packed=packed, policy=policy) -> None:
                    if packed.interleaved:
                        wide.swiglu(x, packed, policy, out)
                    else:
                        wide.linear(x, packed, policy, residual, out)

                work = 2 * tokens * case.rows * case.columns
                line = f"{name:6} {case.name:24} T {tokens:5}"
                for panel, product in ((48, 32), (24, 16), (96, 64), (192, 192)) if limits else ((48, 32),):
                    wide.PANEL, wide.PRODUCT = panel << 20, product << 20
                    us = elapsed(run)
                    line += f" {panel}/{product}: {us:7.1f}us {work / us / 1e6:5.0f} TFLOP/s"
                print(f"{line}  floor {work / PEAK * 1e6:.0f}us", flush=True)
                wide.PANEL, wide.PRODUCT = 48 << 20, 32 << 20
    if not limits:
        return
    for fast in (False, True):
        for tokens in (1024, 4096):
            a = torch.randint(0, 60, (tokens, 5120), dtype=torch.uint8, device="cuda").view(
                torch.float8_e4m3fn
            )
            b = torch.randint(0, 60, (8192, 5120), dtype=torch.uint8, device="cuda").view(torch.float8_e4m3fn)
            s, t = torch.ones(tokens, 1, device="cuda"), torch.ones(1, 8192, device="cuda")
            one = torch.ones((), device="cuda")
            line = f"scaled_mm fast={fast} T {tokens}"
            for text, args, kind in (
                ("f32", (one, one), torch.float32),
                ("bf16", (one, one), torch.bfloat16),
                ("rows", (s, t), torch.bfloat16),
            ):
                try:
                    us = elapsed(
                        lambda: torch._scaled_mm(a, b.t(), *args, out_dtype=kind, use_fast_accum=fast)
                    )
                    line += f" {text} {2 * tokens * 8192 * 5120 / us / 1e6:.0f}"
                except Exception as error:
                    line += f" {text} {str(error)[:60]}"
            print(line)
    for rows, columns, tokens in (
        (8192, 5120, 4096),
        (34816, 5120, 4096),
        (5120, 17408, 4096),
        (5120, 6144, 4096),
        (8192, 5120, 512),
    ):
        a, b = (
            torch.randn(tokens, columns, device="cuda").bfloat16(),
            torch.randn(rows, columns, device="cuda").bfloat16(),
        )
        c = torch.zeros(tokens, rows, device="cuda", dtype=torch.bfloat16)
        work = 2 * tokens * rows * columns / 1e6
        us = [
            elapsed(lambda: torch.mm(a, b.t(), out=c)),
            elapsed(lambda: torch.mm(a, b.t(), out_dtype=torch.float32)),
            elapsed(lambda: torch.addmm(c, a, b.t(), out=c)),
        ]
        print(
            f"mm [{rows},{columns}] T {tokens}: bf16 {work / us[0]:.0f} float32 {work / us[1]:.0f} addmm {work / us[2]:.0f} TFLOP/s"
        )


def warm(names: list[str], tokens: list[int]) -> None:
    """Compile what small products need, in parallel."""
    defines = []
    for name, case in itertools.product(names, SMALL):
        packing = PACKINGS[name]
        units = -(-case.columns // packing.unit_columns)
        own = small.divide(packing, case.rows // 16, units, 132)
        for division in (own, *divisions(packing, case)):
            for tiles in {small.token_tiles(t) for t in (tokens if division == own else tokens[:1])}:
                made = small.module(packing, small._for_tokens(division, tiles), tiles).defines
                if made not in defines:
                    defines.append(made)
    with ProcessPoolExecutor(8, mp_context=get_context("spawn")) as pool:
        list(pool.map(_compile, [(made, architecture(0)) for made in defines]))
    print(f"{len(defines)} kernels compiled")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", default="1,4,8")
    parser.add_argument("--formats", default="Q4K,Q6K,Q4G64,Q8G32")
    for name in ("small", "variants", "decode", "wide", "limits", "warm"):
        parser.add_argument(f"--{name}", action="store_true")
    options = parser.parse_args()
    tokens, names = [int(t) for t in options.tokens.split(",")], options.formats.split(",")
    if options.warm:
        warm(names, tokens)
    if options.decode:
        decoding()
    if options.wide:
        wide_products(["Nvfp4", "Q4K", "Fp8Row"], options.limits)
    if options.small:
        small_products(names, tokens, options.variants)


if __name__ == "__main__":
    main()
