"""What a Program takes at start: every buffer, counted before any is allocated."""

from __future__ import annotations

from dataclasses import dataclass

from ninfer.errors import CapacityError, OptionError
from ninfer.models import KvLayout, StateLayout
from ninfer.ops import PAGE

CHUNK_STEP = 128
DEFAULT_CHUNK = 1024
SLOTS = 2
"""State slots of one sequence: a unit of work reads one and writes the other, so it can be interrupted."""


@dataclass(frozen=True)
class Plan:
    """Sizes of a Program's fixed memory; `str(plan)` is the table shown at start.

    `max_context` and `prefill_chunk` in tokens, `pages` of 64 tokens, all other figures in bytes.
    """

    max_context: int
    prefill_chunk: int
    pages: int
    page_bytes: int
    slots: int
    slot_bytes: int
    buffer_bytes: int

    @property
    def total_bytes(self) -> int:
        return self.pages * self.page_bytes + self.slots * self.slot_bytes + self.buffer_bytes

    def __str__(self) -> str:
        rows = [("KV pages", self.pages, self.page_bytes)] if self.page_bytes else []
        rows += [("state slots", self.slots, self.slot_bytes)] if self.slot_bytes else []
        lines = [f"context {self.max_context:,} tokens, prefill chunks of {self.prefill_chunk:,}"]
        lines += [f"{name:<12}{count:>6} x {_mib(size)} = {_mib(count * size)}" for name, count, size in rows]
        lines += [f"{'buffers':<35}{_mib(self.buffer_bytes)}", f"{'total':<35}{_mib(self.total_bytes)}"]
        return "\n".join(lines)


def make_plan(
    kv: KvLayout,
    state: StateLayout,
    *,
    max_context: int,
    prefill_chunk: int,
    context_limit: int,
    public_tokens: int,
    hidden_size: int,
    available_bytes: int | None,
) -> Plan:
    """Size everything, or say in a sentence what cannot be.

    `context_limit` is what the checkpoint was made for; `available_bytes` is None where nobody knows.
    """
    if max_context < 1:
        raise OptionError(f"--max-context must be at least 1, not {max_context}")
    if max_context > context_limit:
        raise CapacityError(
            f"--max-context {max_context} is more than the {context_limit} positions that the model knows"
        )
    if prefill_chunk < CHUNK_STEP or prefill_chunk % CHUNK_STEP:
        raise OptionError(f"--prefill-chunk must be a positive multiple of {CHUNK_STEP}, not {prefill_chunk}")
    chunk = min(prefill_chunk, max_context)
    pages = -(-max_context // PAGE)
    columns = 2 * 4 * chunk
    row = 4 * (pages + public_tokens) + 2 * kv.dtype.itemsize * hidden_size
    plan = Plan(max_context, chunk, pages, kv.page_bytes, SLOTS, state.slot_bytes, columns + row)
    if available_bytes is not None and plan.total_bytes > available_bytes:
        raise CapacityError(
            f"a context of {max_context} tokens needs {_mib(plan.total_bytes).strip()}, but only "
            f"{_mib(available_bytes).strip()} are free; lower --max-context"
        )
    return plan


def _mib(size: int) -> str:
    return f"{size / 2**20:>9,.2f} MiB"
