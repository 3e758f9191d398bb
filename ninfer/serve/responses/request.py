"""The body of a create or count request, checked and turned into a `GenerationRequest`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import orjson

from ninfer.frontend.options import EFFORTS
from ninfer.serve.calls import GenerationRequest, JsonFormat, Protocol
from ninfer.serve.errors import invalid
from ninfer.serve.fields import Fields, spelled
from ninfer.serve.responses.conversation import messages_of
from ninfer.serve.responses.items import Json, normalize
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


def read_create(members: Json, store: Store, client: str | None = None) -> Create:
    """Check a create request of the client of that label. Raises ApiError."""
    body = _read_body(members, CREATE_FIELDS)
    _refuse_platform(body)
    create = _read_common(body, store)
    include = _read_include(body)
    top = body.integer("top_logprobs", 0, 20)
    _read_hints(body)
    echo = {
        **create.echo,
        "background": False,
        "max_output_tokens": body.integer("max_output_tokens", 0, _U32),
        "max_tool_calls": body.integer("max_tool_calls", 0, _U32),
        "metadata": _read_metadata(body),
        "service_tier": "default",
        "store": body.boolean("store") is not False,
        "top_logprobs": top or 0,
    }
    generation = replace(
        create.generation,
        stream=body.boolean("stream") or False,
        max_output=echo["max_output_tokens"],
        temperature=body.number("temperature", 0, 2),
        top_p=body.number("top_p", 0, 1),
        logprobs=top or 0 if top or LOGPROBS in include else None,
        client=client,
    )
    return replace(
        create, generation=generation, store=echo["store"], encrypted=ENCRYPTED in include, echo=echo
    )


def read_count(members: Json, store: Store) -> Create:
    """Check a request to count the tokens of an input. Raises ApiError."""
    body = _read_body(members, COUNT_FIELDS)
    if body.get("personality") is not None:
        body.refuse("personality", "is not supported", "personality_not_supported")
    return _read_common(body, store)


def _read_body(members: Json, known: frozenset[str]) -> Fields:
    body = Fields(members)
    _refuse_unknown(body, known)
    nested: Any = members
    for _ in range(_MARGIN):
        nested = [nested]
    try:
        orjson.dumps(nested)
    except orjson.JSONEncodeError as error:
        raise invalid(f"The body can't be stored as JSON, it is nested too deeply: {error}.") from error
    return body


def _refuse_unknown(fields: Fields, known: Iterable[str]) -> None:
    for name in fields.members:
        if name not in known:
            raise invalid(
                f"Unknown parameter: {fields.at(name)[:80]!r}.", fields.at(name)[:80], "unknown_parameter"
            )


def _read_common(body: Fields, store: Store) -> Create:
    if body.get("conversation") is not None:
        body.refuse(
            "conversation", "is not supported; use previous_response_id", "conversations_not_supported"
        )
    model = body.string("model", required=True) or body.refuse("model", "must not be empty")
    parent = _read_parent(body, store)
    items = tuple(normalize(body.get("input"), store.item))
    history = (*parent.history, *items) if parent else items
    _refuse_twins(history)
    instructions = body.string("instructions")
    toolbox = Toolbox(body.get("tools"))
    messages = messages_of(history, toolbox, instructions)
    text = body.object("text") or Fields({}, "text")
    parallel = body.boolean("parallel_tool_calls") is not False
    truncation = _choice(body, "truncation", ("auto", "disabled"), "truncation_not_supported")
    reasoning = body.object("reasoning") or Fields({}, "reasoning")
    effort, context = _read_reasoning(reasoning)
    kwargs = body.object("chat_template_kwargs") or Fields({}, "chat_template_kwargs")
    inherited = parent.preserve_thinking if parent else None
    stated = (_read_preserve(body, kwargs), context, inherited)
    generation = GenerationRequest(
        protocol=Protocol.RESPONSES,
        model=model,
        messages=messages,
        tools=toolbox.tools,
        tool_choice=toolbox.choice(body),
        parallel_calls=parallel,
        response_format=_read_format(text),
        effort=effort,
        preserve_thinking=next((flag for flag in stated if flag is not None), None),
        template_kwargs={
            name: value for name, value in kwargs.members.items() if name != "preserve_thinking"
        },
    )
    choice = body.get("tool_choice")
    echo = {
        "instructions": instructions,
        "model": model,
        "parallel_tool_calls": parallel,
        "previous_response_id": body.get("previous_response_id"),
        "reasoning": {"effort": reasoning.get("effort"), "summary": None},
        "text": {**text.members, "format": text.get("format") or {"type": "text"}},
        "tool_choice": "auto" if choice is None else choice,
        "tools": body.get("tools") or [],
        "truncation": truncation or "disabled",
    }
    return Create(generation, items, history, toolbox, instructions, shrink=truncation == "auto", echo=echo)


def _choice(fields: Fields, name: str, choices: tuple[str, ...], code: str) -> str | None:
    """One of some words, refused with a code of its own."""
    value = fields.string(name)
    if value is not None and value not in choices:
        fields.refuse(name, f"must be one of {', '.join(choices)}, not {spelled(value)}", code)
    return value


def _read_parent(body: Fields, store: Store) -> Record | None:
    parent = body.string("previous_response_id")
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


def _refuse_platform(body: Fields) -> None:
    """What needs OpenAI's platform behind it."""
    if body.boolean("background"):
        body.refuse("background", "is not supported; use stream", "background_not_supported")
    for name, code in (
        ("prompt", "prompt_templates_not_supported"),
        ("context_management", "context_management_not_supported"),
        ("moderation", "moderation_not_supported"),
    ):
        if body.get(name) not in (None, [], {}):
            body.refuse(name, "is not supported", code)


def _read_include(body: Fields) -> list[Any]:
    include = body.array("include") or []
    for name in include:
        if name not in _INCLUDES:
            body.refuse("include", f"can't be {spelled(name)}", "include_not_supported")
    return include


def _read_metadata(body: Fields) -> Json:
    metadata = body.object("metadata") or Fields({})
    if len(metadata.members) > 16:
        body.refuse("metadata", f"has {len(metadata.members)} pairs; at most 16 are allowed")
    for name in metadata.members:
        if len(name) > 64:
            body.refuse("metadata", f"has a key of {len(name)} characters; at most 64 are allowed")
        metadata.string(name, most=512, required=True)
    return dict(metadata.members)


def _read_hints(body: Fields) -> None:
    """What is checked and has no effect: the prefix cache needs no hints, and there is one service tier."""
    body.object("client_metadata")
    body.string("prompt_cache_key", most=64)
    body.string("safety_identifier", most=128)
    body.string("user")
    body.choice("prompt_cache_retention", ("in_memory", "in-memory", "24h"))
    options = body.object("prompt_cache_options") or Fields({})
    options.choice("mode", ("implicit", "explicit"))
    options.string("ttl")
    _choice(body, "service_tier", _TIERS, "service_tier_not_supported")
    options = body.object("stream_options") or Fields({})
    _refuse_unknown(options, ("include_obfuscation", "include_usage"))
    for name in options.members:
        options.boolean(name)


def _read_reasoning(reasoning: Fields) -> tuple[str | None, bool | None]:
    """The effort, and whether reasoning of earlier turns stays in the prompt."""
    _refuse_unknown(reasoning, ("effort", "summary", "generate_summary", "context", "mode"))
    effort = reasoning.choice("effort", (*EFFORTS, "adaptive", "default", "auto"))
    for name in ("summary", "generate_summary", "mode"):
        reasoning.string(name)
    contexts = ("auto", "current_turn", "all_turns")
    context = _choice(reasoning, "context", contexts, "reasoning_option_not_supported")
    keep = {"current_turn": False, "all_turns": True}.get(context or "")
    return None if effort in ("default", "auto") else effort, keep


def _read_preserve(body: Fields, kwargs: Fields) -> bool | None:
    """`preserve_thinking`, as a field or a template argument; two that differ are refused."""
    field, argument = body.boolean("preserve_thinking"), kwargs.boolean("preserve_thinking")
    if field is not None and argument is not None and field != argument:
        body.refuse(
            "preserve_thinking",
            "differs from chat_template_kwargs.preserve_thinking; send one of them",
            "conflicting_template_option",
        )
    return argument if field is None else field


def _read_format(text: Fields) -> JsonFormat | None:
    _refuse_unknown(text, ("format", "verbosity"))
    text.choice("verbosity", ("low", "medium", "high"))
    form = text.object("format")
    if form is None:
        return None
    form.string("type", required=True)
    kind = _choice(form, "type", ("text", "json_object", "json_schema"), "structured_outputs_not_supported")
    if kind == "json_schema":
        form.string("name", required=True)
        form.boolean("strict")
        schema = form.object("schema")
        return JsonFormat(form.refuse("schema", "is missing") if schema is None else dict(schema.members))
    return JsonFormat() if kind == "json_object" else None
