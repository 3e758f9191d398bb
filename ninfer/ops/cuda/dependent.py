"""Triton kernels that start while the kernel ahead of them in the stream still runs (sm_90 and up).

A kernel started by `start` has a constant `EARLY`, calls `wait_for_previous(EARLY)` in every program before
it touches anything that other kernels write or read, and `allow_next(EARLY)` where the kernel behind it may
start. Ahead of the wait it may load constants: weights and tables, which no kernel writes. A program that
ended without waiting would let the kernel behind believe that all is done.

Where `allow_next` comes first, a kernel may run while one two places ahead of it still does, and no more is
known before its own wait. Behind a kernel that allows it after its wait (`embedding`, with which a pass of a
model begins), all that was launched before that one has ended.
"""

# pyright: reportUnreachable=false

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra import cuda

from ninfer.ops.cuda.compile import most_shared


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


@cache
def overlaps(device: torch.device) -> bool:
    """Can kernels start early on this device?"""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 9


_prepare = cache(most_shared)
"""Once for each loaded kernel."""


def start(kernel: Any, grid: tuple[int, ...], device: torch.device, *args: Any, **constants: Any) -> None:
    """Launch a kernel with a constant `EARLY` on `device`, early if it can."""
    early = overlaps(device)
    options = {"launch_pdl": True} if early else {}
    made = kernel[grid](*args, EARLY=early, **constants, **options)
    if early:
        _prepare(made.function)
