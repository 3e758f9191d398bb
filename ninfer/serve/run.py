"""One life of the server, from the bound port to the exit code."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any, Protocol, TypeVar

import uvicorn

from ninfer.api.loading import load_frontend, opened
from ninfer.errors import UnavailableError
from ninfer.frontend import Frontend
from ninfer.serve.address import announcement, bind, url
from ninfer.serve.jobs import EngineInfo, Link, LinkState
from ninfer.serve.link import EngineLink, Progress
from ninfer.serve.options import ServeOptions

_LAST_WORDS = 3.0
"""Seconds in which answers that had to be broken off may still tell their clients."""
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

    def listening(self, host: str, port: int) -> None: ...

    def changed(self, link: EngineLink) -> None:
        """The engine's state has changed, after the first time that it was ready."""
        ...

    def stopping(self) -> None:
        """Requests that come from now on are refused; those under way may end."""
        ...

    async def stopped(self) -> None:
        """No request is left; the link still works, unless requests had to be broken off."""
        ...


Assemble = Callable[[ServeOptions, Frontend, str, Link], Life]
"""Options, frontend, the artifact's name and the link make a server."""


@dataclass
class _Stop:
    """Requests to stop: the first lets answers end, the second doesn't."""

    asked: asyncio.Event
    hurried: asyncio.Event

    def __call__(self) -> None:
        (self.hurried if self.asked.is_set() else self.asked).set()


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
    What the context manager `progress` yields is told (stage, done, total) of a checkpoint's conversion;
    `announce` gets the text for users.
    """
    if assemble is None:
        from ninfer.serve.assembly import Assembly as assemble  # noqa: N813
    assert assemble is not None
    stop = _Stop(asyncio.Event(), asyncio.Event())
    with closing(bind(options.host, options.port)) as listener, _signals(stop):
        port = listener.getsockname()[1]
        options = replace(options, port=port)
        link = EngineLink(
            options.model_path,
            options.engine,
            idle_unload=options.idle_unload,
            worker=worker,
        )
        try:
            await link.start()
            loading = asyncio.create_task(_load(options, link, assemble, progress or _quietly))
            if not await _before(stop, loading):
                loading.cancel()
                return 0
            life = loading.result()
            http = _Http(_config(life.app), lambda: _open(life, options, link, announce))
            serving = asyncio.create_task(http.serve(sockets=[listener]))
            link.watch(lambda state: _changed(life, link, state, stop))
            await _before(stop, serving)
            if not http.started:
                raise UnavailableError("the web server could not be started; see the log")
            await _drain(options, life, link, http, serving, stop)
            return 2 if link.state is LinkState.FAILED else 0
        finally:
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


async def _load(
    options: ServeOptions,
    link: EngineLink,
    assemble: Assemble,
    progress: Callable[[], AbstractContextManager[Progress | None]],
) -> Life:
    with progress() as tell:
        path = await link.opened(tell)
    name, frontend = await asyncio.to_thread(_frontend, path, options.engine.chat_template)
    life = assemble(options, frontend, name, link)
    life.loaded(link, await link.wait_ready())
    return life


def _frontend(path: Path, chat_template: str | None) -> tuple[str, Frontend]:
    with opened(path, None, None) as artifact, closing(artifact):
        name = str(artifact.metadata.get("name") or path.stem)
        return name, load_frontend(artifact, chat_template)


def _open(
    life: Life, options: ServeOptions, link: EngineLink, announce: Callable[[str], None] | None
) -> None:
    life.listening(options.host, options.port)
    if announce is not None:
        model = options.model_id or link.info.name
        base = url(options.host, options.port)
        announce(announcement(base, model, key=options.api_key is not None))


def _changed(life: Life, link: EngineLink, state: LinkState, stop: _Stop) -> None:
    life.changed(link)
    if state is LinkState.FAILED and not stop.asked.is_set():
        stop()


async def _drain(
    options: ServeOptions, life: Life, link: EngineLink, http: _Http, serving: asyncio.Task, stop: _Stop
) -> None:
    """Take no more connections, let answers end, break off those that take too long."""
    life.stopping()
    http.should_exit = True
    limit = _LAST_WORDS if link.state is LinkState.FAILED else options.drain_timeout
    hurried = asyncio.create_task(stop.hurried.wait())
    await asyncio.wait({serving, hurried}, timeout=limit, return_when=asyncio.FIRST_COMPLETED)
    hurried.cancel()
    if not serving.done():
        await link.stop()
        await asyncio.wait({serving}, timeout=_LAST_WORDS)
        http.force_exit = True
    await serving
    await life.stopped()


async def _before(stop: _Stop, task: asyncio.Task) -> bool:
    """Wait for the task or a signal; True if the task ended (its error is raised), False for a signal."""
    asked = asyncio.create_task(stop.asked.wait())
    await asyncio.wait({asked, task}, return_when=asyncio.FIRST_COMPLETED)
    asked.cancel()
    if task.done():
        await task
        return True
    return False


def _quietly() -> AbstractContextManager[None]:
    return nullcontext()


class _Http(uvicorn.Server):
    """Tells when it listens, and leaves signals to us."""

    def __init__(self, config: uvicorn.Config, listening: Callable[[], None]) -> None:
        super().__init__(config)
        self._listening = listening

    async def startup(self, sockets: Any = None) -> None:
        await super().startup(sockets=sockets)
        if self.started:
            self._listening()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _config(app: Any) -> uvicorn.Config:
    return uvicorn.Config(
        app,
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
