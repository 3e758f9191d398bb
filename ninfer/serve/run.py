"""One life of the server, from the bound port to the exit code."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any, Protocol, TypeVar

import uvicorn

from ninfer.api.loading import load_frontend, opened
from ninfer.api.options import EngineOptions
from ninfer.frontend import Frontend
from ninfer.serve.address import announcement, bind, url
from ninfer.serve.door import Door
from ninfer.serve.jobs import EngineInfo, Link, LinkState
from ninfer.serve.link import EngineLink, Progress
from ninfer.serve.options import ServeOptions
from ninfer.serve.protocol import BoundedProtocol

_LAST_WORDS = 3.0
"""Seconds in which answers that had to be broken off may still tell their clients."""
_FORCED = 0.5
"""Seconds after which connections that are still open count as lost."""
_KEEP_ALIVE = 75
"""Seconds that an idle connection stays open: longer than clients keep theirs, so that none is closed just as
it is used again."""
_T = TypeVar("_T")


class Life(Protocol):
    """What the server does in between, and who is told how it goes."""

    app: Any
    """The ASGI application."""

    def loaded(self, link: Link, info: EngineInfo) -> None:
        """The engine is ready for the first time."""
        ...

    def listening(self, host: str, port: int) -> None:
        """Requests are served from now on."""
        ...

    def changed(self, link: EngineLink) -> None:
        """The engine's state has changed, after the first time that it was ready."""
        ...

    def stopping(self) -> None:
        """Requests that come from now on are refused; those under way may end."""
        ...

    async def stopped(self) -> None:
        """No request is left. The link still works, unless requests had to be broken off."""
        ...


Assemble = Callable[[ServeOptions, Frontend, str, Link], Life]
"""Options, frontend, the artifact's name and the link make a server."""


class _Stop:
    """Requests to stop: the first lets answers end, the second doesn't."""

    def __init__(self) -> None:
        self.asked, self.hurried = asyncio.Event(), asyncio.Event()

    def __call__(self) -> None:
        (self.hurried if self.asked.is_set() else self.asked).set()

    async def before(self, work: Awaitable[_T]) -> _T | None:
        """What the work yields; None if the end is asked for first, whereupon it goes on by itself."""
        task, asked = asyncio.ensure_future(work), asyncio.create_task(self.asked.wait())
        task.add_done_callback(_look_at)
        await asyncio.wait({asked, task}, return_when=asyncio.FIRST_COMPLETED)
        asked.cancel()
        return task.result() if task.done() else None


async def serve(
    options: ServeOptions,
    *,
    assemble: Assemble | None = None,
    progress: Callable[[], AbstractContextManager[Progress]] | None = None,
    worker: Sequence[str] | None = None,
    announce: Callable[[str], None] | None = None,
) -> int:
    """Bind, load, serve until a signal or the engine's failure, and end; the exit code.

    0 after SIGINT or SIGTERM, 2 if the engine failed while serving. Raises `NInferError` if it can't start.
    What the context manager `progress` yields is told (stage, done, total) of a checkpoint's conversion and
    of weights on their way to a GPU;
    `announce` gets the text for users.
    """
    if assemble is None:
        from ninfer.serve.assembly import Assembly as assemble
        from ninfer.serve.observe import configure

        configure(options.log_level)
    assert assemble is not None
    stop, life = _Stop(), None
    with closing(bind(options.host, options.port)) as listener, _signals(stop):
        options = replace(options, port=listener.getsockname()[1])
        engine = _with_places_to_spare(options.engine)
        link = EngineLink(options.model_path, engine, idle_unload=options.idle_unload, worker=worker)
        door = Door(options)
        http = _Http(_config(door))
        serving = asyncio.create_task(http.serve(sockets=[listener]))
        try:
            await link.start()
            with (progress or nullcontext)() as tell:
                life = await stop.before(_assembled(options, link, assemble, tell))
                info = await stop.before(link.wait_ready())
            if life is None or info is None:
                return 0
            life.loaded(link, info)
            door.app = life.app
            life.listening(options.host, options.port)
            if announce is not None:
                base, model = url(options.host, options.port), options.model_id or info.name
                announce(announcement(base, model, key=options.api_key is not None))
            await _serve(options, life, link, http, serving, stop)
            return 2 if link.state is LinkState.FAILED else 0
        finally:
            await _close(http, serving, _FORCED)
            if life is not None:
                await life.stopped()
            await link.stop()


def run(program: Coroutine[Any, Any, _T]) -> _T:
    """`asyncio.run` on the fastest event loop there is. On Windows on the one that can wait for sockets of
    other libraries."""
    factory: Callable[[], asyncio.AbstractEventLoop] | None = None
    if sys.platform == "win32":
        factory = asyncio.SelectorEventLoop
    else:
        with suppress(ImportError):
            import uvloop

            factory = uvloop.new_event_loop
    with asyncio.Runner(loop_factory=factory) as runner:
        return runner.run(program)


def _with_places_to_spare(engine: EngineOptions) -> EngineOptions:
    """The service counts the requests and refuses those that are too many. The engine gives a place back
    a moment after it has said that an answer ended; until then its successor needs another one."""
    places = engine.max_concurrency + engine.max_pending
    return replace(engine, max_pending=min(engine.max_pending + places, 2**32 - 1))


async def _assembled(
    options: ServeOptions,
    link: EngineLink,
    assemble: Assemble,
    progress: Progress | None,
) -> Life:
    path = await link.opened(progress)
    name, frontend = await asyncio.to_thread(_frontend, path, options.engine.chat_template)
    return assemble(options, frontend, name, link)


def _frontend(path: Path, chat_template: str | None) -> tuple[str, Frontend]:
    with opened(path, None, None) as artifact, closing(artifact):
        name = str(artifact.metadata.get("name") or path.stem)
        return name, load_frontend(artifact, chat_template)


async def _serve(
    options: ServeOptions,
    life: Life,
    link: EngineLink,
    http: uvicorn.Server,
    serving: asyncio.Task[None],
    stop: _Stop,
) -> None:
    """Serve until asked to stop or the engine fails; then take no more connections, let answers end, and
    break off those that take too long."""

    def changed(state: LinkState) -> None:
        life.changed(link)
        if state is LinkState.FAILED:
            stop.asked.set()

    link.watch(changed)
    if link.state is LinkState.FAILED:
        changed(link.state)
    await stop.before(serving)
    life.stopping()
    http.should_exit = True
    limit = _LAST_WORDS if link.state is LinkState.FAILED else options.drain_timeout
    hurried = asyncio.create_task(stop.hurried.wait())
    await asyncio.wait({serving, hurried}, timeout=limit, return_when=asyncio.FIRST_COMPLETED)
    hurried.cancel()
    if not serving.done():
        await link.stop()
        await _close(http, serving, _LAST_WORDS)


async def _close(http: uvicorn.Server, serving: asyncio.Task[None], patience: float) -> None:
    """Take no more connections; those that are open have so many seconds."""
    http.should_exit = True
    await asyncio.wait({serving}, timeout=patience)
    http.force_exit = True
    # It may yet wait for a client that neither reads nor goes.
    await asyncio.wait({serving}, timeout=_FORCED)
    serving.cancel()
    await asyncio.wait({serving})


def _look_at(task: asyncio.Future) -> None:
    """Its error is no complaint of its own, if nobody waited for it."""
    if not task.cancelled():
        task.exception()


class _Http(uvicorn.Server):
    """Leaves signals to us."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _config(app: Any) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        interface="asgi3",
        http=BoundedProtocol,
        lifespan="off",
        proxy_headers=False,
        log_config=None,
        access_log=False,
        server_header=False,
        ws="none",
        timeout_keep_alive=_KEEP_ALIVE,
    )


@contextmanager
def _signals(stop: _Stop) -> Iterator[None]:
    """Inside, SIGINT and SIGTERM ask for an end. In another thread than the first nobody can be asked so."""
    loop = asyncio.get_running_loop()
    before: list[tuple[signal.Signals, Any]] = []

    def handle(_number: int, _frame: FrameType | None) -> None:
        loop.call_soon_threadsafe(stop)

    with suppress(ValueError):
        for number in (signal.SIGINT, signal.SIGTERM):
            before.append((number, signal.signal(number, handle)))
    try:
        yield
    finally:
        for number, handler in before:
            signal.signal(number, handler)
