"""What a running request tells the outside: text deltas, their channel, and why it ended.

These records cross rooms (frontend, engine, api, serve, cli) and import nothing.
"""

from dataclasses import dataclass
from enum import StrEnum


class Channel(StrEnum):
    """The stream a piece of text belongs to.

    TOOL is the exact text of tool calls, markers included, and the space around them. It is content if it
    turns out not to be a call; joined with the content in order, the channels are the whole visible answer.
    """

    CONTENT = "content"
    REASONING = "reasoning"
    TOOL = "tool"


class FinishReason(StrEnum):
    """Why a request ended; the values are the words of reports and logs."""

    STOP_TOKEN = "stop-token"
    STOP_STRING = "stop-string"
    OUTPUT_LIMIT = "output-limit"
    CONTEXT_CAPACITY = "context-capacity"
    CANCELLED = "cancelled"


MOST_LOGPROBS = 20
"""Likeliest tokens that can be told at each place."""


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A drawn token's natural log-probability, of the model's scores before temperature, penalties and masks,
    and the likeliest tokens at that place with theirs, best first."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Delta:
    """New text of one channel. `text` is never empty and never ends inside a character."""

    channel: Channel
    text: str


@dataclass(frozen=True, slots=True)
class Step:
    """What a batch of generated tokens means.

    `deltas` is the text that may be published now, in order; neighbours have different channels.
    `finish` is STOP_TOKEN or STOP_STRING if the output ends here, else None.
    `committed` is how many of the offered tokens belong to the output: all of them, or those up to and
    including the one that completed the stop. Tokens behind it must not be committed.
    `content_tokens` are the indexes of those among the offered tokens that belong to content, ascending: not
    reasoning, not a tool call's text, not a stop token.
    """

    deltas: tuple[Delta, ...] = ()
    finish: FinishReason | None = None
    committed: int = 0
    content_tokens: tuple[int, ...] = ()
