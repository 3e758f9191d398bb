"""From a request's template options to the variables a chat template sees."""

from collections.abc import Mapping, Sequence
from typing import Any

from ninfer.errors import FrontendError
from ninfer.frontend.messages import Message
from ninfer.frontend.provenance import TemplateText
from ninfer.frontend.resources import SPECIAL_TOKEN_NAMES

EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
_RESERVED = frozenset(
    (
        "messages",
        "tools",
        "add_generation_prompt",
        "continue_final_message",
        *SPECIAL_TOKEN_NAMES,
    )
)
_BOOLEANS = ("enable_thinking", "preserve_thinking", "add_vision_id")


def template_variables(
    messages: Sequence[Message],
    *,
    tools: Sequence[Any] | None,
    thinking: bool | None,
    reasoning_effort: str | None,
    preserve_thinking: bool | None,
    add_generation_prompt: bool,
    continue_final_message: bool,
    template_kwargs: Mapping[str, Any] | None,
    special_tokens: Mapping[str, str],
) -> dict[str, Any]:
    """The template's variables; an option that nobody set is absent, so that the template's default holds.

    Effort `none` means thinking off and is not itself passed on. Raises FrontendError for keyword arguments
    that set reserved names, disagree with a typed option or have the wrong type, for an unknown effort, and
    for an effort together with thinking off.
    """
    options = {
        "enable_thinking": thinking,
        "reasoning_effort": reasoning_effort,
        "preserve_thinking": preserve_thinking,
    }
    variables: dict[str, Any] = {}
    for name, value in (template_kwargs or {}).items():
        if name in _RESERVED:
            raise FrontendError(f"The template argument {name!r} is reserved and cannot be set by a request.")
        if name in _BOOLEANS or name == "reasoning_effort":
            if value is None:
                continue
            if name in _BOOLEANS and not isinstance(value, bool):
                raise FrontendError(f"The template argument {name!r} must be true or false, not {value!r}.")
            if options.get(name, value) not in (None, value):
                raise FrontendError(
                    f"The template argument {name} = {value!r} conflicts with the option {options[name]!r}."
                )
            options[name] = value
        else:
            variables[name] = value
    _apply_effort(options)
    variables.update((name, value) for name, value in options.items() if value is not None)
    variables.update((name, TemplateText.literal(text)) for name, text in special_tokens.items())
    variables.update(
        messages=list(messages),
        tools=list(tools) if tools else None,
        add_generation_prompt=add_generation_prompt,
        continue_final_message=continue_final_message,
    )
    return variables


def _apply_effort(options: dict[str, Any]) -> None:
    effort = options["reasoning_effort"]
    if effort is None:
        return
    if effort not in EFFORTS:
        raise FrontendError(f"The reasoning effort {effort!r} is unknown; use one of {', '.join(EFFORTS)}.")
    if effort == "none":
        if options["enable_thinking"]:
            raise FrontendError("The reasoning effort 'none' conflicts with thinking switched on.")
        options["enable_thinking"] = False
        options["reasoning_effort"] = None
    elif options["enable_thinking"] is False:
        raise FrontendError(f"The reasoning effort {effort!r} conflicts with thinking switched off.")
