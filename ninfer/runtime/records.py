"""The records that go into and come out of a Program; no tensors, nothing that can't be written to a wire."""

from __future__ import annotations

from dataclasses import dataclass

from ninfer.ops import Purpose, SamplingParams


@dataclass(frozen=True)
class Draw:
    """How to choose a token from the last column: `position` and `purpose` key the random number."""

    sampling: SamplingParams
    position: int
    purpose: Purpose


def penalized(sampling: SamplingParams) -> bool:
    """Does the choice depend on how often each token was generated?"""
    return sampling.presence_penalty != 0 or sampling.frequency_penalty != 0


@dataclass(frozen=True)
class Ingress:
    """One unit of work: feed `tokens` at positions `frontier`, `frontier + 1`, …; then draw, if asked to.

    The state before comes from `source_slot`, the state after goes to `target_slot` (another one). No tokens:
    draw again from the column before `frontier`.
    """

    tokens: tuple[int, ...]
    frontier: int
    source_slot: int
    target_slot: int
    draw: Draw | None


@dataclass(frozen=True)
class Egress:
    """What a unit of work produced: `tokens` holds one id, or none if nothing was drawn."""

    tokens: tuple[int, ...]


@dataclass(frozen=True)
class Admission:
    """A prompt has been taken in: `reused_tokens` of `prompt_tokens` need no computation.

    At most `output_limit` tokens can be committed after it; `limited_by_context` says that the context and
    not the request's own number is what binds.
    """

    prompt_tokens: int
    reused_tokens: int
    output_limit: int
    limited_by_context: bool


@dataclass(frozen=True)
class Prefilled:
    """One prefill chunk is done: `processed_tokens` of `prompt_tokens` are in memory (reused ones included).

    `tokens` holds the first output token after the last chunk, and is empty before.
    """

    processed_tokens: int
    prompt_tokens: int
    tokens: tuple[int, ...]


@dataclass(frozen=True)
class Decoded:
    """One decode step is done; `tokens` are provisional until they are committed."""

    tokens: tuple[int, ...]
