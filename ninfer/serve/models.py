"""GET /health, GET /v1/models and /v1/models/{id}, in OpenAI's form and in Anthropic's."""

from __future__ import annotations

from datetime import UTC, datetime
from time import time
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from ninfer.serve.errors import ApiError
from ninfer.serve.gateway import is_anthropic
from ninfer.serve.http import json_response, known_model
from ninfer.serve.openapi import operation, path_parameter

if TYPE_CHECKING:
    from ninfer.serve.server import Server

_HEALTH = {"type": "object", "properties": {"status": {"type": "string"}}, "required": ["status"]}


def router(server: Server) -> APIRouter:
    """The routes by which clients see whether and what they can ask."""
    routes = APIRouter()
    created = int(time())

    async def health(request: Request) -> Response:
        # A full queue is no illness.
        try:
            server.service.check()
        except ApiError as error:
            return json_response({"status": "unavailable"}, error.status, error.headers)
        return json_response({"status": "ok"})

    async def models(request: Request) -> Response:
        names = [server.model_id, *sorted(server.names - {server.model_id})]
        if is_anthropic(request.scope):
            data = [_anthropic(server, name, created) for name in names]
            page = {"has_more": False, "first_id": names[0], "last_id": names[-1]}
            return json_response({"data": data, **page})
        return json_response({"object": "list", "data": [_openai(server, n, created) for n in names]})

    async def model(request: Request) -> Response:
        name = request.path_params["model_id"]
        known_model(name, server)
        if is_anthropic(request.scope):
            return json_response(_anthropic(server, name, created))
        return json_response(_openai(server, name, created))

    described = operation("Can requests be served?", ok=_HEALTH, errors=())
    described["responses"][503] = {
        "description": "Loading, failed or shutting down",
        "content": {"application/json": {"schema": _HEALTH}},
    }
    routes.add_api_route("/health", health, methods=["GET"], **described)
    routes.add_api_route("/health", health, methods=["HEAD"], include_in_schema=False)
    routes.add_api_route("/v1/models", models, methods=["GET"], **operation("The models of this server"))
    about_one = operation(
        "One of the models", errors=(401, 404), parameters=[path_parameter("model_id", sorted(server.names))]
    )
    routes.add_api_route("/v1/models/{model_id:path}", model, methods=["GET"], **about_one)
    return routes


def _openai(server: Server, name: str, created: int) -> dict[str, Any]:
    model = {"id": name, "object": "model", "created": created, "owned_by": "ninfer"}
    return {**model, "max_model_len": server.link.info.max_context}


def _anthropic(server: Server, name: str, created: int) -> dict[str, Any]:
    at = datetime.fromtimestamp(created, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    model = {"type": "model", "id": name, "display_name": name, "created_at": at, "lifecycle": "active"}
    context = server.link.info.max_context
    return {**model, "max_input_tokens": context, "max_tokens": context}
