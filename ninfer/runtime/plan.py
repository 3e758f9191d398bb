"""What a Program takes at start: every buffer, counted before any is allocated."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from ninfer.errors import CapacityError, OptionError
from ninfer.models import KvLayout, StateLayout
from ninfer.ops import PAGE
from ninfer.runtime.records import Shape, egress, ingress

CHUNK_STEP = 128
DEFAULT_CHUNK = 1024
MAX_CONCURRENCY = 8
HEADROOM = 1 << 30


@dataclass(frozen=True)
class Limits:
    """What the user may choose about memory.

    `max_context` and `kv_capacity` in tokens (capacity None: one full context; "auto": what memory allows),
    `state_slots` snapshots of the prefix cache (None: concurrency + 4), `headroom` bytes that "auto" leaves.
    `width`: columns of a row in a round, 1 + drafts; `span`: tokens of the longest text that is forced.
    """

    max_context: int
    prefill_chunk: int = DEFAULT_CHUNK
    max_concurrency: int = 1
    kv_capacity: int | Literal["auto"] | None = None
    state_slots: int | None = None
    headroom: int | None = None
    width: int = 1
    span: int = 64


@dataclass(frozen=True)
class Plan:
    """Sizes of a Program's fixed memory; `str(plan)` is the table shown at start.

    Lanes work in `pages` of 64 tokens; `copies` further pages take copies of partly filled ones. `slots` are
    two a lane (a unit of work reads one and writes the other) and `snapshots` of the prefix cache.
    `record_bytes`: what verification keeps until it is committed; `graph_bytes`: code and recordings on a
    GPU, an allowance. Bytes otherwise.
    """

    shape: Shape
    max_context: int
    kv: KvLayout
    pages: int
    copies: int
    slots: int
    snapshots: int
    slot_bytes: int
    record_bytes: int
    buffer_bytes: int
    workspace_bytes: int
    weight_bytes: int
    graph_bytes: int = 0
    available_bytes: int | None = field(default=None, compare=False)
    """What was free for all this, where it is known."""

    @property
    def prefill_chunk(self) -> int:
        return self.shape.chunk

    @property
    def concurrency(self) -> int:
        return self.shape.rows

    @property
    def kv_bytes(self) -> int:
        return (self.pages + self.copies) * self.kv.page_bytes

    @property
    def total_bytes(self) -> int:
        """All but the weights."""
        return (
            self.kv_bytes
            + self.slots * self.slot_bytes
            + self.record_bytes
            + self.buffer_bytes
            + self.workspace_bytes
            + self.graph_bytes
        )

    def __str__(self) -> str:
        rows = [("weights", "", self.weight_bytes)]
        if self.kv.page_bytes:
            detail = f"{self.pages} + {self.copies} pages of {_mib(self.kv.page_bytes).strip()}"
            rows.append((f"KV {self.kv.format}", detail, self.kv_bytes))
        if self.slot_bytes:
            detail = f"{self.slots - self.snapshots} + {self.snapshots} of {_mib(self.slot_bytes).strip()}"
            rows.append(("state slots", detail, self.slots * self.slot_bytes))
        if self.record_bytes:
            rows.append(("round records", "", self.record_bytes))
        rows += [("buffers", "", self.buffer_bytes), ("workspace", "", self.workspace_bytes)]
        if self.graph_bytes:
            rows.append(("graphs", "", self.graph_bytes))
        rows.append(("total", "", self.weight_bytes + self.total_bytes))
        head = (
            f"{self.concurrency} request{'s' * (self.concurrency > 1)} of {self.max_context:,} tokens at "
            f"most, {self.pages * PAGE:,} in all, prefill chunks of {self.prefill_chunk:,}"
        )
        return "\n".join([head, *(f"{name:<15}{detail:<32}{_mib(size)}" for name, detail, size in rows)])


def make_plan(
    kv: KvLayout,
    state: StateLayout,
    limits: Limits,
    *,
    context_limit: int,
    public_tokens: int,
    workspace_bytes: int,
    weight_bytes: int,
    available_bytes: int | None,
    graph_bytes: int = 0,
) -> Plan:
    """Size everything, or say in a sentence what cannot be.

    `context_limit` is what the checkpoint was made for; `available_bytes` (after the weights) is None where
    nobody knows.
    """
    context, rows = limits.max_context, limits.max_concurrency
    if context < 1:
        raise OptionError(f"--max-context must be at least 1, not {context}")
    if context > context_limit:
        raise CapacityError(
            f"--max-context {context} is more than the {context_limit} positions that the model knows"
        )
    if limits.prefill_chunk < CHUNK_STEP or limits.prefill_chunk % CHUNK_STEP:
        raise OptionError(
            f"--prefill-chunk must be a positive multiple of {CHUNK_STEP}, not {limits.prefill_chunk}"
        )
    if not 1 <= rows <= MAX_CONCURRENCY:
        raise OptionError(f"--max-concurrency must be between 1 and {MAX_CONCURRENCY}, not {rows}")
    snapshots = rows + 4 if limits.state_slots is None else limits.state_slots
    if snapshots < 0:
        raise OptionError(f"--device-state-slots must not be negative, not {snapshots}")
    snapshots = snapshots if state.slot_bytes else 0
    chunk, pages = min(limits.prefill_chunk, context), -(-context // PAGE)
    drafts = limits.width - 1 if state.hidden else 0
    shape = Shape(rows, limits.width, chunk, limits.span, pages, public_tokens, drafts)
    records = state.record_bytes(shape.draws) if limits.width > 1 else 0
    # The engine may be in another process and then has a record of its own.
    buffers = 2 * (ingress(shape).nbytes + egress(shape).nbytes) + 4 * shape.count_rows * public_tokens

    def plan(pages: int) -> Plan:
        return Plan(
            shape=shape,
            max_context=context,
            kv=kv,
            pages=pages,
            copies=rows if kv.layers else 0,
            slots=2 * rows + snapshots if state.slot_bytes else 0,
            snapshots=snapshots,
            slot_bytes=state.slot_bytes,
            record_bytes=records,
            buffer_bytes=buffers,
            workspace_bytes=workspace_bytes,
            weight_bytes=weight_bytes,
            graph_bytes=graph_bytes,
            available_bytes=available_bytes,
        )

    least = plan(max(shape.pages, rows))
    chosen = least
    if limits.kv_capacity == "auto":
        if available_bytes is None:
            raise OptionError("--kv-capacity auto needs to know the free memory; give a number of tokens")
        headroom = HEADROOM if limits.headroom is None else limits.headroom
        spare = available_bytes - headroom - least.total_bytes
        if spare < 0:
            raise CapacityError(
                f"--kv-capacity auto needs {_mib(least.total_bytes).strip()} and "
                f"{_mib(headroom).strip()} of headroom, but only {_mib(available_bytes).strip()} are free "
                f"after the weights; lower --max-context, --max-concurrency or --device-state-slots"
            )
        if kv.page_bytes:
            chosen = plan(least.pages + spare // kv.page_bytes)
    elif limits.kv_capacity is not None:
        if limits.kv_capacity < context:
            raise OptionError(
                f"--kv-capacity must be at least --max-context: {limits.kv_capacity} is less than {context}"
            )
        chosen = plan(max(least.pages, -(-limits.kv_capacity // PAGE)))
    if available_bytes is not None and chosen.total_bytes > available_bytes:
        remedy = "--max-context, --max-concurrency or --device-state-slots"
        if chosen.pages > least.pages:
            remedy = f"--kv-capacity (at least {context}), {remedy}"
        raise CapacityError(
            f"{_mib(chosen.total_bytes).strip()} are needed beside the weights (KV "
            f"{_mib(chosen.kv_bytes).strip()}, states {_mib(chosen.slots * chosen.slot_bytes).strip()}), but "
            f"only {_mib(available_bytes).strip()} are free; lower {remedy}"
        )
    return chosen


def _mib(size: int) -> str:
    return f"{size / 2**20:>10,.2f} MiB"
