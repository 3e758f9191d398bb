"""RMS norms of hidden rows, of heads, and of gated heads.

    python -m bench.ops.norms

Roofline: 4 bytes an element (6 with a gate) over the read ceiling of the same run; at T = 1 the launch.
"""

from __future__ import annotations

import torch

from bench.ops import ceiling
from bench.ops.table import Row, table
from bench.ops.timing import copies, time_graph
from ninfer.ops.cuda.norms import gated_rms_norm, rms_norm

BF16 = torch.bfloat16
SHAPES = ((1, 5120), (4, 5120), (4096, 5120), (1, 2048), (4096, 2048), (4096, 3072), (24, 256), (98304, 256))


def plain(rows: int, width: int) -> Row:
    weight = torch.randn(width, device="cuda").to(BF16)
    count = copies(4 * rows * width, 3)
    inputs = [torch.randn(rows, width, device="cuda").to(BF16) for _ in range(count)]
    calls = [lambda x=x: rms_norm(x, weight, 1e-6, True) for x in inputs]
    return Row(f"norm {rows} x {width}", time_graph(calls, budget_s=0.1), 4 * rows * width)


def gated(columns: int, heads: int = 48, width: int = 128) -> Row:
    weight = torch.randn(width, device="cuda").to(BF16)
    order = torch.randperm(heads, device="cuda").int()
    elements = columns * heads * width
    calls = []
    for _ in range(copies(6 * elements, 3)):
        o = torch.randn(columns, heads, width, device="cuda").to(BF16)
        z = torch.randn(columns, heads * width, device="cuda").to(BF16)
        calls.append(lambda o=o, z=z: gated_rms_norm(o, z, weight, 1e-6, order))
    return Row(f"gated norm {columns} x {heads} x {width}", time_graph(calls, budget_s=0.1), 6 * elements)


def main() -> None:
    torch.manual_seed(0)
    best = ceiling.measure("cuda")
    print(torch.cuda.get_device_name(), best, flush=True)
    rows = [plain(*shape) for shape in SHAPES] + [gated(columns) for columns in (1, 4, 4096)]
    print(table(rows, best.read))


if __name__ == "__main__":
    main()
