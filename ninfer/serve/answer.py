"""The answers of one request while they are made.

Each answer's job is read by a task of its own, the *pump*: it turns the engine's events into `AnswerEvent`s
and lays them out for the response, which takes them at its client's speed. So a job always ends and is always
reported, whatever becomes of the client.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING

from ninfer.engine import Done, Event, Output, PromptProgress, Started, Statistics
from ninfer.errors import UnavailableError
from ninfer.events import Channel, FinishReason
from ninfer.events import TokenLogprob as TokenIds
from ninfer.frontend import Frontend, SamplingPreset
from ninfer.serve.calls import (
    Alternative,
    AnswerEvent,
    Begun,
    CallArguments,
    CallBegan,
    CallEnded,
    Finished,
    Progress,
    Text,
    Timings,
    TokenLogprob,
    Usage,
)
from ninfer.serve.errors import ApiError, as_api_error
from ninfer.serve.jobs import Job, JobStream
from ninfer.serve.observer import CallReport, Outcome, RequestRecord
from ninfer.serve.resolve import for_protocol
from ninfer.serve.toolcalls import Parser, parser_for

if TYPE_CHECKING:
    from ninfer.serve.generation import Service


QUIET_SECONDS = 30.0
"""After so long without an event, one that says nothing: Claude Code and Codex give a stream up after five
minutes, and comments don't count."""


class Choice:
    """One of the answers: engine events in, answer events out."""

    def __init__(self, frontend: Frontend, parser: Parser | None, snapshots: bool, before: float) -> None:
        """`snapshots`: texts carry timings; `before` seconds passed before the job's submission."""
        self.finished: Finished | None = None
        self._frontend, self._parser = frontend, parser
        self._snapshots, self._before = snapshots, before
        self._prompt = self._reused = 0
        self._prefill = 0.0
        self._logprobs: tuple[TokenLogprob, ...] = ()
        self._calls = 0
        self._call: int | None = None  # the open one
        self._told = perf_counter()

    @property
    def report(self) -> CallReport:
        return CallReport() if self._parser is None else self._parser.report

    def take(self, event: Event) -> list[AnswerEvent]:
        """What the event means; a `Done` sets `finished`."""
        match event:
            case Output():
                return self._output(event)
            case Started(prompt, reused):
                self._prompt, self._reused = prompt, reused
                return [Begun(prompt, reused)]
            case PromptProgress():
                self._prefill = event.seconds
                done = event.processed_tokens
                return [Progress(event.prompt_tokens, self._reused, done, event.seconds)]
            case Done(statistics):
                return self._done(statistics)

    def _output(self, event: Output) -> list[AnswerEvent]:
        timings = self._timings_now(event) if self._snapshots else None
        if event.channel is Channel.REASONING:
            return [Text("reasoning", event.text, (), timings)]
        logprobs = self._logprobs
        if event.logprobs:
            logprobs += tuple(map(self._with_bytes, event.logprobs))
        if self._parser is None:
            self._logprobs = ()
            return [Text("content", event.text, logprobs, timings)]
        events: list[AnswerEvent] = []
        self._logprobs = logprobs
        for item in self._parser.feed(event.channel, event.text):
            events.append(self._parsed(item, timings))
        now = perf_counter()
        if not events and self._call is not None and now - self._told >= QUIET_SECONDS:
            events.append(CallArguments(self._call, ""))  # a long argument is being written
        if events:
            self._told = now
        return events

    def _parsed(self, item: AnswerEvent, timings: Timings | None) -> AnswerEvent:
        if isinstance(item, CallBegan):
            self._call = item.index
        if isinstance(item, CallEnded):
            self._call = None
            self._calls += 1
        if not isinstance(item, Text):
            return item
        logprobs, self._logprobs = self._logprobs, ()
        return Text("content", item.text, logprobs, timings)

    def _done(self, done: Statistics) -> list[AnswerEvent]:
        events: list[AnswerEvent] = []
        if self._parser is not None:
            cut = done.finish_reason in (FinishReason.OUTPUT_LIMIT, FinishReason.CONTEXT_CAPACITY)
            events = [self._parsed(_marked(item, cut), None) for item in self._parser.close()]
        if self._logprobs:  # of tokens without text of their own
            events.append(Text("content", "", self._logprobs))
        first = done.first_token_seconds
        self.finished = Finished(
            done.finish_reason,
            Usage(done.prompt_tokens, done.reused_tokens, done.generated_tokens, done.reasoning_tokens),
            Timings(
                done.prompt_tokens,
                done.reused_tokens,
                done.generated_tokens,
                done.prefill_seconds,
                done.decode_seconds,
                None if first is None else self._before + first,
                self._before + done.total_seconds,
                done.drafted_tokens,
                done.accepted_tokens,
            ),
            done,
            done.stop_string,
            self._calls,
        )
        events.append(self.finished)
        return events

    def _timings_now(self, event: Output) -> Timings:
        return Timings(self._prompt, self._reused, event.generated, self._prefill, event.seconds)

    def _with_bytes(self, token: TokenIds) -> TokenLogprob:
        spelled = self._frontend.token_bytes
        top = tuple(Alternative(spelled(i), value) for i, value in token.top)
        return TokenLogprob(spelled(token.token_id), token.logprob, top)


def _marked(item: AnswerEvent, cut: bool) -> AnswerEvent:
    """What a parser adds when it closes: a call that it ends there was cut, if the answer was."""
    return replace(item, cut=True) if cut and isinstance(item, CallArguments | CallEnded) else item


class Answer:
    """The `n` answers to one HTTP request.

    Read `events()` once; `close()` must be called whatever happens, and may be called more than once.
    """

    def __init__(
        self,
        service: Service,
        record: RequestRecord,
        jobs: list[Job],
        sampling: SamplingPreset,
        arrival: float,
        *,
        snapshots: bool,
    ) -> None:
        """Use `Service.prepare`."""
        self.record = record
        self.sampling = sampling
        self.prompt_tokens = len(jobs[0].prompt.tokens)
        self.thinking = jobs[0].prompt.starts_in_thinking
        self.flush: Callable[[], Awaitable[None]] | None = None
        """Awaited when all events that there are have been taken, before waiting for more: the moment to
        write what they became."""
        self._service, self._jobs = service, jobs
        self._arrival, self._snapshots = arrival, snapshots
        self._streams: list[JobStream | None] = [None] * len(jobs)
        self._choices: list[Choice | None] = [None] * len(jobs)
        self._pumps: list[asyncio.Task[None]] = []
        self._open = set(range(len(jobs)))
        self._ready: deque[tuple[int, AnswerEvent]] = deque()
        self._error: ApiError | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._read = self._closed = self._released = False

    async def begin(self, *, at_once: bool) -> None:
        """Queue the jobs: `at_once`, so that what goes wrong is raised here, or beside what comes."""
        try:
            try:
                for index in range(len(self._jobs) if at_once else 0):
                    await self._submit(index)
            finally:
                # The engine has it already: logs can take their time.
                self._service.tell("started", self.record)
        except BaseException as error:
            self._fail(as_api_error(error))
            for stream in self._streams:
                if stream is not None:
                    stream.close()
            self._open.clear()
            self._report()
            self.close()
            if isinstance(error, Exception) and self._error is not None:
                raise self._error from error
            raise
        for index in range(len(self._jobs)):
            pump = asyncio.create_task(self._pump(index))
            pump.add_done_callback(partial(self._ended, index))
            self._pumps.append(pump)

    async def events(self) -> AsyncIterator[tuple[int, AnswerEvent]]:
        """(choice, event) until each choice's `Finished`. Raises the `ApiError` that ended the answer."""
        if self._read:
            raise RuntimeError("the events of an answer come once")
        self._read = True
        ready, unfinished = self._ready, len(self._jobs)
        while True:
            while ready:
                item = ready.popleft()
                unfinished -= isinstance(item[1], Finished)
                yield item
            if self._error is not None:
                raise self._error
            if not unfinished or self._closed:
                return
            if self.flush is not None:
                await self.flush()
            if not ready and self._error is None and not self._closed:
                self._waiter = asyncio.get_running_loop().create_future()
                try:
                    await self._waiter
                finally:
                    self._waiter = None

    def nudge(self) -> None:
        """Have `flush` called soon, if `events` is waiting."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def close(self) -> None:
        """No more will be read: what runs is cancelled, and its lifetimes come back when it has ended."""
        if self._closed:
            return
        self._closed = True
        self._ready.clear()
        for stream, choice, pump in zip(self._streams, self._choices, self._pumps, strict=False):
            if stream is None:
                pump.cancel()
            elif choice is None or choice.finished is None:
                stream.cancel()
        self.nudge()
        self._release()

    def response_failed(self, phase: str, error: BaseException) -> None:
        """Rendering, storing or sending went wrong: told to the observers."""
        self._service.tell("response_failed", self.record, phase, error)

    async def _submit(self, index: int) -> JobStream:
        stream = self._streams[index] = await self._service.link.submit(self._jobs[index])
        before = perf_counter() - self._arrival
        parser = parser_for(self.record.request)
        self._choices[index] = Choice(self._service.frontend, parser, self._snapshots, before)
        return stream

    async def _pump(self, index: int) -> None:
        stream = None
        try:
            stream = self._streams[index] or await self._submit(index)
            choice = self._choices[index]
            assert choice is not None
            async for event in stream:
                if self._closed and not isinstance(event, Done):
                    continue
                for item in choice.take(event):
                    self._ready.append((index, item))
                self.nudge()
                if choice.finished is not None:
                    break
            else:
                raise UnavailableError("The engine ended in the middle of the answer; send it again.")
        except Exception as error:
            self._fail(as_api_error(error))
        finally:
            if stream is not None:
                stream.close()
        self._end(index)

    def _ended(self, index: int, pump: asyncio.Task[None]) -> None:
        if pump.cancelled():  # maybe before it had begun
            self._fail(as_api_error(asyncio.CancelledError()))
            self._end(index)

    def _end(self, index: int) -> None:
        self._open.discard(index)
        if not self._open:
            self._report()
            self._release()

    def _fail(self, error: ApiError) -> None:
        """The first failure ends all answers of the request."""
        if self._error is not None:
            return
        self._error = for_protocol(error, self.record.request.protocol)
        for stream, choice in zip(self._streams, self._choices, strict=True):
            if stream is not None and choice is not None and choice.finished is None:
                stream.cancel()
        self.nudge()

    def _report(self) -> None:
        choices = [choice for choice in self._choices if choice is not None]
        finished = tuple(c.finished for c in choices if c.finished is not None)
        if self._error is not None or len(finished) < len(self._jobs):
            self._service.tell("failed", self.record, self._error)
            return
        outcome = Outcome(finished, tuple(c.report for c in choices), tuple(f.statistics for f in finished))
        self._service.tell("done", self.record, outcome)

    def _release(self) -> None:
        if self._closed and not self._open and not self._released:
            self._released = True
            self._service.release(len(self._jobs))
