"""How a worker's events reach their one consumer, in a thread or in an asyncio task."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from queue import Empty, SimpleQueue
from time import perf_counter

from ninfer.engine.events import Done, Event, PromptProgress

_WAKE_EVERY = 10e-3
"""Seconds between wake-ups of a consumer by text. One costs the worker 30 us, of rounds that take 3 ms."""


class Mailbox:
    """A queue of one request's events, ended by `Done` or an error. The producer never waits.

    Of several `PromptProgress` in a row the consumer gets the newest.
    """

    def __init__(self) -> None:
        self._held: list[Event | BaseException] = []
        """The producer's, not yet delivered."""
        self._woken = 0.0
        self._queue: SimpleQueue[list[Event | BaseException]] = SimpleQueue()
        self._taken: deque[Event | BaseException] = deque()
        """The consumer's."""
        self._listener: Callable[[], None] | None = None
        self.ended = False
        """Has the last event or an error been put in? (It may still be unread.)"""
        self.drained = False
        """Has everything been taken?"""

    def put(self, event: Event) -> None:
        """Deliver an event; ignored after the end."""
        if not self.ended:
            self.ended = isinstance(event, Done)
            self._held.append(event)
            self.deliver()

    def put_text(self, event: Event) -> None:
        """Add an event that may wait for the next ones; if none is near, `deliver` must follow."""
        if not self.ended:
            self._held.append(event)
            now = perf_counter()
            if now - self._woken > _WAKE_EVERY:
                self._woken = now  # not by other events: the first text follows the last progress at once
                self.deliver()

    def fail(self, error: BaseException) -> None:
        """End with an error, which the consumer gets after the events so far; ignored after the end."""
        if not self.ended:
            self.ended = True
            self._held.append(error)
            self.deliver()

    def deliver(self) -> None:
        """Hand over what waits."""
        if self._held:
            held, self._held = self._held, []
            self._queue.put(held)
            listener = self._listener  # looked up once: the consumer may leave in between
            if listener is not None:
                listener()

    def take(self, *, wait: bool) -> Event | None:
        """The next event; None after the last one, or if there is none yet and `wait` is off. Raises the
        error that ended the request, once."""
        taken = self._taken
        try:
            if not taken and not self.drained:
                taken += self._queue.get(block=wait)
            while not self._queue.empty():
                taken += self._queue.get()
        except Empty:
            pass
        if not taken:
            return None
        item = taken.popleft()
        while taken and isinstance(item, PromptProgress) and isinstance(taken[0], PromptProgress):
            item = taken.popleft()
        self.drained = isinstance(item, Done | BaseException)
        if isinstance(item, BaseException):
            raise item
        return item

    def listen(self, listener: Callable[[], None] | None) -> None:
        """Have `listener` called, from the producer's thread, whenever there is something to take."""
        self._listener = listener
        if listener is not None:
            listener()
