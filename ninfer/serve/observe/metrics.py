"""Metrics for Prometheus, in a registry of our own."""

from __future__ import annotations

import asyncio
from importlib.metadata import PackageNotFoundError, version

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Enum,
    Gauge,
    Histogram,
    Info,
    ProcessCollector,
    generate_latest,
)

from ninfer.engine import RuntimeStatistics, Statistics
from ninfer.serve.calls import Finished, Protocol, Timings
from ninfer.serve.errors import ApiError
from ninfer.serve.jobs import EngineInfo, Link, LinkState
from ninfer.serve.observe.records import reason
from ninfer.serve.observe.startup import page_count
from ninfer.serve.observe.summary import answers, computed_tokens
from ninfer.serve.observer import Outcome, RequestRecord

MEDIA_TYPE = "text/plain; version=0.0.4; charset=utf-8"
OUTCOMES = ("completed", "cancelled", "rejected", "overloaded", "timeout", "failed")
_WAITS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
_TOKEN_TIMES = (0.001, 0.002, 0.004, 0.006, 0.008, 0.01, 0.015, 0.02, 0.03, 0.05, 0.1, 0.2, 0.5)
_RATES = (1, 2, 5, 10, 20, 30, 50, 75, 100, 150, 200, 300, 500, 1000)
_TOTALS = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800)
_PATIENCE = 1.0


class Metrics:
    """An `Observer` that counts. Counters are the server's and go on when the engine process is replaced."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        ProcessCollector(registry=registry)
        self._link: Link | None = None

        def counter(name: str, help: str, *labels: str) -> Counter:
            return Counter(f"ninfer_{name}", help, labels, registry=registry)

        def histogram(name: str, help: str, buckets: tuple[float, ...], *labels: str) -> Histogram:
            return Histogram(f"ninfer_{name}", help, labels, buckets=buckets, registry=registry)

        def gauge(name: str, help: str) -> Gauge:
            return Gauge(f"ninfer_{name}", help, registry=registry)

        self._build = Info("ninfer_build", "Version and model", registry=registry)
        self._build.info({"version": _version()})
        self._state = Enum(
            "ninfer_engine_state", "State of the engine process", states=list(LinkState), registry=registry
        )
        self._requests = counter("requests", "Requests by how they ended", "protocol", "outcome")
        self._answers = counter("answers", "Answers by why they ended", "finish_reason")
        self._calls = counter("tool_calls", "Tool calls in answers")
        self._fallbacks = counter("tool_markup_fallbacks", "Answers whose tool markup stayed text", "reason")
        self._prompt = counter("prompt_tokens", "Prompt tokens of answers, cached ones included")
        self._computed = counter("prompt_tokens_computed", "Prompt tokens that had to be computed")
        self._cached = counter("prompt_tokens_cached", "Prompt tokens taken from the prefix cache")
        self._lookups = counter("prefix_cache_lookups", "Answers that could have used the prefix cache")
        self._hits = counter("prefix_cache_hits", "Answers that used the prefix cache")
        self._generated = counter("generated_tokens", "Tokens generated, hidden ones included")
        self._reasoning = counter("reasoning_tokens", "Generated tokens inside thinking blocks")
        self._drafted = counter("drafted_tokens", "Tokens proposed by speculation")
        self._accepted = counter("accepted_tokens", "Proposed tokens that were accepted")
        self._first = histogram(
            "time_to_first_token_seconds", "From a request's arrival to its first token", _WAITS, "protocol"
        )
        self._queue = histogram("queue_wait_seconds", "Before a request had its memory", _WAITS)
        self._total = histogram(
            "request_duration_seconds", "From a request's arrival to its end", _TOTALS, "protocol"
        )
        self._between = histogram(
            "time_per_output_token_seconds", "Mean time between an answer's tokens", _TOKEN_TIMES
        )
        self._rate = histogram("decode_tokens_per_second", "Decode rate of an answer", _RATES)
        self._active = gauge("requests_in_progress", "Requests that have been prepared and have not ended")
        self._running = gauge("requests_running", "Requests that the engine works on")
        self._waiting = gauge("requests_waiting", "Requests in the engine's queue")
        self._prefilling = gauge("requests_prefilling", "Running requests whose prompt is being computed")
        self._pages = gauge("kv_pages_capacity", "KV pages of 64 tokens")
        self._used = gauge("kv_pages_used", "KV pages that a request or the prefix cache has")
        self._locked = gauge("kv_pages_active", "KV pages that a running request uses")
        self._promised = gauge("kv_pages_reserved", "KV pages promised to running requests")
        self._blocks = gauge("prefix_cache_blocks", "Blocks of 64 tokens in the prefix cache")
        self._snapshots = gauge("prefix_cache_snapshots", "Recurrent states in the prefix cache")
        self._slots = gauge("state_slots_used", "State slots of running requests and of the prefix cache")
        self._tasks = gauge("server_tasks", "Tasks of the server process: open connections and their work")
        for protocol in Protocol:
            for outcome in OUTCOMES:
                self._requests.labels(protocol.value, outcome)
            self._first.labels(protocol.value)
            self._total.labels(protocol.value)

    def start(self, link: Link, info: EngineInfo, model_id: str) -> None:
        self._link = link
        self._build.info(
            {
                "version": _version(),
                "model": model_id,
                "architecture": info.architecture,
                "device": info.device,
                "device_name": info.device_name,
                "kv_dtype": info.kv_dtype,
            }
        )

    # Requests

    def started(self, record: RequestRecord) -> None:
        self._active.inc()

    def rejected(self, record: RequestRecord, error: ApiError) -> None:
        self._ended(record, _outcome(error))

    def failed(self, record: RequestRecord, error: ApiError) -> None:
        self._active.dec()
        self._ended(record, _outcome(error))

    def done(self, record: RequestRecord, outcome: Outcome) -> None:
        self._active.dec()
        done = answers(outcome)
        cancelled = all(reason(s.finish_reason) == "cancelled" for s in done)
        self._ended(record, "cancelled" if cancelled else "completed")
        protocol = record.request.protocol.value
        for statistics in done:
            self._answer(statistics, record.options is None or record.options.prefix_reuse)
        for report in outcome.calls:
            self._calls.inc(report.structured_calls)
            if report.fallback != "none":
                self._fallbacks.labels(report.fallback).inc()
        for timings in _timings(outcome.finished):
            if timings.ttft is not None:
                self._first.labels(protocol).observe(timings.ttft)
            self._total.labels(protocol).observe(timings.total)

    def response_failed(self, record: RequestRecord, phase: str, error: BaseException) -> None:
        """Its outcome is counted when the answer ends."""

    def _ended(self, record: RequestRecord, outcome: str) -> None:
        self._requests.labels(record.request.protocol.value, outcome).inc()

    def _answer(self, s: Statistics, reuses: bool) -> None:
        self._answers.labels(reason(s.finish_reason)).inc()
        self._queue.observe(s.queue_seconds)
        self._prompt.inc(s.prompt_tokens)
        self._computed.inc(computed_tokens(s))
        self._cached.inc(s.reused_tokens)
        if reuses and s.first_token_seconds is not None:
            self._lookups.inc()
            self._hits.inc(s.reused_tokens > 0)
        self._generated.inc(s.generated_tokens)
        self._reasoning.inc(s.reasoning_tokens)
        self._drafted.inc(s.drafted_tokens)
        self._accepted.inc(s.accepted_tokens)
        if s.decode_rate is not None:
            self._rate.observe(s.decode_rate)
            self._between.observe(1 / s.decode_rate)

    # Scrapes

    async def scrape(self) -> bytes:
        """The exposition, in the format of MEDIA_TYPE. Asks the engine how it stands."""
        self._tasks.set(len(asyncio.all_tasks()))
        if self._link is not None:
            self._state.state(self._link.state.value)
            try:
                async with asyncio.timeout(_PATIENCE):
                    now = await self._link.statistics()
            except Exception:
                now = None  # then the gauges say that nothing runs, and the state says why
            self._standing(now or RuntimeStatistics(), self._link, now is not None)
        return generate_latest(self.registry)

    def _standing(self, now: RuntimeStatistics, link: Link, loaded: bool) -> None:
        pages = page_count(link.info) if loaded else 0
        self._running.set(now.running)
        self._waiting.set(now.waiting)
        self._prefilling.set(now.prefilling)
        self._pages.set(pages)
        self._used.set(max(pages - now.free_pages, 0))
        self._locked.set(now.active_pages)
        self._promised.set(now.reserved_pages)
        self._blocks.set(now.cached_blocks)
        self._snapshots.set(now.snapshots)
        self._slots.set(now.used_slots)


def _outcome(error: ApiError) -> str:
    if error.status == 499:
        return "cancelled"
    if error.code == "request_queue_timeout":
        return "timeout"
    if error.status == 429:
        return "overloaded"
    return "rejected" if error.client_fault else "failed"


def _timings(finished: tuple[Finished, ...]) -> list[Timings]:
    """One a request: that of the answer that took longest."""
    return [max((f.timings for f in finished), key=lambda t: t.total)] if finished else []


def _version() -> str:
    try:
        return version("ninfer")
    except PackageNotFoundError:
        return "unknown"
