"""All observers as one, and when they begin and end."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

from fastapi import APIRouter, Response

from ninfer.frontend import Frontend
from ninfer.serve.errors import ApiError
from ninfer.serve.jobs import EngineInfo, Link
from ninfer.serve.observe.console import Console
from ninfer.serve.observe.gpu import Gpus
from ninfer.serve.observe.metrics import MEDIA_TYPE, Metrics
from ninfer.serve.observe.misses import MissDump
from ninfer.serve.observe.request_log import RequestLog
from ninfer.serve.observe.startup import Gpu, ordinal
from ninfer.serve.observe.throughput import Throughput
from ninfer.serve.observer import Observer, Outcome, RequestRecord
from ninfer.serve.options import ServeOptions

_logger = logging.getLogger("ninfer.serve")


class Observers:
    """The `Observer` that the service tells: console, metrics, request log and miss dump.

    `start` once the engine process is loaded, `close` at the end of the server. `console` also has the lines
    of the server's life. A defect in one of them is logged and harms neither a request nor the others.
    """

    def __init__(self, options: ServeOptions, frontend: Frontend) -> None:
        """Raises OptionError if the request log or the miss dump can't be written."""
        self.console = Console(options)
        self.metrics = Metrics()
        self._options = options
        self._misses = (
            None
            if options.prefill_miss_dump is None
            else MissDump(
                options.prefill_miss_dump,
                frontend,
                min_tokens=options.prefill_miss_min_tokens,
                min_match=options.prefill_miss_min_match,
            )
        )
        self._log = (
            None if options.request_log is None else RequestLog(options.request_log, options, frontend)
        )
        known: Sequence[Observer | None] = (self.console, self.metrics, self._log, self._misses)
        self._all = [observer for observer in known if observer is not None]
        self._throughput: Throughput | None = None
        self._gpus: Gpus | None = None

    def start(self, link: Link, info: EngineInfo) -> None:
        """The engine is ready: says so, writes `server_start` and begins throughput intervals. Needs a
        running event loop; not for later loads after an idle time (those: `console.ready`)."""
        self.console.ready(info)
        self.metrics.start(link, info, self._options.model_id or info.name)
        if self._log is not None:
            uuids = [uuid for uuid in info.extra.get("gpu_uuids", "").split(",") if uuid]
            first = max(ordinal(info), 0)
            self._gpus = Gpus.open(range(first, first + len(uuids)), uuids)
            self._log.server_start(info, self._gpus.describe() if self._gpus else Gpu())
        if self._options.stats_interval > 0:
            log = None if self._log is None else self._log.throughput
            self._throughput = Throughput(
                link, self._options.stats_interval, self.console.throughput, log, self._gpus
            )
            self._throughput.start()

    async def close(self) -> None:
        """Write what waits. May be called more than once, and without `start`."""
        if self._throughput is not None:
            await self._throughput.close()
        for part in (self._log, self._misses, self._gpus):
            if part is not None:
                await asyncio.to_thread(part.close)

    def router(self) -> APIRouter:
        """`GET /metrics`; the API key, if one is set, protects it like any other route."""
        router = APIRouter()

        @router.get(
            "/metrics",
            summary="Metrics for Prometheus",
            response_class=Response,
            responses={200: {"content": {"text/plain": {}}}},
        )
        async def metrics() -> Response:
            return Response(await self.metrics.scrape(), headers={"Content-Type": MEDIA_TYPE})

        return router

    # Observer

    def started(self, record: RequestRecord) -> None:
        self._tell(lambda observer: observer.started(record))

    def rejected(self, record: RequestRecord, error: ApiError) -> None:
        self._tell(lambda observer: observer.rejected(record, error))

    def done(self, record: RequestRecord, outcome: Outcome) -> None:
        self._tell(lambda observer: observer.done(record, outcome))

    def failed(self, record: RequestRecord, error: ApiError) -> None:
        self._tell(lambda observer: observer.failed(record, error))

    def response_failed(self, record: RequestRecord, phase: str, error: BaseException) -> None:
        self._tell(lambda observer: observer.response_failed(record, phase, error))

    def _tell(self, event: Callable[[Observer], None]) -> None:
        for observer in self._all:
            try:
                event(observer)
            except Exception as defect:
                _logger.error("an event could not be logged", exc_info=defect)
