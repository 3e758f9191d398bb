"""Attention of many columns, and the preparation of heads: 24 query heads, 4 key heads of 256.

    python -m bench.ops.prefill_attention [--formats bf16,int8] [--columns 4096,256] [--starts 0,81000]

Roofline: 4 x 256 x 24 operations a column and visible key, over the rate of a large bf16 product in the same
run; at few columns the bytes of keys and values. Pages are random and scattered.
"""

# pyright: reportCallIssue=false

from __future__ import annotations

import argparse

import torch

from bench.ops import ceiling
from bench.ops.table import Row, table
from bench.ops.timing import time_graph
from ninfer.formats import KvCode, KvFormat, KvSide
from ninfer.ops import PAGE, KvPages, Rope
from ninfer.ops.cuda.attend_wide import paged_attention_wide
from ninfer.ops.cuda.prepare import qk_prepare

HEADS, KV_HEADS, WIDTH = 24, 4, 256
BF16 = torch.bfloat16


def random_plane(side: KvSide, count: int) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Codes and scales of `count` pages whose numbers are of the order of one."""
    rows = (count, PAGE, KV_HEADS)
    if side.code is KvCode.PLAIN:
        return torch.randn((*rows, WIDTH), device="cuda", dtype=BF16), None
    codes = torch.randint(0, 127, (*rows, side.code.codes(WIDTH)), device="cuda", dtype=torch.uint8)
    codes |= torch.randint(0, 2, codes.shape, device="cuda", dtype=torch.uint8) << 7
    scales = (*rows, side.code.scales(WIDTH))
    if side.code is KvCode.NVFP4:
        return codes, torch.randint(40, 56, scales, device="cuda", dtype=torch.uint8)
    halves = (torch.rand(scales, device="cuda") / 64 + 1e-3).half()
    return (codes.view(torch.int8) if side.code is KvCode.INT8 else codes), halves


def random_pages(format: KvFormat, count: int) -> KvPages:
    (k, k_scales), (v, v_scales) = (random_plane(s, count) for s in (format.keys, format.values))
    return KvPages(format, k, v, k_scales, v_scales)


def vector_bytes(format: KvFormat) -> int:
    """Of a key and a value of all heads."""
    return KV_HEADS * sum(s.code.vector_bytes(WIDTH, 2) for s in (format.keys, format.values))


def matrix_rate() -> float:
    """TFLOP/s of a large bf16 product of random numbers."""
    a, b = (torch.randn(8192, 8192, device="cuda").to(BF16) for _ in range(2))
    return 2 * 8192**3 / time_graph([lambda: a @ b], launches=10) / 1e6


def attention(pages: KvPages, columns: int, start: int, rate: float) -> Row:
    keys = start + columns
    order = torch.randperm(len(pages.k), device="cuda")[: -(-keys // PAGE)].int()[None]
    positions = torch.arange(start, keys, device="cuda").int()
    q = torch.randn(2, columns, HEADS, WIDTH, device="cuda").to(BF16)
    calls = [lambda x=x: paged_attention_wide(x, pages, order, positions, WIDTH**-0.5, keys) for x in q]
    us = time_graph(calls, launches=2, replays=3, budget_s=0.05, warm=1)
    flops = 4 * WIDTH * HEADS * (columns * start + columns * (columns + 1) // 2)
    traffic = keys * vector_bytes(pages.format) + 4 * q[0].numel()
    note = f"{flops / us / 1e6 / rate:.1%} of the product"
    return Row(f"{pages.format} {columns} columns from {start}", us, traffic, flops, note)


def preparation(format: KvFormat, columns: int) -> Row:
    held = -(-columns // PAGE)
    heads = HEADS + 2 * KV_HEADS
    traffic = columns * ((HEADS * 2 + 2 * KV_HEADS) * WIDTH * 2 + vector_bytes(format))
    norm, rope = torch.randn(WIDTH, device="cuda").to(BF16), Rope(64, 1e7, (11, 11, 10))
    positions = torch.arange(columns, device="cuda").int()
    calls = []
    for _ in range(3 if columns > 64 else 20):
        wide = torch.randn(columns, heads * WIDTH, device="cuda").to(BF16).view(columns, heads, WIDTH)
        parts = wide.split((HEADS, KV_HEADS, KV_HEADS), 1)
        place = (random_pages(format, held), torch.randperm(held, device="cuda").int()[None], positions)
        calls.append(
            lambda parts=parts, place=place: qk_prepare(*parts, positions, rope, norm, norm, 1e-6, *place)
        )
    return Row(f"prepare {format} T {columns}", time_graph(calls, budget_s=0.05), traffic)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--formats", default="bf16,int8,nvfp4")
    parser.add_argument("--columns", default="4096,1024,256,17")
    parser.add_argument("--starts", default="0,20000,81000")
    options = parser.parse_args()
    columns, starts = ([int(n) for n in part.split(",")] for part in (options.columns, options.starts))
    torch.manual_seed(0)
    best, rate = ceiling.measure("cuda"), matrix_rate()
    print(torch.cuda.get_device_name(), best, f"product {rate:.0f} TFLOP/s", flush=True)
    rows = []
    for name in options.formats.split(","):
        format = KvFormat(name)
        pages = random_pages(format, -(-(max(starts) + max(columns)) // PAGE))
        rows += [attention(pages, count, start, rate) for count in columns for start in starts]
        del pages
        rows += [preparation(format, count) for count in (1, 4, 4096)]
    print(table(rows, best.read))


if __name__ == "__main__":
    main()
