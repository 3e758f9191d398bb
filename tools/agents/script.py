"""What the scripted model says: a call that reads a file, and after its result the words that it found.

Decided from the prompt alone, so it holds for any number of turns, retries and parallel conversations.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from typing import Any

SHELLS = ("Bash", "bash", "exec_command", "run_shell_command")
"""The agents' tools that run a command: Claude Code, opencode, Codex, Qwen Code."""
CODE = "exec"
"""Codex's only tool for its newest models, which takes JavaScript."""
COMMAND = "ls -1; cat notes.txt"
WITHOUT_TOOLS = "Notes"
THOUGHT = "The tool knows."
_WORD = re.compile(r"\bword-\w+")
_LISTED = re.compile(r"<tools>\n(.*?)\n</tools>", re.DOTALL)
_FILLERS = {"boolean": "false", "integer": "1", "number": "1", "array": "[]", "object": "{}"}


def answer(messages: Sequence[str], *, thinking: bool) -> str:
    """The whole answer to a prompt given as its messages, headers and all; the last one opens the answer.

    `thinking` says that the opener left a thinking block open.
    """
    return (f"{THOUGHT}\n</think>\n\n" if thinking else "") + _content(messages[:-1])


def _content(messages: Sequence[str]) -> str:
    asked = next((i for i in reversed(range(len(messages))) if _role(messages[i]) == "assistant"), -1)
    result = "\n".join(message for message in messages[asked + 1 :] if "<tool_response>" in message)
    if result:
        return f"done. It says {', '.join(dict.fromkeys(_WORD.findall(result))) or 'nothing'}."
    tool = next((tool for tool in _tools(messages) if tool.get("name") in (*SHELLS, CODE)), None)
    return call(tool) if tool else WITHOUT_TOOLS


def call(tool: dict[str, Any]) -> str:
    """A call of a shell tool in the model's form: the command and whatever else is required."""
    schema = tool.get("parameters") or {}
    properties: dict[str, Any] = schema.get("properties") or {}
    if tool["name"] == CODE:
        values = {
            "input": f"const r = await tools.exec_command({{cmd: {json.dumps(COMMAND)}}}); text(r.output);"
        }
    else:
        values = {"cmd" if "cmd" in properties else "command": COMMAND}
    for name in schema.get("required") or ():
        kind = (properties.get(name) or {}).get("type")
        values.setdefault(name, _FILLERS.get(str(kind), "Reads the notes"))
    parameters = "".join(f"<parameter={name}>\n{value}\n</parameter>\n" for name, value in values.items())
    return f"<tool_call>\n<function={tool['name']}>\n{parameters}</function>\n</tool_call>"


def _tools(messages: Sequence[str]) -> Iterator[dict[str, Any]]:
    """The functions that the first message lists, one JSON description a line."""
    listed = _LISTED.search(messages[0]) if messages else None
    for line in listed[1].splitlines() if listed else ():
        try:
            tool = json.loads(line)
        except ValueError:
            continue
        yield tool.get("function", tool)


def _role(message: str) -> str:
    return message.removeprefix("<|im_start|>").partition("\n")[0].strip()
