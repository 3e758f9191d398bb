"""Who is told what happens to requests: the logs, the metrics and the prefill-miss dump."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from ninfer.api.options import GenerationOptions
from ninfer.engine import Statistics
from ninfer.serve.calls import Finished, GenerationRequest
from ninfer.serve.errors import ApiError


@dataclass(frozen=True)
class CallReport:
    """What parsing tool calls found in an answer. `fallback`: why text with a marker stayed text, or none
    (malformed_structure, duplicate_parameter, invalid_tool_name, undeclared_tool, trailing_content)."""

    marker_seen: bool = False
    structured_calls: int = 0
    empty_arguments_omitted: int = 0
    schema_mismatches: int = 0
    fallback: str = "none"


@dataclass
class RequestRecord:
    """A generation request as the logs see it; `id` counts from 1 in the order of preparation.

    What preparation resolves (`prompt_tokens`, `options`, `thinking`) is None before it has. Seconds.
    """

    id: int
    request: GenerationRequest
    max_output: int
    max_output_from_client: bool
    prompt: Sequence[int] | None = None
    options: GenerationOptions | None = None
    thinking: bool | None = None
    prepare_seconds: float = 0.0
    tokenize_seconds: float = 0.0


@dataclass(frozen=True)
class Outcome:
    """How a request ended: one entry in each list for each of its `n` answers."""

    finished: tuple[Finished, ...]
    calls: tuple[CallReport, ...]
    statistics: tuple[Statistics, ...] = field(default=())


class Observer(Protocol):
    """Told in this order: `started`, then one of `done` and `failed`; or only `rejected`.

    Called in the server's event loop: must return quickly and never raise.
    """

    def started(self, record: RequestRecord) -> None: ...

    def rejected(self, record: RequestRecord, error: ApiError) -> None:
        """Preparation failed."""
        ...

    def done(self, record: RequestRecord, outcome: Outcome) -> None: ...

    def failed(self, record: RequestRecord, error: ApiError) -> None:
        """The engine or the queue failed after `started`."""
        ...

    def response_failed(self, record: RequestRecord, phase: str, error: BaseException) -> None:
        """Rendering, storing or sending an answer failed; console only."""
        ...
