"""Answers of Chat Completions: the body of a whole one, and the chunks of a stream."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass, field
from time import time
from typing import Any

from ninfer.events import FinishReason
from ninfer.serve.answer import Answer
from ninfer.serve.calls import (
    Begun,
    CallArguments,
    CallBegan,
    CallEnded,
    Finished,
    Progress,
    Text,
    Timings,
    TokenLogprob,
    Usage,
)
from ninfer.serve.chat.request import ChatRequest
from ninfer.serve.custom import InputText
from ninfer.serve.errors import ApiError, openai_body
from ninfer.serve.sse import sse

_LENGTH = (FinishReason.OUTPUT_LIMIT, FinishReason.CONTEXT_CAPACITY)


def timings_body(timings: Timings) -> dict[str, Any]:
    """The `timings` object that clients of llama.cpp's server read; milliseconds and tokens per second."""
    computed = timings.prompt_tokens - timings.cached_tokens
    later = max(timings.generated_tokens - 1, 0)
    body: dict[str, Any] = {
        "cache_n": timings.cached_tokens,
        "prompt_n": computed,
        "prompt_ms": timings.prefill * 1000,
        "prompt_per_token_ms": _over(timings.prefill * 1000, computed),
        "prompt_per_second": _over(computed, timings.prefill),
        "predicted_n": timings.generated_tokens,
        "predicted_ms": timings.decode * 1000,
        "predicted_per_token_ms": _over(timings.decode * 1000, later),
        "predicted_per_second": _over(later, timings.decode),
    }
    if timings.drafted:
        body |= {"draft_n": timings.drafted, "draft_n_accepted": timings.accepted}
    return body


def usage_body(usages: Iterable[Usage]) -> dict[str, Any]:
    """Token counts; of several answers to one prompt, which counts once."""
    usages = list(usages)
    prompt = usages[0].prompt_tokens
    completion = sum(usage.completion_tokens for usage in usages)
    return {
        "prompt_tokens": prompt,
        "prompt_tokens_details": {"cached_tokens": usages[0].cached_tokens},
        "completion_tokens": completion,
        "completion_tokens_details": {"reasoning_tokens": sum(usage.reasoning_tokens for usage in usages)},
        "total_tokens": prompt + completion,
    }


def logprobs_body(tokens: Iterable[TokenLogprob]) -> dict[str, Any]:
    """The `logprobs` object of a choice."""
    return {
        "content": [
            {
                **_token(token.token_bytes, token.logprob),
                "top_logprobs": [_token(other.token_bytes, other.logprob) for other in token.top],
            }
            for token in tokens
        ],
        "refusal": None,
    }


def finish_reason(finished: Finished, *, legacy: bool) -> str:
    if finished.reason in _LENGTH:
        return "length"
    if finished.calls:
        return "function_call" if legacy else "tool_calls"
    return "stop"


@dataclass
class _Choice:
    """What one answer has so far."""

    content: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    calls: list[dict[str, Any]] = field(default_factory=list)
    arguments: list[str] = field(default_factory=list)
    """Pieces of the call that is being written, without what only closes one that was cut: a client takes
    arguments that aren't JSON for what they are."""
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finished: Finished | None = None


async def whole(answer: Answer, request: ChatRequest, model: str) -> dict[str, Any]:
    """The body of a response that isn't streamed. Raises `ApiError`."""
    choices = [_Choice() for _ in range(request.generation.n)]
    async for index, event in answer.events():
        choice = choices[index]
        match event:
            case Text("content", text, logprobs):
                choice.content.append(text)
                choice.logprobs += logprobs
            case Text("reasoning", text):
                choice.reasoning.append(text)
            case CallArguments(_, piece, cut) if not cut:
                choice.arguments.append(piece)
            case CallEnded():
                choice.calls.append(_whole_call(event, "".join(choice.arguments), request))
                choice.arguments.clear()
            case Finished():
                choice.finished = event
    finished = [choice.finished for choice in choices if choice.finished is not None]
    return {
        "id": _new_id("chatcmpl-"),
        "object": "chat.completion",
        "created": int(time()),
        "model": model,
        "choices": [_choice_body(i, choice, request) for i, choice in enumerate(choices)],
        "usage": usage_body(f.usage for f in finished),
        "timings": timings_body(_merged([f.timings for f in finished])),
    }


def _choice_body(index: int, choice: _Choice, request: ChatRequest) -> dict[str, Any]:
    content = "".join(choice.content)
    message: dict[str, Any] = {
        "role": "assistant",
        "content": None if choice.calls and not content else content,
        "refusal": None,
    }
    if choice.reasoning:
        message["reasoning_content"] = "".join(choice.reasoning)
    if choice.calls and request.use.legacy:
        message["function_call"] = choice.calls[0]["function"]
    elif choice.calls:
        message["tool_calls"] = choice.calls
    wanted = request.generation.logprobs is not None
    assert choice.finished is not None
    return {
        "index": index,
        "message": message,
        "logprobs": logprobs_body(choice.logprobs) if wanted else None,
        "finish_reason": finish_reason(choice.finished, legacy=request.use.legacy),
    }


def _whole_call(call: CallEnded, arguments: str, request: ChatRequest) -> dict[str, Any]:
    if call.name in request.use.custom:
        custom = {"name": call.name, "input": InputText().end(call.arguments)}
        return {"id": _new_id("call_"), "type": "custom", "custom": custom}
    function = {"name": call.name, "arguments": arguments}
    return {"id": _new_id("call_"), "type": "function", "function": function}


class Chunks:
    """The events of a stream. Every chunk has one choice, but the last with the usage, which has none."""

    def __init__(self, answer: Answer, request: ChatRequest, model: str) -> None:
        self._answer, self._request = answer, request
        self._frame: dict[str, Any] = {
            "id": _new_id("chatcmpl-"),
            "object": "chat.completion.chunk",
            "created": int(time()),
            "model": model,
        }
        self._usage = {"usage": None} if request.include_usage else {}
        self._finished: list[Finished] = []
        self._processed = [-1] * request.generation.n
        self._custom: set[tuple[int, int]] = set()

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for index in range(self._request.generation.n):
            yield self._chunk(index, {"role": "assistant", "content": ""})
        try:
            async for index, event in self._answer.events():
                match event:
                    case Text():
                        yield self._text(index, event)
                    case CallArguments() | CallBegan() | CallEnded():
                        if delta := self._call(index, event):
                            yield self._chunk(index, delta)
                    case Begun() | Progress():
                        if self._request.progress and (body := self._progress(index, event)):
                            yield self._chunk(index, {}, prompt_progress=body)
                    case Finished():
                        yield self._finish(index, event)
        except ApiError as error:
            yield sse(None, openai_body(error))
            return
        if self._request.include_usage:
            timings = _merged([f.timings for f in self._finished])
            usage = usage_body(f.usage for f in self._finished)
            body = self._frame | {"choices": [], "usage": usage, "timings": timings_body(timings)}
            yield sse(None, body)
        yield b"data: [DONE]\n\n"

    def _chunk(
        self,
        index: int,
        delta: dict[str, Any],
        finish: str | None = None,
        logprobs: dict[str, Any] | None = None,
        **more: Any,
    ) -> bytes:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish}
        return sse(None, {**self._frame, "choices": [choice], **self._usage, **more})

    def _text(self, index: int, event: Text) -> bytes:
        more = {} if event.timings is None else {"timings": timings_body(event.timings)}
        name = "content" if event.channel == "content" else "reasoning_content"
        logprobs = logprobs_body(event.logprobs) if event.logprobs else None
        return self._chunk(index, {name: event.text}, None, logprobs, **more)

    def _call(self, choice: int, event: CallBegan | CallArguments | CallEnded) -> dict[str, Any] | None:
        """The delta of a call's event. A custom tool's input comes whole, at the call's end."""
        use, number = self._request.use, event.index
        if use.legacy:
            if number:
                return None
            match event:
                case CallBegan(_, name):
                    return {"function_call": {"name": name, "arguments": ""}}
                case CallArguments(_, piece, cut) if not cut:
                    return {"function_call": {"arguments": piece}}
            return None
        call: dict[str, Any] = {"index": number}
        custom = (choice, number) in self._custom
        match event:
            case CallBegan(_, name):
                call["id"] = _new_id("call_")
                if name in use.custom:
                    self._custom.add((choice, number))
                    call |= {"type": "custom", "custom": {"name": name, "input": ""}}
                else:
                    call |= {"type": "function", "function": {"name": name, "arguments": ""}}
            case CallArguments(_, piece, cut) if not custom and not cut:
                call["function"] = {"arguments": piece}
            case CallEnded(_, _, arguments) if custom:
                call["custom"] = {"input": InputText().end(arguments)}
            case _:
                return None
        return {"tool_calls": [call]}

    def _progress(self, index: int, event: Begun | Progress) -> dict[str, Any] | None:
        match event:
            case Begun(total, cached):
                done, seconds = cached, 0.0
            case Progress(total, cached, done, seconds):
                pass
        if done <= self._processed[index]:
            return None
        self._processed[index] = done
        return {"total": total, "cache": cached, "processed": done, "time_ms": seconds * 1000}

    def _finish(self, index: int, event: Finished) -> bytes:
        self._finished.append(event)
        more = {} if self._request.include_usage else {"timings": timings_body(event.timings)}
        return self._chunk(index, {}, finish_reason(event, legacy=self._request.use.legacy), **more)


def _merged(timings: list[Timings]) -> Timings:
    """Those of answers that were made together."""
    first = timings[0]
    if len(timings) == 1:
        return first
    return Timings(
        first.prompt_tokens,
        first.cached_tokens,
        sum(t.generated_tokens for t in timings),
        max(t.prefill for t in timings),
        max(t.decode for t in timings),
        first.ttft,
        max(t.total for t in timings),
        sum(t.drafted for t in timings),
        sum(t.accepted for t in timings),
    )


def _token(token: bytes, logprob: float) -> dict[str, Any]:
    return {"token": token.decode("utf-8", "replace"), "logprob": logprob, "bytes": list(token)}


def _over(value: float, count: float) -> float:
    return value / count if count > 0 else 0.0


def _new_id(prefix: str) -> str:
    return prefix + secrets.token_hex(8)
