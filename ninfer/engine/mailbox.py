"""How a worker's events reach their one consumer, in a thread or in an asyncio task."""

from __future__ import annotations

from collections.abc import Callable
from queue import Empty, SimpleQueue

from ninfer.engine.events import Done, Event, PromptProgress


class Mailbox:
    """A queue of one request's events, ended by `Done` or an error. The producer never waits.

    Of several `PromptProgress` in a row the consumer gets the newest.
    """

    def __init__(self) -> None:
        self._queue: SimpleQueue[Event | BaseException] = SimpleQueue()
        self._ahead: list[Event | BaseException] = []
        """At most one, taken out of the queue to see what follows a progress."""
        self._listener: Callable[[], None] | None = None
        self.ended = False
        """Has the last event or an error been put in? (It may still be unread.)"""
        self.drained = False
        """Has everything been taken?"""

    def put(self, event: Event) -> None:
        """Add an event; ignored after the end."""
        if not self.ended:
            self.ended = isinstance(event, Done)
            self._add(event)

    def fail(self, error: BaseException) -> None:
        """End with an error, which the consumer gets after the events so far; ignored after the end."""
        if not self.ended:
            self.ended = True
            self._add(error)

    def take(self, *, wait: bool) -> Event | None:
        """The next event; None after the last one, or if there is none yet and `wait` is off. Raises the
        error that ended the request, once."""
        if self.drained:
            return None
        try:
            item = self._ahead.pop() if self._ahead else self._queue.get(block=wait)
        except Empty:
            return None
        while isinstance(item, PromptProgress) and not self._queue.empty():
            following = self._queue.get()
            if not isinstance(following, PromptProgress):
                self._ahead.append(following)
                return item
            item = following
        self.drained = isinstance(item, Done | BaseException)
        if isinstance(item, BaseException):
            raise item
        return item

    def listen(self, listener: Callable[[], None] | None) -> None:
        """Have `listener` called, from the producer's thread, whenever there is something to take."""
        self._listener = listener
        if listener is not None:
            listener()

    def _add(self, item: Event | BaseException) -> None:
        self._queue.put(item)
        listener = self._listener  # looked up once: the consumer may leave in between
        if listener is not None:
            listener()
