"""One HTTP request's answers as one line: what the request log and the console both say."""

from __future__ import annotations

from dataclasses import dataclass

from ninfer.engine import Speculation, Statistics
from ninfer.engine.events import HostWork
from ninfer.events import FinishReason
from ninfer.serve.calls import Protocol
from ninfer.serve.observer import CallReport, Outcome, RequestRecord

SHORT_NAMES = {
    Protocol.CHAT: "openai-chat",
    Protocol.RESPONSES: "openai-responses",
    Protocol.MESSAGES: "anthropic",
}


@dataclass(frozen=True)
class Summary:
    """Tokens are sums over the answers, except those of the prompt and its reuse: the first answer's. Times
    (seconds) and host work are those of the answer that took longest; `ttft` is the earliest. The reason is
    the first answer's, and so are the lengths of drafts; an answer that never began counts as cancelled."""

    reason: FinishReason
    prompt: int
    reused: int
    reuse_path: str
    computed: int
    generated: int
    thinking: int
    control: int
    applied: bool
    budget: int | None
    speculation: Speculation
    rounds: int
    calls: CallReport
    call_count: int
    queue: float
    ttft: float | None
    prefill: float
    decode: float
    total: float
    prefilled: int
    """Tokens that `prefill` seconds brought."""
    decoded: int
    """Tokens that `decode` seconds brought: all of that answer's after its first."""
    host: HostWork


def answers(outcome: Outcome) -> tuple[Statistics, ...]:
    return tuple(f.statistics for f in outcome.finished) or outcome.statistics


def summarize(record: RequestRecord, outcome: Outcome) -> Summary:
    done = answers(outcome)
    calls = CallReport(
        marker_seen=any(c.marker_seen for c in outcome.calls),
        structured_calls=sum(c.structured_calls for c in outcome.calls),
        empty_arguments_omitted=sum(c.empty_arguments_omitted for c in outcome.calls),
        schema_mismatches=sum(c.schema_mismatches for c in outcome.calls),
        fallback=next((c.fallback for c in outcome.calls if c.fallback != "none"), "none"),
    )
    if not done:
        done = (_nothing(len(record.prompt or ())),)
    first, longest = done[0], max(done, key=lambda s: s.total_seconds)
    timings = [f.timings for f in outcome.finished]
    begun = [s.first_token_seconds for s in done if s.first_token_seconds is not None]
    known = [t.ttft for t in timings if t.ttft is not None]
    reports = [s.thinking for s in done if s.thinking is not None]
    speculation = Speculation(lengths=first.speculation.lengths)
    for one in done:
        speculation.add(one.speculation)
    return Summary(
        reason=first.finish_reason,
        prompt=first.prompt_tokens,
        reused=first.reused_tokens,
        reuse_path=str(first.reuse_path),
        computed=sum(computed_tokens(s) for s in done),
        generated=sum(s.generated_tokens for s in done),
        thinking=sum(thinking_tokens(s) for s in done),
        control=sum(report.control_tokens for report in reports),
        applied=any(report.applied for report in reports),
        budget=None if record.options is None else record.options.thinking_budget,
        speculation=speculation,
        rounds=longest.rounds,
        calls=calls,
        call_count=sum(f.calls for f in outcome.finished),
        queue=longest.queue_seconds,
        ttft=min(known) if known else record.prepare_seconds + min(begun) if begun else None,
        prefill=longest.prefill_seconds,
        decode=longest.decode_seconds,
        total=max((t.total for t in timings), default=0.0) or record.prepare_seconds + longest.total_seconds,
        prefilled=computed_tokens(longest),
        decoded=max(longest.generated_tokens - 1, 0),
        host=longest.host,
    )


def thinking_tokens(statistics: Statistics) -> int:
    """Tokens of the thinking block that the model chose itself."""
    if statistics.thinking is not None:
        return statistics.thinking.model_tokens
    return statistics.reasoning_tokens


def computed_tokens(statistics: Statistics) -> int:
    """Prompt tokens that were not reused; those of a request that ended while it waited were neither."""
    if statistics.first_token_seconds is None and not statistics.prefill_seconds:
        return 0
    return statistics.prompt_tokens - statistics.reused_tokens


def _nothing(prompt_tokens: int) -> Statistics:
    return Statistics(FinishReason.CANCELLED, prompt_tokens, 0, 0, 0, 0.0, 0.0, ())
