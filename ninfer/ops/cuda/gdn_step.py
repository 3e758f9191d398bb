"""The gated delta rule column by column on the GPU: decoding, verification with records, their fold, and what
a chunked call leaves over; for few columns the whole mixer in one kernel.

Roofline at 27B (48 value heads, 128 x 128): 3.1 MB of states read and written once a call, 1 MB of control
projections: 1.7 us a request and layer at 4.2 TB/s.

A program holds the state of one value head in registers over all columns of its request. A state's element
(row, k) is tiled as [k // 32, row, k % 32], so that eight threads share a row and a sum over k takes three
exchanges. With dk = S k and dq = S q of the old state both sums of a column run at once: the error is
`u = beta (v - alpha dk)`, the output `alpha dq + u (q.k)`.

One function advances states in every kernel and multiply-adds are explicit, so that a fold has the bits of the
call whose columns it repeats.
"""

# pyright: reportUnreachable=false

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl

from ninfer.errors import OptionError
from ninfer.ops.cuda.bf16 import to_bf16, to_f32
from ninfer.ops.cuda.convolve import check_fold, silu
from ninfer.ops.cuda.gating import STEPS, control_products, controls
from ninfer.ops.cuda.specimens import Specimen
from ninfer.ops.delta import RECORD_COLUMNS, DeltaRecords

TAPS = 4
"""The most taps of a convolution that the fused kernel holds."""


@triton.jit
def over_keys(x):
    """Sums of [JN, rows, 32] over k: [1, rows, 1]."""
    return tl.sum(tl.sum(x, 0, keep_dims=True), 2, keep_dims=True)


@triton.jit
def unit(x, factor):
    """`factor * x / sqrt(sum x^2 + 1e-6)` of one key or query [JN, 1, 32]."""
    return x * (factor / tl.sqrt(over_keys(x * x) + 1e-6))


@triton.jit
def advance(state, k, v, g, beta):
    """(dk, u, alpha) and the state after one column; keys normalized, v [1, rows, 1], g and beta [1, 1, 1]."""
    alpha = tl.exp(g)
    dk = over_keys(state * k)
    u = beta * (v - alpha * dk)
    shape: tl.constexpr = state.shape
    grown = alpha * state
    new = tl.fma(tl.broadcast_to(u, shape), tl.broadcast_to(k, shape), grown)
    return u, alpha, new


@triton.jit
def output(state, k, q, u, alpha):
    """What a column shows, [1, rows, 1], from the state before it."""
    return alpha * over_keys(state * q) + u * over_keys(k * q)


@triton.jit
def state_tile(states, slot, head, HEADS: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, row, i):
    """Addresses of a state's elements [JN, rows, 32]."""
    return states + (slot.to(tl.int64) * HEADS + head) * (DV * DK) + row * DK + i


@triton.jit
def recurrence_kernel(
    q, k, v, q_stride, k_stride, v_stride, g, beta, states, sources, targets, counts, out,
    k_records, v_records, g_records, beta_records, columns, first, record_rows,
    HEADS: tl.constexpr, GROUP: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, JN: tl.constexpr,
    ROWS: tl.constexpr, OUT: tl.constexpr, RECORD: tl.constexpr, COUNTS: tl.constexpr,
):  # fmt: skip
    """A program is ROWS rows of one value head of one request; grid (heads, requests, blocks of rows).

    Columns `first` and up of `columns` a request; with COUNTS at most that many from the first. OUT: outputs
    are wanted. RECORD: columns are recorded and no state is written."""
    head, request = tl.program_id(0), tl.program_id(1)
    key_head = head // GROUP
    i = tl.arange(0, JN)[:, None, None] * 32 + tl.arange(0, 32)[None, None, :]
    row = tl.program_id(2) * ROWS + tl.arange(0, ROWS)[None, :, None]
    end = columns
    if COUNTS:
        end = tl.minimum(tl.load(counts + request), columns)
    if end > first:
        source = tl.load(sources + request)
        inside = (i < DK) & (row < DV)
        state = tl.load(
            state_tile(states, source, head, HEADS, DK, DV, row, i), inside & (i < tl.where(source >= 0, DK, 0)), other=0.0
        )
        for column in range(first, end):
            t = (request * columns + column).to(tl.int64)
            raw_key = tl.load(k + t * k_stride + key_head * DK + i, i < DK, other=0.0)
            value = tl.load(v + t * v_stride + head * DV + row, row < DV, other=0.0)
            decay = tl.load(g + t * HEADS + head + tl.zeros((1, 1, 1), tl.int32))
            strength = tl.load(beta + t * HEADS + head + tl.zeros((1, 1, 1), tl.int32))
            key = unit(to_f32(raw_key), 1.0)
            u, alpha, new = advance(state, key, to_f32(value), decay, strength)
            if OUT:
                query = to_f32(tl.load(q + t * q_stride + key_head * DK + i, i < DK, other=0.0))
                shown = output(state, key, unit(query, 1.0 / tl.sqrt(DK + 0.0)), u, alpha)
                tl.store(out + (t * HEADS + head) * DV + row, to_bf16(shown), row < DV)
            state = new
            if RECORD:
                at = (request * record_rows + column).to(tl.int64)
                tl.store(v_records + (at * HEADS + head) * DV + row, value, row < DV)
                if tl.program_id(2) == 0:
                    tl.store(g_records + at * HEADS + head + tl.zeros((1, 1, 1), tl.int32), decay)
                    tl.store(beta_records + at * HEADS + head + tl.zeros((1, 1, 1), tl.int32), strength)
                    if head % GROUP == 0:
                        place = k_records + (at * (HEADS // GROUP) + key_head) * DK + i
                        tl.store(place, raw_key, i < DK)
        if not RECORD:
            target = tl.load(targets + request)
            tl.store(state_tile(states, target, head, HEADS, DK, DV, row, i), state, inside)


@triton.jit
def convolved(w0, w1, w2, w3, x0, x1, x2, x3):
    """Weights float32, columns from the oldest on; the result is rounded to bf16."""
    total = w0 * to_f32(x0)
    total = tl.fma(w1, to_f32(x1), total)
    total = tl.fma(w2, to_f32(x2), total)
    total = tl.fma(w3, to_f32(x3), total)
    return to_bf16(silu(total))


@triton.jit
def tap(weight, channel, valid, channels, TAPS: tl.constexpr, J: tl.constexpr):
    """Weight J of 4 of the channels; a shorter filter has none of the first ones."""
    if J >= 4 - TAPS:
        return to_f32(tl.load(weight + (J - 4 + TAPS) * channels + channel, valid, other=0.0))
    return tl.zeros(channel.shape, tl.float32)


@triton.jit
def past(states, source, channel, valid, channels, TAPS: tl.constexpr, J: tl.constexpr):
    """Column J of the 3 before a call."""
    if J >= 4 - TAPS:
        place = (source.to(tl.int64) * (TAPS - 1) + (J - 4 + TAPS)) * channels + channel
        return tl.load(states + place, valid & (channel < tl.where(source >= 0, channels, 0)), other=0.0)
    return tl.zeros(channel.shape, states.dtype.element_ty)


@triton.jit
def mix_kernel(
    qkv, qkv_stride, z, z_stride, h, h_stride, a, b, a_log, dt_bias, weight, norm, order,
    conv_states, states, sources, targets, out,
    conv_records, k_records, v_records, g_records, beta_records, columns, record_rows, eps,
    HEADS: tl.constexpr, GROUP: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, HIDDEN: tl.constexpr,
    TAPS: tl.constexpr, JN: tl.constexpr, ROWS: tl.constexpr, PART: tl.constexpr, STEPS: tl.constexpr,
    ORDER: tl.constexpr, RECORD: tl.constexpr,
):  # fmt: skip
    """A program is one value head of one request; grid (heads, requests). Histories are not advanced: other
    programs may still read them."""
    KEYS: tl.constexpr = HEADS // GROUP * DK
    CHANNELS: tl.constexpr = 2 * KEYS + HEADS * DV
    place, request = tl.program_id(0), tl.program_id(1)
    head = place
    if ORDER:
        head = tl.load(order + place)
    source = tl.load(sources + request)
    key_head = head // GROUP
    i = tl.arange(0, JN)[:, None, None] * 32 + tl.arange(0, 32)[None, None, :]
    row = tl.arange(0, ROWS)[None, :, None]
    in_key = i < DK
    in_row = row < DV
    inside = in_key & in_row
    state = tl.load(
        state_tile(states, source, head, HEADS, DK, DV, row, i), inside & (i < tl.where(source >= 0, DK, 0)), other=0.0
    )
    q_at, k_at, v_at = key_head * DK + i, KEYS + key_head * DK + i, 2 * KEYS + head * DV + row
    q0 = past(conv_states, source, q_at, in_key, CHANNELS, TAPS, 0)
    q1 = past(conv_states, source, q_at, in_key, CHANNELS, TAPS, 1)
    q2 = past(conv_states, source, q_at, in_key, CHANNELS, TAPS, 2)
    k0 = past(conv_states, source, k_at, in_key, CHANNELS, TAPS, 0)
    k1 = past(conv_states, source, k_at, in_key, CHANNELS, TAPS, 1)
    k2 = past(conv_states, source, k_at, in_key, CHANNELS, TAPS, 2)
    v0 = past(conv_states, source, v_at, in_row, CHANNELS, TAPS, 0)
    v1 = past(conv_states, source, v_at, in_row, CHANNELS, TAPS, 1)
    v2 = past(conv_states, source, v_at, in_row, CHANNELS, TAPS, 2)
    qw0 = tap(weight, q_at, in_key, CHANNELS, TAPS, 0)
    qw1 = tap(weight, q_at, in_key, CHANNELS, TAPS, 1)
    qw2 = tap(weight, q_at, in_key, CHANNELS, TAPS, 2)
    qw3 = tap(weight, q_at, in_key, CHANNELS, TAPS, 3)
    kw0 = tap(weight, k_at, in_key, CHANNELS, TAPS, 0)
    kw1 = tap(weight, k_at, in_key, CHANNELS, TAPS, 1)
    kw2 = tap(weight, k_at, in_key, CHANNELS, TAPS, 2)
    kw3 = tap(weight, k_at, in_key, CHANNELS, TAPS, 3)
    vw0 = tap(weight, v_at, in_row, CHANNELS, TAPS, 0)
    vw1 = tap(weight, v_at, in_row, CHANNELS, TAPS, 1)
    vw2 = tap(weight, v_at, in_row, CHANNELS, TAPS, 2)
    vw3 = tap(weight, v_at, in_row, CHANNELS, TAPS, 3)
    gain = to_f32(tl.load(norm + row, in_row, other=0.0))
    log, bias = tl.load(a_log + head), tl.load(dt_bias + head)
    step = tl.arange(0, STEPS)
    for begin in range(0, columns, STEPS):
        column = request * columns + begin
        count = tl.minimum(columns - begin, STEPS)
        product_a, product_b = control_products(h, h_stride, a, b, head, column, count, HIDDEN, PART, STEPS)
        decays, strengths = controls(product_a, product_b, log, bias)
        if RECORD:
            spot = (request * record_rows + begin + step) * HEADS + head
            tl.store(g_records + spot, decays, step < count)
            tl.store(beta_records + spot, strengths, step < count)
        for s in range(count):
            t = (column + s).to(tl.int64)
            fresh = qkv + t * qkv_stride
            q3 = tl.load(fresh + q_at, in_key, other=0.0)
            k3 = tl.load(fresh + k_at, in_key, other=0.0)
            v3 = tl.load(fresh + v_at, in_row, other=0.0)
            gate = to_f32(tl.load(z + t * z_stride + head * DV + row, in_row, other=0.0))
            raw_query = convolved(qw0, qw1, qw2, qw3, q0, q1, q2, q3)
            raw_key = convolved(kw0, kw1, kw2, kw3, k0, k1, k2, k3)
            value = convolved(vw0, vw1, vw2, vw3, v0, v1, v2, v3)
            if RECORD:
                at = (request * record_rows + begin + s).to(tl.int64)
                tl.store(conv_records + at * CHANNELS + v_at, v3, in_row)
                tl.store(v_records + (at * HEADS + head) * DV + row, value, in_row)
                if head % GROUP == 0:
                    tl.store(conv_records + at * CHANNELS + q_at, q3, in_key)
                    tl.store(conv_records + at * CHANNELS + k_at, k3, in_key)
                    tl.store(k_records + (at * (HEADS // GROUP) + key_head) * DK + i, raw_key, in_key)
            key = unit(to_f32(raw_key), 1.0)
            query = unit(to_f32(raw_query), 1.0 / tl.sqrt(DK + 0.0))
            decay = tl.sum(tl.where(step == s, decays, 0.0), 0)
            strength = tl.sum(tl.where(step == s, strengths, 0.0), 0)
            u, alpha, new = advance(state, key, to_f32(value), decay, strength)
            shown = to_f32(to_bf16(output(state, key, query, u, alpha)))
            state = new
            square = tl.sum(tl.where(in_row, shown * shown, 0.0), 1, keep_dims=True)
            y = shown * (1.0 / tl.sqrt(square / DV + eps)) * gain * silu(gate)
            tl.store(out + (t * HEADS + place) * DV + row, to_bf16(y), in_row)
            q0, q1, q2 = q1, q2, q3
            k0, k1, k2 = k1, k2, k3
            v0, v1, v2 = v1, v2, v3
    if not RECORD:
        target = tl.load(targets + request)
        tl.store(state_tile(states, target, head, HEADS, DK, DV, row, i), state, inside)


def run_columns(
    q: torch.Tensor | None,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    states: torch.Tensor,
    source_slots: torch.Tensor,
    target_slots: torch.Tensor,
    out: torch.Tensor | None,
    first: int,
    records: DeltaRecords | None = None,
    counts: torch.Tensor | None = None,
) -> None:
    """Columns `first` and up of every request (with `counts` that many from the first), from the source slots
    to the target slots or into records; heads of a row of q, k, v stand side by side."""
    requests, (heads, width_v, width) = source_slots.numel(), states.shape[1:]
    kept = (None,) * 4 if records is None else (records.k, records.v, records.g, records.beta)
    recurrence_kernel[(heads, requests, 1)](
        q, k, v, 0 if q is None else q.stride(0), k.stride(0), v.stride(0), g, beta, states, source_slots,
        target_slots, counts, out, *kept, v.shape[0] // requests, first,
        0 if records is None else records.g.shape[0] // requests,
        HEADS=heads, GROUP=heads // k.shape[1], DK=width, DV=width_v, **tiles(width, width_v),
        OUT=out is not None, RECORD=records is not None, COUNTS=counts is not None,
        num_warps=warps(width, width_v),
    )  # fmt: skip


def tiles(width: int, width_v: int) -> dict[str, int]:
    return {"JN": triton.next_power_of_2(triton.cdiv(width, 32)), "ROWS": triton.next_power_of_2(width_v)}


def warps(width: int, width_v: int) -> int:
    """Warps that hold a state, 64 registers of a thread at most."""
    return 8 if width * width_v > 64 * 64 else 4


def fold_delta_net(
    records: DeltaRecords,
    counts: torch.Tensor,
    states: torch.Tensor,
    source_slots: torch.Tensor,
    target_slots: torch.Tensor,
) -> None:
    check_records(records, states, source_slots.numel(), 1)
    check_fold(counts, source_slots, target_slots)
    k, v = records.k, records.v
    run_columns(
        None, k, v, records.g, records.beta, states, source_slots, target_slots, None, 0, None, counts
    )


def check_records(records: DeltaRecords, states: torch.Tensor, requests: int, columns: int) -> None:
    """Do the records fit the states, and have room for as many columns of each request?"""
    rows, v_heads = records.g.shape
    k, v = records.k, records.v
    if (
        v.shape != (rows, v_heads, states.shape[2])
        or k.shape[0] != rows
        or states.shape[1:] != (v_heads, v.shape[2], k.shape[2])
        or v_heads % k.shape[1]
        or records.beta.shape != records.g.shape
        or k.dtype != v.dtype
        or not records.g.dtype == records.beta.dtype == states.dtype == torch.float32
    ):
        raise OptionError(
            f"records of k {tuple(k.shape)} {k.dtype}, v {tuple(v.shape)} {v.dtype} and g {(rows, v_heads)} "
            f"{records.g.dtype} do not fit states {tuple(states.shape)}"
        )
    if not all(x.is_contiguous() for x in (k, v, records.g, records.beta, states)):
        raise OptionError("records and states must be contiguous")
    if columns > min(RECORD_COLUMNS, rows // requests):
        raise OptionError(
            f"records of {rows} columns hold up to {min(RECORD_COLUMNS, rows // requests)} of each of "
            f"{requests} requests, got {columns}"
        )


def specimens() -> Iterator[Specimen]:
    halves = ("q", "k", "v", "out", "k_records", "v_records", "qkv", "z", "h", "a", "b", "weight", "norm")
    types = dict.fromkeys((*halves, "conv_states", "conv_records"), "*bf16")
    types |= dict.fromkeys(("g", "beta", "states", "g_records", "beta_records", "a_log", "dt_bias"), "*fp32")
    types |= dict.fromkeys(("sources", "targets", "counts", "order"), "*i32") | {"eps": "fp32"}
    shape = {"HEADS": 48, "GROUP": 3, "DK": 128, "DV": 128, "JN": 4, "ROWS": 128}
    for kernel, constants in (
        (recurrence_kernel, {"OUT": True, "RECORD": True, "COUNTS": False}),
        (recurrence_kernel, {"OUT": False, "RECORD": False, "COUNTS": True}),
        (mix_kernel, {"HIDDEN": 5120, "TAPS": 4, "PART": 1024, "STEPS": STEPS.value, "ORDER": True, "RECORD": True}),
        (mix_kernel, {"HIDDEN": 5120, "TAPS": 4, "PART": 1024, "STEPS": STEPS.value, "ORDER": True, "RECORD": False}),
    ):
        names = [name for name in kernel.arg_names if not name.isupper()]
        signature = {name: types.get(name, "i32") for name in names}
        yield Specimen(kernel, signature, shape | constants, {"num_warps": 8})
