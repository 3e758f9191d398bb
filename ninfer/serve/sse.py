"""Server-sent events: a stream of chunks as a response that knows when its client goes away."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from time import monotonic
from typing import Any

import orjson
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ninfer.serve.answer import Answer
from ninfer.serve.connection import Gone, connected

_log = logging.getLogger("ninfer.serve")
KEEP_ALIVE = b": keep-alive\n\n"
_SEPARATORS = [(c.encode(), b"\\u%04x" % ord(c)) for c in "\x85\u2028\u2029"]
"""In a text they are as good in JSON's spelling, and many clients take them for ends of lines."""
_MAX_UNWRITTEN = 64 << 10
_HEADERS = [
    (b"content-type", b"text/event-stream"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


def sse(event: str | None, data: Any) -> bytes:
    """One event; `data` becomes JSON."""
    head = b"data: " if event is None else b"event: %b\ndata: " % event.encode()
    body = orjson.dumps(data)
    if not body.isascii():
        for character, escape in _SEPARATORS:
            body = body.replace(character, escape)
    return head + body + b"\n\n"


class EventStream(Response):
    """Writes `chunks`, which are made from `answer`'s events; what is there at once goes out at once.

    A comment is sent after `keep_alive` seconds without a write. A slow reader stops the taking of chunks,
    nothing else. Whatever happens, the answer is closed; a client that goes away ends everything.
    """

    def __init__(self, answer: Answer, chunks: AsyncIterator[bytes], keep_alive: float) -> None:
        self.status_code = 200
        self.background = None
        self.raw_headers = list(_HEADERS)
        self._answer, self._chunks, self._keep_alive = answer, chunks, keep_alive
        self._unwritten: list[bytes] = []
        self._size = 0
        self._written = monotonic()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        loop = asyncio.get_running_loop()

        async def flush() -> None:
            if not self._unwritten:
                return
            body = b"".join(self._unwritten)
            self._unwritten.clear()
            self._size = 0
            self._written = monotonic()
            await send({"type": "http.response.body", "body": body, "more_body": True})

        def beat() -> None:
            nonlocal timer
            quiet = monotonic() - self._written
            if quiet >= self._keep_alive and not self._unwritten:
                self._unwritten.append(KEEP_ALIVE)
                self._answer.nudge()
                quiet = 0.0
            timer = loop.call_later(self._keep_alive - quiet, beat)

        timer = loop.call_later(self._keep_alive, beat)
        self._answer.flush = flush
        try:
            async with connected(receive):
                await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
                async for chunk in self._chunks:
                    self._unwritten.append(chunk)
                    self._size += len(chunk)
                    if self._size >= _MAX_UNWRITTEN:
                        await flush()
                body = b"".join(self._unwritten)
                await send({"type": "http.response.body", "body": body, "more_body": False})
        except Gone:
            pass
        except Exception as error:
            # The response has begun: all that can be said is that it ends too early.
            self._answer.response_failed("stream", error)
        finally:
            timer.cancel()
            self._answer.close()
            await self._end_chunks()

    async def _end_chunks(self) -> None:
        aclose = getattr(self._chunks, "aclose", None)
        if aclose is not None:
            try:
                await aclose()
            except Exception as error:
                self._answer.response_failed("stream", error)


def event_stream(answer: Answer, chunks: AsyncIterator[bytes], keep_alive: float) -> EventStream:
    """The streaming response of an answer; see `EventStream`."""
    return EventStream(answer, chunks, keep_alive)
