"""A request: what was asked for, and what the worker keeps about it."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto
from typing import TYPE_CHECKING

from ninfer.engine.events import HostWork, Speculation, Statistics, ThinkingReport
from ninfer.engine.mailbox import Mailbox
from ninfer.engine.reuse import ReusePath
from ninfer.errors import ContextLengthError, OptionError, ThinkingBudgetError
from ninfer.events import MOST_LOGPROBS, FinishReason, TokenLogprob

if TYPE_CHECKING:
    from ninfer.engine.output import OutputSession
    from ninfer.engine.sequence import Sequence
    from ninfer.engine.taps import Tap
    from ninfer.ops import SamplingParams


_NO_WORK = HostWork()


@dataclass(frozen=True)
class Marks:
    """Where a prompt could be resumed one day, as token offsets: each message's beginning (`boundaries`,
    ascending), the end of the leading system or tools block (`preamble`), and the beginning of the header
    that opens the answer (`opener`)."""

    boundaries: tuple[int, ...] = ()
    preamble: int | None = None
    opener: int | None = None


@dataclass(frozen=True)
class Request:
    """What to run: prompt token ids, sampling, output tokens at most (None: to the end of the context), the
    thinking budget in tokens (None: no limit, or the prompt doesn't start in thinking), marks, whether the
    prefix cache may serve and learn from it, and how many of the likeliest tokens are told beside each
    content token (0 to 20; None: no log-probabilities)."""

    prompt: tuple[int, ...]
    sampling: SamplingParams
    max_output: int | None = None
    thinking_budget: int | None = None
    marks: Marks = Marks()
    reuse: bool = True
    logprobs: int | None = None


@dataclass(frozen=True)
class Budget:
    """What a request may use: `output` tokens, bound by the context or by its own number, and `context`
    positions in memory (the last output token needs none)."""

    output: int
    limited_by_context: bool
    context: int

    def finish(self, generated: int) -> FinishReason | None:
        """Why the output ends after `generated` tokens, if it does."""
        if generated < self.output:
            return None
        return FinishReason.CONTEXT_CAPACITY if self.limited_by_context else FinishReason.OUTPUT_LIMIT


def budget(
    request: Request, session: OutputSession, *, max_context: int, public_tokens: int, span: int
) -> Budget:
    """Check a request and size it; `span` is the longest text that can be forced.

    Raises `ContextLengthError`, `ThinkingBudgetError` or `OptionError`.
    """
    count = len(request.prompt)
    if not count:
        raise OptionError("the prompt is empty; at least one token is needed")
    for index, token in enumerate(request.prompt):
        if not 0 <= token < public_tokens:
            raise OptionError(f"token id {token} at position {index} is not below {public_tokens}")
    if count > max_context:
        raise ContextLengthError(
            f"the prompt has {count} tokens but the context holds {max_context}; shorten it or raise "
            f"--max-context"
        )
    wanted = request.max_output
    if wanted is not None and wanted < 0:
        raise OptionError(f"the output limit must not be negative, not {wanted}")
    room = max_context - count + 1
    by_context = wanted is None or wanted > room
    output = room if wanted is None else min(wanted, room)
    if request.logprobs is not None and not 0 <= request.logprobs <= MOST_LOGPROBS:
        raise OptionError(
            f"log-probabilities of 0 to {MOST_LOGPROBS} tokens can be told, not {request.logprobs}"
        )
    if request.thinking_budget is not None and request.thinking_budget < 1:
        raise OptionError(f"the thinking budget must be at least 1 token, not {request.thinking_budget}")
    # The session knows whether a thinking block is open, and it is the session that will ask for the closer.
    thinking, closer = session.thinking_remaining, len(session.closer)
    if thinking is not None:
        needed = thinking + closer + 1
        if not 1 <= closer <= span:
            raise OptionError(f"the closing text has {closer} tokens; it must have 1 to {span}")
        if thinking < output < needed:
            raise ThinkingBudgetError(
                f"a thinking budget of {thinking} tokens needs room for {needed} tokens with its closing "
                f"text and an answer, but the output is limited to {output}; lower the budget or raise the "
                f"limit"
            )
    return Budget(output, by_context, count + max(output - 1, 0))


class State(Enum):
    """Where a request stands."""

    WAITING = auto()
    PREFILL = auto()
    DECODE_READY = auto()
    CONTROL_READY = auto()
    """The thinking block has to be closed: tokens that aren't drawn come next."""
    FINISHED = auto()


@dataclass(eq=False)
class Ticket:
    """A request from submission to its end. All but `mailbox` and two flags belongs to the worker:
    `cancelled`, and `gone` once the consumer reads no more.

    Times are `perf_counter` seconds; `order` is the place in the queue.
    """

    order: int
    request: Request
    session: OutputSession
    budget: Budget
    submitted: float
    deadline: float | None
    mailbox: Mailbox = field(default_factory=Mailbox)
    cancelled: bool = False
    gone: bool = False
    state: State = State.WAITING
    sequence: Sequence | None = None
    taps: tuple[Tap, ...] = ()
    reused: int = 0
    reuse_path: ReusePath = ReusePath.ROOT
    output: list[int] = field(default_factory=list)
    admitted: float = 0.0
    first_token: float | None = None
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    rounds: int = 0
    drafts: list[int] = field(default_factory=list)
    """Of the model's predictor, for the next round."""
    speculation: Speculation = field(default_factory=Speculation)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    """Of content whose text is still to come."""
    work_before: HostWork | None = None
    """The engine's at admission."""

    def __post_init__(self) -> None:
        self.constrained = self.session.constrained
        self.plain = not self.constrained and self.request.logprobs is None

    def statistics(self, reason: FinishReason, now: float, work: HostWork = _NO_WORK) -> Statistics:
        """`work`: the engine's so far."""
        session, budget = self.session, self.request.thinking_budget
        thinking = None
        if budget is not None:
            controls = session.control_tokens
            thinking = ThinkingReport(budget, session.thinking_model_tokens, controls, controls > 0)
        admitted = self.admitted or now
        return Statistics(
            finish_reason=reason,
            prompt_tokens=len(self.request.prompt),
            reused_tokens=self.reused,
            generated_tokens=len(self.output),
            reasoning_tokens=session.reasoning_tokens,
            prefill_seconds=self.prefill_seconds,
            decode_seconds=self.decode_seconds,
            token_ids=tuple(self.output),
            thinking=thinking,
            queue_seconds=admitted - self.submitted,
            first_token_seconds=None if self.first_token is None else self.first_token - self.submitted,
            total_seconds=now - self.submitted,
            rounds=self.rounds,
            stop_string=session.stop_string,
            speculation=self.speculation,
            host=_NO_WORK if self.work_before is None else work.since(self.work_before),
            reuse_path=self.reuse_path,
        )
