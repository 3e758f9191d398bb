"""The `messages` of a request as the conversation that chat templates read."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ninfer.serve.errors import ApiError, invalid
from ninfer.serve.messages.blocks import block_text, read_blocks, result_text, tool_input
from ninfer.serve.messages.fields import Json, as_list, as_object, as_text, kind
from ninfer.serve.messages.signature import opened
from ninfer.serve.messages.tools import Toolbox

_ROLES = ("user", "assistant", "system")
Message = dict[str, Any]


@dataclass
class _Turn:
    """Neighbouring messages of one role, as one; each block with its place in the request."""

    role: str
    where: str
    blocks: list[tuple[Json, str]] = field(default_factory=list)


def read_conversation(system: str, value: Any, box: Toolbox) -> tuple[list[Message], bool]:
    """The messages to render, and whether the last one is the answer's beginning.

    `system` leads, if there is any. Tool references are looked up in `box`, which remembers them.
    """
    turns = _turns(value)
    messages: list[Message] = [{"role": "system", "content": system}] if system else []
    waiting: list[str] = []  # calls that have no result yet
    for index, turn in enumerate(turns):
        final = index == len(turns) - 1
        match turn.role:
            case "system":
                text = "".join(block_text(block, where) for block, where in turn.blocks)
                if text:
                    messages.append({"role": "system", "content": text})
            case "user":
                messages += _user(turn, waiting, box, first=index == 0)
                waiting = []
            case _:
                _expect_results(waiting, turn.where)
                message = _assistant(turn)
                waiting = [call["id"] for call in message.get("tool_calls", ())]
                if not final:
                    messages.append(message)
                elif not all(block["type"] in ("text", "redacted_thinking") for block, _ in turn.blocks):
                    raise invalid(
                        f"{turn.where} ends the conversation and would be continued, which only text can be; "
                        f"end with a user message.",
                        "messages",
                        "assistant_prefill_not_supported",
                    )
                elif message["content"]:
                    return [*messages, message], True
    _expect_results(waiting, "messages")
    return messages, False


def fold_system(messages: list[Message]) -> list[Message]:
    """The same conversation for templates that allow a system message only at the start: the others become
    part of the user's text or tool result before them, else of the one after them. They must not make a user
    message of their own behind tool results, or templates would take it for a new question and drop the
    reasoning since the last."""
    folded: list[Message] = []
    held = ""
    for message in messages:
        if message["role"] == "system" and folded:
            note = _reminder(message["content"])
            if folded[-1]["role"] in ("user", "tool"):
                folded[-1]["content"] = _joined(folded[-1]["content"], note)
            else:
                held = _joined(held, note)
        else:
            message = dict(message)
            if held and message["role"] in ("user", "tool"):
                message["content"], held = _joined(held, message["content"]), ""
            folded.append(message)
    if held:
        folded.append({"role": "user", "content": held})
    return folded


def _reminder(text: str) -> str:
    return f"<system-reminder>\n{text.strip()}\n</system-reminder>"


def _joined(first: str, second: str) -> str:
    return f"{first}\n\n{second}" if first and second else first or second


def _turns(value: Any) -> list[_Turn]:
    turns: list[_Turn] = []
    for index, item in enumerate(as_list(value, "messages")):
        where = f"messages[{index}]"
        role = as_object(item, where).get("role")
        if role not in _ROLES:
            said = repr(role[:40]) if isinstance(role, str) else kind(role)
            raise invalid(f"{where} must be by user, assistant or system, not {said}.", "messages")
        if not turns or turns[-1].role != role or role == "system":
            turns.append(_Turn(role, where))
        where += ".content"
        turns[-1].blocks += (
            (block, f"{where}[{number}]")
            for number, block in enumerate(read_blocks(item.get("content"), where))
        )
    if not turns:
        raise invalid("messages is empty; send at least one message.", "messages")
    return turns


def _user(turn: _Turn, waiting: list[str], box: Toolbox, *, first: bool) -> list[Message]:
    """Tool results in the order of their calls, then what the user says."""
    results: dict[str, Message] = {}
    texts: list[str] = []
    for block, where in turn.blocks:
        if block["type"] != "tool_result":
            if block["type"] in ("tool_use", "thinking", "redacted_thinking"):
                raise invalid(f"{where} is {block['type']}, which only the assistant can send.", "messages")
            texts.append(block_text(block, where))
            continue
        call = as_text(block.get("tool_use_id"), f"{where}.tool_use_id")
        if texts:
            raise _history(f"{where} comes behind other content; tool results come first.")
        if call in results:
            raise _history(f"{where} is a second result of one call.")
        if call not in waiting and not first:
            raise _history(f"{where} names no call of the assistant message before it.")
        results[call] = {"role": "tool", "content": result_text(block, where, box), "tool_call_id": call}
    _expect_results([call for call in waiting if call not in results], turn.where)
    messages = [results[call] for call in waiting or results]
    if texts or not messages:
        messages.append({"role": "user", "content": "".join(texts)})
    return messages


def _assistant(turn: _Turn) -> Message:
    reasoning: list[str] = []
    texts: list[str] = []
    calls: list[dict[str, Any]] = []
    for block, where in turn.blocks:
        match block["type"]:
            case "thinking":
                text = as_text(block.get("thinking"), f"{where}.thinking")
                signature = block.get("signature")
                if not text and signature is not None:
                    text = opened(as_text(signature, f"{where}.signature"), f"{where}.signature")
                reasoning.append(text)
            case "redacted_thinking":
                pass
            case "tool_use":
                name = as_text(block.get("name"), f"{where}.name")
                call = as_text(block.get("id"), f"{where}.id")
                if not name:
                    raise invalid(f"{where}.name is empty.", f"{where}.name")
                if any(call == other["id"] for other in calls):
                    raise _history(f"{where} has the id of another call in its message.")
                function = {"name": name, "arguments": tool_input(block, where)}
                calls.append({"type": "function", "id": call, "function": function})
            case "tool_result":
                raise _history(f"{where} is a tool_result, which only the user can send.")
            case _:
                texts.append(block_text(block, where))
    message: Message = {"role": "assistant", "content": "".join(texts)}
    if any(reasoning):
        message["reasoning_content"] = "".join(reasoning)
    if calls:
        message["tool_calls"] = calls
    return message


def _expect_results(calls: list[str], where: str) -> None:
    if calls:
        raise _history(
            f"{where} must begin with a tool_result for each call of the assistant message before it; "
            f"{len(calls)} of them are missing."
        )


def _history(message: str) -> ApiError:
    return invalid(message, "messages", "invalid_tool_history")
