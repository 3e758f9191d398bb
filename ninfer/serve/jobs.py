"""What the server asks of an engine in another process, and what it learns of it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

from ninfer.api.options import GenerationOptions
from ninfer.engine import Event, RuntimeStatistics
from ninfer.frontend import Prompt


class LinkState(StrEnum):
    """How the engine process stands."""

    STARTING = "starting"
    READY = "ready"
    UNLOADED = "unloaded"
    """Ended after an idle time; the next job starts it again."""
    FAILED = "failed"
    """The engine has failed; the server stops with exit code 2."""
    STOPPED = "stopped"


@dataclass(frozen=True)
class Job:
    """A prompt and everything that was resolved for it; what the model's preset would fill is filled."""

    prompt: Prompt
    options: GenerationOptions


@dataclass(frozen=True)
class EngineInfo:
    """What the engine process loaded; bytes, tokens and seconds. `memory` is the printed plan,
    `memory_available` what is free for more."""

    name: str
    architecture: str
    device: str
    threads: int
    max_context: int
    kv_dtype: str
    kv_tokens: int
    kv_bytes: int
    weight_bytes: int
    load_seconds: float
    memory: str
    max_concurrency: int = 1
    prefill_chunk: int = 1024
    pages: int = 0
    snapshots: int = 0
    slots: int = 0
    slot_bytes: int = 0
    buffer_bytes: int = 0
    workspace_bytes: int = 0
    record_bytes: int = 0
    graph_bytes: int = 0
    artifact_path: str = ""
    artifact_bytes: int = 0
    artifact_objects: int = 0
    formats: tuple[str, ...] = ()
    prefill_signature: str = ""
    process: int = 0
    memory_available: int | None = None
    device_name: str = ""
    cuda_graph: bool = False
    upload_seconds: float = 0.0
    extra: dict[str, str] = field(default_factory=dict)


class JobStream(Protocol):
    """The events of one job, once: `Started`, `PromptProgress`, `Output`, `Done` of `ninfer.engine`.

    Iteration raises the `NInferError` that ended the job (the same class as in the engine's process).
    """

    def __aiter__(self) -> AsyncIterator[Event]: ...

    def cancel(self) -> None:
        """Ask the job to end at the next boundary; its `Done` still comes. Safe to call more than once."""
        ...

    def close(self) -> None:
        """Nothing more will be read; cancels the job if it still runs."""
        ...


class Link(Protocol):
    """The engine process as the server sees it; tests stand in for it with scripted events."""

    @property
    def state(self) -> LinkState: ...

    @property
    def info(self) -> EngineInfo:
        """Of the process that runs or ran last."""
        ...

    async def submit(self, job: Job) -> JobStream:
        """Queue a job; starts the engine again if it was unloaded and waits until it is ready.

        Raises `UnavailableError`; what else is wrong with the job is raised by its stream.
        """
        ...

    async def statistics(self) -> RuntimeStatistics | None:
        """The engine's counters; None while it isn't ready."""
        ...
