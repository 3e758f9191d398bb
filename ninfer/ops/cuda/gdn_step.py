"""The gated delta rule column by column on the GPU: decoding, verification with records, their fold, and what
a chunked call leaves over. Devices with clusters have their own kernels (`gdn_native`); this one runs
everywhere.

Roofline at 27B (48 value heads, 128 x 128): 3.1 MB of states read and written once a call: 1.5 us a request
and layer at 4.2 TB/s.

A program holds the state of one value head in registers over all columns of its request. A state's element
(row, k) is tiled as [k // 32, row, k % 32], so that eight threads share a row and a sum over k takes three
exchanges. With dk = S k and dq = S q of the old state both sums of a column run at once: the error is
`u = beta (v - alpha dk)`, the output `alpha dq + u (q.k)`.

There is one kernel whatever a call wants, so that a fold has the bits of the call whose columns it repeats.
"""

# pyright: reportArgumentType=false, reportIndexIssue=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl

from ninfer.errors import OptionError
from ninfer.ops.checks import check_delta_records, check_fold
from ninfer.ops.cuda import gdn_native
from ninfer.ops.cuda.bf16 import to_bf16, to_f32
from ninfer.ops.cuda.specimens import Specimen
from ninfer.ops.delta import DeltaRecords

_RUN_TIME = [
    "q_stride", "k_stride", "v_stride", "columns", "first", "record_rows", "shows", "records", "counted"
]  # fmt: skip
"""Arguments of which no special value makes another kernel."""


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
    """(u, alpha, the state after one column); k normalized, v [1, rows, 1], g and beta [1, 1, 1]."""
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


@triton.jit(do_not_specialize=_RUN_TIME)
def recurrence_kernel(
    q, k, v, q_stride, k_stride, v_stride, g, beta, states, sources, targets, counts, out,
    k_records, v_records, g_records, beta_records, columns, first, record_rows, shows, records, counted,
    HEADS: tl.constexpr, GROUP: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, JN: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """A program is one value head of one request; grid (heads, requests).

    Columns `first` and up of `columns` a request; if `counted` at most that many from the first. `shows`:
    outputs are wanted. `records`: columns are recorded and no state is written. What a call wants is known
    at run time only, so that all calls have the same code."""
    head, request = tl.program_id(0), tl.program_id(1)
    key_head = head // GROUP
    i = tl.arange(0, JN)[:, None, None] * 32 + tl.arange(0, 32)[None, None, :]
    row = tl.arange(0, ROWS)[None, :, None]
    one = tl.zeros((1, 1, 1), tl.int32)
    end = columns
    if counted != 0:
        end = tl.minimum(tl.load(counts + request), columns)
    if end > first:
        source = tl.load(sources + request)
        inside = (i < DK) & (row < DV)
        known = inside & (i < tl.where(source >= 0, DK, 0))
        state = tl.load(state_tile(states, source, head, HEADS, DK, DV, row, i), known, other=0.0)
        for column in range(first, end):
            t = (request * columns + column).to(tl.int64)
            raw_key = tl.load(k + t * k_stride + key_head * DK + i, i < DK, other=0.0)
            raw_query = tl.load(q + t * q_stride + key_head * DK + i, i < DK * shows, other=0.0)
            value = tl.load(v + t * v_stride + head * DV + row, row < DV, other=0.0)
            decay = tl.load(g + t * HEADS + head + one)
            strength = tl.load(beta + t * HEADS + head + one)
            key, query = unit(to_f32(raw_key), 1.0), unit(to_f32(raw_query), 1.0 / tl.sqrt(DK + 0.0))
            u, alpha, new = advance(state, key, to_f32(value), decay, strength)
            shown = output(state, key, query, u, alpha)
            tl.store(out + (t * HEADS + head) * DV + row, to_bf16(shown), row < DV * shows)
            state = new
            if records != 0:
                at = (request * record_rows + column).to(tl.int64)
                tl.store(v_records + (at * HEADS + head) * DV + row, value, row < DV)
                tl.store(g_records + at * HEADS + head + one, decay)
                tl.store(beta_records + at * HEADS + head + one, strength)
                if head % GROUP == 0:
                    place = k_records + (at * (HEADS // GROUP) + key_head) * DK + i
                    tl.store(place, raw_key, i < DK)
        if records == 0:
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
    if gdn_native.runs(states.device, heads, k.shape[1], width, width_v):
        gdn_native.run_columns(
            q, k, v, g, beta, states, source_slots, target_slots, out, first, records, counts
        )
        return
    # What is not wanted is given as something of its type, and neither read nor written.
    shows, query, shown = int(out is not None), k if q is None else q, v if out is None else out
    kept = (k, v, g, beta) if records is None else (records.k, records.v, records.g, records.beta)
    recurrence_kernel[(heads, requests)](
        query, k, v, query.stride(0), k.stride(0), v.stride(0), g, beta, states, source_slots, target_slots,
        source_slots if counts is None else counts, shown, *kept, v.shape[0] // requests, first,
        kept[2].shape[0] // requests, shows, int(records is not None), int(counts is not None),
        HEADS=heads, GROUP=heads // k.shape[1], DK=width, DV=width_v,
        JN=triton.next_power_of_2(triton.cdiv(width, 32)), ROWS=triton.next_power_of_2(width_v),
        num_warps=8 if width * width_v > 64 * 64 else 4,
    )  # fmt: skip


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
    """`check_delta_records`; kernels also need contiguous states."""
    check_delta_records(records, states, requests, columns)
    if not states.is_contiguous():
        raise OptionError("states must be contiguous")


def specimens() -> Iterator[Specimen]:
    types = dict.fromkeys(("q", "k", "v", "out", "k_records", "v_records"), "*bf16")
    types |= dict.fromkeys(("g", "beta", "states", "g_records", "beta_records"), "*fp32")
    types |= dict.fromkeys(("sources", "targets", "counts"), "*i32")
    names = [name for name in recurrence_kernel.arg_names if not name.isupper()]
    yield Specimen(
        recurrence_kernel,
        {name: types.get(name, "i32") for name in names},
        {"HEADS": 48, "GROUP": 3, "DK": 128, "DV": 128, "JN": 4, "ROWS": 128},
        {"num_warps": 8},
    )
