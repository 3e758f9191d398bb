"""The consumer's side of a request."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import suppress
from threading import Lock

from ninfer.engine.events import Event
from ninfer.engine.mailbox import Mailbox
from ninfer.errors import EngineError


class Handle:
    """A running request: iterate (`for` in a thread, `async for` in a task) for its events, which come once,
    to one reader at a time.

    `cancel()` may be called from any thread or signal handler. A handle that is dropped or closed before its
    end cancels its request; the place that it took is given back when the request has ended and the handle is
    gone, closed or read to the end.
    """

    def __init__(self, mailbox: Mailbox, cancel: Callable[[], None], release: Callable[[], None]) -> None:
        self.owner: object = None
        """Kept alive with the handle and its iterators: what would end the request by being collected."""
        self._mailbox = mailbox
        self._reader = Lock()
        self._cancel = cancel
        self._finalizer = weakref.finalize(self, release)

    def cancel(self) -> None:
        """Ask the request to end at the next boundary, with its text so far."""
        self._cancel()

    def close(self) -> None:
        """Nothing more will be read; cancels the request if it still runs."""
        self._finalizer()

    def listen(self, listener: Callable[[], None] | None) -> None:
        """Have `listener` called, from now on and at once, whenever `poll` may have something: mostly in the
        engine's worker, which waits for it and must not see it raise. Instead of iterating; None ends it."""
        self._mailbox.listen(listener)

    def poll(self) -> Event | None:
        """The next event, if there is one; raises the error that ended the request. One thread at a time."""
        return self._mailbox.take(wait=False)

    @property
    def drained(self) -> bool:
        """Has the last event been read?"""
        return self._mailbox.drained

    def _claim(self) -> None:
        """Of two readers at a time each would get a part, and the slower one would wait for ever."""
        if not self._reader.acquire(blocking=False):
            raise EngineError(
                "the events of this request are being read elsewhere; they come once, so let one reader pass "
                "them on"
            )

    def __iter__(self) -> Iterator[Event]:
        self._claim()
        try:
            while (event := self._mailbox.take(wait=True)) is not None:
                yield event
        finally:
            self._reader.release()
            self.close()

    async def __aiter__(self) -> AsyncIterator[Event]:
        loop, ready = asyncio.get_running_loop(), asyncio.Event()

        def wake() -> None:
            # The loop may have been closed under a request that nobody awaits any more; the worker that
            # calls this must not fall over it.
            with suppress(RuntimeError):
                loop.call_soon_threadsafe(ready.set)

        self._claim()
        self._mailbox.listen(wake)
        try:
            while True:
                ready.clear()
                while (event := self._mailbox.take(wait=False)) is not None:
                    yield event
                if self._mailbox.drained:
                    return
                await ready.wait()
        finally:
            self._mailbox.listen(None)
            self._reader.release()
            self.close()
