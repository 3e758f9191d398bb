"""The whole HTTP application: routes of every API behind one gateway."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager

from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.responses import Response

import ninfer
from ninfer.serve import chat, messages, models, responses, tokenize
from ninfer.serve.errors import ApiError
from ninfer.serve.gateway import Gateway, error_response
from ninfer.serve.http import Gone
from ninfer.serve.observer import Observer
from ninfer.serve.server import Server

_ROUTERS = (models.router, chat.router, responses.router, messages.router, tokenize.router)


def create_app(server: Server, observers: Iterable[Observer] = ()) -> FastAPI:
    """The application of a server; `observers` are told of its requests besides those that already are."""
    server.service.observe(*observers)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        server.service.close()

    app = FastAPI(
        title="NInfer",
        version=ninfer.__version__,
        lifespan=lifespan,
        docs_url=None,  # those pages load scripts from elsewhere
        redoc_url=None,
        redirect_slashes=False,
    )
    app.add_middleware(Gateway, options=server.options)
    app.add_exception_handler(ApiError, _refused)
    app.add_exception_handler(HTTPException, _no_route)
    app.add_exception_handler(Gone, _gone)
    for router in _ROUTERS:
        app.include_router(router(server))
    return app


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error_response(request, error)


async def _no_route(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    headers = dict(error.headers or {})
    method, path = request.method, request.url.path
    if error.status_code == 405:
        message = f"{method} is not possible on {path}; use {headers.get('Allow') or 'another method'}."
    elif error.status_code == 404:
        message = f"There is no route {method} {path:.200}."
    else:
        message = str(error.detail)
    return error_response(request, ApiError(error.status_code, message, headers=headers))


async def _gone(request: Request, error: Exception) -> Response:
    """Nobody reads this: the client closed its connection."""
    return Response(status_code=499)
