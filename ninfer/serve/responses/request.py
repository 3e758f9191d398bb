"""The body of a create or count request, checked and turned into a `GenerationRequest`."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import orjson

from ninfer.frontend.options import EFFORTS
from ninfer.serve.calls import GenerationRequest, JsonFormat, Protocol
from ninfer.serve.errors import ApiError, invalid
from ninfer.serve.responses.conversation import messages_of
from ninfer.serve.responses.fields import (
    Json,
    read_choice,
    read_flag,
    read_list,
    read_name,
    read_number,
    read_object,
    read_text,
    read_whole,
    refuse_unknown,
    shown,
)
from ninfer.serve.responses.items import normalize
from ninfer.serve.responses.store import Record, Store
from ninfer.serve.responses.tools import Toolbox

_COMMON = (
    "chat_template_kwargs",
    "conversation",
    "input",
    "instructions",
    "model",
    "parallel_tool_calls",
    "preserve_thinking",
    "previous_response_id",
    "reasoning",
    "text",
    "tool_choice",
    "tools",
    "truncation",
)
CREATE_FIELDS = frozenset(
    (
        *_COMMON,
        "background",
        "client_metadata",
        "context_management",
        "include",
        "max_output_tokens",
        "max_tool_calls",
        "metadata",
        "moderation",
        "prompt",
        "prompt_cache_key",
        "prompt_cache_options",
        "prompt_cache_retention",
        "safety_identifier",
        "service_tier",
        "store",
        "stream",
        "stream_options",
        "temperature",
        "top_logprobs",
        "top_p",
        "user",
    )
)
COUNT_FIELDS = frozenset((*_COMMON, "personality"))

ENCRYPTED = "reasoning.encrypted_content"
LOGPROBS = "message.output_text.logprobs"
# Includes for tools that OpenAI runs are sent whether or not such a tool was used: nothing to add then.
_INCLUDES = (
    ENCRYPTED,
    LOGPROBS,
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
)
_TIERS = ("auto", "default", "flex", "scale", "priority", "fast", "ultrafast")
_U32 = 2**32 - 1
# orjson writes at most 254 levels; what a client sends stands a few levels deep in what we answer and store.
_MARGIN = 8


@dataclass(frozen=True)
class Create:
    """A request for a response: what the engine is asked, and what the response object says of it.

    `items` are those of `input`, `history` all that precede the answer, those included. `echo` holds the
    members that the response object repeats. `encrypted`: reasoning is given back in a form to be returned.
    `shrink`: the oldest turns may be left out if the prompt is too long (`truncation` auto).
    """

    generation: GenerationRequest
    items: tuple[Json, ...]
    history: tuple[Json, ...]
    toolbox: Toolbox
    instructions: str | None = None
    store: bool = False
    encrypted: bool = False
    shrink: bool = False
    echo: Json = field(default_factory=dict)

    def shortened(self, history: tuple[Json, ...]) -> Create:
        """The same with another history in the prompt."""
        messages = messages_of(history, self.toolbox, self.instructions)
        return replace(self, generation=replace(self.generation, messages=messages))


def read_create(body: Json, store: Store, client: str | None = None) -> Create:
    """Check a create request of the client of that label. Raises ApiError."""
    _check_body(body, CREATE_FIELDS)
    _refuse_platform(body)
    create = _read_common(body, store)
    include = _read_include(body)
    top = read_whole(body.get("top_logprobs"), "top_logprobs", 0, 20)
    _read_hints(body)
    echo = {
        **create.echo,
        "background": False,
        "max_output_tokens": read_whole(body.get("max_output_tokens"), "max_output_tokens", 0, _U32),
        "max_tool_calls": read_whole(body.get("max_tool_calls"), "max_tool_calls", 0, _U32),
        "metadata": _read_metadata(body.get("metadata")),
        "service_tier": "default",
        "store": read_flag(body.get("store"), "store", True),
        "top_logprobs": top or 0,
    }
    read_choice(body.get("service_tier"), "service_tier", _TIERS, "service_tier_not_supported")
    stream_options = read_object(body.get("stream_options"), "stream_options") or {}
    refuse_unknown(stream_options, ("include_obfuscation", "include_usage"), "stream_options.")
    for name, value in stream_options.items():
        read_flag(value, f"stream_options.{name}")
    generation = replace(
        create.generation,
        stream=read_flag(body.get("stream"), "stream"),
        max_output=echo["max_output_tokens"],
        temperature=read_number(body.get("temperature"), "temperature", 0, 2),
        top_p=read_number(body.get("top_p"), "top_p", 0, 1),
        logprobs=top or 0 if top or LOGPROBS in include else None,
        client=client,
    )
    return replace(
        create, generation=generation, store=echo["store"], encrypted=ENCRYPTED in include, echo=echo
    )


def read_count(body: Json, store: Store) -> Create:
    """Check a request to count the tokens of an input. Raises ApiError."""
    _check_body(body, COUNT_FIELDS)
    if body.get("personality") is not None:
        raise invalid("personality is not supported.", "personality", "personality_not_supported")
    return _read_common(body, store)


def _check_body(body: Json, known: frozenset[str]) -> None:
    refuse_unknown(body, known)
    nested: Any = body
    for _ in range(_MARGIN):
        nested = [nested]
    try:
        orjson.dumps(nested)
    except orjson.JSONEncodeError as error:
        raise invalid(f"The body can't be stored as JSON, it is nested too deeply: {error}.") from error


def _read_common(body: Json, store: Store) -> Create:
    if body.get("conversation") is not None:
        raise invalid(
            "conversation is not supported; use previous_response_id.",
            "conversation",
            "conversations_not_supported",
        )
    model = read_name(body.get("model"), "model")
    parent = _read_parent(body.get("previous_response_id"), store)
    items = tuple(normalize(body.get("input"), store.item))
    history = (*parent.history, *items) if parent else items
    _refuse_twins(history)
    instructions = read_text(body.get("instructions"), "instructions")
    toolbox = Toolbox(body.get("tools"))
    messages = messages_of(history, toolbox, instructions)
    text = read_object(body.get("text"), "text") or {}
    parallel = read_flag(body.get("parallel_tool_calls"), "parallel_tool_calls", True)
    truncation = read_choice(
        body.get("truncation"), "truncation", ("auto", "disabled"), "truncation_not_supported"
    )
    effort, context = _read_reasoning(body)
    kwargs = read_object(body.get("chat_template_kwargs"), "chat_template_kwargs") or {}
    inherited = parent.preserve_thinking if parent else None
    stated = (_read_preserve(body, kwargs), context, inherited)
    generation = GenerationRequest(
        protocol=Protocol.RESPONSES,
        model=model,
        messages=messages,
        tools=toolbox.tools,
        tool_choice=toolbox.choice(body.get("tool_choice")),
        parallel_calls=parallel,
        response_format=_read_format(text),
        effort=effort,
        preserve_thinking=next((flag for flag in stated if flag is not None), None),
        template_kwargs={name: value for name, value in kwargs.items() if name != "preserve_thinking"},
    )
    choice = body.get("tool_choice")
    echo = {
        "instructions": instructions,
        "model": model,
        "parallel_tool_calls": parallel,
        "previous_response_id": body.get("previous_response_id"),
        "reasoning": {"effort": (body.get("reasoning") or {}).get("effort"), "summary": None},
        "text": {**text, "format": text.get("format") or {"type": "text"}},
        "tool_choice": "auto" if choice is None else choice,
        "tools": body.get("tools") or [],
        "truncation": truncation or "disabled",
    }
    return Create(generation, items, history, toolbox, instructions, shrink=truncation == "auto", echo=echo)


def _read_parent(raw: Any, store: Store) -> Record | None:
    parent = read_text(raw, "previous_response_id")
    return None if parent is None else store.get(parent, "previous_response_id")


def _refuse_twins(history: tuple[Json, ...]) -> None:
    seen: set[str] = set()
    for item in history:
        if item["id"] in seen:
            raise invalid(
                f"The item {item['id']!r:.80} is in input and in the history of previous_response_id.",
                "input",
            )
        seen.add(item["id"])


def _refuse_platform(body: Json) -> None:
    """What needs OpenAI's platform behind it."""
    if read_flag(body.get("background"), "background"):
        raise invalid("background is not supported; use stream.", "background", "background_not_supported")
    for name, code in (
        ("prompt", "prompt_templates_not_supported"),
        ("context_management", "context_management_not_supported"),
        ("moderation", "moderation_not_supported"),
    ):
        if body.get(name) not in (None, [], {}):
            raise invalid(f"{name} is not supported.", name, code)


def _read_include(body: Json) -> list[str]:
    include = read_list(body.get("include"), "include")
    for name in include:
        if name not in _INCLUDES:
            raise invalid(f"include can't be {shown(name)}.", "include", "include_not_supported")
    return include


def _read_metadata(raw: Any) -> Json:
    metadata = read_object(raw, "metadata") or {}
    if len(metadata) > 16:
        raise invalid(f"metadata has {len(metadata)} pairs; at most 16 are allowed.", "metadata")
    for name, value in metadata.items():
        if len(name) > 64:
            raise invalid(
                f"A key of metadata has {len(name)} characters; at most 64 are allowed.", "metadata"
            )
        if read_text(value, f"metadata.{name}", most=512) is None:
            raise invalid(f"metadata.{name} must be a string, not null.", "metadata")
    return metadata


def _read_hints(body: Json) -> None:
    """Hints that are checked and have no effect: the prefix cache needs none."""
    read_object(body.get("client_metadata"), "client_metadata")
    read_text(body.get("prompt_cache_key"), "prompt_cache_key", most=64)
    read_text(body.get("safety_identifier"), "safety_identifier", most=128)
    read_text(body.get("user"), "user")
    retention = ("in_memory", "in-memory", "24h")
    read_choice(body.get("prompt_cache_retention"), "prompt_cache_retention", retention)
    options = read_object(body.get("prompt_cache_options"), "prompt_cache_options") or {}
    read_choice(options.get("mode"), "prompt_cache_options.mode", ("implicit", "explicit"))
    read_text(options.get("ttl"), "prompt_cache_options.ttl")


def _read_reasoning(body: Json) -> tuple[str | None, bool | None]:
    """The effort, and whether reasoning of earlier turns stays in the prompt."""
    reasoning = read_object(body.get("reasoning"), "reasoning") or {}
    refuse_unknown(reasoning, ("effort", "summary", "generate_summary", "context", "mode"), "reasoning.")
    allowed = (*EFFORTS, "adaptive", "default", "auto")
    effort = read_choice(reasoning.get("effort"), "reasoning.effort", allowed)
    for name in ("summary", "generate_summary", "mode"):
        read_text(reasoning.get(name), f"reasoning.{name}")
    contexts = ("auto", "current_turn", "all_turns")
    context = read_choice(
        reasoning.get("context"), "reasoning.context", contexts, "reasoning_option_not_supported"
    )
    keep = {"current_turn": False, "all_turns": True}.get(context or "")
    return None if effort in ("default", "auto") else effort, keep


def _read_preserve(body: Json, kwargs: Json) -> bool | None:
    """`preserve_thinking`, as a field or a template argument; two that differ are refused."""
    flags = set()
    for prefix, values in (("", body), ("chat_template_kwargs.", kwargs)):
        if values.get("preserve_thinking") is not None:
            flags.add(read_flag(values["preserve_thinking"], f"{prefix}preserve_thinking"))
    if len(flags) > 1:
        raise invalid(
            "preserve_thinking and chat_template_kwargs.preserve_thinking differ; send one of them.",
            "preserve_thinking",
            "conflicting_template_option",
        )
    return flags.pop() if flags else None


def _read_format(text: Json) -> JsonFormat | None:
    refuse_unknown(text, ("format", "verbosity"), "text.")
    read_choice(text.get("verbosity"), "text.verbosity", ("low", "medium", "high"))
    form = read_object(text.get("format"), "text.format") or {"type": "text"}
    kind = form.get("type")
    if kind == "text":
        return None
    if kind == "json_object":
        return JsonFormat()
    if kind != "json_schema":
        raise ApiError(
            400,
            f"text.format.type must be text, json_object or json_schema, not {shown(kind)}.",
            param="text.format.type",
            code="structured_outputs_not_supported",
        )
    read_name(form.get("name"), "text.format.name")
    read_flag(form.get("strict"), "text.format.strict")
    schema = form.get("schema")
    if not isinstance(schema, dict):
        raise invalid(f"text.format.schema must be an object, not {shown(schema)}.", "text.format.schema")
    return JsonFormat(schema)
