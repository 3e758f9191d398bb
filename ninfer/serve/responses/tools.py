"""Tools of the Responses API and the functions that stand for them in the engine.

A function, a custom tool and a tool search that the client runs are each one function for the model. Tools
that OpenAI runs itself (web search, MCP, ...) and types that we don't know are accepted and not offered.
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass, replace
from typing import Any, Literal

from ninfer.serve.calls import Tool, ToolChoice
from ninfer.serve.errors import invalid
from ninfer.serve.fields import Fields, spelled
from ninfer.serve.tools import INPUT_SCHEMA, read_name

SEARCH = "tool_search"
DEFAULT_NAMESPACE = "functions"
"""The namespace that tools outside of namespaces belong to; its name is neither added nor answered."""

_PLAIN = re.compile(r"[A-Za-z0-9_-]{1,64}")
_CALLED = ("function", "custom", SEARCH)
_EMPTY: dict[str, Any] = {"type": "object", "properties": {}}
_QUERY: dict[str, Any] = {
    "type": "object",
    "properties": {"query": {"type": "string"}},
    "required": ["query"],
}

Kind = Literal["function", "custom", "search"]


@dataclass(frozen=True)
class Declared:
    """A tool as the client knows it (`kind`, `name`, `namespace`) and as the engine does (`tool`)."""

    kind: Kind
    name: str
    namespace: str | None
    tool: Tool
    deferred: bool = False


def engine_name(namespace: str | None, name: str) -> str:
    """The function's name in the prompt: `namespace__name`, at most 64 ASCII letters, digits, `_` and `-`."""
    full = f"{namespace}__{name}" if namespace and namespace != DEFAULT_NAMESPACE else name
    if _PLAIN.fullmatch(full):
        return full
    plain = re.sub(r"[^A-Za-z0-9_-]", "_", full)
    if len(plain) <= 64 and full.isascii():
        return plain
    return f"{plain[:55]}_{hashlib.sha256(full.encode()).hexdigest()[:8]}"


class Toolbox:
    """The tools of one request: those of `tools`, and those that items of its history add."""

    def __init__(self, raw: Any, param: str = "tools") -> None:
        self._declared: dict[str, Declared] = {}
        tools = _read_tools(raw, param)
        # Without a search that the client runs nothing could ever load a deferred tool.
        searchable = any(tool.kind == "search" for tool in tools)
        hidden = [tool for tool in tools if searchable and tool.deferred]
        seen: set[str] = set()
        for tool in tools:
            if tool.tool.name in seen:
                raise invalid(
                    f"Two tools are called {tool.tool.name!r}; names must differ.",
                    param,
                    "duplicate_tool_name",
                )
            seen.add(tool.tool.name)
            if tool.kind == "search":
                tool = _with_loadable(tool, hidden)
            if not (searchable and tool.deferred):
                self._declared[tool.tool.name] = tool

    def load(self, raw: Any, param: str, *, listed: bool) -> list[Tool]:
        """Add the tools of an item. They stand in the prompt's list only if `listed`, which the caller may
        choose for an item at its very beginning; others must be shown at the item's place. A later
        declaration of a name replaces the earlier one."""
        added = []
        for tool in _read_tools(raw, param):
            known = self._declared.get(tool.tool.name)
            shown_above = listed or (known is not None and known.tool.listed)
            tool = replace(tool, tool=replace(tool.tool, listed=shown_above))
            self._declared[tool.tool.name] = tool
            added.append(tool.tool)
        return added

    @property
    def tools(self) -> tuple[Tool, ...]:
        """What the engine is told. The call syntax is explained with the list, so something must be in it."""
        tools = tuple(declared.tool for declared in self._declared.values())
        if any(tool.listed for tool in tools):
            return tools
        return tuple(replace(tool, listed=True) for tool in tools)

    def __getitem__(self, name: str) -> Declared:
        """The tool that the engine calls `name`."""
        return self._declared[name]

    def find(self, name: str, namespace: str | None) -> str:
        """The engine's name of a tool that an item of the history calls; it need not be declared any more.

        A name without its namespace is looked for in all of them.
        """
        direct = engine_name(namespace, name)
        if namespace is None and direct not in self._declared:
            same = [known for known, tool in self._declared.items() if tool.name == name]
            if len(same) == 1:
                return same[0]
        return direct

    def choice(self, body: Fields) -> ToolChoice:
        """What `tool_choice` means. Raises ApiError for a tool that isn't declared or can't be forced."""
        raw = body.get("tool_choice")
        if raw is None or raw == "auto":
            return ToolChoice()
        if raw == "none":
            return ToolChoice("none")
        if raw == "required":
            return ToolChoice("required", self._some(None))
        if isinstance(raw, str):
            body.refuse("tool_choice", f"must be auto, none, required or an object, not {spelled(raw)}")
        fields = Fields(raw, "tool_choice")
        kind = fields.get("type")
        if kind == "allowed_tools":
            return self._allowed(fields)
        if kind not in _CALLED:
            fields.refuse(
                "type",
                f"is {spelled(kind)}, which is not supported: OpenAI's own tools can't be forced here",
                "tool_choice_not_supported",
            )
        return ToolChoice("required", (self._chosen(fields),))

    def _allowed(self, fields: Fields) -> ToolChoice:
        mode = fields.choice("mode", ("auto", "required"))
        names = [self._chosen(entry) for entry in fields.objects("tools") if entry.get("type") in _CALLED]
        if mode == "required":
            return ToolChoice("required", self._some(names))
        return ToolChoice("auto", tuple(names)) if names else ToolChoice("none")

    def _some(self, names: list[str] | None) -> tuple[str, ...] | None:
        if not (self._declared if names is None else names):
            raise invalid(
                "tool_choice requires a call, but no tool can be called; declare a function.", "tool_choice"
            )
        return None if names is None else tuple(names)

    def _chosen(self, fields: Fields) -> str:
        name = SEARCH
        if fields.get("type") != SEARCH:
            inner = fields if fields.get("name") is not None else fields.object("function") or fields
            named = inner.string("name", required=True) or ""
            name = self.find(named, fields.string("namespace"))
        if name not in self._declared:
            raise invalid(
                f"{fields.path} names the tool {name!r:.80}, which tools doesn't declare.", fields.path
            )
        return name


def listing(tools: list[Tool]) -> str:
    """Declarations as text, in the form of the prompt's list of tools."""
    lines = (json.dumps(tool.declared(), ensure_ascii=False) for tool in tools)
    return "<tools>\n" + "\n".join(lines) + "\n</tools>" if tools else "No tools were found."


def _with_loadable(search: Declared, hidden: list[Declared]) -> Declared:
    """The search tool, told what it can find: namespaces once, other deferred functions by name."""
    names = dict.fromkeys(tool.namespace or tool.name for tool in hidden)
    if not names:
        return search
    text = "Tools that a search can load: " + ", ".join(names) + "."
    described = "\n\n".join(filter(None, (search.tool.description, text)))
    return replace(search, tool=replace(search.tool, description=described))


def _read_tools(raw: Any, param: str) -> list[Declared]:
    """Every tool that the model can call, namespaces flattened, in order."""
    found = []
    for entry in Fields({param: raw}).objects(param):
        kind = entry.string("type", required=True)
        if kind == "namespace":
            found += _read_namespace(entry)
        elif kind == SEARCH and entry.get("execution") == "client":
            found.append(_read_search(entry))
        elif kind in ("function", "custom"):
            found.append(_read_tool(entry, None, None))
    return found


def _read_namespace(entry: Fields) -> list[Declared]:
    name, description = read_name(entry), entry.string("description")
    return [
        _read_tool(inner, name, description)
        for inner in entry.objects("tools")
        if inner.get("type") in ("function", "custom")
    ]


def _read_tool(entry: Fields, namespace: str | None, about: str | None) -> Declared:
    kind: Kind = "custom" if entry.get("type") == "custom" else "function"
    inner = entry.object("function") if kind == "function" and entry.get("name") is None else None
    entry = inner or entry  # the form of Chat Completions
    name = read_name(entry)
    texts = [about, entry.string("description")]
    if kind == "custom":
        texts.append(_read_format(entry))
        parameters = INPUT_SCHEMA
    else:
        given = entry.object("parameters")
        parameters = _EMPTY if given is None else given.members
    if namespace == DEFAULT_NAMESPACE:
        namespace = None
    tool = Tool(
        engine_name(namespace, name),
        parameters,
        "\n\n".join(filter(None, texts)) or None,
        kind == "function" and (entry.boolean("strict") or False),
    )
    return Declared(kind, name, namespace, tool, entry.boolean("defer_loading") or False)


def _read_search(entry: Fields) -> Declared:
    given = entry.object("parameters")
    description = entry.string("description") or "Searches for further tools and makes them callable."
    return Declared("search", SEARCH, None, Tool(SEARCH, given.members if given else _QUERY, description))


def _read_format(entry: Fields) -> str:
    """What a custom tool's input must look like, in words for the model."""
    form = entry.object("format")
    if form is None or form.get("type") != "grammar":
        return "`input` is free text."
    form = form.object("grammar") or form  # as Chat Completions nests it
    syntax, definition = form.string("syntax") or "lark", form.string("definition") or ""
    return f"`input` is free text that follows this grammar ({syntax}):\n{definition}"
