"""The `messages` of a request as the conversation that chat templates read."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ninfer.serve.errors import ApiError, invalid
from ninfer.serve.fields import Fields, spelled
from ninfer.serve.messages.blocks import block_text, read_blocks, result_text
from ninfer.serve.messages.tools import Toolbox
from ninfer.serve.sealing import opened

Message = dict[str, Any]


@dataclass
class _Turn:
    """Neighbouring messages of one role, as one; `path` is the first one's."""

    role: str
    path: str
    blocks: list[Fields] = field(default_factory=list)


def read_conversation(
    system: str, body: Fields, box: Toolbox, *, counting: bool = False
) -> tuple[list[Message], bool]:
    """The messages to render, and whether the last one is the answer's beginning. Raises `ApiError` 400.

    `system` leads, if there is any. Tool references are looked up in `box`, which remembers them. Where
    tokens are only counted, the conversation may end anywhere.
    """
    turns = _turns(body)
    messages: list[Message] = [{"role": "system", "content": system}] if system else []
    waiting: list[str] = []  # calls that have no result yet
    for index, turn in enumerate(turns):
        if turn.role == "system":
            if text := "".join(map(block_text, turn.blocks)):
                messages.append({"role": "system", "content": text})
        elif turn.role == "user":
            messages += _user(turn, waiting, box, first=index == 0)
            waiting = []
        else:
            _expect_results(waiting, turn.path)
            message = _assistant(turn)
            if index == len(turns) - 1:
                return _with_final(messages, message, turn, counting=counting)
            waiting = [call["id"] for call in message.get("tool_calls", ())]
            messages.append(message)
    if not counting:
        _expect_results(waiting, "The end of messages")
    return messages, False


def _turns(body: Fields) -> list[_Turn]:
    turns: list[_Turn] = []
    for message in body.objects("messages"):
        role = message.get("role")
        if role not in ("user", "assistant", "system"):
            # The member's path would make Claude Code send no system messages any more.
            raise invalid(
                f"{message.path} must be by user, assistant or system, not {spelled(role)}.", "messages"
            )
        if not turns or turns[-1].role != role or role == "system":
            turns.append(_Turn(role, message.path))
        turns[-1].blocks += read_blocks(message)
    if not turns:
        body.refuse("messages", "must be a non-empty array")
    return turns


def _user(turn: _Turn, waiting: list[str], box: Toolbox, *, first: bool) -> list[Message]:
    """Tool results in the order of their calls, then what the user says."""
    results: dict[str, Message] = {}
    texts: list[str] = []
    for block in turn.blocks:
        kind = block.get("type")
        if kind != "tool_result":
            if kind in ("tool_use", "thinking", "redacted_thinking"):
                block.refuse("type", f"is {kind}, which only assistant messages may have")
            texts.append(block_text(block))
            continue
        call = block.string("tool_use_id", required=True) or ""
        if texts:
            raise _history(f"{block.path} comes behind other content; tool results come first.")
        if call in results:
            raise _history(f"{block.path} is a second result of one call.")
        if call not in waiting and not first:
            raise _history(f"{block.path} names no call of the assistant message before it.")
        results[call] = {"role": "tool", "content": result_text(block, box), "tool_call_id": call}
    _expect_results([call for call in waiting if call not in results], turn.path)
    messages = [results[call] for call in waiting or results]
    if texts or not messages:
        messages.append({"role": "user", "content": "".join(texts)})
    return messages


def _assistant(turn: _Turn) -> Message:
    reasoning: list[str] = []
    texts: list[str] = []
    calls: list[Message] = []
    for block in turn.blocks:
        match block.get("type"):
            case "thinking":
                reasoning.append(_thinking(block))
            case "redacted_thinking":
                pass
            case "tool_use":
                calls.append(_call(block))
            case "tool_result":
                raise _history(f"{block.path} is a tool_result, which only user messages may have.")
            case _:
                texts.append(block_text(block))
    if len({call["id"] for call in calls}) < len(calls):
        raise _history(f"{turn.path} has two calls with one id.")
    message: Message = {"role": "assistant", "content": "".join(texts)}
    if any(reasoning):
        message["reasoning_content"] = "".join(reasoning)
    if calls:
        message["tool_calls"] = calls
    return message


def _thinking(block: Fields) -> str:
    """What was thought: the text, or what a signature of ours holds in its place."""
    text = block.string("thinking", required=True)
    signature = block.string("signature")
    if text or signature is None:
        return text or ""
    try:
        return opened(signature)
    except ValueError:
        block.refuse(
            "signature",
            "is one of this server's, but damaged; send it unchanged",
            "invalid_thinking_signature",
        )


def _call(block: Fields) -> Message:
    """An earlier call; its input is whatever object the client could make of it."""
    arguments = block.object("input")
    if arguments is None:
        block.refuse("input", "must be an object, not null")
    name = block.string("name", required=True)
    if not name:
        block.refuse("name", "must not be empty")
    function = {"name": name, "arguments": arguments.members}
    return {"type": "function", "id": block.string("id", required=True), "function": function}


def _with_final(
    messages: list[Message], message: Message, turn: _Turn, *, counting: bool
) -> tuple[list[Message], bool]:
    """An assistant message at the end is the beginning of the answer, if it says anything."""
    if any(block.get("type") in ("thinking", "tool_use") for block in turn.blocks):
        if counting:
            return [*messages, message], False
        raise invalid(
            f"{turn.path} ends the conversation and would be continued, which only text can be; "
            f"end with a user message.",
            "messages",
            "assistant_prefill_not_supported",
        )
    return ([*messages, message], True) if message["content"] else (messages, False)


def _expect_results(calls: list[str], path: str) -> None:
    if calls:
        raise _history(
            f"{path} must begin with a tool_result for each call of the assistant message before; "
            f"{len(calls)} are missing."
        )


def _history(message: str) -> ApiError:
    return invalid(message, "messages", "invalid_tool_history")
