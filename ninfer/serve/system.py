"""System messages in the middle of a conversation, for chat templates that take them only at its start."""

from __future__ import annotations

from typing import Any

from ninfer.errors import FrontendError
from ninfer.frontend import Frontend

Message = dict[str, Any]
_SYSTEM = ("system", "developer")


def takes_system_anywhere(frontend: Frontend) -> bool:
    """Does the chat template print system and developer messages that come after the first user message, and
    where they are? Many refuse them."""
    words = ("opening", "question", "remark", "reply", "notice")
    for role in _SYSTEM:
        roles = ("system", "user", role, "assistant", role)
        conversation = [
            {"role": role, "content": f"the {word}"} for role, word in zip(roles, words, strict=True)
        ]
        try:
            text = frontend.render(conversation).text
        except FrontendError:
            return False
        places = [text.find(f"the {word}") for word in words]
        if places[0] < 0 or places != sorted(places) or text.count("the remark") != 1:
            return False
    return True


def fold_system(messages: list[Message]) -> list[Message]:
    """The same conversation with one system message at most, at the start: later ones become part of the
    user's text or tool result before them, else of the one after them. They must not make a user message of
    their own behind tool results, or templates would take it for a new question and drop the reasoning since
    the last."""
    leading = 0
    while leading < len(messages) and messages[leading]["role"] in _SYSTEM:
        leading += 1
    folded: list[Message] = []
    if leading:
        opening = "\n\n".join(text for m in messages[:leading] if (text := _text(m["content"])))
        folded.append({"role": "system", "content": opening})
    held = ""
    for message in messages[leading:]:
        if message["role"] in _SYSTEM:
            note = f"<system-reminder>\n{_text(message['content']).strip()}\n</system-reminder>"
            if folded and folded[-1]["role"] in ("user", "tool"):
                folded[-1]["content"] = _joined(_text(folded[-1]["content"]), note)
            else:
                held = _joined(held, note)
        else:
            message = dict(message)
            if held and message["role"] in ("user", "tool"):
                message["content"], held = _joined(held, _text(message["content"])), ""
            folded.append(message)
    if held:
        folded.append({"role": "user", "content": held})
    return folded


def _text(content: Any) -> str:
    """The text of a message's content: a string, text parts, or None."""
    if isinstance(content, list):
        return "".join(part.get("text", "") for part in content)
    return content or ""


def _joined(first: str, second: str) -> str:
    return f"{first}\n\n{second}" if first and second else first or second
