"""The whole HTTP application: routes of every API behind one gateway."""

from __future__ import annotations

from collections.abc import Iterable

from fastapi import FastAPI, Request
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.routing import Match

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

    app = FastAPI(
        title="NInfer",
        version=ninfer.__version__,
        docs_url=None,  # those pages load scripts from elsewhere
        redoc_url=None,
        redirect_slashes=False,
    )
    app.add_middleware(Gateway, options=server.options)
    app.add_exception_handler(ApiError, _refused)
    app.add_exception_handler(HTTPException, _no_route)
    app.add_exception_handler(Gone, _gone)
    routers = [router(server) for router in _ROUTERS]
    for router in routers:
        app.include_router(router)
    app.state.routes = [route for router in routers for route in router.routes]
    return app


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error_response(request, error)


async def _no_route(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    headers = dict(error.headers or {})
    method, path = request.method, request.url.path
    if error.status_code == 405:
        headers["Allow"] = ", ".join(_methods(request, headers.get("Allow", "")))
        message = f"{method} is not possible on {path:.200}; use {headers['Allow']}."
    elif error.status_code == 404:
        message = f"There is no route {method} {path:.200}."
    else:
        message = str(error.detail)
    return error_response(request, ApiError(error.status_code, message, headers=headers))


def _methods(request: Request, known: str) -> list[str]:
    """Those of all routes of that path; `known` are those of the first of them, which refused another."""
    routes = (r for r in request.app.state.routes if isinstance(r, APIRoute) and r.include_in_schema)
    fitting = [route.methods or () for route in routes if route.matches(request.scope)[0] is not Match.NONE]
    return sorted(set(known.split(", ")).union(*fitting))


async def _gone(request: Request, error: Exception) -> Response:
    """Nobody reads this: the client closed its connection."""
    return Response(status_code=499)
