"""Query and key heads: norm, rotation, and appending keys and values to the pages, in one launch.

A program is one head of one column: a query head, or a key or value head. Roofline: every element is read and
written once; at T = 1 the launch and one chain of dependent operations count.

Positions and page tables are read while the kernel ahead may still run: see `dependent`.

Angles are exact fractions of a turn: a position times a 64-bit fixed-point frequency, modulo 2^64, of which
the upper half is taken. So they are as good at position 2^20 as at 1, without float64.

Reached on an H200 (2026-11-30, 24/4 heads of 256 in a graph): T = 1 in 2.0 us (int8; 3.0 without an early
start); T = 4,096 in 107 to 132 us.
"""

# pyright: reportArgumentType=false, reportIndexIssue=false, reportAttributeAccessIssue=false
# pyright: reportCallIssue=false, reportOperatorIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

import functools
from collections.abc import Iterator

import torch
import triton
import triton.language as tl

from ninfer.errors import OptionError
from ninfer.formats import KvFormat
from ninfer.formats.kv_codec import rotation_factor
from ninfer.ops.attention import KvPages
from ninfer.ops.checks import check_heads, side_by_side
from ninfer.ops.cuda.bf16 import to_bf16, to_f32
from ninfer.ops.cuda.dependent import allow_next, settled, start, wait_for_previous
from ninfer.ops.cuda.kv_codes import CODES, put_vector
from ninfer.ops.cuda.specimens import Specimen
from ninfer.ops.rope import Rope


@triton.jit
def _sines(turns):
    """float32 sine and cosine of int64 angles in units of 2^-64 turns: Taylor in the nearest quadrant."""
    angle = (turns >> 32).to(tl.int32)
    quadrant = ((angle >> 29) + 1) >> 1
    r = (angle - (quadrant << 30)).to(tl.float32) * 1.4629180792671596e-09  # 2 pi / 2^32
    z = r * r
    s = ((-1.9515295891e-4 * z + 8.3321608736e-3) * z - 1.6666654611e-1) * z * r + r
    c = (((2.443315711e-5 * z - 1.388731625e-3) * z + 4.166664568e-2) * z - 0.5) * z + 1.0
    swap = (quadrant & 1) != 0
    sine = tl.where(swap, c, s)
    cosine = tl.where(swap, s, c)
    sine = tl.where((quadrant & 2) != 0, -sine, sine)
    return sine, tl.where(((quadrant + 1) & 2) != 0, -cosine, cosine)


@triton.jit
def _gains(weight, d, partner, inside):
    """Of a vector and of its partners."""
    wa = to_f32(tl.load(weight + d, mask=inside, other=0.0)) + 1.0
    return wa, to_f32(tl.load(weight + partner, mask=inside, other=0.0)) + 1.0


@triton.jit
def _normed(a, b, wa, wb, eps, WIDTH: tl.constexpr):
    """A vector and its partners after the norm, rounded to bf16."""
    inverse = 1.0 / tl.sqrt(tl.sum(a * a, axis=0) / WIDTH + eps)
    return to_f32(to_bf16(a * inverse * wa)), to_f32(to_bf16(b * inverse * wb))


@triton.jit
def _prepare_kernel(
    q, k, v, out, positions, cache_positions, table, frequencies, axes, q_norm, k_norm,
    k_codes, k_scales, v_codes, v_scales,
    q_stride, k_stride, v_stride, axis_stride, table_stride, per_request, eps,
    Q_HEADS: tl.constexpr, K_HEADS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
    PAIRS: tl.constexpr, Q_NORM: tl.constexpr, K_NORM: tl.constexpr,
    K_CODE: tl.constexpr, K_ROTATED: tl.constexpr, V_CODE: tl.constexpr, V_ROTATED: tl.constexpr,
    FACTOR: tl.constexpr, K_BYTES: tl.constexpr, K_EACH: tl.constexpr, V_BYTES: tl.constexpr,
    V_EACH: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """`*_BYTES` and `*_EACH` are the entries of a vector in the code and scale planes."""
    allow_next(EARLY)
    head, t = tl.program_id(0), tl.program_id(1)
    d = tl.arange(0, BLOCK)
    inside = d < WIDTH
    # Dimension d turns with its partner; both are read, so nothing crosses lanes.
    turning = d < 2 * PAIRS
    partner = tl.where(d < PAIRS, d + PAIRS, tl.where(turning, d - PAIRS, d))
    pair = tl.where(d < PAIRS, d, tl.where(turning, d - PAIRS, 0))
    frequency, axis = tl.load(frequencies + pair), tl.load(axes + pair)
    if Q_NORM:
        q_a, q_b = _gains(q_norm, d, partner, inside)
    if K_NORM:
        k_a, k_b = _gains(k_norm, d, partner, inside)
    position = settled(positions + t + axis_stride * axis)
    place = settled(cache_positions + t)
    page = 0
    if place >= 0:
        page = settled(table + (t // per_request) * table_stride + (place >> 6))
    vector = (page.to(tl.int64) * 64 + (place & 63)) * K_HEADS
    sine, cosine = _sines(position.to(tl.int64) * frequency)
    wait_for_previous(EARLY)
    if head < Q_HEADS + K_HEADS:
        is_query = head < Q_HEADS
        if is_query:
            source = q + t.to(tl.int64) * q_stride + head * WIDTH
        else:
            source = k + t.to(tl.int64) * k_stride + (head - Q_HEADS) * WIDTH
        a = to_f32(tl.load(source + d, mask=inside, other=0.0))
        b = to_f32(tl.load(source + partner, mask=inside, other=0.0))
        if is_query:
            if Q_NORM:
                a, b = _normed(a, b, q_a, q_b, eps, WIDTH)
        else:
            if K_NORM:
                a, b = _normed(a, b, k_a, k_b, eps, WIDTH)
        turned = a * cosine + tl.where(d < PAIRS, -b, b) * sine
        y = to_bf16(tl.where(turning, turned, a))
        if is_query:
            tl.store(out + (t.to(tl.int64) * Q_HEADS + head) * WIDTH + d, y, mask=inside)
        elif place >= 0:
            vector += head - Q_HEADS
            put_vector(
                y, k_codes + vector * K_BYTES, k_scales + vector * K_EACH,
                K_CODE, K_ROTATED, FACTOR, WIDTH, BLOCK,
            )  # fmt: skip
    elif place >= 0:
        value = head - Q_HEADS - K_HEADS
        vector += value
        x = tl.load(v + t.to(tl.int64) * v_stride + value * WIDTH + d, mask=inside, other=0.0)
        put_vector(
            x, v_codes + vector * V_BYTES, v_scales + vector * V_EACH,
            V_CODE, V_ROTATED, FACTOR, WIDTH, BLOCK,
        )  # fmt: skip


def qk_prepare(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    positions: torch.Tensor,
    rope: Rope,
    q_norm: torch.Tensor | None,
    k_norm: torch.Tensor | None,
    eps: float,
    pages: KvPages,
    page_table: torch.Tensor,
    cache_positions: torch.Tensor,
) -> torch.Tensor:
    """`ninfer.ops.qk_prepare` for bf16."""
    columns, q_heads, width = q.shape
    k_heads = k.shape[1]
    check_heads(q, k, v, rope, positions, page_table, cache_positions)
    if q.dtype != torch.bfloat16:
        raise OptionError(f"activations on a GPU are bf16, got {q.dtype}")
    pages.check(k_heads, width, q.dtype)
    q, k, v = side_by_side(q), side_by_side(k), side_by_side(v)
    out = torch.empty((columns, q_heads, width), dtype=q.dtype, device=q.device)
    frequencies, axes = _turns(rope.rotary_dim, rope.theta, rope.sections, q.device)
    start(
        _prepare_kernel, (q_heads + 2 * k_heads, columns), q.device,
        q, k, v, out, positions, cache_positions, page_table, frequencies, axes,
        q if q_norm is None else q_norm, q if k_norm is None else k_norm,
        pages.k, pages.k if pages.k_scales is None else pages.k_scales,
        pages.v, pages.v if pages.v_scales is None else pages.v_scales,
        q.stride(0), k.stride(0), v.stride(0), positions.stride(0) if positions.dim() == 2 else 0,
        page_table.stride(0), columns // page_table.shape[0], eps,
        Q_HEADS=q_heads, K_HEADS=k_heads, PAIRS=rope.rotary_dim // 2, Q_NORM=q_norm is not None,
        K_NORM=k_norm is not None, **format_constants(pages.format, width), num_warps=1,
        enable_fp_fusion=False,
    )  # fmt: skip
    return out


@functools.cache
def format_constants(format: KvFormat, width: int) -> dict[str, int | float | bool]:
    """The constants of kernels that write vectors of `width` in this format."""
    keys, values = format.keys, format.values
    return {
        "WIDTH": width, "BLOCK": max(16, triton.next_power_of_2(width)),
        "K_CODE": CODES[keys.code], "K_ROTATED": keys.rotation(width),
        "V_CODE": CODES[values.code], "V_ROTATED": values.rotation(width),
        "FACTOR": 1.0 if width & (width - 1) else rotation_factor(width),
        "K_BYTES": keys.code.codes(width), "K_EACH": keys.code.scales(width),
        "V_BYTES": values.code.codes(width), "V_EACH": values.code.scales(width),
    }  # fmt: skip


@functools.lru_cache(maxsize=64)
def _turns(
    rotary_dim: int, theta: float, sections: tuple[int, int, int] | None, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Of each pair: the frequency in 2^-64 turns per position, modulo 2^64 (int64), and its axis (int32)."""
    rope = Rope(rotary_dim, theta, sections)
    quarters = rope.quarter_turns[: rotary_dim // 2].tolist()
    words = [int(quarter * 2.0**62) & (1 << 64) - 1 for quarter in quarters]  # a product with 2^62 is exact
    words = [word - (1 << 64) if word >> 63 else word for word in words]
    return torch.tensor(words, dtype=torch.int64, device=device), rope.axes.to(device)


def specimens() -> Iterator[Specimen]:
    planes = {
        KvFormat.BF16: ("*bf16", "*bf16", "*bf16", "*bf16"),
        KvFormat.INT8: ("*i8", "*fp16", "*i8", "*fp16"),
        KvFormat.FP8: ("*u8", "*fp16", "*u8", "*fp16"),
        KvFormat.NVFP4: ("*u8", "*u8", "*u8", "*u8"),
        KvFormat.K8V4: ("*u8", "*fp16", "*u8", "*u8"),
    }
    for format, (k_codes, k_scales, v_codes, v_scales) in planes.items():
        signature = {
            **dict.fromkeys(("q", "k", "v", "out"), "*bf16"),
            **dict.fromkeys(("positions", "cache_positions", "table"), "*i32"),
            "frequencies": "*i64", "axes": "*i32", "q_norm": "*bf16", "k_norm": "*bf16",
            "k_codes": k_codes, "k_scales": k_scales, "v_codes": v_codes, "v_scales": v_scales,
            **dict.fromkeys(
                ("q_stride", "k_stride", "v_stride", "axis_stride", "table_stride", "per_request"), "i32"
            ),
            "eps": "fp32",
        }  # fmt: skip
        constants = {
            "Q_HEADS": 24, "K_HEADS": 4, "PAIRS": 32, "Q_NORM": True, "K_NORM": True,
            **format_constants(format, 256),
        }  # fmt: skip
        options = {"num_warps": 1, "enable_fp_fusion": False}
        yield Specimen(_prepare_kernel, signature, constants, options)
