"""What clients find while the model is being loaded."""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send

from ninfer.serve.errors import unavailable
from ninfer.serve.gateway import Gateway
from ninfer.serve.http import json_response
from ninfer.serve.options import ServeOptions


class Door:
    """An ASGI application that is another one, `app`, as soon as there is one. Until then it asks to come
    again, in the words of each API."""

    def __init__(self, options: ServeOptions) -> None:
        self.app: ASGIApp = Gateway(_loading, options)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self.app(scope, receive, send)


async def _loading(scope: Scope, receive: Receive, send: Send) -> None:
    error = unavailable("The model is being loaded; try again later.", retry_after=2)
    if scope["path"] != "/health":
        raise error
    await json_response({"status": "unavailable"}, error.status, error.headers)(scope, receive, send)
