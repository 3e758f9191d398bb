"""The one place where the parts of the server meet: service, routes and observers around a link."""

from __future__ import annotations

from ninfer.frontend import Frontend
from ninfer.serve.app import create_app
from ninfer.serve.generation import Service
from ninfer.serve.jobs import EngineInfo, Link, LinkState
from ninfer.serve.link import EngineLink
from ninfer.serve.observe import build
from ninfer.serve.options import ServeOptions
from ninfer.serve.server import Server


class Assembly:
    """A `run.Life` of the real routes. Raises OptionError if a log can't be written."""

    def __init__(self, options: ServeOptions, frontend: Frontend, name: str, link: Link) -> None:
        self._options = options
        self._model = options.model_id or name
        self._observers = build(options, frontend)
        self._service = Service(frontend, link, options)
        names = frozenset({self._model, *options.model_aliases})
        server = Server(options, frontend, link, self._service, self._model, names)
        self.app = create_app(server, [self._observers])
        self.app.include_router(self._observers.router())
        self._observers.console.starting()

    def loaded(self, link: Link, info: EngineInfo) -> None:
        self._observers.start(link, info)

    def listening(self, host: str, port: int) -> None:
        self._observers.console.listening(host, port, self._model)

    def changed(self, link: EngineLink) -> None:
        console = self._observers.console
        if link.state is LinkState.READY:
            console.ready(link.info)
        elif link.state is LinkState.UNLOADED:
            console.unloaded(self._options.idle_unload or 0.0)
        elif link.state is LinkState.FAILED:
            console.engine_failed(link.failure)

    def stopping(self) -> None:
        self._service.draining = True
        self._observers.console.draining(self._service.active)

    async def stopped(self) -> None:
        self._service.close()
        await self._observers.close()
        self._observers.console.stopped()
