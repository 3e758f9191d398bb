"""Recorded requests to the Messages API."""

import json
from pathlib import Path
from typing import Any

import pytest

from ninfer.serve.messages.request import MessagesRequest, Terms, read_request

DATA = Path(__file__).parents[2] / "data" / "clients"
CLIENTS = ("claude-code", "anthropic-python", "opencode", "aider")
TERMS = Terms(default_max_tokens=8192, closer_tokens=25)


def recorded(client: str) -> list[dict[str, Any]]:
    """A client's requests to /v1/messages and count_tokens, in the order of its file."""
    (file,) = DATA.glob(f"{client}-*.jsonl")
    lines = [json.loads(line) for line in file.read_text("utf-8").splitlines()]
    return [line for line in lines if line["path"].startswith("/v1/messages")]


def recording(client: str, case: str, step: int) -> dict[str, Any]:
    """The body of one of them."""
    (body,) = [line["body"] for line in recorded(client) if (line["case"], line["step"]) == (case, step)]
    return body


RECORDED = [
    pytest.param(line, id=f"{client}-{line['case']}-{line['step']}")
    for client in CLIENTS
    for line in recorded(client)
]


def body(*messages: Any, **members: Any) -> dict[str, Any]:
    """A request; a message that is a string is the user's."""
    said = [{"role": "user", "content": m} if isinstance(m, str) else m for m in messages]
    return {"model": "m", "max_tokens": 100, "messages": said, **members}


def read(*messages: Any, terms: Terms = TERMS, counting: bool = False, **members: Any) -> MessagesRequest:
    return read_request(body(*messages, **members), terms, counting=counting)


def user(*blocks: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(blocks)}


def assistant(*blocks: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": list(blocks)}


def text(words: Any, **members: Any) -> dict[str, Any]:
    return {"type": "text", "text": words, **members}


def use(call: str, name: Any = "Bash", **arguments: Any) -> dict[str, Any]:
    return {"type": "tool_use", "id": call, "name": name, "input": arguments}


def result(call: str, content: Any = "ok", **members: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": call, "content": content, **members}


def tool(name: str = "Bash", **members: Any) -> dict[str, Any]:
    return {"name": name, "description": f"Does {name}.", "input_schema": {"type": "object"}, **members}
