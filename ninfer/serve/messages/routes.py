"""The routes of the Messages API."""

from __future__ import annotations

from collections.abc import AsyncIterator

from fastapi import APIRouter, Request
from starlette.responses import Response

from ninfer.serve.errors import ApiError, anthropic_body, as_api_error
from ninfer.serve.generation import Answer
from ninfer.serve.http import (
    client_label,
    event_stream,
    json_response,
    prepare,
    read_json,
    request_id,
    sse,
    until_disconnect,
)
from ninfer.serve.messages.request import MessagesRequest, Terms, read_request
from ninfer.serve.messages.response import Event, MessageEvents, whole_message
from ninfer.serve.messages.schema import COUNT, CREATE
from ninfer.serve.server import Server


def router(server: Server) -> APIRouter:
    """`POST /v1/messages` and `/v1/messages/count_tokens`. Query parameters (`beta=true`) and beta headers
    have no effect."""
    routes = APIRouter()
    terms = Terms(
        default_max_tokens=server.options.default_max_tokens,
        closer_tokens=len(server.frontend.thinking_closer),
    )

    async def read(request: Request, *, counting: bool) -> MessagesRequest:
        body = await read_json(request, server)
        return read_request(body, terms, client=client_label(request), counting=counting)

    async def create(request: Request) -> Response:
        wanted = await read(request, counting=False)
        answer = await prepare(request, server, wanted.generation)
        message = MessageEvents(
            wanted.generation.model, prompt_tokens=answer.prompt_tokens, omit_thinking=wanted.omit_thinking
        )
        if wanted.generation.stream:
            chunks = _stream(answer, message, request_id(request))
            return event_stream(answer, chunks, server.options.keep_alive)
        return json_response(await until_disconnect(request, answer, _whole(answer, message)))

    async def count_tokens(request: Request) -> Response:
        wanted = await read(request, counting=True)
        return json_response({"input_tokens": await server.service.count(wanted.generation)})

    routes.add_api_route("/v1/messages", create, methods=["POST"], **CREATE)
    routes.add_api_route("/v1/messages/count_tokens", count_tokens, methods=["POST"], **COUNT)
    return routes


async def _stream(answer: Answer, message: MessageEvents, request: str) -> AsyncIterator[bytes]:
    try:
        async for _, event in answer.events():
            for item in message.of(event):
                yield sse(item["type"], item)
    except Exception as error:
        if not isinstance(error, ApiError):
            answer.response_failed("stream", error)
        for item in message.start():
            yield sse(item["type"], item)
        body = anthropic_body(as_api_error(error), request)
        yield sse(body["type"], body)


async def _whole(answer: Answer, message: MessageEvents) -> Event:
    events: list[Event] = []
    async for _, event in answer.events():
        events += message.of(event)
    return whole_message(events)
