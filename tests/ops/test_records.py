"""Columns that are recorded and folded leave the bits that running only them would have left."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from ninfer.errors import OptionError
from ninfer.ops import DeltaRecords, causal_conv, fold_conv, fold_delta_net
from tests.ops.criteria import GDN_STATE
from tests.ops.delta import Problem

GEOMETRIES = [(2, 2, 16, 32), (2, 4, 24, 20), (1, 3, 8, 8), (2, 2, 128, 128), (1, 2, 40, 128)]
"""(key heads, value heads, width of keys, width of values)"""
WIDTHS, REQUESTS = [1, 2, 4, 5, 16], [1, 3, 8]
NAN = float("nan")


def room(problem: Problem, spare: int) -> DeltaRecords:
    """Records full of NaN, with `spare` more columns for each request and one more that can't be shared."""
    rows = problem.requests * (problem.columns + spare) + (problem.requests > 1)
    return DeltaRecords(
        k=torch.full((rows, *problem.k.shape[1:]), NAN, dtype=problem.k.dtype),
        v=torch.full((rows, *problem.v.shape[1:]), NAN, dtype=problem.v.dtype),
        g=torch.full((rows, problem.g.shape[1]), NAN),
        beta=torch.full((rows, problem.g.shape[1]), NAN),
    )


def some_counts(requests: int, columns: int) -> Iterator[torch.Tensor]:
    """Every count for the first request, the others mixed; all 0 and all columns are among them."""
    for first in range(columns + 1):
        counts = torch.tensor([(first + 5 * b) % (columns + 1) for b in range(requests)])
        yield counts.int()
    yield torch.zeros(requests, dtype=torch.int32)
    yield torch.full((requests,), columns, dtype=torch.int32)


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.view(torch.uint8)


@pytest.mark.parametrize("geometry", GEOMETRIES)
@pytest.mark.parametrize("columns", WIDTHS)
@pytest.mark.parametrize("requests", REQUESTS)
def test_a_fold_is_the_direct_call(geometry, columns: int, requests: int, dtype: torch.dtype) -> None:
    problem = Problem(requests, columns, *geometry, dtype=dtype)
    if requests > 1:
        problem.sources[1] = -1
    direct = problem.states.clone()
    expected = problem.run(direct, problem.sources, problem.targets)
    records, states = room(problem, 2), problem.states.clone()
    nowhere = torch.full_like(problem.targets, 1 << 20)
    out = problem.run(states, problem.sources, nowhere, records=records)
    assert torch.equal(out, expected)
    assert torch.equal(states, problem.states)
    check_records(problem, records)

    # One request at a time, one column more each time: the states after every count.
    steps = [direct_states(problem, b) for b in range(requests)]
    share = len(records.g) // requests
    for counts in some_counts(requests, columns):
        kept = DeltaRecords(*(x.clone() for x in (records.k, records.v, records.g, records.beta)))
        for b in range(requests):
            for x in (kept.k, kept.v, kept.g, kept.beta):
                x[b * share + int(counts[b]) : (b + 1) * share] = NAN
        folded = problem.states.clone()
        fold_delta_net(kept, counts, folded, problem.sources, problem.targets)
        wanted = problem.states.clone()
        for b, count in enumerate(counts.tolist()):
            if count:
                wanted[problem.targets[b]] = steps[b][count - 1]
        assert torch.equal(bits(folded), bits(wanted)), counts
        if int(counts.min()) == columns:
            assert torch.equal(bits(folded), bits(direct))


def check_records(problem: Problem, records: DeltaRecords) -> None:
    share = len(records.g) // problem.requests
    fields = (
        (records.k, problem.k),
        (records.v, problem.v),
        (records.g, problem.g),
        (records.beta, problem.beta),
    )
    for kept, raw in fields:
        for b in range(problem.requests):
            rows = raw[b * problem.columns : (b + 1) * problem.columns]
            begin = b * share
            assert torch.equal(kept[begin : begin + problem.columns], rows)
            assert kept[begin + problem.columns : begin + share].isnan().all()


def direct_states(problem: Problem, request: int) -> list[torch.Tensor]:
    """State of a request after 1, 2, ... of its columns, each from one direct call."""
    begin, out = request * problem.columns, []
    one = slice(request, request + 1)
    for count in range(1, problem.columns + 1):
        states = problem.states.clone()
        slots = problem.sources[one], problem.targets[one]
        problem.run(states, *slots, rows=slice(begin, begin + count))
        out.append(states[problem.targets[request]].clone())
    return out


@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_folded_values(geometry, dtype: torch.dtype) -> None:
    """The definition in float64 is the judge of what a fold leaves."""
    problem = Problem(3, 7, *geometry, dtype=dtype)
    problem.sources[2] = -1
    counts = [7, 3, 5]
    records, states = room(problem, 0), problem.states.clone()
    problem.run(states, problem.sources, problem.targets, records=records)
    fold_delta_net(records, torch.tensor(counts).int(), states, problem.sources, problem.targets)
    GDN_STATE.check(states[problem.targets.long()], problem.reference(counts)[1])


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_rounds_in_place_are_one_long_call(threads: int) -> None:
    """Rounds of four columns of which some are kept, each fold back into its source."""
    kept = [3, 1, 4, 2, 4]
    problem = Problem(1, sum(kept), 2, 4, 24, 40, torch.bfloat16)
    whole, states = problem.states.clone(), problem.states.clone()
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    expected = problem.run(whole, problem.sources, problem.targets)
    slots, begin = (problem.sources, problem.sources), 0
    records = room(problem, 0)
    for count in kept:
        rows = slice(begin, begin + min(4, sum(kept) - begin))
        out = problem.run(states, *slots, rows=rows, records=records)
        assert torch.equal(out[:count], expected[begin : begin + count])
        fold_delta_net(records, torch.tensor([count]).int(), states, problem.sources, problem.sources)
        begin += count
    torch.set_num_threads(before)
    assert torch.equal(states[problem.sources.long()], whole[problem.targets.long()])


@pytest.mark.parametrize(("channels", "taps"), [(72, 4), (13, 4), (32, 2), (16, 1), (7, 6)])
@pytest.mark.parametrize("columns", WIDTHS)
@pytest.mark.parametrize("requests", REQUESTS)
def test_histories(channels: int, taps: int, columns: int, requests: int, dtype: torch.dtype) -> None:
    u = torch.randn(requests * columns, channels + 9).to(dtype)[:, 5 : 5 + channels]
    weight = torch.randn(taps, channels).bfloat16()
    before = torch.randn(2 * requests + 1, taps - 1, channels).to(dtype)
    slots = torch.randperm(2 * requests + 1).int()
    sources, targets = slots[:requests].clone(), slots[requests : 2 * requests].clone()
    if requests > 1:
        sources[1] = -1
    direct, states = before.clone(), before.clone()
    expected = causal_conv(u, weight, direct, sources, targets)
    share = columns + 3
    records = torch.full((requests * share, channels), NAN, dtype=dtype)
    out = causal_conv(u, weight, states, sources, torch.full_like(targets, 1 << 20), records)
    assert torch.equal(out, expected)
    assert torch.equal(states, before)
    for b in range(requests):
        rows = u[b * columns : (b + 1) * columns]
        assert torch.equal(records[b * share : b * share + columns], rows)
        assert records[b * share + columns : (b + 1) * share].isnan().all()
    for counts in some_counts(requests, columns):
        for in_place in (False, True):
            places = sources.where(sources >= 0, targets) if in_place else targets
            folded, wanted, kept = before.clone(), before.clone(), records.clone()
            for b, count in enumerate(counts.tolist()):
                kept[b * share + count : (b + 1) * share] = NAN
                old = before[sources[b]] if sources[b] >= 0 else torch.zeros(taps - 1, channels).to(dtype)
                history = torch.cat((old, u[b * columns : b * columns + count]))
                if count:
                    wanted[places[b]] = history[count:]
            fold_conv(kept, counts, folded, sources, places)
            assert torch.equal(bits(folded), bits(wanted)), counts
        if int(counts.min()) == columns:
            fold_conv(records, counts, states, sources, targets)
            assert torch.equal(bits(states), bits(direct))
            states = before.clone()


def test_any_bits_of_a_column_are_kept() -> None:
    """Histories and records are copies, not numbers: signalling NaN and both zeros come back as they were."""
    words = torch.tensor([[0x7F81, -0x7F, -0x8000, 0, 1] * 4], dtype=torch.int16)
    u = words.view(torch.bfloat16)
    records, states = torch.zeros(1, 20).bfloat16(), torch.zeros(2, 3, 20).bfloat16()
    source, target = torch.tensor([-1]).int(), torch.tensor([1]).int()
    weight = torch.ones(4, 20).bfloat16()
    causal_conv(u, weight, states, source, target, records)
    assert torch.equal(records.view(torch.int16), words)
    fold_conv(records, torch.tensor([1]).int(), states, source, target)
    assert torch.equal(states[1, 2].view(torch.int16), words[0])
    direct = torch.zeros_like(states)
    causal_conv(u, weight, direct, source, target)
    assert torch.equal(bits(direct), bits(states))


def test_records_that_do_not_fit_are_refused() -> None:
    problem = Problem(2, 3, 2, 4, 16, 24, torch.float32)
    slots = problem.sources, problem.targets
    good = room(problem, 0)
    counts = torch.ones(2, dtype=torch.int32)
    few = DeltaRecords(good.k[:3], good.v[:3], good.g[:3], good.beta[:3])
    narrow = DeltaRecords(good.k, good.v[..., :8], good.g, good.beta)
    rounded = DeltaRecords(good.k.bfloat16(), good.v.bfloat16(), good.g, good.beta)
    turned = DeltaRecords(good.k, good.v, good.g.T.contiguous().T, good.beta)
    for records, message in (
        (few, "hold up to 1 of each of 2 requests, got 3"),
        (narrow, "do not fit states"),
        (rounded, "do not fit keys"),
        (turned, "contiguous"),
    ):
        with pytest.raises(OptionError, match=message):
            problem.run(problem.states, *slots, records=records)
    with pytest.raises(OptionError, match="must be int32"):
        fold_delta_net(good, counts.long(), problem.states, *slots)
    with pytest.raises(OptionError, match="1 counts, 2 source and 2 target slots"):
        fold_delta_net(good, counts[:1], problem.states, *slots)
    long = Problem(1, 17, 1, 1, 16, 16, torch.float32)
    with pytest.raises(OptionError, match="hold up to 16"):
        long.run(long.states, long.sources, long.targets, records=room(long, 0))
    states, records = torch.zeros(3, 3, 8), torch.zeros(4, 8)
    with pytest.raises(OptionError, match="do not fit histories"):
        fold_conv(records[:, :7], counts, states, *slots)
    with pytest.raises(OptionError, match="hold up to 2 of each of 2 requests, got 3"):
        causal_conv(torch.zeros(6, 8), torch.zeros(4, 8), states, *slots, records)
