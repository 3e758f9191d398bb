"""Between the passes of a speculative round: a few integers and vectors, so what counts is the launch
itself."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ninfer.errors import OptionError
from ninfer.ops.cpu.access import kind_of, read_row, size_of, write_row
from ninfer.ops.cpu.block import argument, next_shared
from ninfer.ops.cpu.choose import find_best
from ninfer.ops.cpu.instructions import device
from ninfer.ops.cpu.kernel import Kernel, bits, launch, threads
from ninfer.ops.cpu.normalize import inverse_rms
from ninfer.ops.cpu.simd import (
    add,
    copy_bytes,
    get_f32,
    get_f64,
    get_i32,
    load_f32,
    mul,
    put_i32,
    splat,
    stack,
    store_f32,
)

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


@device
def add_drafts(rows, tokens, positions, counts, size, begin, width, stand):
    """In a request's rows of counts, of one column each, count its tokens up to the column; or, with `stand`,
    the first so many instead."""
    for column in range(begin, begin + width):
        row = get_i32(rows + 4 * column)
        if row < 0:
            continue
        for other in range(begin, begin + width):
            if get_i32(positions + 4 * other) < 0:
                continue
            change = 1 if other <= column else 0
            if stand:
                change = (1 if other < begin + stand else 0) - change
            if change != 0:
                place = counts + 4 * (size * row + get_i32(tokens + 4 * other))
                put_i32(place, get_i32(place) + change)


def accept_kernel(data):
    """For one thread. Arguments: 0 drawn, 1 tokens, 2 positions, 3 rows, 4 width, 5 produced, 6 following, 7
    kept, 8 last; 9 count rows, 10 counts or 0, 11 their row's length; 12 hidden, 13 their row's bytes, 14
    states or 0, 15 slots."""
    drawn, tokens, positions = argument(data, 0), argument(data, 1), argument(data, 2)
    width, counts, size = argument(data, 4), argument(data, 10), argument(data, 13)
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
        if counts:
            add_drafts(argument(data, 9), tokens, positions, counts, argument(data, 11), begin, width, count)
        if argument(data, 14):
            slot = get_i32(argument(data, 15) + 4 * row)
            copy_bytes(
                argument(data, 14) + slot * size, argument(data, 12) + (begin + count - 1) * size, size
            )


def count_drafts_kernel(data):
    """For one thread. Arguments: 0 tokens, 1 positions, 2 count rows, 3 requests, 4 width, 5 counts, 6 their
    row's length."""
    width = argument(data, 4)
    for request in range(argument(data, 3)):
        add_drafts(
            argument(data, 2), argument(data, 0), argument(data, 1), argument(data, 5), argument(data, 6),
            request * width, width, 0,
        )  # fmt: skip


def last_columns_kernel(data):
    """For one thread. Arguments: 0 columns, 1 counts, 2 requests, 3 columns of each, 4 bytes of a row, 5 from
    row to row, 6 out."""
    size = argument(data, 4)
    for row in range(argument(data, 2)):
        column = row * argument(data, 3) + max(get_i32(argument(data, 1) + 4 * row), 1) - 1
        copy_bytes(argument(data, 6) + row * size, argument(data, 0) + column * argument(data, 5), size)


def keep_last_kernel(data):
    """For one thread. Arguments: 0 hidden, 1 counts, 2 requests, 3 columns of each, 4 bytes of a row, 5
    states, 6 slots."""
    size = argument(data, 4)
    for row in range(argument(data, 2)):
        count = get_i32(argument(data, 1) + 4 * row)
        if count > 0:
            target = argument(data, 5) + get_i32(argument(data, 6) + 4 * row) * size
            copy_bytes(target, argument(data, 0) + (row * argument(data, 3) + count - 1) * size, size)


def next_draft_kernel(data):
    """An item is a row. Arguments: 0 scores, 1 positions, 2 limits, 3 rows, 4 drafts, 5 their row stride, 6
    step, 7 tokens, 8 new positions, 9 tokens of scores or 0, 10 scores of a row."""
    size, values, ids = argument(data, 10), stack(4 * 32), stack(4 * 32)
    while True:
        row = next_shared(data, 1)
        if row >= argument(data, 3):
            break
        found = find_best(argument(data, 0) + 4 * size * row, size, 1, 0, 0, 0.0, 0.0, values, ids)
        best, token = get_f32(values), -1
        if found and best - best == 0.0:
            token = get_i32(ids)
            if argument(data, 9):
                token = get_i32(argument(data, 9) + 4 * token)
        put_i32(argument(data, 4) + 4 * (row * argument(data, 5) + argument(data, 6)), token)
        put_i32(argument(data, 7) + 4 * row, max(token, 0))
        ahead = get_i32(argument(data, 1) + 4 * row) + 1
        if ahead <= 0 or ahead >= get_i32(argument(data, 2) + 4 * row):
            ahead = -1
        put_i32(argument(data, 8) + 4 * row, ahead)


_norm_pair = Kernel(norm_pair_kernel)
_accept = Kernel(accept_kernel)
_count_drafts = Kernel(count_drafts_kernel)
_last_columns = Kernel(last_columns_kernel)
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
    drawn: torch.Tensor,
    tokens: torch.Tensor,
    positions: torch.Tensor,
    produced: torch.Tensor,
    count_rows: torch.Tensor | None = None,
    counts: torch.Tensor | None = None,
    hidden: torch.Tensor | None = None,
    states: torch.Tensor | None = None,
    target_slots: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    rows = produced.numel()
    following, kept = torch.empty_like(drawn), torch.empty_like(drawn)
    last = torch.empty(rows, dtype=torch.int32)
    if hidden is not None:
        hidden = hidden.contiguous()
    launch(
        _accept.address, 1, 0, drawn.data_ptr(), tokens.data_ptr(), positions.data_ptr(), rows,
        drawn.numel() // rows, produced.data_ptr(), following.data_ptr(), kept.data_ptr(), last.data_ptr(),
        _address(count_rows), _address(counts), 0 if counts is None else counts.shape[1],
        _address(hidden), 0 if hidden is None else hidden.shape[1] * hidden.element_size(),
        _address(states), _address(target_slots),
    )  # fmt: skip
    return following, kept, last


def count_drafts(
    tokens: torch.Tensor, positions: torch.Tensor, count_rows: torch.Tensor, counts: torch.Tensor, rows: int
) -> None:
    launch(
        _count_drafts.address, 1, 0, tokens.data_ptr(), positions.data_ptr(), count_rows.data_ptr(), rows,
        tokens.numel() // rows, counts.data_ptr(), counts.shape[1],
    )  # fmt: skip


def last_columns(columns: Sequence[torch.Tensor], counts: torch.Tensor) -> tuple[torch.Tensor, ...]:
    rows, made = counts.numel(), []
    for x in columns:
        x = x if x[0].is_contiguous() else x.contiguous()
        out = torch.empty((rows, *x.shape[1:]), dtype=x.dtype)
        size = x.element_size()
        launch(
            _last_columns.address, 1, 0, x.data_ptr(), counts.data_ptr(), rows, len(x) // rows,
            out.numel() // rows * size, x.stride(0) * size, out.data_ptr(),
        )  # fmt: skip
        made.append(out)
    return tuple(made)


def keep_last(
    hidden: torch.Tensor, counts: torch.Tensor, states: torch.Tensor, target_slots: torch.Tensor
) -> None:
    rows, hidden = counts.numel(), hidden.contiguous()
    launch(
        _keep_last.address, 1, 0, hidden.data_ptr(), counts.data_ptr(), rows, len(hidden) // rows,
        hidden.shape[1] * hidden.element_size(), states.data_ptr(), target_slots.data_ptr(),
    )  # fmt: skip


def next_draft(
    scores: torch.Tensor,
    positions: torch.Tensor,
    limits: torch.Tensor,
    drafts: torch.Tensor,
    step: int,
    token_ids: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    scores = scores.contiguous()
    rows, size = scores.shape
    tokens, ahead = torch.empty(rows, dtype=torch.int32), torch.empty(rows, dtype=torch.int32)
    team = threads() if rows > 1 and scores.numel() > _PARALLEL else 1
    launch(
        _next_draft.address, team, 0, scores.data_ptr(), positions.data_ptr(), limits.data_ptr(), rows,
        drafts.data_ptr(), drafts.stride(0), step, tokens.data_ptr(), ahead.data_ptr(), _address(token_ids),
        size,
    )  # fmt: skip
    return tokens, ahead


def _address(x: torch.Tensor | None) -> int:
    return 0 if x is None else x.data_ptr()
