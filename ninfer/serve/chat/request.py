"""The body of POST /v1/chat/completions, checked and turned into a `GenerationRequest`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ninfer.serve.calls import GenerationRequest, JsonFormat, Protocol
from ninfer.serve.chat.messages import read_messages
from ninfer.serve.chat.tools import ToolUse, read_tools
from ninfer.serve.fields import Fields, spelled

_U32 = 2**32 - 1
_MAX_STOPS = 4
_REFUSED = {  # fields that would change the answer, and that we don't have
    "web_search_options": "web_search_not_supported",
    "moderation": "moderation_not_supported",
    "structured_outputs": "constrained_decoding_not_supported",
    "guided_json": "constrained_decoding_not_supported",
    "guided_regex": "constrained_decoding_not_supported",
    "guided_choice": "constrained_decoding_not_supported",
    "guided_grammar": "constrained_decoding_not_supported",
}


@dataclass(frozen=True)
class ChatRequest:
    """A request and how its answer is to be written: usage at the end of a stream, timings with each text,
    progress of the prompt, and the tools' kinds."""

    generation: GenerationRequest
    include_usage: bool
    timings: bool
    progress: bool
    use: ToolUse


def read_request(body: Mapping[str, Any], model: str, client: str | None = None) -> ChatRequest:
    """Raises `ApiError` 400 that names the field; unknown fields are ignored."""
    fields = Fields(body)
    _check_unsupported(fields)
    _check_hints(fields)
    use = read_tools(fields)
    stream = fields.boolean("stream") or False
    options = fields.object("stream_options") or Fields({})
    options.path = "stream_options"
    include_usage = options.boolean("include_usage") or False
    options.boolean("include_obfuscation")
    timings = fields.boolean("timings_per_token") or False
    progress = fields.boolean("return_progress") or False
    kwargs = fields.object("chat_template_kwargs")
    parallel = fields.boolean("parallel_tool_calls")
    generation = GenerationRequest(
        Protocol.CHAT,
        model,
        read_messages(fields),
        stream=stream,
        tools=use.tools,
        tool_choice=use.choice,
        parallel_calls=parallel is not False and not use.legacy,
        response_format=_response_format(fields),
        max_output=_max_output(fields),
        temperature=fields.number("temperature", 0, 2),
        top_p=fields.number("top_p", 0, 1),
        top_k=fields.integer("top_k", 0, 20),
        min_p=fields.number("min_p", 0, 1),
        presence_penalty=fields.number("presence_penalty", -2, 2),
        frequency_penalty=fields.number("frequency_penalty", -2, 2),
        seed=fields.integer("seed", -(2**63), 2**64 - 1),
        stop=_stops(fields),
        logprobs=_logprobs(fields),
        n=fields.integer("n", 1, 128) or 1,
        thinking=fields.boolean("enable_thinking"),
        effort=_effort(fields),
        thinking_budget=fields.integer("thinking_budget", 1, _U32),
        preserve_thinking=fields.boolean("preserve_thinking"),
        template_kwargs={} if kwargs is None else dict(kwargs.members),
        client=client,
    )
    return ChatRequest(generation, include_usage, timings and stream, progress and stream, use)


def _max_output(fields: Fields) -> int | None:
    newer, older = fields.integer("max_completion_tokens", 0), fields.integer("max_tokens", 0)
    value = older if newer is None else newer
    return None if value is None else min(value, _U32)


def _stops(fields: Fields) -> tuple[str, ...]:
    value = fields.get("stop")
    if value is None:
        return ()
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or not all(isinstance(stop, str) and stop for stop in stops):
        fields.refuse("stop", "must be a non-empty string or an array of such")
    if len(stops) > _MAX_STOPS:
        fields.refuse("stop", f"must have at most {_MAX_STOPS} strings, not {len(stops)}")
    return tuple(stops)


def _logprobs(fields: Fields) -> int | None:
    wanted, top = fields.boolean("logprobs"), fields.integer("top_logprobs", 0, 20)
    if wanted:
        return top or 0
    if top:
        fields.refuse("top_logprobs", "needs logprobs true")
    return None


def _effort(fields: Fields) -> str | None:
    effort = fields.string("reasoning_effort")
    return None if effort in ("default", "auto") else effort


def _response_format(fields: Fields) -> JsonFormat | None:
    form = fields.object("response_format")
    if form is None:
        return None
    kind = form.get("type")
    if kind == "text":
        return None
    if kind == "json_object":
        return JsonFormat(form.get("schema"))
    if kind != "json_schema":
        form.refuse(
            "type",
            f"must be text, json_object or json_schema, not {spelled(kind)}",
            "response_format_not_supported",
        )
    inner = form.object("json_schema")
    if inner is None:
        form.refuse("json_schema", "must be an object with a schema")
    inner.string("name")
    inner.boolean("strict")
    return JsonFormat(inner.get("schema"))


def _check_unsupported(fields: Fields) -> None:
    for name, code in _REFUSED.items():
        if fields.get(name) is not None:
            fields.refuse(name, "is not supported; leave it out", code)
    if fields.get("grammar") not in (None, ""):
        fields.refuse(
            "grammar", "is not supported; use response_format", "constrained_decoding_not_supported"
        )
    bias = fields.object("logit_bias")
    if bias is not None and any(value != 0 for value in bias.members.values()):
        fields.refuse("logit_bias", "is not supported other than 0", "logit_bias_not_supported")
    if fields.get("repetition_penalty") not in (None, 1):
        fields.refuse(
            "repetition_penalty",
            "is not supported other than 1; use presence_penalty",
            "repetition_penalty_not_supported",
        )
    extra = fields.object("mm_processor_kwargs")
    if extra is not None and any(value is not None for value in extra.members.values()):
        fields.refuse("mm_processor_kwargs", "is not supported", "mm_processor_kwargs_not_supported")
    modalities = fields.array("modalities")
    if modalities is not None and any(item != "text" for item in modalities):
        fields.refuse("modalities", "must be text only", "modality_not_supported")
    if fields.choice("verbosity", ("low", "medium", "high")) in ("low", "high"):
        fields.refuse("verbosity", "must be medium", "verbosity_not_supported")
    if fields.boolean("store"):
        fields.refuse("store", "is not supported; leave it out", "store_not_supported")


def _check_hints(fields: Fields) -> None:
    """Names and prompt-cache hints: checked, then ignored; the prefix cache needs none."""
    fields.string("user")
    fields.string("safety_identifier", most=64)
    fields.string("prompt_cache_key", most=64)
    fields.choice("prompt_cache_retention", ("in_memory", "in-memory", "24h"))
    options = fields.object("prompt_cache_options")
    if options is not None:
        options.choice("mode", ("implicit", "explicit"))
        options.choice("ttl", ("30m",))
