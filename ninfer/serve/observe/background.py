"""A thread that does what must not keep the event loop waiting, in order, and is finished at the end."""

from __future__ import annotations

from collections.abc import Callable
from queue import Full, Queue
from threading import Thread


class Background:
    """Runs callables one after the other. They must not raise. `close` waits for all that were taken."""

    def __init__(self, name: str, capacity: int) -> None:
        self._queue: Queue[Callable[[], object] | None] = Queue(capacity)
        self._thread = Thread(target=self._work, name=name, daemon=True)
        self.closed = False
        self._thread.start()

    def submit(self, work: Callable[[], object]) -> bool:
        """False if `capacity` callables wait already, or after `close`; never blocks."""
        if self.closed:
            return False
        try:
            self._queue.put_nowait(work)
        except Full:
            return False
        return True

    def close(self) -> None:
        """May be called more than once."""
        if not self.closed:
            self.closed = True
            self._queue.put(None)
        self._thread.join()

    def _work(self) -> None:
        while (work := self._queue.get()) is not None:
            work()
