"""The response object and the items of its output, as the API shows them."""

from __future__ import annotations

import time
from collections.abc import Iterable

from ninfer.events import FinishReason
from ninfer.serve.calls import Alternative, TokenLogprob, Usage
from ninfer.serve.errors import ApiError
from ninfer.serve.responses.items import Json, new_id
from ninfer.serve.responses.request import Create
from ninfer.serve.responses.tools import Declared
from ninfer.serve.sealing import sealed

_LIMITS = (FinishReason.OUTPUT_LIMIT, FinishReason.CONTEXT_CAPACITY)


def begun(create: Create, temperature: float, top_p: float) -> Json:
    """The response object of an answer that begins; `temperature` and `top_p` are the resolved ones."""
    echo = create.echo
    return {
        "id": new_id("resp_"),
        "object": "response",
        "created_at": int(time.time()),
        "completed_at": None,
        "status": "in_progress",
        "background": False,
        "error": None,
        "incomplete_details": None,
        "instructions": echo["instructions"],
        "max_output_tokens": echo["max_output_tokens"],
        "max_tool_calls": echo["max_tool_calls"],
        "metadata": echo["metadata"],
        "model": echo["model"],
        "output": [],
        "parallel_tool_calls": echo["parallel_tool_calls"],
        "previous_response_id": echo["previous_response_id"],
        "reasoning": echo["reasoning"],
        "service_tier": echo["service_tier"],
        "store": echo["store"],
        "temperature": temperature,
        "text": echo["text"],
        "tool_choice": echo["tool_choice"],
        "tools": echo["tools"],
        "top_logprobs": echo["top_logprobs"],
        "top_p": top_p,
        "truncation": echo["truncation"],
        "usage": None,
    }


def finished(response: Json, output: list[Json], reason: FinishReason, usage: Usage) -> Json:
    """The response object of an answer that ended by itself or at a limit."""
    ended: Json = {**response, "output": output, "usage": usage_object(usage)}
    if reason in _LIMITS:
        ended |= {"status": "incomplete", "incomplete_details": {"reason": "max_output_tokens"}}
    elif reason is FinishReason.CANCELLED:
        ended |= {"status": "cancelled"}
    else:
        ended |= {"status": "completed", "completed_at": int(time.time())}
    return ended


def failed(response: Json, output: list[Json], error: ApiError) -> Json:
    """The response object of an answer that broke off."""
    code = error.code if error.code not in (None, "internal_error") else "server_error"
    return {
        **response,
        "status": "failed",
        "output": output,
        "error": {"code": code, "message": error.message},
    }


def usage_object(usage: Usage) -> Json:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }


def reasoning_item(name: str, status: str, text: str, *, encrypted: bool) -> Json:
    item: Json = {
        "id": name,
        "type": "reasoning",
        "status": status,
        "summary": [],
        "content": [reasoning_part(text)] if text else [],
    }
    if encrypted and text:
        item["encrypted_content"] = sealed(text)
    return item


def reasoning_part(text: str) -> Json:
    return {"type": "reasoning_text", "text": text}


def message_item(name: str, status: str, parts: list[Json]) -> Json:
    return {"id": name, "type": "message", "status": status, "role": "assistant", "content": parts}


def text_part(text: str, logprobs: list[Json] | None) -> Json:
    part: Json = {"type": "output_text", "annotations": [], "text": text}
    if logprobs is not None:
        part["logprobs"] = logprobs
    return part


def call_item(name: str, status: str, call_id: str, tool: Declared, value: object) -> Json:
    """A call's item; `value` is its arguments (JSON text), a custom tool's input, or a search's arguments."""
    if tool.kind == "search":
        return {
            "id": name,
            "type": "tool_search_call",
            "status": status,
            "call_id": call_id,
            "execution": "client",
            "arguments": value,
        }
    item: Json = {
        "id": name,
        "type": "custom_tool_call" if tool.kind == "custom" else "function_call",
        "status": status,
        "call_id": call_id,
        "name": tool.name,
    }
    if tool.namespace is not None:
        item["namespace"] = tool.namespace
    item["input" if tool.kind == "custom" else "arguments"] = value
    return item


def logprob_objects(logprobs: Iterable[TokenLogprob]) -> list[Json]:
    return [
        {**_logprob(entry), "top_logprobs": [_logprob(other) for other in entry.top]} for entry in logprobs
    ]


def _logprob(entry: TokenLogprob | Alternative) -> Json:
    return {
        "token": entry.token_bytes.decode("utf-8", "replace"),
        "bytes": list(entry.token_bytes),
        "logprob": entry.logprob,
    }
