"""What an engine has done since its start, and how it is."""

from __future__ import annotations

from dataclasses import dataclass, field

from ninfer.events import FinishReason


@dataclass(frozen=True)
class Health:
    """Can requests be served? `error` says why not."""

    available: bool
    error: str | None = None


@dataclass
class RuntimeStatistics:
    """Counters since the start, and (from `waiting` on) how things stand.

    Seconds of prefill, decode and control are wall time of their units, `*_device_seconds` the part in which
    the device (on the CPU: the model's kernels) worked; the rest is the host's. `boundary_seconds`: what the
    worker does between units. The first output token belongs to prefill.
    `evicted_*`: what the prefix cache gave up for want of pages or slots.
    """

    admitted: int = 0
    failed: int = 0
    finished: dict[FinishReason, int] = field(default_factory=dict)
    reused_tokens: int = 0
    prefill_tokens: int = 0
    decode_tokens: int = 0
    control_tokens: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    rounds: int = 0
    row_rounds: int = 0
    evicted_blocks: int = 0
    evicted_snapshots: int = 0
    boundary_seconds: float = 0.0
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
    free_pages: int = 0
    active_pages: int = 0
    reserved_pages: int = 0
    cached_blocks: int = 0
    snapshots: int = 0

    @property
    def decode_host_share(self) -> float | None:
        """Part of the decode time in which the device waited for the host."""
        total = self.decode_seconds + self.boundary_seconds
        return 1 - self.decode_device_seconds / total if self.decode_seconds else None
