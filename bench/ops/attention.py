"""Attention of few columns over paged keys and values: 24 query heads, 4 key heads of 256.

    python -m bench.ops.attention [--formats int8,bf16] [--depths 128,85000] [--columns 1,4] [--requests 1,8]

Roofline: bytes of the keys and values below the depth, and of their scales, over the read ceiling that the
same run measures. Pages are random and scattered, and each launch reads other pages than the last ones.
"""

from __future__ import annotations

import argparse

import torch

from bench.ops import ceiling
from bench.ops.table import Row, table
from bench.ops.timing import copies, time_graph
from ninfer.formats import KvCode, KvFormat, KvSide
from ninfer.ops.attention import PAGE, KvPages
from ninfer.ops.cuda.attend_few import paged_attention_few

HEADS, KV_HEADS, WIDTH = 24, 4, 256
DEPTHS = (128, 1024, 8192, 32768, 85_000)


def random_plane(side: KvSide, count: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Codes and scales of `count` pages whose numbers are of the order of one."""
    rows = (count, PAGE, KV_HEADS)
    if side.code is KvCode.PLAIN:
        return torch.randn((*rows, WIDTH), device=device, dtype=torch.bfloat16), None
    codes = torch.randint(0, 127, (*rows, side.code.codes(WIDTH)), device=device, dtype=torch.uint8)
    codes |= torch.randint(0, 2, codes.shape, device=device, dtype=torch.uint8) << 7
    scales = (*rows, side.code.scales(WIDTH))
    if side.code is KvCode.NVFP4:
        return codes, torch.randint(40, 56, scales, device=device, dtype=torch.uint8)
    if side.code is KvCode.INT8:
        return codes.view(torch.int8), (torch.rand(scales, device=device) / 64 + 1e-3).half()
    return codes, (torch.rand(scales, device=device) / 64 + 1e-3).half()


def random_pages(format: KvFormat, count: int, device: torch.device) -> KvPages:
    (k, k_scales), (v, v_scales) = (random_plane(s, count, device) for s in (format.keys, format.values))
    return KvPages(format, k, v, k_scales, v_scales)


def bytes_of(format: KvFormat, keys: int) -> int:
    """What one request of so many keys reads."""
    return keys * KV_HEADS * sum(s.code.vector_bytes(WIDTH, 2) for s in (format.keys, format.values))


def measure(pages: KvPages, depth: int, columns: int, requests: int, attend=paged_attention_few) -> Row:
    """A row of the table; `pages` are enough for the requests."""
    device = pages.k.device
    per_table = -(-depth // PAGE)
    traffic = bytes_of(pages.format, depth) * requests
    sets = max(1, min(copies(traffic), len(pages.k) // (per_table * requests)))
    order = torch.randperm(len(pages.k), device=device)[: sets * requests * per_table].int()
    tables = order.view(sets, requests, per_table)
    q = torch.randn(sets, requests * columns, HEADS, WIDTH, device=device).bfloat16()
    positions = torch.arange(depth - columns, depth, device=device).int().repeat(requests)
    gate = torch.randn(requests * columns, HEADS * WIDTH, device=device).bfloat16()
    calls = [
        lambda x=x, t=t: attend(x, pages, t, positions, WIDTH**-0.5, gate)
        for x, t in zip(q, tables, strict=True)
    ]
    us = time_graph(calls, budget_s=0.04, launches=max(20, min(sets, 64)), warm=1)
    return Row(f"{pages.format} {depth} keys, T {columns}, B {requests}", us, traffic)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--formats", default=",".join(KvFormat))
    parser.add_argument("--depths", default=",".join(map(str, DEPTHS)))
    parser.add_argument("--columns", default="1,4")
    parser.add_argument("--requests", default="1,8")
    options = parser.parse_args()
    numbers = [
        [int(n) for n in part.split(",")] for part in (options.depths, options.columns, options.requests)
    ]
    depths, columns, requests = numbers
    torch.manual_seed(0)
    device = torch.device("cuda")
    best = ceiling.measure(device)
    print(torch.cuda.get_device_name(), best, flush=True)
    rows = []
    for format in options.formats.split(","):
        pages = random_pages(KvFormat(format), max(requests) * -(-max(depths) // PAGE) + 512, device)
        for b in requests:
            for t in columns:
                rows += [measure(pages, depth, t, b) for depth in depths]
        del pages
    print(table(rows, best.read))


if __name__ == "__main__":
    main()
