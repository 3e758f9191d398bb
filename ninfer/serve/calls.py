"""One generation request, whatever protocol it came by, and the events of its answer.

The protocol packages (`chat`, `responses`, `messages`) turn bodies into a `GenerationRequest` and events into
bodies; `generation.Service` does everything in between and knows no protocol.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal

from ninfer.engine import Statistics
from ninfer.events import FinishReason


class Protocol(StrEnum):
    """The API by which a request came; the values are those of the request log."""

    CHAT = "openai_chat_completions"
    RESPONSES = "openai_responses"
    MESSAGES = "anthropic_messages"


@dataclass(frozen=True)
class Tool:
    """A function that the answer may call.

    `parameters` is its JSON schema with the members in the client's order. `strict`: arguments must follow
    the schema, enforced in sampling. `listed`: shown in the prompt's list of tools; a tool that isn't becomes
    known to the model by a message, but may be called all the same.
    """

    name: str
    parameters: Mapping[str, Any] = field(default_factory=dict)
    description: str | None = None
    strict: bool = False
    listed: bool = True

    def declared(self) -> dict[str, Any]:
        """The form that chat templates print and that the parser and the grammar read."""
        function: dict[str, Any] = {"name": self.name}
        if self.description is not None:
            function["description"] = self.description
        function["parameters"] = dict(self.parameters)
        return {"type": "function", "function": function}


@dataclass(frozen=True)
class ToolChoice:
    """May, must or must not the answer call a tool? `names` narrows which ones (None: all)."""

    mode: Literal["auto", "none", "required"] = "auto"
    names: tuple[str, ...] | None = None


@dataclass(frozen=True)
class JsonFormat:
    """The content must be one JSON value: any object (`schema` None) or one that follows the schema."""

    schema: Any = None


@dataclass(frozen=True)
class GenerationRequest:
    """What a client asked for. None: not stated, so that server flags, template and presets decide.

    `messages` have the form of `frontend.messages` (role, content, reasoning_content, tool_calls,
    tool_call_id). `max_output` tokens; 0 only renders the prompt. `stop` ends content and, if
    `stop_reasoning`, reasoning. `logprobs`: so many alternatives with each content token (0: only the token's
    own; None: none). `n` answers. `continue_final`: the last message is the answer's beginning.
    `effort` is one of `frontend.options.EFFORTS`. `client` is the value of X-Ninfer-Client.
    """

    protocol: Protocol
    model: str
    messages: list[dict[str, Any]]
    stream: bool = False
    tools: tuple[Tool, ...] = ()
    tool_choice: ToolChoice = ToolChoice()
    parallel_calls: bool = True
    response_format: JsonFormat | None = None
    max_output: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_reasoning: bool = True
    logprobs: int | None = None
    n: int = 1
    thinking: bool | None = None
    effort: str | None = None
    thinking_budget: int | None = None
    preserve_thinking: bool | None = None
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    continue_final: bool = False
    client: str | None = None


@dataclass(frozen=True)
class Alternative:
    """A token that could have stood there: its text as bytes, and its log-probability (natural)."""

    token_bytes: bytes
    logprob: float


@dataclass(frozen=True)
class TokenLogprob:
    """A content token, its log-probability before temperature and penalties, and the likeliest instead."""

    token_bytes: bytes
    logprob: float
    top: tuple[Alternative, ...] = ()


@dataclass(frozen=True)
class Timings:
    """Times in seconds: `prefill` from admission to the first token, `decode` from the first to the last.
    `ttft` and `total` count from the request's arrival. `drafted`, `accepted`: speculative tokens."""

    prompt_tokens: int
    cached_tokens: int
    generated_tokens: int
    prefill: float
    decode: float
    ttft: float | None = None
    total: float = 0.0
    drafted: int = 0
    accepted: int = 0


@dataclass(frozen=True)
class Begun:
    """The request has its memory; `cached_tokens` of `prompt_tokens` need no computation."""

    prompt_tokens: int
    cached_tokens: int


@dataclass(frozen=True)
class Progress:
    """`processed_tokens` of the prompt (cached ones included) are done, `seconds` after admission."""

    prompt_tokens: int
    cached_tokens: int
    processed_tokens: int
    seconds: float


@dataclass(frozen=True)
class Text:
    """New text; `timings` is the state so far."""

    channel: Literal["reasoning", "content"]
    text: str
    logprobs: tuple[TokenLogprob, ...] = ()
    timings: Timings | None = None


@dataclass(frozen=True)
class CallBegan:
    """A tool call whose name is known and declared; calls count from 0."""

    index: int
    name: str


@dataclass(frozen=True)
class CallArguments:
    """The next piece of the call's arguments: joined, the pieces are one JSON object. An empty piece only
    says that the call goes on: a value that doesn't stream takes long.

    `cut`: the piece only completes what the output limit cut off, see `CallEnded`."""

    index: int
    json: str
    cut: bool = False


@dataclass(frozen=True)
class CallEnded:
    """The call is complete; `arguments` are all pieces joined.

    `cut`: it was being written when the output limit was reached. Its arguments are JSON, but not what the
    model meant to send, so a protocol should let the client see that before it executes them."""

    index: int
    name: str
    arguments: str
    cut: bool = False


@dataclass(frozen=True)
class Usage:
    """Token counts of one answer; `completion_tokens` counts hidden and forced tokens too."""

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    reasoning_tokens: int


@dataclass(frozen=True)
class Finished:
    """The answer is over. `stop_string` is the one that ended it; `calls` how many tool calls it has."""

    reason: FinishReason
    usage: Usage
    timings: Timings
    statistics: Statistics
    stop_string: str | None = None
    calls: int = 0


AnswerEvent = Begun | Progress | Text | CallBegan | CallArguments | CallEnded | Finished
