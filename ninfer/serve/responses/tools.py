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
from ninfer.serve.errors import ApiError, invalid
from ninfer.serve.responses.fields import Json, read_flag, read_list, read_object, read_text, shown

SEARCH = "tool_search"
DEFAULT_NAMESPACE = "functions"
"""The namespace that tools outside of namespaces belong to; its name is neither added nor answered."""

_PLAIN = re.compile(r"[A-Za-z0-9_-]{1,64}")
# Clients that bridge other systems use dots (MCP servers in editors), spaces (OpenFox), slashes, colons.
_ACCEPTED = re.compile(r"[^\s<>\"'={}]([^<>\"'={}\x00-\x1f\x7f]{0,126}[^\s<>\"'={}])?")
_HOSTED_CHOICES = "a tool that runs on OpenAI's servers can't be forced here"

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

    def choice(self, raw: Any) -> ToolChoice:
        """What `tool_choice` means. Raises ApiError for a tool that isn't declared or can't be forced."""
        if raw is None or raw == "auto":
            return ToolChoice()
        if raw == "none":
            return ToolChoice("none")
        if raw == "required":
            return ToolChoice("required", self._some(None))
        if not isinstance(raw, dict):
            raise invalid(
                f"tool_choice must be auto, none, required or an object, not {shown(raw)}.", "tool_choice"
            )
        kind = raw.get("type")
        if kind == "allowed_tools":
            return self._allowed(raw)
        if kind in ("function", "custom", SEARCH):
            name = self._chosen(raw, "tool_choice")
            return ToolChoice("required", (name,))
        raise invalid(
            f"tool_choice of type {shown(kind)} is not supported: {_HOSTED_CHOICES}.",
            "tool_choice",
            "tool_choice_not_supported",
        )

    def _allowed(self, raw: Json) -> ToolChoice:
        mode = raw.get("mode", "auto")
        if mode not in ("auto", "required"):
            raise invalid(
                f"tool_choice.mode must be auto or required, not {shown(mode)}.", "tool_choice.mode"
            )
        names = []
        for index, entry in enumerate(read_list(raw.get("tools"), "tool_choice.tools")):
            param = f"tool_choice.tools[{index}]"
            entry = read_object(entry, param) or {}
            if entry.get("type") in ("function", "custom", SEARCH):
                names.append(self._chosen(entry, param))
        if mode == "required":
            return ToolChoice("required", self._some(names))
        return ToolChoice("auto", tuple(names)) if names else ToolChoice("none")

    def _some(self, names: list[str] | None) -> tuple[str, ...] | None:
        if not (self._declared if names is None else names):
            raise invalid(
                "tool_choice requires a call, but no tool can be called; declare a function.", "tool_choice"
            )
        return None if names is None else tuple(names)

    def _chosen(self, raw: Json, param: str) -> str:
        if raw["type"] == SEARCH:
            name = SEARCH
        else:
            named = raw.get("name")
            if named is None and isinstance(raw.get("function"), dict):
                named = raw["function"].get("name")
            if not isinstance(named, str):
                raise invalid(f"{param}.name must be a string, not {shown(named)}.", f"{param}.name")
            name = self.find(named, read_text(raw.get("namespace"), f"{param}.namespace"))
        if name not in self._declared:
            raise invalid(f"{param} names the tool {name!r:.80}, which tools doesn't declare.", param)
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
    for index, entry in enumerate(read_list(raw, param)):
        where = f"{param}[{index}]"
        entry = read_object(entry, where) or {}
        kind = entry.get("type")
        if not isinstance(kind, str):
            raise invalid(f"{where}.type must be a string, not {shown(kind)}.", f"{where}.type")
        if kind == "namespace":
            found += _read_namespace(entry, where)
        elif kind == SEARCH:
            if entry.get("execution") == "client":
                found.append(_read_search(entry, where))
        elif kind in ("function", "custom"):
            found.append(_read_tool(entry, where, None, None))
    return found


def _read_namespace(entry: Json, where: str) -> list[Declared]:
    name = _read_name(entry.get("name"), f"{where}.name")
    description = read_text(entry.get("description"), f"{where}.description")
    found = []
    for index, inner in enumerate(read_list(entry.get("tools"), f"{where}.tools")):
        inner_where = f"{where}.tools[{index}]"
        inner = read_object(inner, inner_where) or {}
        if inner.get("type") in ("function", "custom"):
            found.append(_read_tool(inner, inner_where, name, description))
    return found


def _read_tool(entry: Json, where: str, namespace: str | None, about: str | None) -> Declared:
    if entry["type"] == "function" and "name" not in entry and isinstance(entry.get("function"), dict):
        entry = {"type": "function", **entry["function"]}  # the form of Chat Completions
    name = _read_name(entry.get("name"), f"{where}.name")
    texts = [about, read_text(entry.get("description"), f"{where}.description")]
    if entry["type"] == "custom":
        kind: Kind = "custom"
        texts.append(_read_format(entry.get("format"), f"{where}.format"))
        parameters: Json = {
            "type": "object",
            "properties": {"input": {"type": "string"}},
            "required": ["input"],
        }
        strict = False
    else:
        kind = "function"
        given = read_object(entry.get("parameters"), f"{where}.parameters")
        parameters = {"type": "object", "properties": {}} if given is None else given
        strict = read_flag(entry.get("strict"), f"{where}.strict")
    if namespace == DEFAULT_NAMESPACE:
        namespace = None
    return Declared(
        kind,
        name,
        namespace,
        Tool(engine_name(namespace, name), parameters, "\n\n".join(filter(None, texts)) or None, strict),
        read_flag(entry.get("defer_loading"), f"{where}.defer_loading"),
    )


def _read_search(entry: Json, where: str) -> Declared:
    parameters = read_object(entry.get("parameters"), f"{where}.parameters") or {
        "type": "object",
        "properties": {"query": {"type": "string"}},
        "required": ["query"],
    }
    description = read_text(entry.get("description"), f"{where}.description")
    tool = Tool(SEARCH, parameters, description or "Searches for further tools and makes them callable.")
    return Declared("search", SEARCH, None, tool)


def _read_format(raw: Any, param: str) -> str:
    """What a custom tool's input must look like, in words for the model."""
    form = read_object(raw, param) or {}
    if form.get("type") != "grammar":
        return "`input` is free text."
    form = {**form, **(read_object(form.get("grammar"), f"{param}.grammar") or {})}
    syntax = read_text(form.get("syntax"), f"{param}.syntax") or "lark"
    definition = read_text(form.get("definition"), f"{param}.definition") or ""
    return f"`input` is free text that follows this grammar ({syntax}):\n{definition}"


def _read_name(raw: Any, param: str) -> str:
    if not isinstance(raw, str) or not _ACCEPTED.fullmatch(raw):
        raise ApiError(
            400,
            f"{param} must have 1 to 128 characters, none of them < > = {{ }} or a quote, and no space at its"
            f" ends, not {shown(raw)}.",
            param=param,
            code="invalid_tool_name",
        )
    return raw
