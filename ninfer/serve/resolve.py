"""What a request leaves open, decided: thinking, sampling, limits. Pure functions; errors are `ApiError`s."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from ninfer.frontend import SamplingPreset
from ninfer.frontend.options import EFFORTS
from ninfer.serve.calls import GenerationRequest, Protocol
from ninfer.serve.errors import ApiError, invalid
from ninfer.serve.options import SamplingOverrides, ServeOptions

# The levels that Qwen's templates know; a client's others mean the nearest of them.
_FOLDED = {"minimal": "low", "high": "xhigh", "max": "xhigh", "adaptive": "xhigh"}
_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty")
_PARAMS = {
    Protocol.RESPONSES: {
        "messages": "input",
        "reasoning_effort": "reasoning.effort",
        "response_format": "text.format",
    },
    Protocol.MESSAGES: {
        "reasoning_effort": "output_config.effort",
        "response_format": "output_config.format",
    },
}


@dataclass(frozen=True)
class TemplateOptions:
    """What the chat template is given; None is the template's to decide."""

    thinking: bool | None
    effort: str | None
    preserve_thinking: bool | None
    kwargs: Mapping[str, Any]


def template_options(request: GenerationRequest, options: ServeOptions) -> TemplateOptions:
    """Request before server flag before template; effort folded to the template's levels.

    `enable_thinking`, `preserve_thinking` and `reasoning_effort` may stand in the template's arguments as
    well as in fields of their own, but then must agree.
    """
    kwargs = dict(request.template_kwargs)
    thinking = _merged(kwargs, "enable_thinking", request.thinking, bool)
    preserve = _merged(kwargs, "preserve_thinking", request.preserve_thinking, bool)
    effort = _merged(kwargs, "reasoning_effort", request.effort, str)
    if effort is not None and effort not in EFFORTS and effort not in _FOLDED:
        raise invalid(
            f"Unknown reasoning effort {effort!r:.40}; use one of {', '.join(EFFORTS)}.", "reasoning_effort"
        )
    if effort == "none":
        if thinking:
            raise _conflict("Reasoning effort 'none' contradicts enable_thinking true; send one of them.")
        thinking, effort = False, None
    elif effort is not None and thinking is False:
        raise _conflict(f"Reasoning effort {effort!r} contradicts enable_thinking false; send one of them.")
    if thinking is None and effort is None:
        thinking = options.thinking
    if preserve is None:
        preserve = options.preserve_thinking
    return TemplateOptions(thinking, _FOLDED.get(effort or "", effort), preserve, kwargs)


def sampling(request: GenerationRequest, flags: SamplingOverrides, preset: SamplingPreset) -> SamplingPreset:
    """The model's preset, overridden by the server's flags, those by the request, and all by `greedy`."""
    chosen: dict[str, Any] = {}
    for name in _SAMPLING:
        for source in (flags, request):
            if (value := getattr(source, name)) is not None:
                chosen[name] = value
    if flags.greedy:
        chosen["temperature"] = 0.0
    return replace(preset, **chosen)


def thinking_budget(
    request: GenerationRequest, options: ServeOptions, *, thinking: bool, output: int, closer: int
) -> int | None:
    """Tokens that the open thinking block may take; None without a limit or without such a block.

    `output` is what the answer may have in all, `closer` the length of the text that closes the block. A
    request's own budget must leave room in its own limit for that and one token. The server's default gives
    way, and any budget does where it is the rest of the context that leaves no room.
    """
    if not thinking:
        return None
    budget = request.thinking_budget
    wanted = options.default_max_tokens if request.max_output is None else request.max_output
    if budget is None or output < wanted:
        budget = options.default_thinking_budget if budget is None else budget
        if budget is None or budget >= output:
            return budget
        return max(1, min(budget, output - closer - 1)) if output > closer + 1 else None
    if budget < output < budget + closer + 1:
        raise ApiError(
            400,
            f"A thinking budget of {budget} tokens needs an output of {budget + closer + 1} tokens with its "
            f"closing text and an answer, but the output is limited to {output}; lower the budget or raise "
            f"the limit.",
            code="thinking_budget_capacity_insufficient",
        )
    return budget


def check_context(protocol: Protocol, prompt: int, context: int) -> None:
    """A prompt that is too long is refused in the words by which the API's clients know it."""
    if prompt <= context:
        return
    if protocol is Protocol.MESSAGES:
        raise invalid(f"prompt is too long: {prompt} tokens > {context} maximum")
    raise ApiError(
        400,
        f"This model's maximum context length is {context} tokens, but the request's prompt has {prompt}; "
        f"shorten the conversation or start the server with a larger --max-context.",
        param="messages",
        code="context_length_exceeded",
        extra={"prompt_tokens": prompt, "max_context": context},
    )


def for_protocol(error: ApiError, protocol: Protocol) -> ApiError:
    """The same error, its field named as the client's API names it."""
    if error.param is not None:
        error.param = _PARAMS.get(protocol, {}).get(error.param, error.param)
    return error


def _merged(kwargs: dict[str, Any], name: str, field: Any, kind: type) -> Any:
    """The value of an option that may come by two ways; removed from the template's arguments."""
    value = kwargs.pop(name, None)
    if value is None:
        return field
    if not isinstance(value, kind):
        what = "true or false" if kind is bool else "a string"
        raise invalid(f"{name} must be {what}, not {value!r:.40}.", f"chat_template_kwargs.{name}")
    if field is not None and field != value:
        raise ApiError(
            400,
            f"{name} is {field!r} in its own field and {value!r} in chat_template_kwargs; send it once.",
            param=f"chat_template_kwargs.{name}",
            code="conflicting_template_option",
        )
    return value


def _conflict(message: str) -> ApiError:
    return ApiError(400, message, param="reasoning_effort", code="conflicting_template_option")
