"""Throughput intervals: what the engine did between two looks at its counters."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

from ninfer.engine import RuntimeStatistics
from ninfer.serve.jobs import Link
from ninfer.serve.observe.interval import busy, interval_record
from ninfer.serve.observe.startup import page_count

_logger = logging.getLogger("ninfer.serve")
_LAST_LOOK = 1.0


class Gauge(Protocol):
    """GPUs that can be asked; may block."""

    def sample(self) -> list[dict[str, Any]]: ...


class Throughput:
    """Every `interval` seconds tells `console` and `log` what happened, if anything did.

    Deadlines are multiples of the interval after the start; those that were missed are skipped. At the end
    the begun interval goes to `log` only. `clock` and `sleep` as `time.monotonic` and `asyncio.sleep`.
    """

    def __init__(
        self,
        link: Link,
        interval: float,
        console: Callable[[dict[str, Any]], None],
        log: Callable[[dict[str, Any]], None] | None,
        gpus: Gauge | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._link, self._interval = link, interval
        self._console, self._log, self._gpus = console, log, gpus
        self._clock, self._sleep = clock, sleep
        self._before: RuntimeStatistics | None = None
        self._process = 0
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Needs a running event loop."""
        self._since = self._clock()
        self._task = asyncio.get_running_loop().create_task(self._run(), name="throughput")

    async def close(self) -> None:
        if self._task is None:
            return
        task, self._task = self._task, None
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        try:
            async with asyncio.timeout(_LAST_LOOK):
                await self._look(shown=False)
        except Exception as error:
            _logger.debug("the last throughput interval is not known | %s", type(error).__name__)

    async def _run(self) -> None:
        deadline = self._since
        while True:
            try:
                # Not wait_for: Python 3.11's may lose the cancellation that ends us.
                async with asyncio.timeout(max(self._interval, _LAST_LOOK)):
                    await self._look(shown=True)
            except Exception as error:
                _logger.warning("throughput is not known | %s", type(error).__name__)
            missed = max(0, int((self._clock() - deadline) // self._interval))
            deadline += self._interval * (1 + missed)
            await self._sleep(max(0.0, deadline - self._clock()))

    async def _look(self, *, shown: bool) -> None:
        gpus = None if self._gpus is None else await asyncio.to_thread(self._gpus.sample)
        now = await self._link.statistics()
        at = self._clock()
        seconds, self._since = at - self._since, at
        if now is None:
            return
        if self._before is not None and self._process != self._link.info.process:
            self._before = RuntimeStatistics()  # another engine process counts from zero
        before, self._before, self._process = self._before, now, self._link.info.process
        if before is None or seconds <= 0 or not busy(before, now):
            return
        pages = page_count(self._link.info)
        record = interval_record(before, now, seconds, pages, gpus)
        if self._log is not None:
            self._log(record)
        if shown:
            self._console(record)
