"""What an engine has done since its start, and how it is."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from time import perf_counter
from typing import TYPE_CHECKING

from ninfer.engine.events import HostWork
from ninfer.engine.request import State
from ninfer.events import FinishReason

if TYPE_CHECKING:
    from ninfer.engine.request import Ticket
    from ninfer.engine.sequence import Pools


@dataclass(frozen=True)
class Health:
    """Can requests be served? `error` says why not."""

    available: bool
    error: str | None = None


@dataclass
class RuntimeStatistics:
    """Counters since the start, and (from `waiting` on) how things stand.

    Seconds of prefill, decode and control are wall time of their units, `*_device_seconds` the part in which
    the device (on the CPU: the model's kernels) worked; the rest is the host's. The first output token
    belongs to prefill.

    The host's time by phase: `engine_boundary` (between units: endings, admission, the choice), in units
    `program_submit` (writing the record, masks and drafts included), `program_post` (after the Program, until
    it is known what was drawn) and `engine_commit_output` (what it means, commit, publication), and
    `engine_maintenance` (captures, and what requests leave to the cache), wherever it falls. All five
    together are `engine_boundary` and the host's part of all units. A worker that has nothing to do counts
    nothing.

    `selections` counts admissions by `ReusePath`, `last_frontier` is where the newest one began.
    `captures_completed` snapshots of states were taken, `captures_aborted` were due but found no slot or no
    place; a state that is there already counts as neither. `copied_pages`: partly filled pages that a
    request took over. `evicted_*`: what the prefix cache gave up for want of pages or slots.
    `active_pages` of `total_pages` (those for copies included) are in use by requests, `free_pages` by
    nobody; the cache's blocks are in the others.
    `used_slots`: state slots of requests and `snapshots`.
    """

    admitted: int = 0
    failed: int = 0
    finished: dict[FinishReason, int] = field(default_factory=dict)
    selections: dict[str, int] = field(default_factory=dict)
    last_frontier: int = 0
    reused_tokens: int = 0
    copied_pages: int = 0
    captures_completed: int = 0
    captures_aborted: int = 0
    prefill_tokens: int = 0
    decode_tokens: int = 0
    control_tokens: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    prefill_units: int = 0
    control_units: int = 0
    rounds: int = 0
    row_rounds: int = 0
    evicted_blocks: int = 0
    evicted_snapshots: int = 0
    engine_boundary: float = 0.0
    program_submit: float = 0.0
    program_post: float = 0.0
    engine_commit_output: float = 0.0
    engine_maintenance: float = 0.0
    prefill_seconds: float = 0.0
    prefill_device_seconds: float = 0.0
    decode_seconds: float = 0.0
    decode_device_seconds: float = 0.0
    control_seconds: float = 0.0
    control_device_seconds: float = 0.0
    handovers: int = 0
    handover_seconds: float = 0.0
    """What handing events to another process cost the worker, a part of the host's time; none in this one."""
    waiting: int = 0
    running: int = 0
    prefilling: int = 0
    decode_ready: int = 0
    free_pages: int = 0
    active_pages: int = 0
    reserved_pages: int = 0
    total_pages: int = 0
    cached_blocks: int = 0
    snapshots: int = 0
    used_slots: int = 0

    @property
    def decode_host_share(self) -> float | None:
        """Part of the decode time in which the device waited for the host."""
        total = self.decode_seconds + self.engine_boundary
        return 1 - self.decode_device_seconds / total if self.decode_seconds else None

    @property
    def host(self) -> HostWork:
        """The phases, and how long the device was waited for."""
        device = self.prefill_device_seconds + self.decode_device_seconds + self.control_device_seconds
        return HostWork(
            engine_boundary=self.engine_boundary,
            program_submit=self.program_submit,
            program_post=self.program_post,
            engine_commit_output=self.engine_commit_output,
            engine_maintenance=self.engine_maintenance,
            device_wait=device,
            decode_host=self.decode_seconds - self.decode_device_seconds,
            decode_device_wait=self.decode_device_seconds,
            prefill_units=self.prefill_units,
            control_units=self.control_units,
        )

    def as_of_now(self, pools: Pools, states: list[State], waiting: int) -> RuntimeStatistics:
        """A copy with the counters of others and how things stand; `states` of the requests with a lane."""
        pages, slots, cache = pools.pages, pools.slots, pools.cache
        return replace(
            self,
            finished=dict(self.finished),
            selections=dict(self.selections),
            captures_completed=cache.captured,
            captures_aborted=cache.refused,
            evicted_blocks=cache.evicted_blocks,
            evicted_snapshots=cache.evicted_snapshots,
            waiting=waiting,
            running=len(states),
            prefilling=states.count(State.PREFILL),
            decode_ready=states.count(State.DECODE_READY),
            free_pages=pages.free,
            active_pages=pages.locked,
            reserved_pages=pages.reserved,
            total_pages=pages.capacity,
            cached_blocks=cache.blocks,
            snapshots=cache.snapshots_in_use,
            used_slots=slots.capacity - slots.free,
        )

    def select(self, ticket: Ticket) -> None:
        """Count an admission."""
        self.admitted += 1
        self.reused_tokens += ticket.reused
        self.last_frontier = ticket.reused
        self.selections[ticket.reuse_path] = self.selections.get(ticket.reuse_path, 0) + 1
        if ticket.sequence is not None and ticket.sequence.lends:
            self.copied_pages += 1

    def ran(self, begin: float, written: float, known: float, device: float) -> None:
        """Count a unit whose record was written at `written` and whose results were read at `known`."""
        self.program_submit += written - begin
        self.program_post += known - written - device

    def settled(self, begin: float, maintained: float) -> float:
        """Count the time since `begin` as commit and output, but for maintenance since it was `maintained`;
        all of that time."""
        seconds = perf_counter() - begin
        self.engine_commit_output += seconds - (self.engine_maintenance - maintained)
        return seconds
