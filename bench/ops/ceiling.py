"""What the memory of this GPU gives: a kernel that only reads, and one that copies.

    python -m bench.ops.ceiling

Roofline: itself. The reading kernel makes 16-byte loads over buffers that rotate through more than 1 GB,
adds them up and writes one word a program; all other kernels are judged by the best rate that it reaches.
"""

# pyright: reportCallIssue=false, reportIndexIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false
from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from bench.ops.timing import time_graph

_BUFFERS, _BUFFER_BYTES = 4, 512 << 20
_SMALL_BYTES = 96 << 20
# (words a step and load, loads in flight, warps, programs per multiprocessor)
_SHAPES = ((1024, 4, 4, 8), (2048, 4, 8, 4), (1024, 8, 4, 8), (2048, 8, 8, 8), (4096, 4, 8, 4))


@dataclass(frozen=True)
class Ceiling:
    """GB/s (1e9 bytes a second). `read`: only reading, large buffers; `read_small`: launches of 100 MB, about
    a large matrix of weights, start and end included; `copy`: bytes read plus bytes written."""

    read: float
    read_small: float
    copy: float

    def __str__(self) -> str:
        return (
            f"read ceiling {self.read:,.0f} GB/s ({self.read_small:,.0f} in launches of 100 MB), "
            f"copy {self.copy:,.0f} GB/s"
        )


@triton.jit
def _read(x, out, words, BLOCK: tl.constexpr, LOADS: tl.constexpr):
    program, programs = tl.program_id(0).to(tl.int64), tl.num_programs(0)
    lane = tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.int32)
    for start in range(program * BLOCK * LOADS, words, programs * BLOCK * LOADS):
        for i in tl.static_range(LOADS):
            total += tl.load(x + start + i * BLOCK + lane, eviction_policy="evict_first")
    tl.store(out + program, tl.sum(total))


@triton.jit
def _copy(x, out, words, BLOCK: tl.constexpr, LOADS: tl.constexpr):
    program, programs = tl.program_id(0).to(tl.int64), tl.num_programs(0)
    lane = tl.arange(0, BLOCK)
    for start in range(program * BLOCK * LOADS, words, programs * BLOCK * LOADS):
        for i in tl.static_range(LOADS):
            at = start + i * BLOCK + lane
            tl.store(out + at, tl.load(x + at, eviction_policy="evict_first"), eviction_policy="evict_first")


def read(x: torch.Tensor, out: torch.Tensor, shape: tuple[int, int, int, int], processors: int) -> None:
    """Read all of `x` (int32); `out` int32 `[>= processors * shape[3]]` gets sums that keep the loads alive.

    The number of words is a multiple of `shape[0] * shape[1]`.
    """
    block, loads, warps, programs = shape
    if x.numel() % (block * loads):
        raise ValueError(f"{x.numel()} words are no multiple of {block * loads}")
    _read[(processors * programs,)](x, out, x.numel(), BLOCK=block, LOADS=loads, num_warps=warps)


def copy(x: torch.Tensor, out: torch.Tensor, shape: tuple[int, int, int, int], processors: int) -> None:
    """Copy `x` (int32, as in `read`) to `out` of its size."""
    block, loads, warps, programs = shape
    _copy[(processors * programs,)](x, out, x.numel(), BLOCK=block, LOADS=loads, num_warps=warps)


def measure(device: torch.device | str = "cuda", *, budget_s: float = 0.12) -> Ceiling:
    """Ceilings of `device`; takes about two seconds and 2 GiB."""
    device = torch.device(device)
    with torch.cuda.device(device):
        processors = torch.cuda.get_device_properties(device).multi_processor_count
        words = _BUFFER_BYTES // 4
        buffers = [torch.empty(words, dtype=torch.int32, device=device).random_() for _ in range(_BUFFERS)]
        out = torch.empty(processors * 32, dtype=torch.int32, device=device)
        small = [
            b[i : i + _SMALL_BYTES // 4]
            for b in buffers
            for i in range(0, words - _SMALL_BYTES // 4 + 1, _SMALL_BYTES // 4)
        ]

        def best(parts: list[torch.Tensor]) -> float:
            times = [
                time_graph(
                    [lambda x=x, s=shape: read(x, out, s, processors) for x in parts],
                    launches=8,
                    budget_s=budget_s,
                )
                for shape in _SHAPES
            ]
            return parts[0].numel() * 4 / min(times) / 1e3

        half = len(buffers) // 2
        pairs = list(zip(buffers[:half], buffers[half:], strict=True))
        copying = [
            time_graph(
                [lambda a=a, b=b, s=shape: copy(a, b, s, processors) for a, b in pairs],
                launches=4,
                budget_s=budget_s / 2,
            )
            for shape in _SHAPES
        ]
        return Ceiling(best(buffers), best(small), 2 * _BUFFER_BYTES / min(copying) / 1e3)


if __name__ == "__main__":
    print(f"{torch.cuda.get_device_name()}: {measure()}")
