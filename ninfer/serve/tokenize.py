"""POST /tokenize and /detokenize, with the fields of llama.cpp's and vLLM's routes of that name."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from ninfer.errors import NInferError
from ninfer.serve.chat.request import read_request
from ninfer.serve.chat.schema import MESSAGE
from ninfer.serve.errors import invalid
from ninfer.serve.fields import Fields
from ninfer.serve.http import json_response, known_model, read_object
from ninfer.serve.openapi import PLAIN, nullable, operation

if TYPE_CHECKING:
    from ninfer.serve.server import Server

_MOST_CHARACTERS = 16 << 20
_MOST_TOKENS = 1 << 20
_FLAG = nullable({"type": "boolean"})
_TOKENIZE: dict[str, Any] = {
    "type": "object",
    "properties": {
        "content": {"type": "string"},
        "prompt": {"type": "string"},
        "messages": {"type": "array", "minItems": 1, "items": MESSAGE},
        "add_special": _FLAG,
        "add_special_tokens": _FLAG,
        "with_pieces": _FLAG,
        "return_token_strs": _FLAG,
    },
    "anyOf": [{"required": [name]} for name in ("content", "prompt", "messages")],
}
_TOKENS = {
    "type": "object",
    "properties": {
        "tokens": {"type": "array"},
        "count": {"type": "integer"},
        "max_model_len": {"type": "integer"},
    },
    "required": ["tokens", "count", "max_model_len"],
}
_DETOKENIZE: dict[str, Any] = {
    "type": "object",
    "properties": {"tokens": {"type": "array", "items": {"type": "integer", "minimum": 0}}},
    "required": ["tokens"],
}
_PIECES = {
    "type": "object",
    "properties": {"content": {"type": "string"}, "prompt": {"type": "string"}},
    "required": ["content", "prompt"],
}


def router(server: Server) -> APIRouter:
    """The routes for those who count tokens themselves."""
    routes = APIRouter()

    async def tokenize(request: Request) -> Response:
        fields = Fields(await read_object(request, server))
        _check_model(fields, server)
        tokens = await _tokens(fields, server)
        answer: dict[str, Any] = {
            "tokens": tokens,
            "count": len(tokens),
            "max_model_len": server.link.info.max_context,
        }
        if fields.boolean("with_pieces"):
            answer["tokens"] = [{"id": token, "piece": _piece(server, token)} for token in tokens]
        if fields.boolean("return_token_strs"):
            answer["token_strs"] = [server.frontend.decode([t], keep_special=True) for t in tokens]
        return json_response(answer)

    async def detokenize(request: Request) -> Response:
        fields = Fields(await read_object(request, server))
        _check_model(fields, server)
        tokens, known = fields.array("tokens"), server.frontend.public_tokens
        if tokens is None:
            fields.refuse("tokens", "must be an array of token ids")
        if len(tokens) > _MOST_TOKENS:
            fields.refuse("tokens", f"must have at most {_MOST_TOKENS} ids, not {len(tokens)}")
        for index, token in enumerate(tokens):
            if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token < known:
                where = f"tokens[{index}]"
                raise invalid(f"{where} must be a token id between 0 and {known - 1}.", where)
        text = await server.service.in_thread(lambda: server.frontend.decode(tokens, keep_special=True))
        return json_response({"content": text, "prompt": text})

    routes.add_api_route(
        "/tokenize",
        tokenize,
        methods=["POST"],
        **operation(
            "The tokens of a text or a conversation",
            body=_with_model(_TOKENIZE, server),
            ok=_TOKENS,
            errors=(*PLAIN, 404),
        ),
    )
    routes.add_api_route(
        "/detokenize",
        detokenize,
        methods=["POST"],
        **operation(
            "The text of tokens", body=_with_model(_DETOKENIZE, server), ok=_PIECES, errors=(*PLAIN, 404)
        ),
    )
    return routes


def _with_model(schema: dict[str, Any], server: Server) -> dict[str, Any]:
    model = nullable({"enum": sorted(server.names)})
    return {**schema, "properties": {"model": model, **schema["properties"]}}


def _check_model(fields: Fields, server: Server) -> None:
    if fields.get("model") is not None:
        known_model(fields.get("model"), server)


async def _tokens(fields: Fields, server: Server) -> list[int]:
    """Of `messages` as a chat renders them, or of a text, which has no control tokens."""
    if fields.get("messages") is not None:
        request = read_request(fields.members, server.model_id)
        return list((await server.service.render(request.generation)).tokens)
    text = fields.string("content")
    if text is None:
        text = fields.string("prompt")
    if text is None:
        raise invalid("The request must have content, prompt or messages.", "content")
    if len(text) > _MOST_CHARACTERS:
        raise invalid(
            f"The text must have at most {_MOST_CHARACTERS} characters, not {len(text)}.", "content"
        )
    plain = text
    try:
        tokens = await server.service.in_thread(lambda: server.frontend.encode(plain))
    except NInferError as error:
        raise invalid(str(error), "content") from error
    first = server.frontend.bos_token_id
    special = fields.boolean("add_special") or fields.boolean("add_special_tokens")
    return [first, *tokens] if special and first is not None else tokens


def _piece(server: Server, token: int) -> str | list[int]:
    """A token's text, or its bytes if they are none by themselves."""
    piece = server.frontend.token_bytes(token)
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return list(piece)
