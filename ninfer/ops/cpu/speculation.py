"""Between the passes of a speculative round: a few integers and vectors, so what counts is the launch
itself."""

from __future__ import annotations

import torch

from ninfer.errors import OptionError
from ninfer.ops.cpu.access import kind_of, read_row, size_of, write_row
from ninfer.ops.cpu.block import argument, next_shared
from ninfer.ops.cpu.kernel import Kernel, bits, launch, threads
from ninfer.ops.cpu.normalize import inverse_rms
from ninfer.ops.cpu.simd import add, get_f64, get_i32, load_f32, mul, put_i32, splat, stack, store_f32

_PARALLEL = 1 << 14  # elements


def norm_pair_kernel(data):
    """An item is half a row. Arguments: 0 a, 1 b, 2 and 3 their gains, 4 out, 5 rows, 6 width, 7 kind, 8 and
    9 kinds of the gains, 10 eps."""
    out, rows, width, kind = argument(data, 4), argument(data, 5), argument(data, 6), argument(data, 7)
    eps, size = get_f64(data + 80), size_of(kind)
    row, factors = stack(4 * width + 64), stack(4 * width + 64)
    while True:
        item = next_shared(data, 1)
        if item >= 2 * rows:
            break
        half, t = item % 2, item // 2
        read_row(argument(data, 2 + half), argument(data, 8 + half), width, factors)
        read_row(argument(data, half) + t * width * size, kind, width, row)
        inverse = inverse_rms(row, width, eps)
        for start in range(0, width, 16):
            factor = add(load_f32(factors + 4 * start), splat(1))
            store_f32(row + 4 * start, mul(mul(load_f32(row + 4 * start), inverse), factor))
        write_row(row, out + item * width * size, kind, width)


def accept_kernel(data):
    """For one thread. Arguments: 0 drawn, 1 tokens, 2 positions, 3 rows, 4 width, 5 produced, 6 following, 7
    kept, 8 last."""
    drawn, tokens, positions = argument(data, 0), argument(data, 1), argument(data, 2)
    width = argument(data, 4)
    for row in range(argument(data, 3)):
        begin = row * width
        first = get_i32(positions + 4 * begin)
        count = 1
        while (
            count < width
            and get_i32(positions + 4 * (begin + count)) >= 0
            and get_i32(drawn + 4 * (begin + count - 1)) == get_i32(tokens + 4 * (begin + count))
        ):
            count += 1
        put_i32(argument(data, 5) + 4 * row, count)
        for column in range(width):
            token, position = 0, -1
            if column < count and first >= 0:
                token, position = max(get_i32(drawn + 4 * (begin + column)), 0), first + column
            put_i32(argument(data, 6) + 4 * (begin + column), token)
            put_i32(argument(data, 7) + 4 * (begin + column), position)
        put_i32(argument(data, 8) + 4 * row, first + count - 1 if first >= 0 else -1)


def count_drafts_kernel(data):
    """For one thread. Arguments: 0 tokens, 1 positions, 2 count rows, 3 requests, 4 width, 5 counts, 6 their
    row's length, 7 how many columns stand, or 0."""
    tokens, positions, rows, width = (
        argument(data, 0),
        argument(data, 1),
        argument(data, 2),
        argument(data, 4),
    )
    for request in range(argument(data, 3)):
        begin = request * width
        for column in range(begin, begin + width):
            row = get_i32(rows + 4 * column)
            if row < 0:
                continue
            for other in range(begin, begin + width):
                live = get_i32(positions + 4 * other) >= 0
                change = 1 if other <= column and live else 0
                if argument(data, 7):
                    wanted = 1 if other - begin < get_i32(argument(data, 7) + 4 * request) and live else 0
                    change = wanted - change
                if change != 0:
                    place = argument(data, 5) + 4 * (argument(data, 6) * row + get_i32(tokens + 4 * other))
                    put_i32(place, get_i32(place) + change)


def keep_last_kernel(data):
    """An item is a request. Arguments: 0 columns, 1 counts, 2 requests, 3 columns of each, 4 width, 5 kind, 6
    out, 7 states or 0, 8 slots."""
    columns, out, states = argument(data, 0), argument(data, 6), argument(data, 7)
    width, kind = argument(data, 4), argument(data, 5)
    bytes_ = width * size_of(kind)
    row = stack(4 * width + 64)
    while True:
        item = next_shared(data, 1)
        if item >= argument(data, 2):
            break
        count = get_i32(argument(data, 1) + 4 * item)
        read_row(columns + (item * argument(data, 3) + max(count, 1) - 1) * bytes_, kind, width, row)
        write_row(row, out + item * bytes_, kind, width)
        if states and count > 0:
            write_row(row, states + get_i32(argument(data, 8) + 4 * item) * bytes_, kind, width)


def next_draft_kernel(data):
    """For one thread. Arguments: 0 drawn, 1 positions, 2 limits, 3 rows, 4 drafts, 5 their row stride, 6
    step, 7 tokens, 8 new positions, 9 tokens of what was drawn or 0."""
    for row in range(argument(data, 3)):
        token, position = get_i32(argument(data, 0) + 4 * row), get_i32(argument(data, 1) + 4 * row)
        if token >= 0 and argument(data, 9):
            token = get_i32(argument(data, 9) + 4 * token)
        put_i32(argument(data, 4) + 4 * (row * argument(data, 5) + argument(data, 6)), max(token, -1))
        put_i32(argument(data, 7) + 4 * row, max(token, 0))
        ahead = -1
        if position >= 0 and position + 1 < get_i32(argument(data, 2) + 4 * row):
            ahead = position + 1
        put_i32(argument(data, 8) + 4 * row, ahead)


_norm_pair = Kernel(norm_pair_kernel)
_accept = Kernel(accept_kernel)
_count_drafts = Kernel(count_drafts_kernel)
_keep_last = Kernel(keep_last_kernel)
_next_draft = Kernel(next_draft_kernel)


def norm_pair(
    a: torch.Tensor, b: torch.Tensor, a_gain: torch.Tensor, b_gain: torch.Tensor, eps: float
) -> torch.Tensor:
    rows, width = a.shape
    if b.shape != a.shape or b.dtype != a.dtype or a_gain.numel() != width or b_gain.numel() != width:
        raise OptionError(f"{tuple(a.shape)} and {tuple(b.shape)} can't be normalized side by side")
    a, b = a.contiguous(), b.contiguous()
    out = torch.empty((rows, 2 * width), dtype=a.dtype)
    team = threads() if out.numel() > _PARALLEL else 1
    launch(
        _norm_pair.address, team, 0, a.data_ptr(), b.data_ptr(), a_gain.data_ptr(), b_gain.data_ptr(),
        out.data_ptr(), rows, width, kind_of(a), kind_of(a_gain), kind_of(b_gain), bits(eps),
    )  # fmt: skip
    return out


def accept(
    drawn: torch.Tensor, tokens: torch.Tensor, positions: torch.Tensor, produced: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    rows = produced.numel()
    following, kept = torch.empty_like(drawn), torch.empty_like(drawn)
    last = torch.empty(rows, dtype=torch.int32)
    launch(
        _accept.address, 1, 0, drawn.data_ptr(), tokens.data_ptr(), positions.data_ptr(), rows,
        drawn.numel() // rows, produced.data_ptr(), following.data_ptr(), kept.data_ptr(), last.data_ptr(),
    )  # fmt: skip
    return following, kept, last


def count_drafts(
    tokens: torch.Tensor,
    positions: torch.Tensor,
    count_rows: torch.Tensor,
    counts: torch.Tensor,
    rows: int,
    stand: torch.Tensor | None,
) -> None:
    launch(
        _count_drafts.address, 1, 0, tokens.data_ptr(), positions.data_ptr(), count_rows.data_ptr(), rows,
        tokens.numel() // rows, counts.data_ptr(), counts.shape[1], 0 if stand is None else stand.data_ptr(),
    )  # fmt: skip


def keep_last(
    columns: torch.Tensor,
    counts: torch.Tensor,
    states: torch.Tensor | None,
    target_slots: torch.Tensor | None,
) -> torch.Tensor:
    rows, width = counts.numel(), columns.shape[1]
    columns = columns.contiguous()
    out = torch.empty((rows, width), dtype=columns.dtype)
    slots = 0 if states is None or target_slots is None else target_slots.data_ptr()
    launch(
        _keep_last.address, 1, 0, columns.data_ptr(), counts.data_ptr(), rows, columns.shape[0] // rows,
        width, kind_of(columns), out.data_ptr(), states.data_ptr() if slots and states is not None else 0,
        slots,
    )  # fmt: skip
    return out


def next_draft(
    drawn: torch.Tensor,
    positions: torch.Tensor,
    limits: torch.Tensor,
    drafts: torch.Tensor,
    step: int,
    token_ids: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    tokens, ahead = torch.empty_like(drawn), torch.empty_like(drawn)
    launch(
        _next_draft.address, 1, 0, drawn.data_ptr(), positions.data_ptr(), limits.data_ptr(), drawn.numel(),
        drafts.data_ptr(), drafts.stride(0), step, tokens.data_ptr(), ahead.data_ptr(),
        0 if token_ids is None else token_ids.data_ptr(),
    )  # fmt: skip
    return tokens, ahead
