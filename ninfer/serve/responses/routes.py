"""The routes of the Responses API."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import suppress
from typing import TYPE_CHECKING

from fastapi import APIRouter, Request, WebSocket
from starlette.responses import Response

from ninfer.serve.answer import Answer
from ninfer.serve.calls import Finished
from ninfer.serve.errors import ApiError, as_api_error, invalid, openai_body
from ninfer.serve.http import (
    client_label,
    event_stream,
    json_response,
    known_model,
    prepare,
    read_object,
    sse,
    until_disconnect,
)
from ninfer.serve.responses import schema
from ninfer.serve.responses.items import Json
from ninfer.serve.responses.listing import listed
from ninfer.serve.responses.request import Create, read_count, read_create
from ninfer.serve.responses.response import begun
from ninfer.serve.responses.store import Record, Store
from ninfer.serve.responses.stream import ResponseStream
from ninfer.serve.responses.truncation import fitted

if TYPE_CHECKING:
    from ninfer.serve.server import Server

_NO_WEBSOCKET = ApiError(
    426,
    "Responses over WebSocket are not supported; send POST /v1/responses, with stream for events.",
    code="websocket_not_supported",
    headers={"Upgrade": "HTTP/1.1"},
)


def router(server: Server) -> APIRouter:
    """Create, fetch, list, delete, count; what is stored lives as long as the router."""
    api = APIRouter(prefix="/v1/responses")
    store = Store(server.options.response_store_records, server.options.response_store_bytes)
    _add_creation(api, server, store)
    _add_resources(api, store)
    return api


def _add_creation(api: APIRouter, server: Server, store: Store) -> None:
    @api.post("", **schema.create(server.names))
    async def create(request: Request) -> Response:
        body = await read_object(request, server)
        known_model(body.get("model"), server)
        asked = read_create(body, store, client_label(request))
        if asked.store:
            store.check(asked.history)
        if asked.shrink:
            asked = await fitted(asked, server)
        answer = await prepare(request, server, asked.generation)
        events = _events(asked, answer)
        if asked.generation.stream:
            return event_stream(answer, _chunks(events, answer, asked, store), server.options.keep_alive)
        response = await until_disconnect(request, answer, _whole(events, answer, asked, store))
        return json_response(response)

    @api.post("/input_tokens", **schema.count(server.names))
    async def input_tokens(request: Request) -> Response:
        body = await read_object(request, server)
        body.setdefault("model", server.model_id)
        known_model(body["model"], server)
        asked = read_count(body, store)
        tokens = await server.service.count(asked.generation)
        return json_response({"object": "response.input_tokens", "input_tokens": tokens})

    @api.get("", include_in_schema=False)
    async def upgrade(request: Request) -> Response:
        if "websocket" in request.headers.get("upgrade", "").lower():
            raise _NO_WEBSOCKET
        raise ApiError(
            405,
            "Stored responses can't be listed; use POST /v1/responses or GET /v1/responses/{id}.",
            code="method_not_allowed",
            headers={"Allow": "POST"},
        )

    @api.websocket("")
    async def websocket(socket: WebSocket) -> None:
        """For servers that take upgrades themselves."""
        headers = _NO_WEBSOCKET.headers
        await socket.send_denial_response(json_response(openai_body(_NO_WEBSOCKET), 426, headers))

    @api.post("/compact", **schema.COMPACT)
    async def compact() -> Response:
        raise invalid(
            "Compaction is not supported; ask for a summary in a request of its own.",
            "context_management",
            "compaction_not_supported",
        )


def _add_resources(api: APIRouter, store: Store) -> None:
    @api.get("/{response_id}", **schema.RETRIEVE)
    async def retrieve(request: Request) -> Response:
        _check_query(request)
        return json_response(store.get(_named(request)).response)

    @api.delete("/{response_id}", **schema.DELETE)
    async def delete(request: Request) -> Response:
        store.delete(_named(request))
        return json_response({"id": _named(request), "object": "response.deleted", "deleted": True})

    @api.get("/{response_id}/input_items", **schema.ITEMS)
    async def input_items(request: Request) -> Response:
        items = store.get(_named(request)).items
        return json_response(listed(items, request.query_params.multi_items()))

    @api.post("/{response_id}/cancel", **schema.CANCEL)
    async def cancel(request: Request) -> Response:
        store.get(_named(request))
        raise invalid(
            "Only responses made in the background can be cancelled, and this server makes none; close the"
            " connection to stop an answer.",
            code="background_not_supported",
        )


def _named(request: Request) -> str:
    """The response's id in the path."""
    return request.path_params["response_id"]


def _check_query(request: Request) -> None:
    for name, value in request.query_params.multi_items():
        match name.removesuffix("[]"):
            case "include":
                if value:
                    raise invalid("include is not supported here.", "include", "include_not_supported")
            case "include_obfuscation":
                if value not in ("true", "false"):
                    raise invalid("include_obfuscation must be true or false.", "include_obfuscation")
            case "starting_after":
                raise invalid("Streams can't be resumed.", "starting_after", "stream_recovery_not_supported")
            case "stream":
                if value not in ("true", "false"):
                    raise invalid("stream must be true or false.", "stream")
                if value == "true":
                    raise invalid(
                        "Stored responses can't be streamed.", "stream", "retrieve_stream_not_supported"
                    )
            case _:
                raise invalid(f"Unknown parameter: {name[:80]!r}.", name[:80], "unknown_parameter")


def _events(asked: Create, answer: Answer) -> ResponseStream:
    sampling = answer.sampling
    return ResponseStream(
        begun(asked, sampling.temperature, sampling.top_p),
        asked.toolbox,
        encrypted=asked.encrypted,
        logprobs=asked.generation.logprobs is not None,
    )


async def _chunks(
    events: ResponseStream, answer: Answer, asked: Create, store: Store
) -> AsyncIterator[bytes]:
    """The body of a stream. What is wrong from here on is its last event."""
    for event in events.begin():
        yield sse(event["type"], event)
    try:
        async for _, part in answer.events():
            made = events.finish(part) if isinstance(part, Finished) else events.feed(part)
            for event in made:
                yield sse(event["type"], event)
        _keep(events, asked, store)
    except Exception as error:
        if not isinstance(error, ApiError):
            answer.response_failed("stream", error)
        events.fail(as_api_error(error))
        _keep_failed(events, asked, store)
    last = events.terminal()
    yield sse(last["type"], last)


async def _whole(events: ResponseStream, answer: Answer, asked: Create, store: Store) -> Json:
    """The body of an answer that isn't streamed."""
    for _ in events.begin():
        pass
    async for _, part in answer.events():
        for _ in events.finish(part) if isinstance(part, Finished) else events.feed(part):
            pass
    _keep(events, asked, store)
    return events.response


def _keep(events: ResponseStream, asked: Create, store: Store) -> None:
    if asked.store:
        response = events.response
        history = (*asked.history, *response["output"])
        store.put(Record(response, asked.items, history, asked.generation.preserve_thinking))


def _keep_failed(events: ResponseStream, asked: Create, store: Store) -> None:
    """The client knows the id; what it has failed with matters more than whether it fits into the store."""
    with suppress(ApiError):
        _keep(events, asked, store)
