"""The gated delta rule in chunks of 64 columns on tensor cores.

Inside a chunk, with `G` the running sum of g, the recurrence is the unit lower triangular system
`(I + A) X = rhs`, `A[i, j] = beta_i (k_i.k_j) exp(G_i - G_j)` for j < i. `prepare_kernel` solves it for all
chunks at once:
    T = (I + A)^-1,  W = T (beta exp(G) k),  U = T (beta v),  P[i, j] = (q_i.k_j) exp(G_i - G_j) / sqrt(Dk)
and `scan_kernel` walks through the chunks of a head with the state S in registers:
    N = U - W S^T,  out = exp(G) S q / sqrt(Dk) + P N,  S = exp(G_last) S + sum exp(G_last - G_i) N_i k_i^T

Products take float16 operands (keys, queries, W and T are of the size of 1; values and states saturate) and
sum in float32: three bits more than bf16, which the criterion of the state needs; k.k and q.k take the exact
bf16 values. T is built from blocks of 1 to blocks of 64 by `[[X, 0], [-Z L X, Z]]`, the inverse of a block of
twice the size: only inverses are multiplied, so nothing cancels.

Roofline at 27B, 4,096 columns: 36 GFLOP and 16 of the inverses (0.07 ms at 790 TFLOP/s), scratch of 39 KB a
column written once and read once or twice.

Measured on an H200, 2026-11-30 (python -m bench.ops.gdn wide): 311 us for 4,096 columns, 18 us for 128.
"""

# pyright: reportArgumentType=false, reportIndexIssue=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl

from ninfer.ops.cuda.bf16 import to_bf16, to_f32
from ninfer.ops.cuda.gating import dot
from ninfer.ops.cuda.specimens import Specimen
from ninfer.ops.delta import CHUNK

_STRIP = 64
"""Rows of a state that a program of the scan holds."""


@triton.jit
def half(x):
    """float16, saturated."""
    return tl.minimum(tl.maximum(x, -65504.0), 65504.0).to(tl.float16)


@triton.jit
def doubled(inverse, system, i, j, SIZE: tl.constexpr):
    """From the inverses of the diagonal blocks of SIZE those of blocks of twice the size."""
    below = (i // (2 * SIZE) == j // (2 * SIZE)) & (i // SIZE > j // SIZE)
    link = tl.where(below, system, 0.0).to(tl.float16)
    x = inverse.to(tl.float16)
    return inverse - tl.dot(x, tl.dot(link, x).to(tl.float16))


@triton.jit
def prepare_kernel(
    q, k, v, q_stride, k_stride, v_stride, g, beta, units_q, units_k, w, u, p, sums, columns, chunks,
    HEADS: tl.constexpr, GROUP: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr,
    KEYS: tl.constexpr, VALUES: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """A program is one chunk of one value head; grid (chunks of all requests, heads)."""
    item, head = tl.program_id(0), tl.program_id(1)
    key_head = head // GROUP
    request, chunk = item // chunks, item % chunks
    step = tl.arange(0, CHUNK)
    i, j = step[:, None], step[None, :]
    t = (request * columns + chunk * CHUNK + step).to(tl.int64)
    c, d = tl.arange(0, KEYS)[None, :], tl.arange(0, VALUES)[None, :]
    key = tl.load(k + t[:, None] * k_stride + key_head * DK + c, c < DK, other=0.0)
    query = tl.load(q + t[:, None] * q_stride + key_head * DK + c, c < DK, other=0.0)
    decay = tl.cumsum(tl.load(g + t * HEADS + head), 0)
    strength = tl.load(beta + t * HEADS + head)
    wide = to_f32(key)
    norm_k = 1.0 / tl.sqrt(tl.sum(wide * wide, 1) + 1e-6)
    unit_k = (wide * norm_k[:, None]).to(tl.float16)
    wide = to_f32(query)
    norm_q = 1.0 / tl.sqrt(tl.sum(wide * wide, 1) + 1e-6)
    if head % GROUP == 0:
        place = (item * (HEADS // GROUP) + key_head).to(tl.int64) * CHUNK * KEYS + i * KEYS + c
        tl.store(units_k + place, unit_k)
        tl.store(units_q + place, (wide * norm_q[:, None]).to(tl.float16))
    # The difference is masked before its exponential, since above the diagonal it grows.
    ratio = tl.exp(tl.where(i >= j, decay[:, None] - decay[None, :], float("-inf")))
    none = tl.zeros((CHUNK, CHUNK), tl.float32)
    scores = dot(query, tl.trans(key), none) * ratio * (norm_q / tl.sqrt(DK + 0.0))[:, None] * norm_k[None, :]
    tile = (item * HEADS + head).to(tl.int64)
    tl.store(p + tile * CHUNK * CHUNK + i * CHUNK + j, half(scores))
    tl.store(sums + tile * CHUNK + step, decay)
    system = dot(key, tl.trans(key), none) * ratio * (norm_k * strength)[:, None] * norm_k[None, :]
    inverse = tl.where(i == j, 1.0, 0.0) - tl.where((i // 2 == j // 2) & (i > j), system, 0.0)
    inverse = doubled(inverse, system, i, j, 2)
    inverse = doubled(inverse, system, i, j, 4)
    inverse = doubled(inverse, system, i, j, 8)
    inverse = doubled(inverse, system, i, j, 16)
    inverse = doubled(inverse, system, i, j, 32)
    grown = strength * tl.exp(decay)
    result = tl.dot((inverse * grown[None, :]).to(tl.float16), unit_k)
    tl.store(w + tile * CHUNK * KEYS + i * KEYS + c, result.to(tl.float16))
    value = tl.load(v + t[:, None] * v_stride + head * DV + d, d < DV, other=0.0)
    result = tl.dot((inverse * strength[None, :]).to(tl.float16), half(to_f32(value)))
    tl.store(u + tile * CHUNK * VALUES + i * VALUES + d, half(result))


@triton.jit
def scan_kernel(
    units_q, units_k, w, u, p, sums, states, sources, targets, out, columns, chunks,
    HEADS: tl.constexpr, GROUP: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr,
    KEYS: tl.constexpr, VALUES: tl.constexpr, STRIP: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """A program is STRIP rows of one value head's state; grid (strips, heads, requests)."""
    head, request = tl.program_id(1), tl.program_id(2)
    step, c = tl.arange(0, CHUNK), tl.arange(0, KEYS)
    d = tl.program_id(0) * STRIP + tl.arange(0, STRIP)
    inside = (c < DK)[:, None] & (d < DV)[None, :]
    place = head.to(tl.int64) * (DV * DK) + d[None, :] * DK + c[:, None]
    source = tl.load(sources + request).to(tl.int64)
    target = tl.load(targets + request).to(tl.int64)
    known = inside & (c < tl.where(source >= 0, DK, 0))[:, None]
    state = tl.load(states + source * (HEADS * DV * DK) + place, known, other=0.0)
    for chunk in range(chunks):
        item = (request * chunks + chunk).to(tl.int64)
        tile, key_tile = item * HEADS + head, item * (HEADS // GROUP) + head // GROUP
        decay = tl.load(sums + tile * CHUNK + step)
        last = tl.load(sums + tile * CHUNK + CHUNK - 1)
        carried = tl.load(w + tile * CHUNK * KEYS + step[:, None] * KEYS + c[None, :])
        own = tl.load(u + tile * CHUNK * VALUES + step[:, None] * VALUES + d[None, :])
        memory = half(state)
        fresh = own.to(tl.float32) - tl.dot(carried, memory)
        query = tl.load(units_q + key_tile * CHUNK * KEYS + step[:, None] * KEYS + c[None, :])
        scores = tl.load(p + tile * CHUNK * CHUNK + step[:, None] * CHUNK + step[None, :])
        shown = tl.dot(query, memory) * (tl.exp(decay) / tl.sqrt(DK + 0.0))[:, None]
        shown = tl.dot(scores, half(fresh), shown)
        t = (request * columns + chunk * CHUNK + step).to(tl.int64)
        tl.store(
            out + (t[:, None] * HEADS + head) * DV + d[None, :], to_bf16(shown),
            (d < DV)[None, :] & (step >= 0)[:, None],
        )  # fmt: skip
        key = tl.load(units_k + key_tile * CHUNK * KEYS + step[None, :] * KEYS + c[:, None])
        state = tl.dot(key, half(fresh * tl.exp(last - decay)[:, None]), state * tl.exp(last))
    tl.store(states + target * (HEADS * DV * DK) + place, state, inside)


def run_chunks(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    states: torch.Tensor,
    source_slots: torch.Tensor,
    target_slots: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """The whole chunks of each request, from the source slots to the target slots; `out` gets their columns.

    `q`, `k` `[T, Hk, Dk]`, `v [T, Hv, Dv]` bf16 with heads side by side, `g`, `beta` float32 `[T, Hv]`.
    """
    requests, (heads, width_v, width) = source_slots.numel(), states.shape[1:]
    columns, key_heads = v.shape[0] // requests, k.shape[1]
    chunks = columns // CHUNK
    tiles, keys, values = requests * chunks * CHUNK, _padded(width), _padded(width_v)

    def scratch(*shape: int, dtype: torch.dtype = torch.float16) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=v.device)

    units_q, units_k = scratch(tiles, key_heads, keys), scratch(tiles, key_heads, keys)
    w, u, p = scratch(tiles, heads, keys), scratch(tiles, heads, values), scratch(tiles, heads, CHUNK)
    sums = scratch(tiles, heads, dtype=torch.float32)
    shape = {"HEADS": heads, "GROUP": heads // key_heads, "DK": width, "DV": width_v}
    shape |= {"KEYS": keys, "VALUES": values, "CHUNK": CHUNK}
    prepare_kernel[(requests * chunks, heads)](
        q, k, v, q.stride(0), k.stride(0), v.stride(0), g, beta, units_q, units_k, w, u, p, sums, columns,
        chunks, **shape, num_warps=4,
    )  # fmt: skip
    strip = min(_STRIP, values)
    scan_kernel[(values // strip, heads, requests)](
        units_q, units_k, w, u, p, sums, states, source_slots, target_slots, out, columns, chunks, **shape,
        STRIP=strip, num_warps=4, num_stages=2,
    )  # fmt: skip


def delta_net_bytes(columns: int, key_heads: int, value_heads: int, key_dim: int, value_dim: int) -> int:
    """Scratch of `gated_delta_net` for so many columns of a request: tiles of whole chunks."""
    whole, keys, values = columns // CHUNK * CHUNK, _padded(key_dim), _padded(value_dim)
    return whole * (4 * key_heads * keys + value_heads * (2 * (keys + values + CHUNK) + 4))


def _padded(width: int) -> int:
    return max(64, triton.next_power_of_2(width))


def specimens() -> Iterator[Specimen]:
    types = dict.fromkeys(("q", "k", "v", "out"), "*bf16")
    types |= dict.fromkeys(("units_q", "units_k", "w", "u", "p"), "*fp16")
    types |= dict.fromkeys(("g", "beta", "sums", "states"), "*fp32")
    types |= dict.fromkeys(("sources", "targets"), "*i32")
    shape = {"HEADS": 48, "GROUP": 3, "DK": 128, "DV": 128, "KEYS": 128, "VALUES": 128, "CHUNK": CHUNK}
    for kernel, constants, options in (
        (prepare_kernel, shape, {"num_warps": 4}),
        (scan_kernel, shape | {"STRIP": _STRIP}, {"num_warps": 4, "num_stages": 2}),
    ):
        names = [name for name in kernel.arg_names if not name.isupper()]
        yield Specimen(kernel, {name: types.get(name, "i32") for name in names}, constants, options)
