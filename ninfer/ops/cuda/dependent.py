"""Triton kernels that start while the kernel ahead of them in the stream still runs (sm_90 and up).

A kernel started by `start` has a constant `EARLY` and calls `wait_for_previous(EARLY)` in every program
before it touches anything that other kernels write or read; ahead of the wait it may load constants, weights
and tables which no kernel writes, and with `settled` what was complete before the kernel ahead began. A
program that ended without waiting would let the kernel behind believe that all is done.

`allow_next(EARLY)` lets the kernel behind start, once all programs have called it. It is not for kernels with
a product and its norm behind them: that has a block for each multiprocessor, and takes less than half of one;
let in beside small programs, two of its blocks may share a multiprocessor while another has none, and those
of the products that follow take their places.

Where `allow_next` comes before the wait, a kernel may run while one two places ahead of it still does. But a
pass of a model begins with `embedding`, a predictor's with `embedding_pair`, which let nobody in: behind
them, all that was launched before has ended. So positions and page tables, which no kernel of a pass writes,
are settled in all of them.
"""

# pyright: reportUnreachable=false

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra import cuda


@triton.jit
def wait_for_previous(EARLY: tl.constexpr):
    """The kernels ahead have ended, and their writes are visible."""
    if EARLY:
        cuda.gdc_wait()


@triton.jit
def allow_next(EARLY: tl.constexpr):
    """The kernel behind may start once all programs are here or have ended."""
    if EARLY:
        cuda.gdc_launch_dependents()


@triton.jit
def settled(pointer):
    """A number that is read ahead of the wait. Not from the L1 cache, which may remember older ones."""
    return tl.load(pointer, cache_modifier=".cg")


@cache
def overlaps(device: torch.device) -> bool:
    """Can kernels start early on this device?"""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 9


def start(kernel: Any, grid: tuple[int, ...], device: torch.device, *args: Any, **constants: Any) -> None:
    """Launch a kernel with a constant `EARLY` on `device`, early if it can."""
    early = overlaps(device)
    options = {"launch_pdl": True} if early else {}
    kernel[grid](*args, EARLY=early, **constants, **options)
