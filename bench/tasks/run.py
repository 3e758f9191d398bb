"""Running tasks on a model: greedy, to the model's own stop, and what each answer was worth."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from heapq import nlargest
from pathlib import Path
from time import perf_counter
from typing import Any

from bench.tasks.calls import parse_calls
from bench.tasks.suite import Group
from bench.tasks.task import Reply, Task
from ninfer.api import (
    Channel,
    Done,
    Engine,
    EngineOptions,
    FinishReason,
    Generation,
    GenerationOptions,
    Output,
)
from ninfer.api.loading import load_frontend, opened
from ninfer.api.signature import prefill_signature, weight_formats
from ninfer.errors import CapacityError
from ninfer.frontend import Frontend, Prompt

_WARM_TOKENS = 4
_CUT = (FinishReason.OUTPUT_LIMIT, FinishReason.CONTEXT_CAPACITY)


class Outcome(StrEnum):
    """What an answer was: right, wrong, cut off by a limit, or empty of content and calls."""

    PASSED = "passed"
    WRONG = "wrong"
    CUT = "cut"
    UNANSWERED = "unanswered"


@dataclass(frozen=True)
class Run:
    """One answer. Seconds are of the model's work, rates those of this request beside the others.

    `decode_tok_s` and `tokens_per_round` leave the first token out, which belongs to prefill.
    `calls_expected`: does a right answer call tools? `call_failure`: why text with a marker was no call.
    """

    index: int
    outcome: Outcome
    finish_reason: str
    prompt_tokens: int
    reused_tokens: int
    completion_tokens: int
    reasoning_tokens: int
    prefill_seconds: float
    decode_seconds: float
    total_seconds: float
    prefill_tok_s: float | None
    decode_tok_s: float | None
    rounds: int
    reply: Reply
    calls_expected: bool
    call_failure: str | None
    call_mismatches: int

    @property
    def tokens_per_round(self) -> float:
        return (self.completion_tokens - 1) / self.rounds if self.rounds else 1.0


@dataclass(frozen=True)
class GroupRuns:
    """All runs of a group, the seconds that they took together, and the drafts that the engine counted."""

    name: str
    category: str
    runs: tuple[Run, ...]
    seconds: float
    drafted: int
    accepted: int


@dataclass(frozen=True)
class Subject:
    """A model to measure: its label, its artifact, and the prompts of every group."""

    label: str
    path: Path
    name: str
    architecture: str
    signature: str
    formats: tuple[str, ...]
    size_bytes: int
    positions: int
    prompts: tuple[tuple[Prompt, ...], ...]


def subject(
    label: str, path: Path, groups: Sequence[Group], progress: Callable[[str, int, int], None] | None = None
) -> Subject:
    """Convert the model if need be, identify it and render the prompts. Raises NInferError."""
    with opened(path, None, progress) as artifact:
        frontend = load_frontend(artifact)
        config = artifact.components["text"].config
        made = Subject(
            label=label,
            path=Path(artifact.path),
            name=str(artifact.metadata.get("name") or Path(artifact.path).stem),
            architecture=frontend.architecture,
            signature=prefill_signature(artifact),
            formats=tuple(weight_formats(artifact)),
            size_bytes=Path(artifact.path).stat().st_size,
            positions=int(config["max_position_embeddings"]),
            prompts=tuple(tuple(_render(frontend, task) for task in group.tasks) for group in groups),
        )
        artifact.close()
        return made


def engine_options(
    model: Subject,
    groups: Sequence[Group],
    *,
    kv_dtype: str,
    concurrency: int,
    reuse: bool = False,
    max_context: int | None = None,
    threads: int | None = None,
    draft_tokens: int = 0,
) -> EngineOptions:
    """An engine that holds the longest task, and as many of the longest as may run at a time.

    `max_context` is a limit of the user's on one sequence. Raises CapacityError naming the tasks that are
    longer than it or than the model knows.
    """
    from ninfer.ops import PAGE  # with torch: not before a model is wanted

    def paged(tokens: int) -> int:
        return -(-tokens // PAGE) * PAGE

    limit = model.positions if max_context is None else min(max_context, model.positions)
    needs: list[int] = []
    long: dict[str, int] = {}
    for group, prompts in zip(groups, model.prompts, strict=True):
        sizes = [len(p.tokens) + task.max_new for p, task in zip(prompts, group.tasks, strict=True)]
        needs += sizes
        if max(sizes) > limit:
            long[group.name] = max(sizes)
    if long:
        owner = f"{model.label} knows" if limit == model.positions else "--max-context allows"
        needed = ", ".join(f"{name} needs {size} tokens" for name, size in long.items())
        raise CapacityError(f"{needed}, but {owner} {limit}; leave those tasks out with --tasks")
    context = max_context or min(paged(max(needs)), model.positions)
    together = sum(paged(need) for need in nlargest(concurrency, needs))
    return EngineOptions(
        max_context=context,
        max_concurrency=concurrency,
        kv_capacity=max(together, context),
        kv_dtype=kv_dtype,
        prefix_reuse=reuse,
        max_pending=max(len(group.tasks) for group in groups) + concurrency,
        pending_timeout=None,
        threads=threads,
        spec="mtp" if draft_tokens else None,
        draft_tokens=draft_tokens,
    )


def run_groups(
    engine: Engine,
    groups: Sequence[Group],
    prompts: Sequence[Sequence[Prompt]],
    *,
    concurrency: int,
    reuse: bool = False,
) -> Iterator[GroupRuns]:
    """Answer one group after another, `concurrency` instances at a time, so that the engine's counts before
    and after belong to the group. What the first requests prepare is done before, unmeasured."""
    shortest = min((prompt for group in prompts for prompt in group), key=lambda prompt: len(prompt.tokens))
    for answer in [engine.generate(shortest, _greedy(_WARM_TOKENS, reuse=False)) for _ in range(concurrency)]:
        answer.text()
    for group, rendered in zip(groups, prompts, strict=True):
        before = engine.statistics()
        drafted, accepted, begin = before.drafted_tokens, before.accepted_tokens, perf_counter()
        with _closing(
            [
                engine.generate(prompt, _greedy(task.max_new, reuse=reuse))
                for prompt, task in zip(rendered, group.tasks, strict=True)
            ]
        ) as answers:
            runs = tuple(
                _run(index, task, answer)
                for index, (task, answer) in enumerate(zip(group.tasks, answers, strict=True))
            )
        after = engine.statistics()
        yield GroupRuns(
            group.name,
            group.category,
            runs,
            perf_counter() - begin,
            after.drafted_tokens - drafted,
            after.accepted_tokens - accepted,
        )


def read_reply(parts: Sequence[Output], task: Task) -> tuple[Reply, str | None, int]:
    """A task's reply from the texts of its channels; why its calls are none, and how many arguments don't
    fit. Space around the reasoning is the template's, not the model's."""
    visible = "".join(part.text for part in parts if part.channel is not Channel.REASONING)
    reasoning = "".join(part.text for part in parts if part.channel is Channel.REASONING)
    parsed = parse_calls(visible, task.tools)
    return Reply(parsed.content, reasoning.strip(), parsed.calls), parsed.failure, parsed.mismatches


def judge(task: Task, reply: Reply, finish: FinishReason) -> Outcome:
    """Only an answer that the model ended itself can be right."""
    if finish in _CUT:
        return Outcome.CUT
    if not reply.content.strip() and not reply.tool_calls:
        return Outcome.UNANSWERED
    return Outcome.PASSED if task.check(reply) else Outcome.WRONG


def _run(index: int, task: Task, answer: Generation) -> Run:
    parts: list[Output] = []
    done = None
    for event in answer:
        if isinstance(event, Output):
            parts.append(event)
        elif isinstance(event, Done):
            done = event
    assert done is not None
    statistics = done.statistics
    reply, failure, mismatches = read_reply(parts, task)
    return Run(
        index=index,
        outcome=judge(task, reply, statistics.finish_reason),
        finish_reason=str(statistics.finish_reason),
        prompt_tokens=statistics.prompt_tokens,
        reused_tokens=statistics.reused_tokens,
        completion_tokens=statistics.generated_tokens,
        reasoning_tokens=statistics.reasoning_tokens,
        prefill_seconds=statistics.prefill_seconds,
        decode_seconds=statistics.decode_seconds,
        total_seconds=statistics.total_seconds,
        prefill_tok_s=statistics.prefill_rate,
        decode_tok_s=statistics.decode_rate,
        rounds=statistics.rounds,
        reply=reply,
        calls_expected=bool(task.answer.get("tool_calls")),
        call_failure=failure,
        call_mismatches=mismatches,
    )


def _render(frontend: Frontend, task: Task) -> Prompt:
    return frontend.render(task.messages, tools=task.tools or None, thinking=task.thinking)


def _greedy(max_new: int, *, reuse: bool) -> GenerationOptions:
    return GenerationOptions(
        max_new=max_new, temperature=0.0, presence_penalty=0.0, frequency_penalty=0.0, prefix_reuse=reuse
    )


@contextmanager
def _closing(answers: list[Any]) -> Iterator[list[Any]]:
    """Whatever happens, no answer is made that nobody will read."""
    try:
        yield answers
    finally:
        for answer in answers:
            answer.close()
