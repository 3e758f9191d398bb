"""The body of `POST /v1/messages` (and of count_tokens) as a `GenerationRequest`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ninfer.serve.calls import GenerationRequest, JsonFormat, Protocol
from ninfer.serve.errors import ApiError, invalid
from ninfer.serve.messages.blocks import system_text
from ninfer.serve.messages.cache import check_cache_marks
from ninfer.serve.messages.conversation import fold_system, read_conversation
from ninfer.serve.messages.fields import (
    Json,
    as_list,
    as_object,
    as_text,
    flag,
    kind,
    number,
    optional_text,
    whole,
)
from ninfer.serve.messages.tools import read_choice, read_tools

_MIN_BUDGET = 1024
_MOST_TOKENS = 2**32 - 1
_ANSWER_ROOM = 4096


@dataclass(frozen=True)
class MessagesRequest:
    """What to generate, and whether the client wants to see the thinking."""

    generation: GenerationRequest
    omit_thinking: bool


@dataclass(frozen=True)
class Terms:
    """What the server adds to a body: its default for `max_tokens`, the length of the text that closes
    thinking, and whether its chat template takes system messages anywhere."""

    default_max_tokens: int
    closer_tokens: int
    system_anywhere: bool


def read_request(
    body: Any, terms: Terms, *, client: str | None = None, counting: bool = False
) -> MessagesRequest:
    """Raises `ApiError` for a body that breaks a rule; unknown members are ignored. `counting` tokens needs
    no `max_tokens` and asks nothing of the answer."""
    body = as_object(body, "The body")
    model = as_text(body.get("model"), "model")
    if not model:
        raise invalid("model is empty; send any name.", "model")
    if body.get("thread") is not None:
        raise ApiError(
            400,
            "This server keeps no conversations; send the whole one without thread.",
            param="thread",
            code="thread_unsupported_request",
            extra={"details": {"error_code": "thread_unsupported_request"}},
        )
    if "messages" not in body:
        raise invalid("messages is missing; send at least one message.", "messages")
    box = read_tools(body.get("tools"))
    messages, prefilled = read_conversation(system_text(body.get("system")), body["messages"], box)
    choice, parallel = read_choice(body.get("tool_choice"), box)
    check_cache_marks(body)
    max_tokens = _max_tokens(body)
    thinking, budget, omitted = _thinking(body, max_tokens or terms.default_max_tokens, terms.closer_tokens)
    effort, answer_format = _output_config(body)
    if thinking is False and effort != "none":
        effort = None  # here effort is about more than thinking
    if prefilled:
        if thinking and not counting:
            raise invalid(
                "A final assistant message can't be continued with thinking on; switch it off or end with a "
                "user message.",
                "messages",
                "assistant_prefill_not_supported",
            )
        thinking, budget, effort = False, None, None
    template = as_object(body.get("chat_template_kwargs") or {}, "chat_template_kwargs")
    generation = GenerationRequest(
        protocol=Protocol.MESSAGES,
        model=model,
        messages=messages if terms.system_anywhere else fold_system(messages),
        stream=bool(flag(body, "stream")),
        tools=box.offered(),
        tool_choice=choice,
        parallel_calls=parallel,
        response_format=None if counting else answer_format,
        max_output=max_tokens,
        temperature=number(body, "temperature", 0, 1),
        top_p=number(body, "top_p", 0, 1),
        top_k=whole(body, "top_k", 0, 20),
        stop=_stops(body.get("stop_sequences")),
        stop_reasoning=False,
        thinking=thinking,
        effort=effort,
        thinking_budget=None if counting else budget,
        preserve_thinking=_preserve(body, template),
        template_kwargs=template,
        continue_final=prefilled,
        client=client,
    )
    return MessagesRequest(generation, omitted)


def _max_tokens(body: Json) -> int | None:
    value = whole(body, "max_tokens", 0)
    if value == 0:
        raise invalid(
            "max_tokens is 0, but this server can't only warm its cache; ask for at least 1 token.",
            "max_tokens",
            "cache_prewarm_not_supported",
        )
    return None if value is None else min(value, _MOST_TOKENS)


def _thinking(body: Json, max_tokens: int, closer: int) -> tuple[bool | None, int | None, bool]:
    """Whether to think, for how many tokens at most, and whether to leave the thinking out of the answer."""
    value = body.get("thinking")
    if value is None:
        return None, None, False
    value = as_object(value, "thinking")
    display = optional_text(value, "display", "thinking.")
    if display not in (None, "summarized", "omitted"):
        raise invalid("thinking.display must be summarized or omitted.", "thinking.display")
    match value.get("type"):
        case "disabled":
            if display is not None:
                raise invalid("thinking.display has no meaning without thinking.", "thinking.display")
            return False, None, False
        case "adaptive" | "between_tools":
            return True, None, display == "omitted"
        case "enabled":
            budget = whole(value, "budget_tokens", _MIN_BUDGET, where="thinking.")
            if budget is None:
                raise invalid("thinking.budget_tokens is missing.", "thinking.budget_tokens")
            return True, _within(budget, max_tokens, closer), display == "omitted"
        case other:
            said = repr(other[:40]) if isinstance(other, str) else kind(other)
            raise invalid(f"thinking.type has no such value: {said}.", "thinking.type")


def _within(budget: int, max_tokens: int, closer: int) -> int | None:
    """A budget that leaves room for the text that closes thinking and for an answer: clients send budgets up
    to `max_tokens` itself. None: there is no room, so thinking may take it all."""
    room = min(_ANSWER_ROOM, max_tokens // 4) + closer
    return min(budget, max_tokens - room) if room < max_tokens else None


def _output_config(body: Json) -> tuple[str | None, JsonFormat | None]:
    """The effort, and the form that the answer's text must have."""
    config = as_object(body.get("output_config") or {}, "output_config")
    effort = optional_text(config, "effort", "output_config.")
    wanted = config.get("format")
    if wanted is None:
        wanted = body.get("output_format")  # where it stood before it was released
    if wanted is None:
        return effort, None
    wanted = as_object(wanted, "output_config.format")
    if wanted.get("type") != "json_schema":
        raise invalid("output_config.format.type must be json_schema.", "output_config.format.type")
    return effort, JsonFormat(as_object(wanted.get("schema"), "output_config.format.schema"))


def _stops(value: Any) -> tuple[str, ...]:
    stops = [] if value is None else as_list(value, "stop_sequences")
    for index, stop in enumerate(stops):
        if not as_text(stop, f"stop_sequences[{index}]"):
            raise invalid("stop_sequences has an empty string, which would end any answer.", "stop_sequences")
    return tuple(stops)


def _preserve(body: Json, template: Mapping[str, Any]) -> bool | None:
    """Whether the thinking of earlier questions stays in the prompt. Claude Code asks for it by an edit that
    clears nothing, and with it a new question finds the whole conversation before it in the cache."""
    asked = flag(body, "preserve_thinking")
    if asked is not None or template.get("preserve_thinking") is not None:
        return asked
    management = body.get("context_management")
    edits = management.get("edits") if isinstance(management, dict) else None
    for edit in edits if isinstance(edits, list) else ():
        if (
            isinstance(edit, dict)
            and edit.get("type") == "clear_thinking_20251015"
            and edit.get("keep") == "all"
        ):
            return True
    return None
