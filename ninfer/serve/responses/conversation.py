"""Items to messages: what the chat template prints of a history.

Neighbouring items of the assistant are one turn. Outputs stand behind the turn that made the calls, in the
calls' order, wherever the client put them. Leading system and developer texts are one system message, since
many templates allow only that; later ones stay at their place. Tools that an item brings stand in the
prompt's list if the item leads, else in a message at its place, so that what precedes it stays the same.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

from ninfer.serve.errors import invalid
from ninfer.serve.fields import spelled
from ninfer.serve.responses.items import ACTION_OUTPUTS, ACTIONS, Json
from ninfer.serve.responses.tools import SEARCH, Toolbox, listing
from ninfer.serve.tools import arguments_of

_OMITTED = {
    "input_image": "[image omitted: this model has no vision]",
    "input_video": "[video omitted: this model has no vision]",
    "computer_screenshot": "[screenshot omitted: this model has no vision]",
    "input_file": "[file omitted: files are not supported]",
    "input_audio": "[audio omitted: audio is not supported]",
}
_AVAILABLE = "From here on these functions are available too, one JSON description per line:\n\n"


@dataclass
class _Call:
    id: str | None
    name: str
    arguments: dict[str, Any]
    output: str | None = None


@dataclass
class _Turn:
    reasoning: list[str] = field(default_factory=list)
    content: list[str] = field(default_factory=list)
    calls: list[_Call] = field(default_factory=list)

    def messages(self) -> list[Json]:
        message: Json = {"role": "assistant", "content": "\n\n".join(filter(None, self.content))}
        if self.reasoning:
            message["reasoning_content"] = "\n\n".join(self.reasoning)
        if self.calls:
            message["tool_calls"] = [
                {
                    "type": "function",
                    **({"id": call.id} if call.id else {}),
                    "function": {"name": call.name, "arguments": call.arguments},
                }
                for call in self.calls
            ]
        results = [
            {"role": "tool", "content": call.output, **({"tool_call_id": call.id} if call.id else {})}
            for call in self.calls
            if call.output is not None
        ]
        return [message, *results]


def messages_of(items: Sequence[Json], toolbox: Toolbox, instructions: str | None = None) -> list[Json]:
    """The messages of a history; tools that items bring go into `toolbox`. Raises ApiError."""
    return _Conversation(toolbox).read(items, instructions)


class _Conversation:
    def __init__(self, toolbox: Toolbox) -> None:
        self._toolbox = toolbox
        self._leading: list[str] = []
        self._nodes: list[_Turn | Json] = []
        self._turn: _Turn | None = None  # the assistant's, while it goes on
        self._asked = False
        self._waiting: dict[str, list[_Call]] = {}

    def read(self, items: Sequence[Json], instructions: str | None) -> list[Json]:
        if instructions:
            self._leading.append(instructions)
        for item in items:
            self._add(item)
        if not self._asked:
            raise invalid("input must provide a user query: a user message or a call's output.", "input")
        messages = [{"role": "system", "content": "\n\n".join(self._leading)}] if self._leading else []
        for node in self._nodes:
            messages += node.messages() if isinstance(node, _Turn) else [node]
        return messages

    def _add(self, item: Json) -> None:
        match item["type"]:
            case "message":
                self._message(item)
            case "reasoning":
                text = "".join(part["text"] for part in item["content"])
                if text:
                    self._assistant().reasoning.append(text)
            case "function_call":
                name = self._toolbox.find(item["name"], item.get("namespace"))
                self._called(item["call_id"], name, arguments_of(item["arguments"]))
            case "custom_tool_call":
                name = self._toolbox.find(item["name"], item.get("namespace"))
                self._called(item["call_id"], name, {"input": item["input"]})
            case "tool_search_call":
                self._called(item["call_id"], SEARCH, item["arguments"])
            case "function_call_output" | "custom_tool_call_output":
                self._answered(item["call_id"], output_text(item["output"]))
            case "tool_search_output":
                self._found(item)
            case "additional_tools":
                self._tools(item)
            case kind if kind in ACTIONS:
                action = item.get(ACTIONS[kind])
                arguments = action if isinstance(action, dict) else {"action": action}
                self._called(_call_id(item), kind.removesuffix("_call"), arguments)
            case kind if kind in ACTION_OUTPUTS:
                self._answered(_call_id(item), output_text(item.get("output")))

    def _message(self, item: Json) -> None:
        text = "".join(part.get("text", part.get("refusal")) for part in item["content"])
        role = item["role"]
        if role == "assistant":
            self._assistant().content.append(text)
        elif role == "user":
            self._place({"role": "user", "content": text})
            self._asked = True
        elif self._nodes:
            self._place({"role": "system", "content": text})
        elif text:
            self._leading.append(text)

    def _assistant(self) -> _Turn:
        if self._turn is None:
            self._turn = _Turn()
            self._nodes.append(self._turn)
        return self._turn

    def _place(self, message: Json) -> None:
        self._turn = None
        self._nodes.append(message)

    def _called(self, call_id: str | None, name: str, arguments: dict[str, Any]) -> None:
        call = _Call(call_id, name, arguments)
        self._assistant().calls.append(call)
        if call_id:
            self._waiting.setdefault(call_id, []).append(call)

    def _answered(self, call_id: str | None, output: str) -> None:
        self._turn = None
        self._asked = True
        waiting = self._waiting.get(call_id or "")
        if not waiting:
            _refuse(call_id)
        waiting.pop().output = output

    def _found(self, item: Json) -> None:
        """What a search loaded is its call's output; without a call (OpenAI's own search) a message."""
        if not self._waiting.get(item["call_id"] or ""):
            self._tools(item)
            return
        loaded = self._toolbox.load(item["tools"], "input", listed=False)
        self._answered(item["call_id"], listing(loaded))

    def _tools(self, item: Json) -> None:
        leads = not self._nodes
        loaded = self._toolbox.load(item["tools"], "input", listed=leads)
        if loaded and not leads:
            self._place({"role": "system", "content": _AVAILABLE + listing(loaded)})


def output_text(output: Any) -> str:
    """A call's output as text; what the model can't be shown is named in brackets."""
    if output is None or isinstance(output, str):
        return output or ""
    if not isinstance(output, list):
        output = [output]
    return "".join(_part_text(part) for part in output)


def _part_text(part: Any) -> str:
    if isinstance(part, str):
        return part
    if isinstance(part, dict):
        kind, text = part.get("type"), part.get("text")
        if isinstance(kind, str) and kind in _OMITTED:
            return _OMITTED[kind]
        if isinstance(text, str):
            return text
    return json.dumps(part, ensure_ascii=False)


def _call_id(item: Json) -> str | None:
    given = item.get("call_id") or item.get("id")
    return given if isinstance(given, str) else None


def _refuse(call_id: str | None) -> NoReturn:
    raise invalid(
        f"input has an output for call_id {spelled(call_id)}, but no call before it still waits for one.",
        "input",
        "invalid_tool_history",
    )
