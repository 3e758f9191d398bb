"""Clients that ask, listen, dawdle and leave."""

from __future__ import annotations

import asyncio
import json
import random
import socket
import struct
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from time import monotonic
from typing import Any
from urllib.parse import urlsplit

import httpx

from tests.serve.soak.answers import Events, Said, begins, failure, said, said_in_stream, whole
from tests.serve.soak.asks import COUNTED, MESSAGES, MODEL, REFUSED, RESPONSES, Ask, fresh

HANG = 60.0
"""Seconds after which a request counts as one that hangs."""
_BUSY = (429, 529)
_SMALL = [(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)]


class Broken(AssertionError):
    """The server did what it must not do."""


class Tally:
    """How requests ended, and what was wrong."""

    def __init__(self) -> None:
        self.outcomes: Counter[str] = Counter()
        self.broken: list[str] = []

    def __str__(self) -> str:
        counts = ", ".join(f"{name} {count}" for name, count in sorted(self.outcomes.items()))
        return f"{sum(self.outcomes.values())} requests: {counts}"


class Known:
    """The serial answers of the pool, and of the routes that count."""

    def __init__(self, pool: list[Ask]) -> None:
        self.pool = pool
        self.said: list[Said] = []
        self.counted: list[Any] = []

    async def record(self, url: str) -> None:
        """Ask everything once and alone; then as streams, which must say the same."""
        async with httpx.AsyncClient(base_url=url, timeout=HANG) as http:
            for ask in self.pool:
                answer = await http.post(ask.path, json=ask.streaming(False))
                assert answer.status_code == 200, (ask, answer.text)
                self.said.append(whole(said(ask.path, answer.json())))
            for ask, made in zip(self.pool, self.said, strict=True):
                answer = await http.post(ask.path, json=ask.streaming(True))
                events = Events().feed(answer.content)
                assert whole(said_in_stream(ask.path, events)) == made, ask
            for path, body in COUNTED:
                self.counted.append((await http.post(path, json=body)).raise_for_status().json())


class Client:
    """One client; what it does when is decided by its seed."""

    def __init__(self, url: str, known: Known, tally: Tally, seed: int) -> None:
        self._url, self._known, self._tally = url, known, tally
        self._rng = random.Random(seed)
        self._busy = False

    async def run(self, end: float) -> None:
        """Do one thing after the other until that moment of `monotonic`."""
        acts: dict[Callable[[], Awaitable[None]], int] = {
            self._whole: 4,
            self._streamed: 4,
            self._fresh: 3,
            self._leave: 5,
            self._leave_stream: 4,
            self._slow: 2,
            self._stall: 1,
            self._break_off: 2,
            self._chain: 2,
            self._count: 1,
            self._malformed: 2,
        }
        async with (
            httpx.AsyncClient(base_url=self._url, timeout=HANG) as self._http,
            httpx.AsyncClient(
                base_url=self._url,
                timeout=HANG,
                transport=httpx.AsyncHTTPTransport(socket_options=_SMALL),
            ) as self._small,
        ):
            while monotonic() < end:
                (act,) = self._rng.choices(list(acts), list(acts.values()))
                self._busy = False
                try:
                    async with asyncio.timeout(HANG):
                        await act()
                    if self._busy:
                        await asyncio.sleep(self._rng.uniform(0.1, 0.5))
                except TimeoutError:
                    self._tally.broken.append(f"{act.__name__} hangs")
                except (Broken, httpx.HTTPError, KeyError, ValueError) as error:
                    self._tally.broken.append(f"{act.__name__}: {error!r}")

    def _ended(self, outcome: str) -> None:
        self._tally.outcomes[outcome] += 1

    def _choose(self) -> tuple[Ask, Said]:
        index = self._rng.randrange(len(self._known.pool))
        return self._known.pool[index], self._known.said[index]

    def _took(self, answer: httpx.Response, status: int = 200) -> bool:
        """Was it answered as expected? A server that is full may say so."""
        if answer.status_code in _BUSY:
            if "retry-after" not in answer.headers:
                raise Broken("busy without Retry-After")
            self._busy = True
            self._ended("busy")
            return False
        if answer.status_code != status:
            raise Broken(f"{answer.request.url.path}: {answer.status_code} {answer.text[:300]}")
        return True

    async def _post(self, ask: Ask) -> Any:
        """The JSON body; None if the server is busy."""
        answer = await self._http.post(ask.path, json=ask.streaming(False))
        return answer.json() if self._took(answer) else None

    async def _read(
        self,
        ask: Ask,
        events: list[Any],
        http: httpx.AsyncClient | None = None,
        pause: float = 0,
        most: int = 0,
    ) -> bool:
        """Put the events of a stream into `events`, `most` pieces if that isn't 0; False if busy."""
        take = Events()
        pieces = 0
        async with (http or self._http).stream("POST", ask.path, json=ask.streaming(True)) as answer:
            if answer.status_code != 200:
                await answer.aread()
            if not self._took(answer):
                return False
            async for piece in answer.aiter_raw(2048 if pause else None):
                events += take.feed(piece)
                if (error := failure(events)) is not None:
                    raise Broken(f"{ask.path}: {error}")
                pieces += 1
                if pieces == most:
                    break
                if pause:
                    await asyncio.sleep(pause)
        return True

    def _same(self, made: Said, expected: Said, ask: Ask) -> None:
        if whole(made) != expected:
            raise Broken(f"{ask.body} got {whole(made)} instead of {expected}")

    def _beginning(self, events: list[Any], expected: Said, ask: Ask) -> None:
        made = said_in_stream(ask.path, events)
        if not begins(made, expected):
            raise Broken(f"{ask.body} began with {made} instead of {expected}")

    # What it may do

    async def _whole(self) -> None:
        ask, expected = self._choose()
        if (body := await self._post(ask)) is not None:
            self._same(said(ask.path, body), expected, ask)
            self._ended("whole")

    async def _streamed(self) -> None:
        ask, expected = self._choose()
        events: list[Any] = []
        if await self._read(ask, events):
            self._same(said_in_stream(ask.path, events), expected, ask)
            self._ended("streamed")

    async def _fresh(self) -> None:
        ask, events = fresh(self._rng), []
        if self._rng.random() < 0.5:
            served = await self._post(ask) is not None
        else:
            served = await self._read(ask, events)
        if served:
            self._ended("fresh")

    async def _leave(self) -> None:
        """Before the headers, during prefill, in the middle of the answer: after a random time."""
        ask, expected = self._choose()
        if self._rng.random() < 0.3:
            ask, expected = fresh(self._rng), None
        events: list[Any] = []
        streams = self._rng.random() < 0.6
        work = self._read(ask, events) if streams else self._post(ask)
        try:
            async with asyncio.timeout(self._rng.choice((0.002, 0.02, 0.1, 0.4)) * self._rng.random()):
                await work
            self._ended("was too fast to leave")
        except TimeoutError:
            self._ended("left a stream" if events else "left before the first event")
        if expected is not None:
            self._beginning(events, expected, ask)

    async def _leave_stream(self) -> None:
        ask, expected = self._choose()
        events: list[Any] = []
        if await self._read(ask, events, most=self._rng.randrange(1, 30)):
            self._beginning(events, expected, ask)
            self._ended("left a stream")

    async def _slow(self) -> None:
        ask, expected = self._choose()
        events: list[Any] = []
        if await self._read(ask, events, self._small, self._rng.uniform(0.005, 0.05)):
            self._same(said_in_stream(ask.path, events), expected, ask)
            self._ended("slow")

    async def _stall(self) -> None:
        """Read something, then nothing for a while, then leave."""
        ask, expected = self._choose()
        events: list[Any] = []
        async with self._small.stream("POST", ask.path, json=ask.streaming(True)) as answer:
            if answer.status_code != 200:
                await answer.aread()
            if not self._took(answer):
                return
            async for piece in answer.aiter_raw():
                events += Events().feed(piece)
                await asyncio.sleep(self._rng.uniform(0.5, 2))
                break
        self._beginning(events, expected, ask)
        self._ended("stalled and left")

    async def _break_off(self) -> None:
        """Half a head, half a body, or a whole request: then the connection is closed or reset."""
        ask, _ = self._choose()
        address = urlsplit(self._url)
        body = json.dumps(ask.streaming(True)).encode()
        head = f"POST {ask.path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode()
        data = head + body
        cut = self._rng.choice((self._rng.randrange(len(head)), self._rng.randrange(len(data)), len(data)))
        reader, writer = await asyncio.open_connection(address.hostname, address.port)
        writer.write(data[:cut])
        with suppress(TimeoutError):
            await asyncio.wait_for(reader.read(1), 0.2 * self._rng.random())
        if self._rng.random() < 0.5:
            linger = struct.pack("ii", 1, 0)
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        writer.close()
        with suppress(OSError):
            await writer.wait_closed()
        self._ended("broken off" if cut < len(data) else "reset or closed")

    async def _chain(self) -> None:
        """A conversation kept by the server, from which one answer is deleted."""
        ids: list[str] = []
        for _ in range(self._rng.randrange(1, 4)):
            body = {"model": MODEL, "input": "And what is 7 + 5?", "max_output_tokens": 30}
            if ids:
                body["previous_response_id"] = ids[-1]
            if self._rng.random() < 0.5:
                made = await self._post(Ask(RESPONSES, body))
            else:
                events: list[Any] = []
                served = await self._read(Ask(RESPONSES, body), events)
                made = events[-1]["response"] if served else None
            if made is None:
                break
            ids.append(made["id"])
            self._ended("chained")
        for name in ids:
            self._took(await self._http.get(f"{RESPONSES}/{name}"))
            self._took(await self._http.get(f"{RESPONSES}/{name}/input_items"))
            if self._rng.random() < 0.7:
                self._took(await self._http.delete(f"{RESPONSES}/{name}"))
                self._took(await self._http.get(f"{RESPONSES}/{name}"), 404)
                self._ended("deleted")

    async def _count(self) -> None:
        index = self._rng.randrange(len(COUNTED))
        path, body = COUNTED[index]
        answer = await self._http.post(path, json=body)
        if self._took(answer):
            if answer.json() != self._known.counted[index]:
                raise Broken(f"{path}: {answer.text} instead of {self._known.counted[index]}")
            self._ended("counted")

    async def _malformed(self) -> None:
        path, body, status = self._rng.choice(REFUSED)
        answer = await self._http.post(path, content=body)
        if self._took(answer, status):
            error = answer.json()
            if not error["error"]["message"] or (error.get("type") == "error") != (path == MESSAGES):
                raise Broken(f"{path}: {answer.text}")
            self._ended("refused")
