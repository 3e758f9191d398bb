"""The server's side of the engine process: jobs go there, their events come back, whatever becomes of it."""

from __future__ import annotations

import asyncio
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from ninfer.api.options import EngineOptions
from ninfer.engine import Done, Event, PromptProgress, RuntimeStatistics
from ninfer.errors import EngineError, NInferError, OptionError, UnavailableError
from ninfer.serve.jobs import EngineInfo, Job, LinkState
from ninfer.serve.process import EngineProcess, describe_exit, worker_command
from ninfer.serve.records import (
    Cancel,
    Counters,
    EngineFailed,
    Events,
    Failed,
    LoadFailed,
    Loading,
    Opened,
    Query,
    Ready,
    Report,
    Submit,
    restored,
)

Progress = Callable[[str, int, int], None]

_GRACE = 5.0
"""Seconds that the engine process may take to end before it is killed."""
_LOOK = 5.0
"""Seconds between looks at whether the engine process still says something."""
_SILENT_LOOKS = 12
"""Looks without a sign of life after which it counts as dead."""


class EngineLink:
    """A `jobs.Link` to a real engine process. Lives in one event loop; nothing here is for other threads.

    `start`, then `wait_ready`; `stop` at the end. `idle_unload` seconds without a job end the engine process,
    and the next job starts it again. `worker` is the command of the engine process.
    """

    def __init__(
        self,
        model: Path,
        options: EngineOptions,
        *,
        idle_unload: float | None = None,
        warm_up: bool = True,
        worker: Sequence[str] | None = None,
    ) -> None:
        self._model, self._options, self._warm_up = model, options, warm_up
        self._idle_unload = idle_unload
        self._progress: Progress | None = None
        self._command = tuple(worker) if worker is not None else worker_command()
        self._state = LinkState.STOPPED
        self._watchers: list[Callable[[LinkState], None]] = []
        self._process: EngineProcess | None = None
        """The one that loads or serves; not one that ends after an idle time."""
        self._life = 0
        """Counts processes; what earlier ones report means nothing."""
        self._info: EngineInfo | None = None
        self._opened: asyncio.Future[Path] | None = None
        self._ready: asyncio.Future[EngineInfo] | None = None
        self._unloading: asyncio.Task[None] | None = None
        self._failure = ""
        """Why no job can be served any more."""
        self._stopping = False
        self._numbers = 0
        self._jobs: dict[int, _Inbox] = {}
        self._queries: dict[int, asyncio.Future[RuntimeStatistics | None]] = {}
        self._no_jobs = asyncio.Event()
        self._no_jobs.set()
        self._idle: asyncio.TimerHandle | None = None
        self._look: asyncio.TimerHandle | None = None
        self._silent = 0

    @property
    def state(self) -> LinkState:
        return self._state

    @property
    def failure(self) -> str:
        """In state FAILED: why, as a sentence."""
        return self._failure

    @property
    def info(self) -> EngineInfo:
        """Of the process that runs or ran last; there is none before the first is ready."""
        if self._info is None:
            raise UnavailableError("the engine has not been loaded yet")
        return self._info

    @property
    def jobs(self) -> int:
        """How many run or wait in the engine."""
        return len(self._jobs)

    def watch(self, watcher: Callable[[LinkState], None]) -> None:
        """Have `watcher` called with each new state."""
        self._watchers.append(watcher)

    # Beginning and end

    async def start(self) -> None:
        """Start the engine process; it loads while the caller does other things."""
        if self._state is not LinkState.STOPPED or self._stopping:
            raise EngineError("a link can be started once; make another one")
        self._begin()

    async def opened(self, progress: Progress | None = None) -> Path:
        """The artifact that is being loaded, as soon as it is there; `progress(stage, done, total)` is called
        while a checkpoint is converted and, until the link is ready, while weights go to a GPU. Raises what
        loading raises."""
        if self._opened is None:
            raise EngineError("the link has not been started")
        self._progress = progress
        return await asyncio.shield(self._opened)

    async def wait_ready(self) -> EngineInfo:
        """Wait until the model is loaded. Raises the error of loading, in its own class."""
        if self._ready is None:
            raise EngineError("the link has not been started")
        return await asyncio.shield(self._ready)

    async def stop(self, drain_timeout: float = 0.0) -> None:
        """Take no more jobs, give those under way so many seconds, and end the engine process. Safe to call
        more than once, also with a shorter time while another call waits."""
        self._stopping = True
        if self._jobs and drain_timeout > 0:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._no_jobs.wait(), drain_timeout)
        self._cancel_timers()
        self._end_all(UnavailableError("the server is stopping; no answer can be completed"))
        if self._process is not None:
            if self._state is not LinkState.READY:
                self._process.kill()  # it listens only when it has loaded
            await self._process.stop(_GRACE)
        if self._unloading is not None:
            await self._unloading
        if self._state is not LinkState.FAILED:
            self._set_state(LinkState.STOPPED)

    # Jobs

    async def submit(self, job: Job) -> _Stream:
        """See `jobs.Link`."""
        while self._state is not LinkState.READY or self._stopping:
            if self._stopping or self._state is LinkState.STOPPED:
                raise UnavailableError("the server is stopping and takes no more requests")
            if self._state is LinkState.FAILED:
                raise UnavailableError(self._failure)
            if self._state is LinkState.UNLOADED:
                self._begin()
            try:
                await self.wait_ready()
            except NInferError as error:
                raise UnavailableError(f"the engine could not be started: {error}") from error
        self._numbers += 1
        number, inbox = self._numbers, _Inbox()
        try:
            command = Submit.of(number, job)
            assert self._process is not None
            self._process.send(command)
        except (UnicodeEncodeError, OverflowError, TypeError):
            inbox.end(OptionError("the request holds text or numbers that can't be passed on"))
        else:
            self._jobs[number] = inbox
            self._no_jobs.clear()
            self._cancel_idle()
        return _Stream(self, number, inbox)

    async def statistics(self) -> RuntimeStatistics | None:
        """See `jobs.Link`."""
        if self._state is not LinkState.READY or self._process is None:
            return None
        self._numbers += 1
        answer = asyncio.get_running_loop().create_future()
        self._queries[self._numbers] = answer
        try:
            self._process.send(Query(self._numbers))
            return await answer
        finally:
            self._queries = {n: query for n, query in self._queries.items() if query is not answer}

    def cancel(self, number: int) -> None:
        """Ask the engine to end a job; nothing happens if it has ended."""
        if number in self._jobs and self._process is not None:
            self._process.send(Cancel(number))

    def abandon(self, number: int) -> None:
        """Nobody reads the job's events any more."""
        inbox = self._jobs.get(number)
        if inbox is not None and not inbox.closed:
            inbox.close()
            self.cancel(number)

    # The engine process

    def _begin(self) -> None:
        loop = asyncio.get_running_loop()
        self._opened, self._ready = loop.create_future(), loop.create_future()
        for future in (self._opened, self._ready):
            future.add_done_callback(_look_at)
        self._set_state(LinkState.STARTING)
        if self._unloading is None or self._unloading.done():
            self._spawn()
        else:
            self._unloading.add_done_callback(lambda _: self._spawn())

    def _spawn(self) -> None:
        if self._stopping:
            return
        self._life += 1
        try:
            self._process = EngineProcess(
                self._command,
                self._model,
                self._options,
                warm_up=self._warm_up,
                receive=partial(self._receive, self._life),
                ended=partial(self._ended, self._life),
            )
        except OSError as error:
            self._fail(EngineError(f"the engine process can't be started: {error.strerror or error}"))
            return
        self._silent = 0
        self._look_again()

    def _receive(self, life: int, report: Report) -> None:
        if life != self._life:
            return
        self._silent = 0
        match report:
            case Events():
                self._deliver(report.job, report.unwrapped())
            case Failed():
                self._end_job(report.job, restored(report.error, report.sentence))
            case Counters():
                if (query := self._queries.get(report.number)) is not None and not query.done():
                    query.set_result(report.statistics)
            case Loading() if self._progress is not None:
                self._progress(report.stage, report.done, report.total)
            case Opened():
                self._model = report.path
                if self._opened is not None and not self._opened.done():
                    self._opened.set_result(report.path)
            case Ready():
                self._loaded(report.info)
            case LoadFailed():
                self._fail(restored(report.error, report.sentence))
            case EngineFailed():
                self._fail(UnavailableError(f"{report.sentence}; start the server again"))

    def _loaded(self, info: EngineInfo) -> None:
        if self._state is not LinkState.STARTING or self._stopping:
            return
        self._progress = None
        identity = "artifact_id"
        if self._info is not None and self._info.extra.get(identity) != info.extra.get(identity):
            self._fail(
                UnavailableError(f"{info.artifact_path} is another model than before; start the server again")
            )
            return
        self._info = info
        self._set_state(LinkState.READY)
        self._arm_idle()
        if self._ready is not None and not self._ready.done():
            self._ready.set_result(info)

    def _ended(self, life: int, code: int) -> None:
        """The process is gone; unless that was wanted, so is the engine."""
        if life != self._life or self._process is None:
            return
        self._process = None
        self._cancel_timers()
        if self._stopping or self._state is LinkState.FAILED:
            return
        when = "while it loaded the model" if self._state is LinkState.STARTING else "unexpectedly"
        self._fail(
            UnavailableError(
                f"the engine process ended {when} ({describe_exit(code)}); start the server again"
            )
        )

    def _fail(self, error: NInferError) -> None:
        """Nothing can be served any more; whoever waits is told."""
        if self._state is LinkState.FAILED or self._stopping:
            return
        self._failure = str(error)
        self._cancel_timers()
        if self._process is not None:
            self._process.kill()
        self._end_all(error)
        self._set_state(LinkState.FAILED)

    def _end_all(self, error: NInferError) -> None:
        for future in (self._opened, self._ready):
            if future is not None and not future.done():
                future.set_exception(error)
        for query in self._queries.values():
            if not query.done():
                query.set_result(None)
        for number in list(self._jobs):
            self._end_job(number, UnavailableError(str(error)))

    def _set_state(self, state: LinkState) -> None:
        if state is not self._state:
            self._state = state
            for watcher in self._watchers:
                watcher(state)

    # Events of jobs

    def _deliver(self, number: int, events: list[Event]) -> None:
        if (inbox := self._jobs.get(number)) is not None:
            inbox.put(events)
            if isinstance(events[-1], Done):
                self._end_job(number, None)

    def _end_job(self, number: int, error: NInferError | None) -> None:
        if (inbox := self._jobs.pop(number, None)) is not None:
            inbox.end(error)
            if not self._jobs:
                self._no_jobs.set()
                self._arm_idle()

    # Time

    def _arm_idle(self) -> None:
        if self._idle_unload is not None and self._state is LinkState.READY and not self._jobs:
            self._cancel_idle()
            loop = asyncio.get_running_loop()
            self._idle = loop.call_later(self._idle_unload, self._unload)

    def _unload(self) -> None:
        if self._state is LinkState.READY and not self._jobs and not self._stopping:
            process, self._process = self._process, None
            assert process is not None
            self._cancel_timers()
            self._set_state(LinkState.UNLOADED)
            for query in self._queries.values():
                if not query.done():
                    query.set_result(None)
            self._unloading = asyncio.create_task(process.stop(_GRACE))

    def _look_again(self) -> None:
        """Notice a process that is there but does nothing. Looks are counted and not seconds, so that a time
        in which we ourselves stood still isn't held against it."""
        self._silent += 1
        if self._silent > _SILENT_LOOKS and self._state is LinkState.READY:
            self._fail(
                UnavailableError(
                    f"the engine process has said nothing for {_SILENT_LOOKS * _LOOK:.0f} seconds; start the "
                    f"server again"
                )
            )
            return
        self._look = asyncio.get_running_loop().call_later(_LOOK, self._look_again)

    def _cancel_idle(self) -> None:
        if self._idle is not None:
            self._idle.cancel()
            self._idle = None

    def _cancel_timers(self) -> None:
        self._cancel_idle()
        if self._look is not None:
            self._look.cancel()
            self._look = None


@dataclass(eq=False)
class _Inbox:
    """A job's events that nobody has read yet. The link fills it, the stream empties it."""

    events: deque[Event] = field(default_factory=deque)
    error: NInferError | None = None
    ended: bool = False
    closed: bool = False
    waiter: asyncio.Future[None] | None = None

    def put(self, events: list[Event]) -> None:
        if self.closed:
            return
        for event in events:
            if (
                isinstance(event, PromptProgress)
                and self.events
                and isinstance(self.events[-1], PromptProgress)
            ):
                self.events.pop()  # a reader that is late wants the newest only
            self.events.append(event)
        self._wake()

    def end(self, error: NInferError | None) -> None:
        self.ended = True
        if not self.closed:
            self.error = error
        self._wake()

    def close(self) -> None:
        self.closed = True
        self.events.clear()
        self.error = None
        self._wake()

    def _wake(self) -> None:
        if self.waiter is not None and not self.waiter.done():
            self.waiter.set_result(None)


class _Stream:
    """See `jobs.JobStream`. One that is dropped is closed."""

    def __init__(self, link: EngineLink, number: int, inbox: _Inbox) -> None:
        self._link, self._number, self._inbox = link, number, inbox
        loop = asyncio.get_running_loop()
        self._finalizer = weakref.finalize(self, _dropped, loop, link, number)
        self._finalizer.atexit = False

    def __aiter__(self) -> _Stream:
        return self

    async def __anext__(self) -> Event:
        inbox = self._inbox
        while not inbox.events:
            if inbox.error is not None:
                error, inbox.error = inbox.error, None
                raise error
            if inbox.ended or inbox.closed:
                raise StopAsyncIteration
            if inbox.waiter is not None:
                raise EngineError("the events of this job are being read elsewhere; they come once")
            inbox.waiter = asyncio.get_running_loop().create_future()
            try:
                await inbox.waiter
            finally:
                inbox.waiter = None
        return inbox.events.popleft()

    def cancel(self) -> None:
        self._link.cancel(self._number)

    def close(self) -> None:
        self._finalizer.detach()
        self._link.abandon(self._number)
        self._inbox.close()


def _dropped(loop: asyncio.AbstractEventLoop, link: EngineLink, number: int) -> None:
    """A stream was collected, in whatever thread."""
    with suppress(RuntimeError):  # the loop is closed, and the link with it
        loop.call_soon_threadsafe(link.abandon, number)


def _look_at(future: asyncio.Future) -> None:
    """Nobody need wait for it; an error isn't worth a complaint then."""
    if not future.cancelled():
        future.exception()
