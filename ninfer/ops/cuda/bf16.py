"""Conversions of bf16 that are right in Triton's interpreter too, which truncates and flushes subnormals."""

# pyright: reportArgumentType=false, reportIndexIssue=false, reportAttributeAccessIssue=false, reportCallIssue=false

from __future__ import annotations

import triton
import triton.language as tl

INTERPRETED: tl.constexpr = tl.constexpr(bool(triton.knobs.runtime.interpret))


@triton.jit
def to_bf16(x):
    """float32 to nearest even; on a GPU one instruction."""
    if INTERPRETED:
        bits = x.to(tl.int32, bitcast=True)
        nearest = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        return tl.where(x == x, nearest, 0x7FC0).to(tl.int16).to(tl.bfloat16, bitcast=True)
    else:
        return x.to(tl.bfloat16)


@triton.jit
def to_f32(x):
    """Of bf16, exactly; float32 as it is."""
    if INTERPRETED:
        if x.dtype == tl.bfloat16:
            return (x.to(tl.int16, bitcast=True).to(tl.int32) << 16).to(tl.float32, bitcast=True)
        else:
            return x.to(tl.float32)
    else:
        return x.to(tl.float32)
