"""The causal convolution on the GPU: elementwise over columns and channels, histories kept apart.

Roofline: 4 bytes an element in bf16 (84 MB in and 84 MB out for 4,096 columns of 10,240 channels: 40 us at
4.2 TB/s); the history is 6 bytes a channel and request.

A history may be advanced in place while other programs still read its old rows. Therefore whoever writes rows
of a history is the only one who reads them: the program of a request's first columns.

Measured on an H200, 2026-11-30 (python -m bench.ops.gdn wide): 75 us for 4,096 columns, 53 % of a copy.
"""

# pyright: reportArgumentType=false, reportIndexIssue=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl

from ninfer.errors import OptionError
from ninfer.ops.checks import check_conv_records, check_convolution, check_fold
from ninfer.ops.cuda.bf16 import to_bf16, to_f32
from ninfer.ops.cuda.specimens import Specimen

_WIDTH, _ROWS = 256, 16
"""Channels and columns of a program."""


@triton.jit
def silu(x):
    return x / (1.0 + tl.exp(-x))


@triton.jit
def kept_rows(
    columns, stride, count, states, source, channel, channels, PAST: tl.constexpr, PAST_ROWS: tl.constexpr
):
    """The last PAST rows of a history (`source` < 0: zeros) followed by `count` columns: a tile [PAST_ROWS,
    channels], and which of its elements there are."""
    j = tl.arange(0, PAST_ROWS)[:, None]
    inside = (j < PAST) & (channel < channels)[None, :]
    row = j + count - PAST
    new = tl.load(columns + row.to(tl.int64) * stride + channel[None, :], inside & (row >= 0), other=0.0)
    place = (source.to(tl.int64) * PAST + row + PAST) * channels + channel[None, :]
    old = tl.load(states + place, inside & (row < tl.where(source >= 0, 0, -PAST)), other=0.0)
    return tl.where(row >= 0, new, old), inside


@triton.jit
def convolution_kernel(
    u, stride, weight, states, sources, targets, out, records, columns, channels, record_rows,
    TAPS: tl.constexpr, PAST_ROWS: tl.constexpr, RECORD: tl.constexpr, ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
):  # fmt: skip
    """A program is WIDTH channels of ROWS columns of a request; grid (blocks of columns, requests, blocks of
    channels)."""
    PAST: tl.constexpr = TAPS - 1
    block, request = tl.program_id(0), tl.program_id(1)
    channel = tl.program_id(2) * WIDTH + tl.arange(0, WIDTH)
    there = (channel < channels)[None, :]
    source = tl.load(sources + request)
    t = block * ROWS + tl.arange(0, ROWS)[:, None]
    first = u + request.to(tl.int64) * columns * stride
    total = tl.zeros((ROWS, WIDTH), tl.float32)
    for j in tl.static_range(TAPS):
        row = t - PAST + j
        valid = there & (t < columns)
        x = tl.load(first + row.to(tl.int64) * stride + channel[None, :], valid & (row >= 0), other=0.0)
        if j < PAST:
            place = (source.to(tl.int64) * PAST + row + PAST) * channels + channel[None, :]
            old = tl.load(states + place, valid & (row < tl.where(source >= 0, 0, -PAST)), other=0.0)
            x = tl.where(row < 0, old, x)
        elif RECORD:
            at = (request * record_rows + t).to(tl.int64) * channels + channel[None, :]
            tl.store(records + at, x, valid)
        w = tl.load(weight + j * channels + channel, channel < channels, other=0.0)
        total = tl.fma(tl.broadcast_to(to_f32(w)[None, :], (ROWS, WIDTH)), to_f32(x), total)
    at = (request * columns + t).to(tl.int64) * channels + channel[None, :]
    tl.store(out + at, to_bf16(silu(total)), there & (t < columns))
    if not RECORD and PAST > 0:
        if block == 0:
            kept, inside = kept_rows(
                first, stride, columns, states, source, channel, channels, PAST, PAST_ROWS
            )
            tl.debug_barrier()  # the old rows have been read
            goal = tl.load(targets + request).to(tl.int64) * PAST + tl.arange(0, PAST_ROWS)[:, None]
            tl.store(states + goal * channels + channel[None, :], kept, inside)


@triton.jit
def history_kernel(
    columns, stride, rows, counts, states, sources, targets, channels,
    PAST: tl.constexpr, PAST_ROWS: tl.constexpr, COUNTS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Advance WIDTH channels of a request's history by the first `counts[request]` of its `rows` columns, or
    by all; grid (blocks of channels, requests)."""
    request = tl.program_id(1)
    channel = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    count = rows
    if COUNTS:
        count = tl.minimum(tl.load(counts + request), rows)
    if count > 0:
        source, target = tl.load(sources + request), tl.load(targets + request).to(tl.int64)
        first = columns + request.to(tl.int64) * rows * stride
        kept, inside = kept_rows(first, stride, count, states, source, channel, channels, PAST, PAST_ROWS)
        tl.debug_barrier()  # the old rows have been read
        row = tl.arange(0, PAST_ROWS)[:, None]
        tl.store(states + (target * PAST + row) * channels + channel[None, :], kept, inside)


def causal_conv(
    u: torch.Tensor,
    weight: torch.Tensor,
    conv_states: torch.Tensor,
    source_slots: torch.Tensor,
    target_slots: torch.Tensor,
    records: torch.Tensor | None,
) -> torch.Tensor:
    check_convolution(u, weight, conv_states, source_slots, target_slots, records)
    check_kernel(u, weight, conv_states)
    requests, (count, channels) = source_slots.numel(), u.shape
    columns, taps = count // requests, weight.shape[0]
    u = u if u.stride(1) == 1 else u.contiguous()
    out = torch.empty((count, channels), dtype=u.dtype, device=u.device)
    rows = min(_ROWS, triton.next_power_of_2(columns))
    convolution_kernel[(triton.cdiv(columns, rows), requests, triton.cdiv(channels, _WIDTH))](
        u, u.stride(0), weight, conv_states, source_slots, target_slots, out, records, columns, channels,
        0 if records is None else records.shape[0] // requests,
        TAPS=taps, PAST_ROWS=triton.next_power_of_2(max(taps - 1, 1)), RECORD=records is not None, ROWS=rows,
        WIDTH=_WIDTH, num_warps=4,
    )  # fmt: skip
    return out


def fold_conv(
    records: torch.Tensor,
    counts: torch.Tensor,
    conv_states: torch.Tensor,
    source_slots: torch.Tensor,
    target_slots: torch.Tensor,
) -> None:
    check_conv_records(records, conv_states, source_slots.numel(), 1)
    check_fold(counts, source_slots, target_slots)
    rows = records.shape[0] // source_slots.numel()
    advance_histories(records, rows, counts, conv_states, source_slots, target_slots)


def advance_histories(
    columns: torch.Tensor,
    rows: int,
    counts: torch.Tensor | None,
    conv_states: torch.Tensor,
    source_slots: torch.Tensor,
    target_slots: torch.Tensor,
) -> None:
    """Histories after the first `counts[b]` of `rows` raw columns of each request (None: after all)."""
    past, channels = conv_states.shape[1:]
    if past:
        history_kernel[(triton.cdiv(channels, _WIDTH), source_slots.numel())](
            columns, columns.stride(0), rows, counts, conv_states, source_slots, target_slots, channels,
            PAST=past, PAST_ROWS=triton.next_power_of_2(past), COUNTS=counts is not None, WIDTH=_WIDTH,
            num_warps=4,
        )  # fmt: skip


def check_kernel(u: torch.Tensor, weight: torch.Tensor, conv_states: torch.Tensor) -> None:
    """What the kernels need beside what the operator does."""
    if u.dtype != torch.bfloat16:
        raise OptionError(f"activations on the GPU are bfloat16, got {u.dtype}")
    if not conv_states.is_contiguous() or not weight.is_contiguous():
        raise OptionError("weights and histories of a convolution must be contiguous")


def specimens() -> Iterator[Specimen]:
    types = dict.fromkeys(("u", "weight", "states", "out", "records", "columns"), "*bf16")
    types |= dict.fromkeys(("sources", "targets", "counts"), "*i32")
    types |= dict.fromkeys(("stride", "rows", "channels", "record_rows"), "i32")
    for rows, record in ((1, True), (16, False)):
        yield Specimen(
            convolution_kernel,
            {name: types.get(name, "i32") for name in _arguments(convolution_kernel)} | {"columns": "i32"},
            {"TAPS": 4, "PAST_ROWS": 4, "RECORD": record, "ROWS": rows, "WIDTH": _WIDTH},
            {"num_warps": 4},
        )
    yield Specimen(
        history_kernel,
        {name: types[name] for name in _arguments(history_kernel)},
        {"PAST": 3, "PAST_ROWS": 4, "COUNTS": True, "WIDTH": _WIDTH},
        {"num_warps": 4},
    )


def _arguments(kernel: triton.JITFunction) -> list[str]:
    """Names of a kernel's arguments that are no constants."""
    return [name for name in kernel.arg_names if not name.isupper()]
