"""The body of `POST /v1/messages` (and of count_tokens) as a `GenerationRequest`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ninfer.serve.calls import GenerationRequest, JsonFormat, Protocol
from ninfer.serve.errors import ApiError, invalid
from ninfer.serve.fields import Fields
from ninfer.serve.messages.blocks import system_text
from ninfer.serve.messages.cache import check_cache_marks
from ninfer.serve.messages.conversation import read_conversation
from ninfer.serve.messages.tools import read_choice, read_tools

_MIN_BUDGET = 1024
_MOST_TOKENS = 2**32 - 1
_ANSWER_ROOM = 4096


@dataclass(frozen=True)
class MessagesRequest:
    """What to generate, and whether the client doesn't want to see the thinking."""

    generation: GenerationRequest
    omit_thinking: bool


@dataclass(frozen=True)
class Terms:
    """What the server adds to a body: its default for `max_tokens`, and the length of the text that closes
    thinking."""

    default_max_tokens: int
    closer_tokens: int


def read_request(
    value: Any, terms: Terms, *, client: str | None = None, counting: bool = False
) -> MessagesRequest:
    """Raises `ApiError` 400 that names the field; unknown fields are ignored. `counting` tokens asks nothing
    of the answer."""
    body = Fields(value)
    model = body.string("model", required=True)
    if not model:
        body.refuse("model", "must not be empty; any name will do")
    _refuse_thread(body)
    box = read_tools(body)
    messages, prefilled = read_conversation(system_text(body), body, box, counting=counting)
    choice, parallel = read_choice(body, box)
    check_cache_marks(body)
    max_tokens = _max_tokens(body)
    thinking, budget, omitted = _thinking(body, max_tokens or terms.default_max_tokens, terms.closer_tokens)
    effort, answer_format = _output_config(body)
    if thinking is False and effort != "none":
        effort = None  # in this API it is about more than thinking
    if prefilled:
        if thinking and not counting:
            raise invalid(
                "A final assistant message can't be continued with thinking on; switch it off or end with a "
                "user message.",
                "messages",
                "assistant_prefill_not_supported",
            )
        thinking, budget, effort = False, None, None
    template = body.object("chat_template_kwargs")
    kwargs = {} if template is None else dict(template.members)
    generation = GenerationRequest(
        Protocol.MESSAGES,
        model,
        messages,
        stream=body.boolean("stream") or False,
        tools=box.offered(),
        tool_choice=choice,
        parallel_calls=parallel,
        response_format=None if counting else answer_format,
        max_output=max_tokens,
        temperature=body.number("temperature", 0, 1),
        top_p=body.number("top_p", 0, 1),
        top_k=body.integer("top_k", 0, 20),
        stop=_stops(body),
        stop_reasoning=False,
        thinking=thinking,
        effort=effort,
        thinking_budget=None if counting else budget,
        preserve_thinking=_preserve(body, kwargs),
        template_kwargs=kwargs,
        continue_final=prefilled,
        client=client,
    )
    return MessagesRequest(generation, omitted)


def _refuse_thread(body: Fields) -> None:
    """Conversations are not kept. The details make the SDK's tool runner send whole ones from then on."""
    if body.get("thread") is not None:
        raise ApiError(
            400,
            "This server keeps no conversations; send the whole one without thread.",
            param="thread",
            code="thread_unsupported_request",
            extra={"details": {"error_code": "thread_unsupported_request"}},
        )


def _max_tokens(body: Fields) -> int | None:
    value = body.integer("max_tokens", 0)
    if value == 0:
        body.refuse(
            "max_tokens",
            "is 0, but this server can't only warm its cache; ask for at least 1 token",
            "cache_prewarm_not_supported",
        )
    return None if value is None else min(value, _MOST_TOKENS)


def _thinking(body: Fields, max_tokens: int, closer: int) -> tuple[bool | None, int | None, bool]:
    """Whether to think, for how many tokens at most, and whether to leave the thinking out of the answer."""
    fields = body.object("thinking")
    if fields is None:
        return None, None, False
    # Other words than `summarized` name ways of showing it that we don't have (Claude Code says `updates`).
    omitted = fields.string("display") == "omitted"
    kind = fields.string("type", required=True)
    if kind == "disabled":
        if fields.get("display") is not None:
            fields.refuse("display", "has no meaning without thinking")
        return False, None, False
    if kind in ("adaptive", "between_tools"):
        return True, None, omitted
    if kind != "enabled":
        fields.refuse("type", "is none that this server knows")
    budget = fields.integer("budget_tokens", _MIN_BUDGET)
    if budget is None:
        fields.refuse("budget_tokens", "is missing")
    return True, _within(budget, max_tokens, closer), omitted


def _within(budget: int, max_tokens: int, closer: int) -> int | None:
    """A budget that leaves room for the text that closes thinking and for an answer: clients send budgets up
    to `max_tokens` itself. None: there is no room, so thinking may take it all."""
    room = min(_ANSWER_ROOM, max_tokens // 4) + closer
    return min(budget, max_tokens - room) if room < max_tokens else None


def _output_config(body: Fields) -> tuple[str | None, JsonFormat | None]:
    """The effort, and the form that the answer's text must have."""
    config = body.object("output_config")
    effort = None if config is None else config.string("effort")
    wanted = None if config is None else config.object("format")
    if wanted is None:
        wanted = body.object("output_format")  # where it stood before its release
    if wanted is None:
        return effort, None
    wanted.choice("type", ("json_schema",))
    schema = wanted.object("schema")
    if schema is None:
        wanted.refuse("schema", "is missing; send a JSON schema")
    return effort, JsonFormat(schema.members)


def _stops(body: Fields) -> tuple[str, ...]:
    stops = body.array("stop_sequences") or []
    if not all(isinstance(stop, str) and stop for stop in stops):
        body.refuse("stop_sequences", "must be an array of non-empty strings")
    return tuple(stops)


def _preserve(body: Fields, kwargs: Mapping[str, Any]) -> bool | None:
    """Whether the thinking of earlier questions stays in the prompt. Claude Code asks for it by an edit that
    clears nothing, and with it a new question finds the whole conversation before it in the cache."""
    asked = body.boolean("preserve_thinking")
    if asked is not None or kwargs.get("preserve_thinking") is not None:
        return asked
    management = body.get("context_management")
    edits = management.get("edits") if isinstance(management, Mapping) else None
    for edit in edits if isinstance(edits, list) else ():
        if isinstance(edit, Mapping) and edit.get("type") == "clear_thinking_20251015":
            return True if edit.get("keep") == "all" else None
    return None
