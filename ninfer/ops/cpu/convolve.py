"""The causal convolution: 16 channels at a time, every column read once.

Roofline: 4 bytes an element in bf16 plus the history; at T = 1 the call itself is what counts.
"""

from __future__ import annotations

import torch

from ninfer.errors import OptionError
from ninfer.ops.cpu.access import kind_of, load_some, size_of, store_some
from ninfer.ops.cpu.block import argument, next_shared
from ninfer.ops.cpu.functions import silu
from ninfer.ops.cpu.kernel import Kernel, launch, threads
from ninfer.ops.cpu.simd import fma, get_i32, load_f32, stack, store_f32, zeros


def convolution_kernel(data):
    """An item is 16 channels of one request.

    Arguments: 0 u, 1 its row stride, 2 weight, 3 states, 4 source slots, 5 target slots, 6 out, 7 requests, 8
    columns a request, 9 channels, 10 taps, 11 kind (u, states, out), 12 kind of the weight. Strides count
    elements.
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
        source = states + size * (get_i32(sources + 4 * request) * past * channels + channel)
        target = states + size * (get_i32(targets + 4 * request) * past * channels + channel)
        for j in range(taps):
            place = weight + size_of(weight_kind) * (j * channels + channel)
            store_f32(coefficients + 64 * j, load_some(place, weight_kind, count, scratch))
        for j in range(past):
            place = source + size * j * channels
            store_f32(history + 64 * j, load_some(place, kind, count, scratch))
        for t in range(columns):
            row = request * columns + t
            newest = load_some(u + size * (row * stride + channel), kind, count, scratch)
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
        for j in range(past):
            place = target + size * j * channels
            store_some(place, kind, load_f32(history + 64 * j), count, scratch)


_convolution = Kernel(convolution_kernel)


def causal_conv(
    u: torch.Tensor,
    weight: torch.Tensor,
    conv_states: torch.Tensor,
    source_slots: torch.Tensor,
    target_slots: torch.Tensor,
) -> torch.Tensor:
    requests = source_slots.numel()
    columns, channels = u.shape
    taps = weight.shape[0]
    if weight.shape[1] != channels or conv_states.shape[1:] != (taps - 1, channels) or columns % requests:
        raise OptionError(
            f"convolution of {tuple(u.shape)} for {requests} requests does not fit "
            f"weights {tuple(weight.shape)} and states {tuple(conv_states.shape)}"
        )
    if conv_states.dtype != u.dtype or not source_slots.dtype == target_slots.dtype == torch.int32:
        raise OptionError(
            f"states must be {u.dtype} and slots int32, got {conv_states.dtype}, {source_slots.dtype}"
        )
    if u.stride(1) != 1:
        u = u.contiguous()
    out = torch.empty((columns, channels), dtype=u.dtype)
    team = threads() if columns * channels > 1 << 12 else 1
    launch(
        _convolution.address, team, 0, u.data_ptr(), u.stride(0), weight.data_ptr(), conv_states.data_ptr(),
        source_slots.data_ptr(), target_slots.data_ptr(), out.data_ptr(), requests, columns // requests,
        channels, taps, kind_of(u), kind_of(weight),
    )  # fmt: skip
    return out
