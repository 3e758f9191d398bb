"""What a request tells its consumer: one `Started`, then `PromptProgress`es, `Output`s, and one `Done`."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from itertools import pairwise

from ninfer.events import Channel, FinishReason, TokenLogprob


@dataclass(frozen=True)
class Started:
    """The request owns its memory and begins; `reused_tokens` of `prompt_tokens` need no computation."""

    prompt_tokens: int
    reused_tokens: int


@dataclass(frozen=True)
class PromptProgress:
    """`processed_tokens` of `prompt_tokens` (reused ones included) are in memory, after `seconds` of work."""

    prompt_tokens: int
    processed_tokens: int
    seconds: float


@dataclass(frozen=True)
class Output:
    """Text for a channel; never half a character, never text after a stop.

    `logprobs`: of the content tokens since the last event that had some, if they were asked for (a token
    whose text is held back comes with the next text). `generated` tokens are committed, `seconds` after the
    first.
    """

    channel: Channel
    text: str
    logprobs: tuple[TokenLogprob, ...] = ()
    generated: int = 0
    seconds: float = 0.0


@dataclass(frozen=True)
class ThinkingReport:
    """Use of a thinking budget: the model's tokens inside the block, and whether the closer was forced."""

    budget: int
    model_tokens: int
    control_tokens: int
    applied: bool


@dataclass(frozen=True)
class HostWork:
    """Seconds that the worker spent while a request was active, whoever it was for; not to be summed over
    requests that ran together. The first five are the host's (the device waits); `device_wait` is the time in
    which the Program worked, the `decode_*` parts are those of decode rounds."""

    engine_boundary: float = 0.0
    program_submit: float = 0.0
    program_post: float = 0.0
    engine_commit_output: float = 0.0
    engine_maintenance: float = 0.0
    device_wait: float = 0.0
    decode_host: float = 0.0
    decode_device_wait: float = 0.0
    prefill_units: int = 0
    control_units: int = 0

    def since(self, before: HostWork) -> HostWork:
        """What was done after `before`."""
        names = [one.name for one in fields(self)]
        return HostWork(*(getattr(self, name) - getattr(before, name) for name in names))


NO_DRAFT = 255
"""In `Speculation.lengths`."""


@dataclass
class Speculation:
    """What drafts came to, of at most `window` a round (0: there is no speculation). `rounds` had some,
    `fallback_steps` none; `accepted` ones stood and are output, so those behind a stop don't count.
    `per_position[i]` counts rounds in which more than i drafts were accepted, so that its sum is `accepted`.
    `lengths`: how many were in each round of any kind, in order, `NO_DRAFT` where there was none."""

    window: int = 0
    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    fallback_steps: int = 0
    per_position: list[int] = field(default_factory=list)
    lengths: bytearray = field(default_factory=bytearray, repr=False)

    def __post_init__(self) -> None:
        self.per_position += [0] * (self.window - len(self.per_position))

    def count(self, drafted: int, accepted: int) -> None:
        """One round of one request."""
        self.lengths.append(accepted if drafted else NO_DRAFT)
        if not drafted:
            self.fallback_steps += 1
            return
        self.rounds += 1
        self.drafted += drafted
        self.accepted += accepted
        for position in range(accepted):
            self.per_position[position] += 1

    def add(self, other: Speculation) -> None:
        """Count another request's as well, all but its `lengths`."""
        self.window = max(self.window, other.window)
        self.rounds += other.rounds
        self.drafted += other.drafted
        self.accepted += other.accepted
        self.fallback_steps += other.fallback_steps
        self.per_position += [0] * (len(other.per_position) - len(self.per_position))
        for position, count in enumerate(other.per_position):
            self.per_position[position] += count

    def histogram(self) -> list[int]:
        """Rounds in which exactly 0, 1, … `window` drafts stood; empty without speculation."""
        if not self.window:
            return []
        reached = [self.rounds, *self.per_position, 0]
        return [more - fewer for more, fewer in pairwise(reached)]


@dataclass(frozen=True)
class Statistics:
    """Counts and times of one finished request.

    `generated_tokens` counts every committed output token (stop and forced tokens too). The first token
    belongs to `prefill_seconds`; `decode_seconds` covers the others. Both are times of the model's work: what
    the consumer of the events takes is not in them. `queue_seconds` passed before the request had its memory,
    `first_token_seconds` and `total_seconds` count from its submission; `rounds` are the decode steps that it
    took part in.
    """

    finish_reason: FinishReason
    prompt_tokens: int
    reused_tokens: int
    generated_tokens: int
    reasoning_tokens: int
    prefill_seconds: float
    decode_seconds: float
    token_ids: tuple[int, ...] = field(repr=False)
    thinking: ThinkingReport | None = None
    queue_seconds: float = 0.0
    first_token_seconds: float | None = None
    total_seconds: float = 0.0
    rounds: int = 0
    stop_string: str | None = None
    """The stop string that ended the output."""
    speculation: Speculation = field(default_factory=Speculation)
    host: HostWork = HostWork()
    reuse_path: str = "root"
    """Where the reused tokens came from; see `ninfer.engine.reuse.ReusePath`."""

    @property
    def drafted_tokens(self) -> int:
        return self.speculation.drafted

    @property
    def accepted_tokens(self) -> int:
        return self.speculation.accepted

    @property
    def prefill_rate(self) -> float | None:
        """Computed prompt tokens per second."""
        return _rate(self.prompt_tokens - self.reused_tokens, self.prefill_seconds)

    @property
    def decode_rate(self) -> float | None:
        """Tokens per second after the first one."""
        return _rate(self.generated_tokens - 1, self.decode_seconds)

    @property
    def overall_rate(self) -> float | None:
        """Generated tokens per second of model time."""
        return _rate(self.generated_tokens, self.prefill_seconds + self.decode_seconds)


@dataclass(frozen=True)
class Done:
    """The request is over; nothing follows."""

    statistics: Statistics


Event = Started | PromptProgress | Output | Done


def _rate(tokens: int, seconds: float) -> float | None:
    return tokens / seconds if tokens > 0 and seconds > 0 else None
