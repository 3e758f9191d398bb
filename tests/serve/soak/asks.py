"""What the clients ask: a pool of seeded requests whose answers are known, and ones never asked before."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

MODEL = "ninfer-nano"
CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
_WORDS = (
    *("river", "stone", "light", "seven", "apple", "window", "slow", "green", "under", "table", "walk"),
    *("three", "bird", "paper", "cold", "engine", "morning", "letter", "quiet", "road", "blue"),
)
_PATH = {
    "type": "object",
    "properties": {"path": {"type": "string", "maxLength": 12}, "line": {"type": "integer"}},
    "required": ["path", "line"],
    "additionalProperties": False,
}
_NUMBERS = {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 999}, "minItems": 25}
_POINT = {
    "type": "object",
    "properties": {"x": {"type": "integer"}, "name": {"enum": ["up", "down"]}},
    "required": ["x", "name"],
    "additionalProperties": False,
}


@dataclass(frozen=True)
class Ask:
    """A request's path and its body without `stream`."""

    path: str
    body: dict[str, Any]

    def streaming(self, stream: bool) -> dict[str, Any]:
        return {**self.body, "stream": stream}


def prose(rng: random.Random, words: int) -> str:
    return " ".join(rng.choice(_WORDS) for _ in range(words))


def ask(path: str, text: str, system: str | None = None, /, **more: Any) -> Ask:
    """A question in the form of that API."""
    body: dict[str, Any] = {"model": MODEL}
    if path == RESPONSES:
        body |= {"input": text, "store": False} | ({} if system is None else {"instructions": system})
    else:
        body["messages"] = [{"role": "user", "content": text}]
        if system is not None and path == CHAT:
            body["messages"].insert(0, {"role": "system", "content": system})
        elif system is not None:
            body["system"] = system
    return Ask(path, body | more)


def _named(kind: str, schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": kind, kind: {"name": "answer", "schema": schema}}


def _function(**more: Any) -> dict[str, Any]:
    return {"name": "read", "description": "Reads a line of a file.", "parameters": _PATH, **more}


def pool() -> list[Ask]:
    """Requests of all protocols, all of them seeded (by the server's --seed where they have no field)."""
    rng = random.Random(5)
    long = [prose(rng, 400) for _ in range(3)]
    quick: dict[str, Any] = {"enable_thinking": False}
    plain = {"thinking": {"type": "disabled"}}
    none = {"reasoning": {"effort": "none"}}
    chat_tool = {"tools": [{"type": "function", "function": _function()}]}
    return [
        ask(CHAT, "What is 48 + 76?", seed=3, max_tokens=80),
        ask(CHAT, "What is 12 * 7?", "Think briefly.", seed=2**63, max_tokens=60, temperature=1.5),
        ask(CHAT, long[0], "Go on.", seed=4, max_tokens=24, **quick),
        ask(
            CHAT, "Tell me of the sea.", max_tokens=40, n=2, logprobs=True, top_logprobs=3, temperature=1.2,
            seed=6, **quick,
        ),
        ask(
            CHAT, "Many numbers, please.", max_tokens=120, seed=8, logprobs=True, top_logprobs=20,
            response_format=_named("json_schema", _NUMBERS), **quick,
        ),
        ask(CHAT, "Where?", max_tokens=60, seed=9, response_format=_named("json_schema", _POINT), **quick),
        ask(CHAT, "Read line 3 of a.txt.", max_tokens=120, seed=1, tool_choice="required", **chat_tool),
        ask(CHAT, "Read line 4 of b.txt.", max_tokens=90, seed=5, tool_choice="auto", **chat_tool),
        ask(CHAT, "Say it again.", max_tokens=30, seed=7, stop=["e"], frequency_penalty=-1, **quick),
        ask(RESPONSES, "What is 31 + 17?", max_output_tokens=80),
        ask(RESPONSES, long[1], "Answer with one word.", max_output_tokens=16, **none),
        ask(
            RESPONSES, "Numbers!", max_output_tokens=110, **none,
            text={"format": {"type": "json_schema", "name": "n", "schema": _NUMBERS}},
        ),
        ask(
            RESPONSES, "Read line 9 of c.txt.", max_output_tokens=120, tool_choice="required",
            tools=[{"type": "function", **_function(strict=True)}],
        ),
        ask(
            RESPONSES, "Tell me of the wind.", max_output_tokens=40, temperature=1.3, top_logprobs=2,
            include=["message.output_text.logprobs"], **none,
        ),
        ask(MESSAGES, "What is 90 - 33?", max_tokens=80),
        ask(MESSAGES, long[2], "Carry on.", max_tokens=20, **plain),
        ask(
            MESSAGES, "Many numbers.", max_tokens=110, **plain,
            output_config={"format": {"type": "json_schema", "schema": _NUMBERS}},
        ),
        ask(
            MESSAGES, "Read line 2 of d.txt.", max_tokens=150, tool_choice={"type": "any"},
            tools=[{"name": "read", "description": "Reads a line.", "input_schema": _PATH}],
        ),
        ask(MESSAGES, "Tell me of stones.", max_tokens=40, stop_sequences=["the"], temperature=1.0, **plain),
    ]  # fmt: skip


COUNTED = [
    ("/v1/messages/count_tokens", {"model": MODEL, "messages": [{"role": "user", "content": "How many?"}]}),
    ("/v1/responses/input_tokens", {"model": MODEL, "input": "How many?"}),
    ("/tokenize", {"content": "How many tokens are these?"}),
    ("/detokenize", {"tokens": [5, 6, 7, 8]}),
]
REFUSED: list[tuple[str, bytes, int]] = [
    (CHAT, b"{", 400),
    (CHAT, b"[]", 400),
    (CHAT, b'{"model": "ninfer-nano", "messages": []}', 400),
    (CHAT, b'{"model": "other", "messages": [{"role": "user", "content": "a"}]}', 404),
    (CHAT, b'{"model": "ninfer-nano", "messages": [{"role": "user", "content": "a"}], "n": 9}', 400),
    (RESPONSES, b'{"model": "ninfer-nano", "input": "a", "previous_response_id": "resp_0"}', 404),
    (RESPONSES, b'{"model": "ninfer-nano", "input": 7}', 400),
    (MESSAGES, b'{"model": "x", "max_tokens": 0, "messages": [{"role": "user", "content": "a"}]}', 400),
    (MESSAGES, b'{"model": "x", "max_tokens": 9, "messages": "\xff"}', 400),
    ("/tokenize", b"{}", 400),
]
"""(path, body, status)."""


def fresh(rng: random.Random) -> Ask:
    """A question that was never asked, so that the prefix cache has to give others up."""
    path = rng.choice((CHAT, RESPONSES, MESSAGES))
    limit = {"max_output_tokens" if path == RESPONSES else "max_tokens": rng.randrange(1, 60)}
    system = prose(rng, rng.randrange(1, 80)) if rng.random() < 0.6 else None
    return ask(path, prose(rng, rng.choice((3, 20, 150, 500))), system, **limit)
