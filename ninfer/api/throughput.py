"""Measuring an engine: cases of a prompt and a number of tokens, run through the public interface.

The first output token belongs to prefill and is never counted as a decoded one, so a case that decodes G
tokens asks for G + 1. Every request is raw, ignores the model's stops and reuses nothing; a repetition counts
only if it made exactly the tokens that were asked for.
"""

from __future__ import annotations

import statistics as stat
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING

import numpy as np

from ninfer.api.options import GenerationOptions
from ninfer.engine import Done, Output, PromptProgress, RuntimeStatistics, Speculation, Statistics
from ninfer.errors import EngineError
from ninfer.events import FinishReason

if TYPE_CHECKING:
    from ninfer.api.engine import Engine, Generation

_SETTLED = 0.5
"""Part of the rounds that must lie where all requests decode, for an aggregate rate of those alone."""


@dataclass(frozen=True)
class Case:
    """`pp`: `prompt` tokens are prefilled. `tg`: `generated` tokens are decoded behind `depth` others (at
    least one), by `concurrency` requests at a time. `pp+tg`: both figures of one request."""

    prompt: int = 0
    generated: int = 0
    depth: int = 0
    concurrency: int = 1

    @property
    def kind(self) -> str:
        return "+".join(name for name, count in (("pp", self.prompt), ("tg", self.generated)) if count)

    @property
    def label(self) -> str:
        """Such as `pp512`, `tg128 @ d8192`, `pp2048+tg512`, `tg128 x8`."""
        parts = [f"pp{self.prompt}"] if self.prompt else []
        parts += [f"tg{self.generated}"] if self.generated else []
        depth = f" @ d{self.depth}" if self.depth else ""
        return "+".join(parts) + depth + (f" x{self.concurrency}" if self.concurrency > 1 else "")

    @property
    def prompt_tokens(self) -> int:
        return self.prompt or max(self.depth, 1)

    @property
    def output_tokens(self) -> int:
        return self.generated + 1

    @property
    def context(self) -> int:
        """Tokens of context that one request takes; the last output token needs none."""
        return self.prompt_tokens + self.generated


def cases(
    prompts: Iterable[int],
    generated: Iterable[int],
    pairs: Iterable[tuple[int, int]],
    depths: Iterable[int] = (0,),
    concurrencies: Iterable[int] = (1,),
) -> list[Case]:
    """All cases in order: prefill, then decode at every depth and concurrency, then both."""
    found = [Case(prompt=count) for count in prompts]
    found += [
        Case(generated=count, depth=depth, concurrency=rows)
        for count in generated
        for depth in depths
        for rows in concurrencies
    ]
    return found + [Case(prompt=prompt, generated=count) for prompt, count in pairs]


def random_ids(public_tokens: int, avoid: Iterable[int], count: int, seed: int = 0) -> list[int]:
    """Pseudo-random token ids, always the same: what a model is fed takes equally long whatever it says."""
    allowed = np.setdiff1d(np.arange(public_tokens), np.array(sorted(avoid), dtype=np.int64))
    return np.random.default_rng(seed).choice(allowed, count).tolist()


@dataclass(frozen=True)
class Repetition:
    """One measured run of a case; seconds, tokens a second, counts of all its requests together.

    `decode_seconds` of one request are its own; of several, those of the rounds in which all of them decoded
    (`decode_output_tokens` are the tokens of those rounds), or of all rounds where those were too few.
    `host_share` is the part of the decode time in which the device waited for the host; `average_batch` the
    mean number of requests in those rounds.
    """

    statistics: tuple[Statistics, ...]
    prepare_seconds: float
    prefill_seconds: float
    decode_seconds: float
    first_token_seconds: float
    total_seconds: float
    decode_output_tokens: int
    decode_engine_tokens: int
    row_rounds: int
    rounds: int
    host_share: float | None
    average_batch: float | None

    @property
    def speculation(self) -> Speculation:
        """Of all requests."""
        total = Speculation()
        for one in self.statistics:
            total.add(one.speculation)
        return total

    @property
    def prefill_tok_s(self) -> float | None:
        prompt = sum(one.prompt_tokens for one in self.statistics)
        return _rate(prompt, self.prefill_seconds)

    @property
    def decode_output_tok_s(self) -> float | None:
        return _rate(self.decode_output_tokens, self.decode_seconds)

    @property
    def decode_engine_tok_s(self) -> float | None:
        return _rate(self.decode_engine_tokens, self.decode_seconds)

    @property
    def decode_wall_tok_s(self) -> float | None:
        """What a client sees: all decoded tokens over the time from the first token to the end."""
        tokens = sum(one.generated_tokens - 1 for one in self.statistics)
        return _rate(tokens, self.total_seconds - self.first_token_seconds)


def measure(engine: Engine, case: Case, ids: Sequence[int]) -> Repetition:
    """Run a case once. `ids` is what prompts are taken from, tiled where it is too short; each of several
    requests begins at another place. Raises EngineError for a repetition that doesn't count."""
    options = GenerationOptions(
        max_new=case.output_tokens,
        temperature=0.0,
        presence_penalty=0.0,
        frequency_penalty=0.0,
        raw=True,
        ignore_model_stops=True,
        prefix_reuse=False,
    )
    prompts = [_prompt(ids, row, case.prompt_tokens) for row in range(case.concurrency)]
    before, begin = engine.statistics(), perf_counter()
    generations = [engine.generate(prompt, options) for prompt in prompts]
    window, found = _finish(engine, generations)
    seconds, after = perf_counter() - begin, engine.statistics()
    for one in found:
        _check(case, one)
    steady = _since(*window)
    if steady.rounds < _SETTLED * case.generated:
        steady = _since(before, after)
    alone = found[0] if case.concurrency == 1 else None
    return Repetition(
        statistics=tuple(found),
        prepare_seconds=sum(one.render_seconds for one in generations),
        prefill_seconds=sum(one.prefill_seconds for one in found),
        decode_seconds=steady.decode_seconds if alone is None else alone.decode_seconds,
        first_token_seconds=min(one.first_token_seconds or 0.0 for one in found),
        total_seconds=seconds if alone is None else alone.total_seconds,
        decode_output_tokens=steady.tokens if alone is None else case.generated,
        decode_engine_tokens=(
            steady.row_rounds + steady.accepted if alone is None else alone.rounds + alone.accepted_tokens
        ),
        row_rounds=steady.row_rounds if alone is None else alone.rounds,
        rounds=steady.rounds,
        host_share=steady.host_share,
        average_batch=steady.row_rounds / steady.rounds if steady.rounds else None,
    )


def mean_and_deviation(values: Iterable[float | None]) -> tuple[float | None, float | None]:
    """Arithmetic mean and sample deviation (0 for one value); None for both if a value is missing."""
    known = list(values)
    if not known or any(value is None for value in known):
        return None, None
    numbers = [value for value in known if value is not None]
    return stat.fmean(numbers), stat.stdev(numbers) if len(numbers) > 1 else 0.0


def _prompt(ids: Sequence[int], row: int, count: int) -> list[int]:
    start = row * 97
    turns = -(-(start + count) // len(ids))
    return list(ids[start : start + count]) if turns <= 1 else (list(ids) * turns)[start : start + count]


def _finish(
    engine: Engine, generations: Sequence[Generation]
) -> tuple[tuple[RuntimeStatistics, RuntimeStatistics], list[Statistics]]:
    """Wait for all; the counters when the last one had its first token, and when the first one was done."""
    iterators = [iter(generation) for generation in generations]
    for event in iterators[-1]:
        if isinstance(event, Output) or (
            isinstance(event, PromptProgress) and event.processed_tokens == event.prompt_tokens
        ):
            break
        if isinstance(event, Done):
            found = [event.statistics if one is iterators[-1] else _done(one) for one in iterators]
            return (engine.statistics(), engine.statistics()), found
    first = engine.statistics()
    found = [_done(iterators[0])]
    last = engine.statistics()
    return (first, last), found + [_done(one) for one in iterators[1:]]


def _done(events: Iterable[object]) -> Statistics:
    for event in events:
        if isinstance(event, Done):
            return event.statistics
    raise EngineError("an answer ended without its statistics")


def _check(case: Case, found: Statistics) -> None:
    if found.finish_reason is not FinishReason.OUTPUT_LIMIT or found.generated_tokens != case.output_tokens:
        raise EngineError(
            f"{case.label} made {found.generated_tokens} of {case.output_tokens} tokens and ended by "
            f"{found.finish_reason.value}; such a repetition doesn't count"
        )
    if found.reused_tokens:
        raise EngineError(f"{case.label} reused {found.reused_tokens} tokens; nothing may be reused")


@dataclass(frozen=True)
class _Work:
    rounds: int
    row_rounds: int
    tokens: int
    accepted: int
    decode_seconds: float
    host_share: float | None


def _since(before: RuntimeStatistics, after: RuntimeStatistics) -> _Work:
    seconds = after.decode_seconds - before.decode_seconds
    device = after.decode_device_seconds - before.decode_device_seconds
    total = seconds + after.engine_boundary - before.engine_boundary
    return _Work(
        after.rounds - before.rounds,
        after.row_rounds - before.row_rounds,
        after.decode_tokens - before.decode_tokens,
        after.accepted_tokens - before.accepted_tokens,
        seconds,
        1 - device / total if seconds > 0 else None,
    )


def _rate(tokens: int, seconds: float) -> float | None:
    return tokens / seconds if tokens > 0 and seconds > 0 else None
