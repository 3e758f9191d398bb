"""Products of many columns on the GPU, decoding by itself, and small products of the integer formats.

    python -m bench.ops.wide [--small] [--decode] [--wide] [--limits] [--gemm] [--warm]

Weights are random bytes in copies beyond the L2 cache; graphs of launches are replayed, medians count.
"""

# ruff: noqa: B023 - functions are called before their variables change
# pyright: reportPrivateImportUsage=false, reportArgumentType=false

from __future__ import annotations

import argparse
import functools
import itertools

import torch

from bench.ops.linear import Case, compile_all, kernels, measure, rotated, timed
from ninfer.ops.cuda import decode, wide
from ninfer.ops.cuda.pack import PACKINGS
from ninfer.ops.cuda.packed import Packed, Packing, Segment
from ninfer.ops.cuda.small import Mode
from ninfer.ops.weights import ActivationPolicy

GATE_UP, DOWN = Case(34816, 5120, Mode.SWIGLU), Case(5120, 17408, residual=True)
CASES = (Case(16384, 5120), Case(5120, 6144, residual=True), GATE_UP, DOWN)
PEAK = 750e12
"""bf16 operations a second of a library product here."""


def segment(packing: Packing, rows: int, columns: int) -> Segment:
    """Random small numbers."""
    tiles, units = -(-rows // 16), -(-columns // packing.unit_columns)
    data = torch.randint(0, 60, (tiles * units * packing.unit_bytes,), dtype=torch.uint8, device="cuda")
    scales = torch.full((16 * tiles,), 0.01, device="cuda") if packing.row_scaled else None
    return Segment(packing, "random", 0, rows, columns, data, scales)


def small_products(names: list[str], tokens: list[int]) -> None:
    """Microseconds and GB/s of weights on the small route."""
    for name, case in itertools.product(names, CASES):
        packing = PACKINGS[name]
        copies = rotated(packing, case)
        size = copies[0].bytes
        times = [measure(packing, case, t, copies) for t in tokens]
        cells = " ".join(
            f"T{n} {t:6.1f}us {size / t / 1000:5.0f}" for n, t in zip(tokens, times, strict=True)
        )
        print(f"{name:6} {case.name:24} {size / 1e6:6.1f}MB {cells}", flush=True)


def decoding(names: list[str]) -> None:
    """Panels by themselves."""
    for packing in (PACKINGS[name] for name in names):
        one, line = segment(packing, 34816, 5120), f"{packing.kernel:8}"
        forms = [decode.Form.WHOLE] + [decode.Form.CODES] * (packing.kernel == "Fp8Row")
        for form in forms:
            kind = torch.uint8 if form is decode.Form.CODES else torch.bfloat16
            out = torch.empty(34816, 5120, dtype=kind, device="cuda")
            us = timed(functools.partial(decode.panel, one, 0, one.tiles, out, form), 1, 5)
            size = out.numel() * out.element_size()
            line += f" {us:7.1f}us {size / us / 1e3:5.0f} GB/s written"
        print(line, flush=True)


def wide_products(names: list[str], tokens: list[int], limits: bool) -> None:
    """Whole products against the floor of the library's."""
    sizes = (
        ((192, 96), (192, 48), (192, 192), (96, 96), (48, 32))
        if limits
        else ((wide.PANEL >> 20, wide.PRODUCT >> 20),)
    )
    for name, case in itertools.product(names, (GATE_UP, DOWN)):
        one = segment(PACKINGS[name], case.rows, case.columns)
        packed = Packed(case.rows, case.columns, (one,), case.mode is Mode.SWIGLU)
        policy = ActivationPolicy.A8 if name == "Fp8Row" else ActivationPolicy.A16
        for count in tokens:
            x = torch.randn(count, case.columns, device="cuda").bfloat16()
            out = torch.empty(count, case.outputs, dtype=torch.bfloat16, device="cuda")
            residual = torch.zeros_like(out) if case.residual else None

            def run(x=x, out=out, residual=residual, packed=packed, policy=policy) -> None:
                if packed.interleaved:
                    wide.swiglu(x, packed, policy, out)
                else:
                    wide.linear(x, packed, policy, residual, out)

            work = 2 * count * case.rows * case.columns
            line = f"{name:6} {case.name:24} T {count:5}"
            before = wide.PANEL, wide.PRODUCT
            for panel, product in sizes if count > 1024 else sizes[:1]:
                wide.PANEL, wide.PRODUCT = panel << 20, product << 20
                us = timed(run, 1, 5)
                line += f" {panel}/{product}: {us:7.1f}us {work / us / 1e6:5.0f}TF"
            wide.PANEL, wide.PRODUCT = before
            print(f"{line}  floor {work / PEAK * 1e6:.0f}us", flush=True)


def products() -> None:
    """The library's products alone."""
    for rows, columns, count in (
        (34816, 5120, 4096),
        (5120, 17408, 4096),
        (34816, 5120, 512),
        (5120, 17408, 128),
    ):
        a = torch.randn(count, columns, device="cuda").bfloat16()
        b = torch.randn(rows, columns, device="cuda").bfloat16()
        c = torch.zeros(count, rows, device="cuda", dtype=torch.bfloat16)
        f = torch.empty(count, rows, device="cuda")
        e = torch.randint(0, 60, (count, columns), dtype=torch.uint8, device="cuda").view(torch.float8_e4m3fn)
        g = torch.randint(0, 60, (rows, columns), dtype=torch.uint8, device="cuda").view(torch.float8_e4m3fn)
        one = torch.ones((), device="cuda")
        line, work = f"mm [{rows},{columns}] T {count}:", 2 * count * rows * columns / 1e6
        for text, run in (
            ("bf16", lambda: torch.mm(a, b.t(), out=c)),
            ("f32", lambda: torch.mm(a, b.t(), out_dtype=torch.float32)),
            ("addmm", lambda: torch.addmm(c, a, b.t(), out=c)),
            (
                "fp8",
                lambda: torch._scaled_mm(e, g.t(), one, one, out_dtype=torch.float32, use_fast_accum=False),
            ),
            (
                "fp8fast",
                lambda: torch._scaled_mm(e, g.t(), one, one, out_dtype=torch.float32, use_fast_accum=True),
            ),
        ):
            line += f" {text} {work / timed(run, 1, 5):.0f}"
        us = timed(lambda: wide.finish.swiglu(f, c[:, : rows // 2], True), 1, 5)
        line += f" TF; swiglu {us:.1f}us {f.numel() * 5 / us / 1e3:.0f} GB/s"
        us = timed(lambda: wide.finish.finish(f, c, 0, c), 1, 5)
        line += f" finish {us:.1f}us {f.numel() * 8 / us / 1e3:.0f} GB/s"
        us = timed(lambda: wide.finish.quantize(a, columns), 1, 5)
        print(f"{line} quantize {us:.1f}us", flush=True)


def main() -> None:
    """Parse options, print tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", default="1,4,8,16,32,64")
    parser.add_argument("--columns", default="65,128,256,512,1024,4096")
    parser.add_argument("--formats", default="Q4K,Q6K,Q4G64,Q8G32")
    for name in ("small", "decode", "wide", "limits", "gemm", "warm"):
        parser.add_argument(f"--{name}", action="store_true")
    options = parser.parse_args()
    tokens, columns = ([int(t) for t in text.split(",")] for text in (options.tokens, options.columns))
    names = options.formats.split(",")
    if options.warm:
        compile_all([d for name in names for case in CASES for d in kernels(PACKINGS[name], case, tokens)])
    if options.decode:
        decoding(names)
    if options.gemm:
        products()
    if options.wide:
        wide_products([n for n in names if n in ("Nvfp4", "Q4K", "Fp8Row")], columns, options.limits)
    if options.small:
        small_products(names, tokens)


if __name__ == "__main__":
    main()
