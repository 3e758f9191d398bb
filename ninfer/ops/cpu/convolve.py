"""The causal convolution: 16 channels at a time, every column read once.

Roofline: 4 bytes an element in bf16 plus the history; at T = 1 the call itself is what counts.
"""

from __future__ import annotations

import torch

from ninfer.ops.checks import check_conv_records, check_convolution, check_fold
from ninfer.ops.cpu.access import kind_of, load_some, size_of, store_some
from ninfer.ops.cpu.block import argument, next_shared
from ninfer.ops.cpu.functions import silu
from ninfer.ops.cpu.instructions import device
from ninfer.ops.cpu.kernel import Kernel, launch, threads
from ninfer.ops.cpu.simd import copy_bytes, fma, get_i32, load_f32, put_u8, stack, store_f32, zeros


@device
def _keep(source, columns, stride, count, past, row, bytes_, target):
    """The last `past` of a history (none: zeros) and `count` >= 1 columns after it become the target's
    history, `bytes_` of each; `stride` and `row` are bytes between columns and between rows of a history.
    In place rows only move forwards."""
    for j in range(past):
        place, old = target + row * j, j + count
        if old >= past:
            copy_bytes(place, columns + stride * (old - past), bytes_)
        elif source:
            copy_bytes(place, source + row * old, bytes_)
        else:
            for i in range(bytes_):
                put_u8(place + i, 0)


def convolution_kernel(data):
    """An item is 16 channels of one request.

    Arguments: 0 u, 1 its row stride, 2 weight, 3 states, 4 source slots, 5 target slots, 6 out, 7 requests, 8
    columns a request, 9 channels, 10 taps, 11 kind (u, states, out), 12 kind of the weight, 13 records or 0
    (then no target is written), 14 record rows a request. Strides count elements.
    """
    u, stride, weight, states = argument(data, 0), argument(data, 1), argument(data, 2), argument(data, 3)
    sources, targets, out = argument(data, 4), argument(data, 5), argument(data, 6)
    requests, columns, channels, taps = (
        argument(data, 7),
        argument(data, 8),
        argument(data, 9),
        argument(data, 10),
    )
    kind, weight_kind = argument(data, 11), argument(data, 12)
    records, record_rows = argument(data, 13), argument(data, 14)
    size = size_of(kind)
    past = taps - 1
    blocks = (channels + 15) // 16
    scratch, history, coefficients = stack(64), stack(64 * taps), stack(64 * taps)
    while True:
        item = next_shared(data, 1)
        if item >= requests * blocks:
            break
        request, channel = item // blocks, item % blocks * 16
        count = min(16, channels - channel)
        slot = get_i32(sources + 4 * request)
        source = states + size * (slot * past * channels + channel) if slot >= 0 else 0
        first = u + size * (request * columns * stride + channel)
        for j in range(taps):
            place = weight + size_of(weight_kind) * (j * channels + channel)
            store_f32(coefficients + 64 * j, load_some(place, weight_kind, count, scratch))
        for j in range(past):
            old = zeros()
            if source:
                old = load_some(source + size * j * channels, kind, count, scratch)
            store_f32(history + 64 * j, old)
        for t in range(columns):
            row = request * columns + t
            newest = load_some(first + size * t * stride, kind, count, scratch)
            if records:
                place = records + size * ((request * record_rows + t) * channels + channel)
                copy_bytes(place, first + size * t * stride, size * count)
            value = zeros()
            for j in range(past):
                old = load_f32(history + 64 * j)
                value = fma(load_f32(coefficients + 64 * j), old, value)
                if j:
                    store_f32(history + 64 * (j - 1), old)
            if past:
                store_f32(history + 64 * (past - 1), newest)
            value = silu(fma(load_f32(coefficients + 64 * past), newest, value))
            store_some(out + size * (row * channels + channel), kind, value, count, scratch)
        if records == 0:
            target = states + size * (get_i32(targets + 4 * request) * past * channels + channel)
            _keep(source, first, size * stride, columns, past, size * channels, size * count, target)


def fold_kernel(data):
    """An item is 16 channels of one request.

    Arguments: 0 records, 1 record rows a request, 2 counts, 3 states, 4 source slots, 5 target slots, 6
    requests, 7 channels, 8 history, 9 bytes of an element.
    """
    records, rows, counts, states = argument(data, 0), argument(data, 1), argument(data, 2), argument(data, 3)
    sources, targets, requests = argument(data, 4), argument(data, 5), argument(data, 6)
    channels, past, size = argument(data, 7), argument(data, 8), argument(data, 9)
    blocks = (channels + 15) // 16
    row = size * channels
    while True:
        item = next_shared(data, 1)
        if item >= requests * blocks:
            break
        request, channel = item // blocks, item % blocks * 16
        count = min(get_i32(counts + 4 * request), rows)
        if count <= 0:
            continue
        slot = get_i32(sources + 4 * request)
        source = states + row * slot * past + size * channel if slot >= 0 else 0
        target = states + row * get_i32(targets + 4 * request) * past + size * channel
        first = records + row * request * rows + size * channel
        _keep(source, first, row, count, past, row, size * min(16, channels - channel), target)


_convolution = Kernel(convolution_kernel)
_fold = Kernel(fold_kernel, "fold_conv")


def causal_conv(
    u: torch.Tensor,
    weight: torch.Tensor,
    conv_states: torch.Tensor,
    source_slots: torch.Tensor,
    target_slots: torch.Tensor,
    records: torch.Tensor | None,
) -> torch.Tensor:
    requests = source_slots.numel()
    columns, channels = u.shape
    taps = weight.shape[0]
    check_convolution(u, weight, conv_states, source_slots, target_slots, records)
    record_rows = 0 if records is None else records.shape[0] // requests
    if u.stride(1) != 1:
        u = u.contiguous()
    out = torch.empty((columns, channels), dtype=u.dtype)
    team = threads() if columns * channels > 1 << 12 else 1
    launch(
        _convolution.address, team, 0, u.data_ptr(), u.stride(0), weight.data_ptr(), conv_states.data_ptr(),
        source_slots.data_ptr(), target_slots.data_ptr(), out.data_ptr(), requests, columns // requests,
        channels, taps, kind_of(u), kind_of(weight), 0 if records is None else records.data_ptr(),
        record_rows,
    )  # fmt: skip
    return out


def fold_conv(
    records: torch.Tensor,
    counts: torch.Tensor,
    conv_states: torch.Tensor,
    source_slots: torch.Tensor,
    target_slots: torch.Tensor,
) -> None:
    requests = source_slots.numel()
    check_conv_records(records, conv_states, requests, 1)
    check_fold(counts, source_slots, target_slots)
    rows, channels = records.shape
    team = threads() if requests * channels > 1 << 12 else 1
    launch(
        _fold.address, team, 0, records.data_ptr(), rows // requests, counts.data_ptr(),
        conv_states.data_ptr(), source_slots.data_ptr(), target_slots.data_ptr(), requests, channels,
        conv_states.shape[1], records.element_size(),
    )  # fmt: skip
