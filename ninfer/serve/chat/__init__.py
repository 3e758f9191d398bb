"""POST /v1/chat/completions."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastapi import APIRouter, Request
from starlette.responses import Response

from ninfer.serve.chat.answers import Chunks, whole
from ninfer.serve.chat.request import read_request
from ninfer.serve.chat.schema import RESPONSE, request_schema
from ninfer.serve.http import (
    client_label,
    event_stream,
    json_response,
    known_model,
    prepare,
    read_object,
    until_disconnect,
)
from ninfer.serve.openapi import GENERATION, operation

if TYPE_CHECKING:
    from ninfer.serve.server import Server

__all__ = ["router"]


def router(server: Server) -> APIRouter:
    """The route of OpenAI's Chat Completions."""
    routes = APIRouter()

    async def completions(request: Request) -> Response:
        body = await read_object(request, server)
        model = known_model(body.get("model"), server)
        chat = read_request(body, model, client_label(request))
        answer = await prepare(request, server, chat.generation, snapshots=chat.timings)
        if chat.generation.stream:
            chunks = aiter(Chunks(answer, chat, model))
            return event_stream(answer, chunks, server.options.keep_alive)
        return json_response(await until_disconnect(request, answer, whole(answer, chat, model)))

    routes.add_api_route(
        "/v1/chat/completions",
        completions,
        methods=["POST"],
        **operation(
            "Answer a conversation (OpenAI Chat Completions)",
            body=request_schema(server.names),
            ok=RESPONSE,
            stream=True,
            errors=GENERATION,
        ),
    )
    return routes
