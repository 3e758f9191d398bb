"""The console log: what the server does, in one line each, without anybody's text."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from ninfer.engine import Speculation
from ninfer.serve.calls import GenerationRequest, Protocol
from ninfer.serve.errors import ApiError, anthropic_status
from ninfer.serve.jobs import EngineInfo
from ninfer.serve.observe.startup import memory
from ninfer.serve.observe.stderr import Progress
from ninfer.serve.observe.summary import SHORT_NAMES, summarize
from ninfer.serve.observe.text import count, duration, groups, label, percent, rate, size
from ninfer.serve.observer import Outcome, RequestRecord
from ninfer.serve.options import ServeOptions

logger = logging.getLogger("ninfer.serve")
_LOOPBACK = ("127.", "localhost", "::1", "[::1]")
_WARM_UP_WORTH_A_LINE = 0.25
_QUEUE_WORTH_A_GROUP = 0.010
_GONE = (ConnectionError, asyncio.CancelledError)


class Console:
    """An `Observer` that writes lines through `logging`; further methods are the life of the server."""

    def __init__(self, options: ServeOptions) -> None:
        self._options = options

    # The server

    def loading(self, name: str = "loading weights") -> Progress:
        """Context manager around a wait for the engine process."""
        return Progress(name, logger)

    def starting(self) -> None:
        logger.info(groups("starting engine", label(self._options.model_path.name)))

    def ready(self, info: EngineInfo) -> None:
        """The engine process is loaded: what it is and what it holds."""
        options, sums = self._options, memory(info, self._options)
        device = info.device_name or f"{info.threads} thread{'s' * (info.threads != 1)}"
        if info.device_name and not info.cuda_graph:
            device += ", no graphs"
        logger.info(
            groups(
                "engine ready",
                label(info.name),
                duration(info.load_seconds),
                f"weights {size(info.weight_bytes)}",
                f"{info.device}, {device}",
            )
        )
        mode = "auto" if options.engine.kv_capacity == "auto" else "explicit"
        free = None
        if info.memory_available is not None:
            free = f"free {size(max(info.memory_available - sums.reservation, 0))}"
        logger.info(
            groups(
                "capacity",
                f"KV {count(info.kv_tokens)} tokens, {info.kv_dtype}, {mode}",
                f"pages {count(info.pages)}/{count(info.pages)}",
                f"runtime {size(sums.reservation)}",
                free,
            )
        )
        cache = "root only"
        if options.engine.prefix_reuse:
            active = info.slots - info.snapshots
            cache = f"{active} active + {info.snapshots} cached device states" if info.slots else "any token"
        logger.info(groups("context cache", cache))

    def warmed_up(self, seconds: float) -> None:
        level = logging.INFO if seconds >= _WARM_UP_WORTH_A_LINE else logging.DEBUG
        logger.log(level, groups("warm-up", duration(seconds)))

    def listening(self, host: str, port: int, model: str) -> None:
        """The port is open; `host` and `port` as bound."""
        base = f"http://{f'[{host}]' if ':' in host else host}:{port}"
        auth = "bearer" if self._options.api_key is not None else "disabled"
        logger.info(groups(f"listening on {base}", f"model {label(model)}", f"auth {auth}"))
        if self._options.api_key is None and not host.startswith(_LOOPBACK):
            logger.warning(
                f"anybody who reaches {label(host)} can use this server | set --api-key or --host 127.0.0.1"
            )

    def unloaded(self, idle: float) -> None:
        logger.info(groups("engine unloaded", f"idle for {duration(idle)}", "the next request loads it"))

    def engine_failed(self, reason: str) -> None:
        """`reason`: a sentence of ours, without anybody's text."""
        logger.critical(groups("engine failed", reason))

    def draining(self, requests: int) -> None:
        logger.info(groups("stopping", f"{requests} request{'s' * (requests != 1)} to finish"))

    def stopped(self) -> None:
        logger.info("server stopped")

    # Requests

    def started(self, record: RequestRecord) -> None:
        if logger.isEnabledFor(logging.INFO):
            request = record.request
            logger.info(
                groups(
                    f"req#{record.id} started",
                    _kind(request),
                    f"{len(request.messages)} message{'s' * (len(request.messages) != 1)}",
                    f"{request.n} answers" if request.n > 1 else None,
                    f"max output {count(record.max_output)}",
                    f"thinking {_thinking(record)}",
                )
            )

    def rejected(self, record: RequestRecord, error: ApiError) -> None:
        what = "cancelled" if error.status == 499 else "rejected" if error.client_fault else "failed"
        _tell(f"req#{record.id} {what} during prepare", record, error)

    def failed(self, record: RequestRecord, error: ApiError) -> None:
        _tell(f"req#{record.id} {'cancelled' if error.status == 499 else 'failed'}", record, error)

    def done(self, record: RequestRecord, outcome: Outcome) -> None:
        for report in outcome.calls:
            if report.fallback != "none":
                logger.warning(groups(f"req#{record.id} tool markup kept as text", report.fallback))
        if not logger.isEnabledFor(logging.INFO):
            return
        s = summarize(record, outcome)
        logger.info(
            groups(
                f"req#{record.id} done",
                SHORT_NAMES[record.request.protocol],
                f"tool calls {s.call_count}" if s.call_count else s.reason.value.replace("-", " "),
                f"prompt {count(s.prompt)}",
                f"output {count(s.generated)}",
                f"cache {count(s.reused)} ({percent(s.reused, s.prompt)}, {s.reuse_path})",
                f"TTFT {'-' if s.ttft is None else duration(s.ttft)}",
                f"total {duration(s.total)}",
                f"queue {duration(s.queue)}" if s.queue >= _QUEUE_WORTH_A_GROUP else None,
                f"prefill {rate(s.prefilled, s.prefill)}",
                f"decode {rate(s.decoded, s.decode)}",
                _drafts(s.speculation),
                _thought(s.thinking, s.budget),
            )
        )

    def response_failed(self, record: RequestRecord, phase: str, error: BaseException) -> None:
        gone = isinstance(error, _GONE) or "Disconnect" in type(error).__name__
        known = isinstance(error, ApiError) and error.status != 500
        logger.log(
            logging.INFO if gone else _severity(error) if isinstance(error, ApiError) else logging.ERROR,
            groups(f"req#{record.id} response failed during {phase}", _name(error)),
            exc_info=None if gone or known else error,
        )

    # Throughput

    def throughput(self, interval: dict[str, Any]) -> None:
        """`interval`: a throughput record of the request log."""
        if not logger.isEnabledFor(logging.INFO):
            return
        tokens, scheduler = interval["tokens"], interval["scheduler"]
        batch, work = interval["decode_batch"], interval["host_work"]
        host = work["elapsed_seconds"]["total"]
        seconds = interval["interval_seconds"]
        average = batch["average_size"]
        logger.info(
            groups(
                "throughput",
                f"{seconds:.1f}s",
                f"prefill {rate(tokens['computed_prefill'], seconds)}",
                f"decode {rate(tokens['committed_decode'], seconds)}",
                f"running {scheduler['running']} (prefill {scheduler['prefilling']}, "
                f"decode-ready {scheduler['decode_ready']})",
                f"waiting {scheduler['waiting']}",
                None if average is None else f"batch {average:.1f}",
                f"host {percent(host, host + work['device_wait_seconds'])} ({duration(host)})",
            )
        )


def _kind(request: GenerationRequest) -> str:
    return f"{SHORT_NAMES[request.protocol]} {'stream' if request.stream else 'non-stream'}"


def _thinking(record: RequestRecord) -> str:
    if not record.thinking:
        return "off"
    budget = None if record.options is None else record.options.thinking_budget
    effort = record.request.effort
    more = [
        *([f"effort {label(effort)}"] if effort else []),
        *([f"budget {count(budget)}"] if budget is not None else []),
    ]
    return f"on ({', '.join(more)})" if more else "on"


def _drafts(s: Speculation) -> str | None:
    if not s.drafted:
        return None
    return f"drafts accepted {count(s.accepted)}/{count(s.drafted)} ({percent(s.accepted, s.drafted)})"


def _thought(tokens: int, budget: int | None) -> str | None:
    if budget is not None:
        return f"thinking {count(tokens)}/{count(budget)}"
    return f"thinking {count(tokens)}" if tokens else None


def _tell(head: str, record: RequestRecord, error: ApiError) -> None:
    request = record.request
    status = anthropic_status(error) if request.protocol is Protocol.MESSAGES else error.status
    defect = error.status == 500
    logger.log(
        _severity(error),
        groups(
            head,
            _kind(request),
            f"{status} {error.code or error.type}",
            label(error.param) if error.param else None,
        ),
        exc_info=(error.__cause__ or error) if defect else None,
    )


def _severity(error: ApiError) -> int:
    """Client input and disconnects are ordinary, overload deserves a look, a defect is ours."""
    if error.client_fault or error.status == 499:
        return logging.INFO
    return logging.ERROR if error.status == 500 else logging.WARNING


def _name(error: BaseException) -> str:
    if isinstance(error, ApiError):
        return f"{error.status} {error.code or error.type}"
    return type(error).__name__
