"""The tools of a request: which are offered, which wait for a reference, which one must be called."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from ninfer.serve.calls import Tool, ToolChoice
from ninfer.serve.errors import invalid
from ninfer.serve.fields import Fields, spelled
from ninfer.serve.tools import read_name

_NEWLY_AVAILABLE = "Now available, besides the functions listed before, and called in the same way:"


@dataclass
class Toolbox:
    """`listed` tools stand in the prompt's list. `deferred` ones become known, and callable, where a message
    refers to them: then they are `referred`. `foreign` are declared tools that this server can't offer: those
    that Anthropic's own servers run, and kinds that it doesn't know."""

    listed: dict[str, Tool] = field(default_factory=dict)
    deferred: dict[str, Tool] = field(default_factory=dict)
    referred: dict[str, Tool] = field(default_factory=dict)
    foreign: set[str] = field(default_factory=set)

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


def read_tools(body: Fields) -> Toolbox:
    """The `tools` of a request. Raises `ApiError` 400."""
    box = Toolbox()
    searched_here = False
    for item in body.objects("tools"):
        kind = item.string("type")
        if kind not in (None, "custom"):
            searched_here |= kind.startswith("tool_search_tool")
            box.foreign.add(item.string("name") or "")
            continue
        tool = _tool(item)
        callers = item.array("allowed_callers")
        if callers is not None and "direct" not in callers:
            box.foreign.add(tool.name)
            continue
        if tool.name in box.listed or tool.name in box.deferred:
            item.refuse("name", f"is {spelled(tool.name)} a second time", "duplicate_tool_name")
        (box.deferred if item.boolean("defer_loading") else box.listed)[tool.name] = tool
    if searched_here:  # only Anthropic's servers run that search: without it nothing would refer to them
        box.listed.update(box.deferred)
        box.deferred.clear()
    return box


def _tool(item: Fields) -> Tool:
    name = read_name(item)
    schema = item.object("input_schema")
    if schema is None:
        item.refuse("input_schema", "is missing; send the JSON schema of an object")
    return Tool(name, schema.members, item.string("description"), item.boolean("strict") or False)


def read_choice(body: Fields, box: Toolbox) -> tuple[ToolChoice, bool]:
    """The `tool_choice` of a request, and whether several calls are allowed in one answer."""
    choice = body.object("tool_choice")
    if choice is None:
        return ToolChoice(), True
    parallel = not choice.boolean("disable_parallel_tool_use")
    match choice.choice("type", ("auto", "any", "tool", "none")):
        case "any":
            if box.offered():
                return ToolChoice("required"), parallel
            if not box.foreign:
                choice.refuse("type", "asks for a call, but there is no tool to call")
        case "tool":
            name = choice.string("name", required=True) or ""
            if name in box.deferred and name not in box.referred:
                box.listed[name] = box.deferred[name]
            if name in box.listed or name in box.referred:
                return ToolChoice("required", (name,)), parallel
            if name not in box.foreign:
                choice.refuse("name", f"is {spelled(name)}, which is no tool of the request")
        case "none":
            return ToolChoice("none"), parallel
        case None:
            choice.refuse("type", "is missing; send auto, any, tool or none")
    return ToolChoice(), parallel
