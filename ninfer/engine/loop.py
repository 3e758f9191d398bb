"""One request from its prompt to its end: prefill chunks, then decode steps, publishing after each commit."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING

from ninfer.engine.events import Done, Event, Output, PromptProgress, Started, Statistics, ThinkingReport
from ninfer.engine.output import OutputSession
from ninfer.errors import CapacityError
from ninfer.events import FinishReason, Step

if TYPE_CHECKING:
    # The loop drives a Program through its records; it needs no tensor library of its own.
    from ninfer.runtime import Admission, Program, SamplingParams


@dataclass(frozen=True)
class Request:
    """What to run: prompt token ids, sampling, output tokens at most (None: to the end of the context), and
    the thinking budget in tokens (None: no limit, or the prompt doesn't start in thinking)."""

    prompt: tuple[int, ...]
    sampling: SamplingParams
    max_output: int | None = None
    thinking_budget: int | None = None


def run(
    program: Program, request: Request, session: OutputSession, cancelled: Callable[[], bool]
) -> Generator[Event]:
    """Carry out one request and yield its events; `cancelled` is asked once before each unit of work.

    A request that ends early, cancelled or abandoned, leaves the program at its last committed token.
    """
    admission = program.start(request.prompt, request.sampling, request.max_output)
    _check_thinking(request, session, admission)
    yield Started(admission.prompt_tokens, admission.reused_tokens)
    output: list[int] = []
    prefill_seconds = decode_seconds = 0.0
    tokens: tuple[int, ...] = ()
    while not tokens and not cancelled():
        begin = perf_counter()
        prefilled = program.prefill()
        prefill_seconds += perf_counter() - begin
        tokens = prefilled.tokens
        yield PromptProgress(prefilled.prompt_tokens, prefilled.processed_tokens, prefill_seconds)
    finish = None if tokens else FinishReason.CANCELLED
    while finish is None:
        step = session.accept(tokens)
        program.commit(step.committed)
        output += tokens[: step.committed]
        yield from _publish(step)
        finish = step.finish or _limit(admission, len(output))
        if finish is None and session.closer_due:
            program.force(session.closer)
            output += session.closer
            yield from _publish(session.commit_closer())
            finish = _limit(admission, len(output))
        if finish is None:
            if cancelled():
                finish = FinishReason.CANCELLED
            else:
                begin = perf_counter()
                tokens = program.decode().tokens
                decode_seconds += perf_counter() - begin
    yield from _publish(session.close())
    thinking = None
    if request.thinking_budget is not None:
        thinking = ThinkingReport(
            request.thinking_budget,
            session.thinking_model_tokens,
            session.control_tokens,
            session.control_tokens > 0,
        )
    yield Done(
        Statistics(
            finish_reason=finish,
            prompt_tokens=admission.prompt_tokens,
            reused_tokens=admission.reused_tokens,
            generated_tokens=len(output),
            reasoning_tokens=session.reasoning_tokens,
            prefill_seconds=prefill_seconds,
            decode_seconds=decode_seconds,
            token_ids=tuple(output),
            thinking=thinking,
        )
    )


def _publish(step: Step) -> Iterator[Output]:
    for delta in step.deltas:
        yield Output(delta.channel, delta.text)


def _limit(admission: Admission, generated: int) -> FinishReason | None:
    if generated < admission.output_limit:
        return None
    return FinishReason.CONTEXT_CAPACITY if admission.limited_by_context else FinishReason.OUTPUT_LIMIT


def _check_thinking(request: Request, session: OutputSession, admission: Admission) -> None:
    """A budget inside the output limit must leave room for the closer and one token of answer."""
    budget = request.thinking_budget
    if budget is None or session.thinking_remaining is None or budget >= admission.output_limit:
        return
    needed = budget + len(session.closer) + 1
    if needed > admission.output_limit:
        raise CapacityError(
            f"a thinking budget of {budget} tokens needs room for {needed} tokens with its closing text and "
            f"an answer, but the output is limited to {admission.output_limit}; lower the budget or raise "
            f"the limit"
        )
