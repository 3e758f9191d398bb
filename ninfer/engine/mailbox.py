"""How a worker's events reach their one consumer, in a thread or in an asyncio task."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from threading import Condition

from ninfer.engine.events import Done, Event, PromptProgress


class Mailbox:
    """A queue of one request's events, ended by `Done` or an error. The producer never waits.

    A newer `PromptProgress` replaces one that nobody has read yet.
    """

    def __init__(self) -> None:
        self._condition = Condition()
        self._events: deque[Event] = deque()
        self._error: BaseException | None = None
        self._ended = False
        self._listener: Callable[[], None] | None = None

    @property
    def ended(self) -> bool:
        """Has the last event or an error been put in? (It may still be unread.)"""
        return self._ended

    def put(self, event: Event) -> None:
        """Add an event; ignored after the end."""
        with self._condition:
            if self._ended:
                return
            last = self._events[-1] if self._events else None
            if isinstance(event, PromptProgress) and isinstance(last, PromptProgress):
                self._events[-1] = event
            else:
                self._events.append(event)
            self._ended = isinstance(event, Done)
            self._tell()

    def fail(self, error: BaseException) -> None:
        """End with an error, which the consumer gets after the events so far; ignored after the end."""
        with self._condition:
            if not self._ended:
                self._error, self._ended = error, True
                self._tell()

    def take(self, *, wait: bool) -> Event | None:
        """The next event; None after the last one, or if there is none yet and `wait` is off. Raises the
        error that ended the request, once."""
        with self._condition:
            while wait and not self._events and not self._ended:
                self._condition.wait()
            if self._events:
                return self._events.popleft()
            if self._error is not None:
                error, self._error = self._error, None
                raise error
            return None

    def listen(self, listener: Callable[[], None] | None) -> None:
        """Have `listener` called, from the producer's thread, whenever there is something to take."""
        with self._condition:
            self._listener = listener
            if listener is not None and (self._events or self._ended):
                listener()

    @property
    def drained(self) -> bool:
        """Has everything been taken?"""
        return self._ended and not self._events and self._error is None

    def _tell(self) -> None:
        self._condition.notify()
        if self._listener is not None:
            self._listener()
