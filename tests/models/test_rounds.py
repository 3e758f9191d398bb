"""Decode steps and verifications of several sequences, bit for bit: a row is what it is alone, and columns
that were verified and folded are what feeding them gives."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache
from pathlib import Path

import pytest
import torch

from ninfer import models, ops
from ninfer.artifact import Artifact
from ninfer.models import Batch, Cache, Model
from ninfer.ops import KvPages
from ninfer.runtime.memory import allocate, allocate_records

from . import test_binding
from .draft import draft
from .test_transformers import GEOMETRIES
from .tiny import build

CPU = torch.device("cpu")
LENGTHS = (63, 0, 64, 5, 70, 1, 128, 30)
"""Tokens of the sequences before the step; one has none yet."""
SEQUENCES, PAGES = len(LENGTHS), 3
NAMES = ["irregular", "all-linear", "threefold", "wide-value", "llama"]


@pytest.fixture(scope="module", params=NAMES)
def name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module", params=[torch.bfloat16, torch.float32], ids=["bf16", "f32"])
def model(name: str, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    path = draft(GEOMETRIES[name], built(name)).write(tmp_path_factory.mktemp("tiny") / "tiny.ninfer")
    with Artifact.open(path) as artifact:
        return models.load(artifact, activation_dtype=request.param)


@cache
def built(name: str) -> torch.nn.Module:
    return build(GEOMETRIES[name], seed=3)


@dataclass(frozen=True)
class Sequences:
    """Fed sequences: row b owns the pages of `tables[b]` and its state is in slot `slots[b]` (-1: no state
    yet); `free[b]` is a slot for the next one."""

    cache: Cache
    tables: torch.Tensor
    slots: torch.Tensor
    free: torch.Tensor

    def copy(self) -> Sequences:
        kv = tuple(
            replace(pages, **{f: x.clone() for f, x in planes(pages).items()}) for pages in self.cache.kv
        )
        conv, recurrent = (tuple(x.clone() for x in xs) for xs in (self.cache.conv, self.cache.recurrent))
        return replace(self, cache=Cache(kv, conv, recurrent))


def planes(pages: KvPages) -> dict[str, torch.Tensor]:
    values = {field.name: getattr(pages, field.name) for field in fields(pages)}
    return {name: value for name, value in values.items() if isinstance(value, torch.Tensor)}


def everything(cache: Cache) -> Iterator[torch.Tensor]:
    """The bits of all that a cache holds."""
    for tensor in (*(x for p in cache.kv for x in planes(p).values()), *cache.conv, *cache.recurrent):
        yield tensor.view(torch.uint8) if tensor.numel() else tensor


def same(a: Cache, b: Cache) -> bool:
    return all(torch.equal(x, y) for x, y in zip(everything(a), everything(b), strict=True))


def token(sequence: int, position: int) -> int:
    return (31 * sequence + 7 * position * position + position) % 199


def make_batch(s: Sequences, rows: Sequence[int], width: int, skip: int = 0, in_place: bool = False) -> Batch:
    """The next `width` columns of these sequences, after `skip` further ones."""
    starts = [LENGTHS[b] + skip for b in rows]
    cells = [(b, p) for b, start in zip(rows, starts, strict=True) for p in range(start, start + width)]
    sources, targets = s.slots[list(rows)], s.free[list(rows)]
    return Batch(
        tokens=torch.tensor([token(b, p) for b, p in cells], dtype=torch.int32),
        positions=torch.tensor([p for _, p in cells], dtype=torch.int32),
        rows=len(rows),
        page_table=s.tables[list(rows)],
        source_slots=targets if in_place else sources,
        target_slots=targets,
    )


@pytest.fixture(scope="module")
def fed(model: Model) -> Sequences:
    generator = torch.Generator().manual_seed(4)
    tables = torch.randperm(SEQUENCES * PAGES, generator=generator).view(SEQUENCES, PAGES).int()
    slots = torch.randperm(2 * SEQUENCES, generator=generator).int()
    memory = allocate(
        model.kv_layout(), model.state_layout(), pages=SEQUENCES * PAGES, slots=2 * SEQUENCES, device=CPU
    )
    for states in (*memory.conv, *memory.recurrent):
        states.fill_(torch.nan)  # a slot that nobody wrote must not be read
    own, free = slots[:SEQUENCES].clone(), slots[SEQUENCES:]
    for b, length in enumerate(LENGTHS):
        if length:
            batch = Batch(
                tokens=torch.tensor([token(b, p) for p in range(length)], dtype=torch.int32),
                positions=torch.arange(length, dtype=torch.int32),
                rows=1,
                page_table=tables[b : b + 1],
                source_slots=torch.tensor([-1], dtype=torch.int32),
                target_slots=own[b : b + 1],
            )
            model.forward(batch, memory)
        else:
            own[b] = -1
    return Sequences(memory, tables, own, free)


@pytest.mark.parametrize("columns", [1, 2])
def test_a_row_is_what_it_is_alone(model: Model, fed: Sequences, columns: int) -> None:
    alone = fed.copy()
    hidden = [model.forward(make_batch(fed, [b], columns), alone.cache) for b in range(SEQUENCES)]
    logits = [model.logits(h) for h in hidden]
    for threads, rows in (
        *((1, rows) for rows in ([4, 1], [7, 0, 3], [6, 2, 5, 1, 0], [3, 7, 1, 5, 0, 2, 6, 4])),
        (2, list(range(8))),
    ):
        torch.set_num_threads(threads)
        together = fed.copy()
        out = model.forward(make_batch(fed, rows, columns), together.cache)
        assert torch.equal(out, torch.cat([hidden[b] for b in rows]))
        assert torch.equal(model.logits(out), torch.cat([logits[b] for b in rows]))
        if len(rows) == SEQUENCES:
            assert same(together.cache, alone.cache)


@pytest.mark.parametrize("width", [1, 2, 4, 5, 16])
@pytest.mark.parametrize("rows", [[4], [6, 1, 0]])
def test_verified_and_folded_columns_are_fed_columns(
    model: Model, fed: Sequences, width: int, rows: list[int]
) -> None:
    """For every number of kept columns: the same hidden states, keys and values, and states."""
    if len(rows) * width > 16:
        rows = rows[:1]  # more columns take the route of prefill chunks, whose bits are others
    records = allocate_records(model.state_layout(), len(rows) * (width + 1), CPU)
    verified = fed.copy()
    batch = make_batch(fed, rows, width)
    hidden = model.forward(batch, verified.cache, records).unflatten(0, (len(rows), -1))
    assert same(replace(verified.cache, kv=()), replace(fed.cache, kv=())), "a slot was written"
    for kept in range(width + 1):
        counts = [(kept + 2 * i) % (width + 1) for i in range(len(rows))]
        folded, direct = verified.copy(), fed.copy()
        kept_counts = torch.tensor(counts, dtype=torch.int32)
        model.fold(folded.cache, records, kept_counts, batch.source_slots, batch.target_slots)
        for i, (b, count) in enumerate(zip(rows, counts, strict=True)):
            if count:
                out = model.forward(make_batch(fed, [b], count), direct.cache)
                assert torch.equal(out, hidden[i, :count])
            # Keys and values of columns that were not kept are there, but nothing reads them.
            copy_rejected(verified, direct, b, range(LENGTHS[b] + count, LENGTHS[b] + width))
        assert same(folded.cache, direct.cache), counts


def copy_rejected(source: Sequences, target: Sequences, row: int, positions: range) -> None:
    for mine, other in zip(source.cache.kv, target.cache.kv, strict=True):
        for a, b in zip(planes(mine).values(), planes(other).values(), strict=True):
            for p in positions:
                page = source.tables[row, p // 64]
                b[page, p % 64] = a[page, p % 64]


def test_rounds_continue_each_other(model: Model, fed: Sequences) -> None:
    """Three rounds of four columns of which some are kept, recorded once and replayed, then a plain step."""
    width, rows, kept = 4, [3, 1, 4, 0], [[2, 4, 1, 0], [1, 3, 4, 2], [4, 1, 2, 3], [1, 1, 3, 4]]
    records = allocate_records(model.state_layout(), len(rows) * width, CPU)
    verified, direct = fed.copy(), fed.copy()
    first = make_batch(fed, rows, width)
    buffers = replace(
        first,
        tokens=first.tokens.clone(),
        positions=first.positions.clone(),
        source_slots=first.source_slots.clone(),
    )
    counts = torch.zeros(len(rows), dtype=torch.int32)
    verify = ops.Recording(lambda: model.forward(buffers, verified.cache, records), CPU)

    def fold() -> None:
        model.fold(verified.cache, records, counts, buffers.source_slots, buffers.target_slots)

    folding = ops.Recording(fold, CPU)
    skip = [0] * len(rows)
    started = [False] * len(rows)
    with torch.inference_mode():
        for round_ in kept:
            batches = [make_batch(fed, [b], width, skip[i], in_place=started[i]) for i, b in enumerate(rows)]
            buffers.tokens.copy_(torch.cat([batch.tokens for batch in batches]))
            buffers.positions.copy_(torch.cat([batch.positions for batch in batches]))
            buffers.source_slots.copy_(torch.cat([batch.source_slots for batch in batches]))
            hidden = verify().unflatten(0, (len(rows), -1))
            counts.copy_(torch.tensor(round_))
            folding()
            for i, (b, count) in enumerate(zip(rows, round_, strict=True)):
                if count:
                    batch = make_batch(fed, [b], count, skip[i], in_place=started[i])
                    assert torch.equal(model.forward(batch, direct.cache), hidden[i, :count])
                    skip[i], started[i] = skip[i] + count, True
                copy_rejected(verified, direct, b, range(LENGTHS[b] + skip[i], LENGTHS[b] + skip[i] + width))
            assert same(verified.cache, direct.cache)
    assert (verify.obstacle, folding.obstacle) == (None, None)
    assert verify.recorded
    assert folding.recorded


def test_a_step_with_another_order_of_heads_is_recorded(tmp_path: Path) -> None:
    out = draft(test_binding.GEOMETRY, test_binding.checkpoint(), packed=False)
    test_binding.reordered_heads(out)
    with Artifact.open(out.write(tmp_path / "tiny.ninfer")) as artifact:
        model = models.load(artifact)
    memory = allocate(model.kv_layout(), model.state_layout(), pages=1, slots=1, device=CPU)
    zero = torch.zeros(1, dtype=torch.int32)
    batch = Batch(zero, zero, 1, zero.view(1, 1), zero - 1, zero)
    step = ops.Recording(lambda: model.forward(batch, memory), CPU)
    with torch.inference_mode():
        first = step().clone()
        for _ in range(2):
            assert torch.equal(step(), first)
    assert step.recorded, step.obstacle
