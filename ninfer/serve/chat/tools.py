"""Tools of a Chat Completions request: what may, must or must not be called."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ninfer.serve.calls import Tool, ToolChoice
from ninfer.serve.fields import Fields, spelled
from ninfer.serve.tools import INPUT_SCHEMA, read_name

EMPTY_SCHEMA: dict[str, Any] = {"type": "object", "properties": {}}

_AUTO = ToolChoice()


@dataclass(frozen=True)
class ToolUse:
    """The tools, the choice among them, which are of type `custom`, and whether the request used the
    `functions` of before tools."""

    tools: tuple[Tool, ...] = ()
    choice: ToolChoice = _AUTO
    custom: frozenset[str] = frozenset()
    legacy: bool = False


def read_tools(body: Fields) -> ToolUse:
    """Raises `ApiError` 400. Tools of a type that isn't ours (hosted ones) are left out."""
    tools: dict[str, Tool] = {}
    custom: set[str] = set()
    for item in body.objects("tools"):
        kind = item.get("type")
        if kind == "function":
            tool = _function(item.object("function") or item)
        elif kind == "custom":
            tool = _custom(item.object("custom") or item)
            custom.add(tool.name)
        elif isinstance(kind, str):
            continue
        else:
            item.refuse("type", f"must be a string, not {spelled(kind)}")
        tools.setdefault(tool.name, tool)
    legacy = False
    if not tools and body.get("functions"):
        legacy = True
        for item in body.objects("functions"):
            tool = _function(item)
            tools.setdefault(tool.name, tool)
    choice = _legacy_choice(body, tools) if legacy else _choice(body, tools)
    return ToolUse(tuple(tools.values()), choice, frozenset(custom), legacy)


def _function(function: Fields) -> Tool:
    parameters = function.object("parameters")
    return Tool(
        read_name(function),
        dict(parameters.members) if parameters is not None else EMPTY_SCHEMA,
        function.string("description"),
        function.boolean("strict") or False,
    )


def _custom(custom: Fields) -> Tool:
    """A tool that takes text: to the model, a function with one string."""
    description = custom.string("description") or ""
    form = custom.object("format")
    if form is not None and form.get("type") == "grammar":
        grammar = form.object("grammar") or form
        syntax, definition = grammar.string("syntax") or "", grammar.string("definition") or ""
        quoted = f"The input must follow this {syntax} grammar:\n{definition}"
        description = f"{description}\n\n{quoted}" if description else quoted
    return Tool(read_name(custom), INPUT_SCHEMA, description or None)


def _choice(body: Fields, tools: dict[str, Tool]) -> ToolChoice:
    value = body.get("tool_choice")
    if value is None:
        return _AUTO
    if isinstance(value, str):
        if value in ("auto", "none"):
            return ToolChoice("auto" if value == "auto" else "none")
        if value in ("required", "any"):
            return _required(body, tools, None)
        body.refuse("tool_choice", f"must be auto, none, required or an object, not {spelled(value)}")
    fields = Fields(value, "tool_choice")
    kind = fields.get("type")
    if kind in ("function", "custom"):
        name = _chosen(fields, tools)
        return _required(body, tools, (name,))
    if kind != "allowed_tools":
        fields.refuse(
            "type",
            f"must be function, custom or allowed_tools, not {spelled(kind)}",
            "tool_choice_not_supported",
        )
    allowed = fields.object("allowed_tools") or fields
    mode = allowed.choice("mode", ("auto", "required")) or "auto"
    named = [
        _chosen(item, tools)
        for item in allowed.objects("tools")
        if item.get("type") in ("function", "custom", None)  # types that aren't ours can't be called anyway
    ]
    names = tuple(name for name in tools if name in named)
    return _required(body, tools, names) if mode == "required" else ToolChoice("auto", names)


def _legacy_choice(body: Fields, tools: dict[str, Tool]) -> ToolChoice:
    value = body.get("function_call")
    if value in (None, "auto"):
        return _AUTO
    if value == "none":
        return ToolChoice("none")
    name = Fields(value, "function_call").string("name", required=True) or ""
    if name not in tools:
        body.refuse("function_call", f"names {spelled(name)}, which functions does not declare")
    return ToolChoice("required", (name,))


def _chosen(fields: Fields, tools: dict[str, Tool]) -> str:
    inner = fields.object("function") or fields.object("custom") or fields
    name = inner.string("name", required=True) or ""
    if name not in tools:
        inner.refuse("name", f"is {spelled(name)}, which tools does not declare")
    return name


def _required(body: Fields, tools: dict[str, Tool], names: tuple[str, ...] | None) -> ToolChoice:
    if not tools or names == ():
        body.refuse("tool_choice", "requires a call, but there is no tool of type function or custom to call")
    return ToolChoice("required", names)
