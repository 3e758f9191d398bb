"""The tools of a request: which are offered, which wait for a reference, which one must be called."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from ninfer.serve.calls import Tool, ToolChoice
from ninfer.serve.errors import invalid
from ninfer.serve.messages.fields import Json, as_list, as_object, as_text, flag, kind, optional_text

# A name stands inside `<function=...>` in the prompt.
_NAME = re.compile(r"[^\s<>](?:[^\n\r<>]{0,126}[^\s<>])?")
_NEWLY_AVAILABLE = "Now available, besides the functions listed before, and called in the same way:"


@dataclass
class Toolbox:
    """`listed` tools stand in the prompt's list. `deferred` ones become known, and callable, where a message
    refers to them. `foreign` are declared tools that this server can't offer: those that Anthropic's own
    servers run, and kinds that it doesn't know."""

    listed: dict[str, Tool]
    deferred: dict[str, Tool]
    foreign: frozenset[str]
    referred: dict[str, Tool]

    def definitions(self, names: Sequence[str]) -> str:
        """What the model reads where a message refers to tools; from now on they may be called."""
        known: list[Tool] = []
        lines: list[str] = []
        for name in names:
            if tool := self.deferred.get(name):
                self.referred[name] = tool
            if tool := tool or self.listed.get(name):
                known.append(tool)
            else:
                lines.append(f"The function {name} is not available.")
        if known:
            described = "\n".join(_described(tool) for tool in known)
            lines.insert(0, f"{_NEWLY_AVAILABLE}\n\n<tools>\n{described}\n</tools>")
        return "\n".join(lines)

    def offered(self) -> tuple[Tool, ...]:
        """All tools that the answer may call."""
        return (*self.listed.values(), *(replace(tool, listed=False) for tool in self.referred.values()))


def _described(tool: Tool) -> str:
    """The tool as chat templates print it."""
    try:
        return json.dumps(tool.declared(), ensure_ascii=False)
    except RecursionError:
        raise invalid(f"The input_schema of tool {tool.name!r} is nested too deep.", "tools") from None


def read_tools(value: Any) -> Toolbox:
    """The `tools` of a request."""
    listed: dict[str, Tool] = {}
    deferred: dict[str, Tool] = {}
    foreign: set[str] = set()
    searched_here = False
    for index, item in enumerate([] if value is None else as_list(value, "tools")):
        where = f"tools[{index}]"
        item = as_object(item, where)
        declared = optional_text(item, "type", f"{where}.")
        if declared not in (None, "custom"):
            searched_here |= declared.startswith("tool_search_tool")
            foreign.add(str(item.get("name", "")))
            continue
        tool = _tool(item, where)
        callers = item.get("allowed_callers")
        if callers is not None and "direct" not in as_list(callers, f"{where}.allowed_callers"):
            foreign.add(tool.name)
            continue
        if tool.name in listed or tool.name in deferred:
            raise invalid(
                f"tools has two tools named {tool.name!r}; names must be different.",
                where,
                "duplicate_tool_name",
            )
        (deferred if flag(item, "defer_loading", f"{where}.") else listed)[tool.name] = tool
    if searched_here:  # a search that only Anthropic's servers run: without it nothing would refer to them
        listed.update(deferred)
        deferred = {}
    return Toolbox(listed, deferred, frozenset(foreign), {})


def _tool(item: Json, where: str) -> Tool:
    name = as_text(item.get("name"), f"{where}.name")
    if not _NAME.fullmatch(name):
        raise invalid(
            f"{where}.name must have 1 to 128 characters without line breaks, '<' and '>'.",
            f"{where}.name",
            "invalid_tool_name",
        )
    return Tool(
        name,
        as_object(item.get("input_schema"), f"{where}.input_schema"),
        optional_text(item, "description", f"{where}."),
        strict=bool(flag(item, "strict", f"{where}.")),
    )


def read_choice(value: Any, box: Toolbox) -> tuple[ToolChoice, bool]:
    """The `tool_choice` of a request, and whether several calls are allowed in one answer."""
    if value is None:
        return ToolChoice(), True
    choice = as_object(value, "tool_choice")
    parallel = not flag(choice, "disable_parallel_tool_use", "tool_choice.")
    match choice.get("type"):
        case "auto":
            return ToolChoice(), parallel
        case "none":
            return ToolChoice("none"), parallel
        case "any":
            if box.listed or box.referred:
                return ToolChoice("required"), parallel
            if box.foreign:
                return ToolChoice(), parallel
            raise invalid("tool_choice asks for a call, but no tool can be called.", "tool_choice")
        case "tool":
            name = as_text(choice.get("name"), "tool_choice.name")
            if name in box.deferred and name not in box.referred:
                box.listed[name] = box.deferred[name]
            if name in box.listed or name in box.referred:
                return ToolChoice("required", (name,)), parallel
            if name in box.foreign:
                return ToolChoice(), parallel
            raise invalid("tool_choice.name is no name in tools.", "tool_choice.name")
        case other:
            said = repr(other[:40]) if isinstance(other, str) else kind(other)
            raise invalid(
                f"tool_choice.type must be auto, any, tool or none, not {said}.", "tool_choice.type"
            )
