"""What `ninfer-serve` may be told, checked; the engine's own part is an `EngineOptions`."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from ninfer.api.options import EngineOptions
from ninfer.errors import OptionError

_U32 = 2**32 - 1


@dataclass(frozen=True)
class SamplingOverrides:
    """The server's sampling flags; None leaves the model's preset. `greedy` wins over everything."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: int | None = None
    greedy: bool = False


@dataclass(frozen=True)
class ServeOptions:
    """Fixed while the server lives.

    `model_path` the artifact; `model_id` its public name (None: the artifact's), `model_aliases` further
    names that requests may use. `engine` what the engine process loads with; its `max_pending` and
    `pending_timeout` are the server's own limits. `idle_unload` seconds without a request end the engine
    process (None: never); the next request starts it again. Sizes are bytes, times seconds.
    """

    model_path: Path
    engine: EngineOptions = field(default_factory=EngineOptions)
    host: str = "127.0.0.1"
    port: int = 8080
    api_key: str | None = field(default=None, repr=False)
    model_id: str | None = None
    model_aliases: tuple[str, ...] = ()
    sampling: SamplingOverrides = SamplingOverrides()
    max_request_bytes: int = 384 << 20
    default_max_tokens: int = 8192
    default_thinking_budget: int | None = None
    thinking: bool | None = None
    preserve_thinking: bool | None = None
    cors: bool = False
    idle_unload: float | None = None
    drain_timeout: float = 30.0
    stats_interval: float = 5.0
    request_log: Path | None = None
    speculation_detail_max_steps: int | None = None
    response_store_records: int = 1024
    response_store_bytes: int = 256 << 20
    prefill_miss_dump: Path | None = None
    prefill_miss_min_tokens: int = 10_000
    prefill_miss_min_match: float = 0.5
    keep_alive: float = 5.0
    log_level: str = "info"
    argv: tuple[str, ...] = ()
    """The command line for the request log, the key left out."""

    def __post_init__(self) -> None:
        if self.model_id == "" or "" in self.model_aliases:
            raise OptionError("a model id must not be empty; leave the option out for the artifact's name")
        if not 1 <= self.port <= 65535 and self.port != 0:
            raise OptionError(f"port must be a whole number between 1 and 65535, not {self.port}")
