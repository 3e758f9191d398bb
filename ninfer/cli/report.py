"""The report on stderr after an answer: stage rows, then a summary, in fixed columns; in a chat one line."""

from collections.abc import Iterable
from typing import TYPE_CHECKING, TextIO

from ninfer.api import EngineDescription, FinishReason, Statistics

if TYPE_CHECKING:
    from ninfer.runtime import SamplingParams


def write_report(
    stream: TextIO,
    statistics: Statistics,
    sampling: "SamplingParams",
    description: EngineDescription,
    render_seconds: float,
    host_share: float | None,
    print_token_ids: bool,
) -> None:
    """Print the report of one finished request, in columns 12 and 26 wide.

    `host_share`: part of the decode time in which the model's kernels waited for the engine.
    """
    total = render_seconds + statistics.prefill_seconds + statistics.decode_seconds
    computed = statistics.prompt_tokens - statistics.reused_tokens
    rows: list[tuple[str, str, str]] = [("phase", "detail", "elapsed/progress")]
    if print_token_ids:
        rows.append(("tokens", "generated ids", " ".join(map(str, statistics.token_ids))))
    rows += [
        ("render", f"{statistics.prompt_tokens} tokens", _seconds(render_seconds)),
        ("prefill", f"{computed} tokens", _seconds(statistics.prefill_seconds)),
        ("decode", f"{max(statistics.generated_tokens - 1, 0)} tokens", _seconds(statistics.decode_seconds)),
        ("total", "", _seconds(total)),
    ]
    rows += [("summary", name, value) for name, value in _summary(statistics, sampling, description)]
    if host_share is not None:
        rows.append(("summary", "host share of decode", f"{100 * host_share:.1f} %"))
    for phase, detail, value in rows:
        print(f"{phase:<12}{detail:<26}{value}".rstrip(), file=stream)


def write_line(stream: TextIO, statistics: Statistics, description: EngineDescription, quiet: bool) -> None:
    """Print what a chat should know after an answer; if `quiet`, only that its context is full."""
    used = min(statistics.prompt_tokens + statistics.generated_tokens, description.max_context)
    if not quiet:
        reused = f"reused {statistics.reused_tokens}, " if statistics.reused_tokens else ""
        print(
            f"[{statistics.generated_tokens} tokens, {_rate(statistics.decode_rate)}, {reused}"
            f"context {used} of {description.max_context}, {statistics.finish_reason.value}]",
            file=stream,
        )
    if statistics.finish_reason is FinishReason.CONTEXT_CAPACITY:
        print(
            f"The context of {description.max_context} tokens is full; /reset starts a new conversation, "
            f"--max-context allows a longer one.",
            file=stream,
        )


def _summary(
    statistics: Statistics, sampling: "SamplingParams", description: EngineDescription
) -> Iterable[tuple[str, str]]:
    yield "sampling", describe_sampling(sampling)
    yield "finish reason", statistics.finish_reason.value
    yield "prompt tokens", str(statistics.prompt_tokens)
    yield "reused tokens", str(statistics.reused_tokens)
    yield "generated tokens", str(statistics.generated_tokens)
    if statistics.reasoning_tokens:
        yield "reasoning tokens", str(statistics.reasoning_tokens)
    if (thinking := statistics.thinking) is not None:
        yield "thinking budget", str(thinking.budget)
        yield "thinking model tokens", str(thinking.model_tokens)
        yield "thinking control tokens", str(thinking.control_tokens)
        yield "thinking budget applied", "yes" if thinking.applied else "no"
    yield "model elapsed", _seconds(statistics.prefill_seconds + statistics.decode_seconds)
    yield "prefill rate", _rate(statistics.prefill_rate)
    yield "decode rate", _rate(statistics.decode_rate)
    yield "overall rate", _rate(statistics.overall_rate)
    if window := description.draft_tokens:
        spec = statistics.speculation
        yield "draft window", str(window)
        yield "rounds", str(spec.rounds)
        yield "fallback steps", str(spec.fallback_steps)
        yield "drafted", str(spec.drafted)
        yield "accepted", str(spec.accepted)
        if spec.rounds:
            yield "acceptance rate", f"{100 * spec.accepted / spec.drafted:.1f} %"
            yield "acceptance length", f"{1 + spec.accepted / spec.rounds:.2f} tok/round"
            yield "accepted by position", " ".join(map(str, spec.per_position))
            yield "rounds by accepted", " ".join(map(str, spec.histogram()))
    yield "device", description.computes_on
    yield "max context", f"{description.max_context} tokens"
    yield "KV", f"{description.kv_dtype}, {description.kv_tokens} tokens, {_mib(description.kv_bytes)}"
    yield "weights", _mib(description.weight_bytes)


def describe_sampling(sampling: "SamplingParams") -> str:
    """One line such as `temperature 0.7, top-p 0.8, top-k 20, seed 0`; `greedy` when the temperature is 0."""
    parts = (
        ["greedy"]
        if sampling.temperature <= 0
        else [
            f"temperature {sampling.temperature:g}",
            f"top-p {sampling.top_p:g}",
            f"top-k {sampling.top_k}",
            *([f"min-p {sampling.min_p:g}"] if sampling.min_p else []),
            f"seed {sampling.seed}",
        ]
    )
    if sampling.presence_penalty:
        parts.append(f"presence penalty {sampling.presence_penalty:g}")
    if sampling.frequency_penalty:
        parts.append(f"frequency penalty {sampling.frequency_penalty:g}")
    return ", ".join(parts)


def _seconds(value: float) -> str:
    return f"{value * 1e3:.1f} ms" if value < 1 else f"{value:.2f} s"


def _rate(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f} tok/s"


def _mib(size: int) -> str:
    return f"{size / 2**20:.1f} MiB"
