"""`python -m bench.speculation MODEL -k 3 --rows 1,4`: MTP drafts against plain decoding, the same tasks, so
many at a time.

Greedy. Says for each task whether the ids are the same, where they part if not and how far the token there is
behind the best one, how many drafts stood at each place, and the time of a round with and without.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from bench.tasks import generators
from bench.tasks.task import Task, rng_for
from ninfer.api import Done, Engine, EngineOptions, GenerationOptions, Output, Statistics, TokenLogprob

DEFAULT = "jsonl32_variant,csv,story,function"
GREEDY: dict[str, Any] = {"temperature": 0.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}


@dataclass(frozen=True)
class Answer:
    """What was asked, in tokens, and what came of it."""

    prompt: tuple[int, ...]
    statistics: Statistics

    @property
    def ids(self) -> tuple[int, ...]:
        return self.statistics.token_ids


@dataclass(frozen=True)
class Parting:
    """The first place where two greedy answers differ, and how many logits the second one's token there is
    behind the best one after all that both have said."""

    index: int
    deficit: float


def tasks(names: Iterable[str], count: int) -> Iterator[tuple[str, Task]]:
    """Held-out instances by name."""
    for name in names:
        for index in range(count):
            yield f"{name}/{index}", generators()[name](rng_for(name, "heldout", index), "heldout")


def answers(
    engine: Engine,
    asked: Sequence[tuple[str, Task]],
    *,
    rows: int = 1,
    penalty: float = 0.0,
    limit: int = 400,
) -> list[Answer]:
    """Of at most `limit` tokens, `rows` at a time."""
    found = []
    for begin in range(0, len(asked), rows):
        running = []
        for _, task in asked[begin : begin + rows]:
            options = GenerationOptions(
                max_new=min(task.max_new, limit), thinking=task.thinking, prefix_reuse=False,
                **{**GREEDY, "presence_penalty": penalty},
            )  # fmt: skip
            running.append(engine.chat(task.messages, options, tools=task.tools or None))
        for one in running:
            *_, done = one
            assert isinstance(done, Done)
            found.append(Answer(tuple(one.prompt.tokens), done.statistics))
    return found


def likeliest(engine: Engine, ids: Sequence[int]) -> TokenLogprob:
    """The token after these, as a fresh prefill says, and the 20 best ones."""
    options = GenerationOptions(
        max_new=1, ignore_model_stops=True, raw=True, prefix_reuse=False, logprobs=20, **GREEDY
    )
    [found] = [one for e in engine.generate(ids, options) if isinstance(e, Output) for one in e.logprobs]
    return found


def parting(engine: Engine, wanted: Answer, found: Answer) -> Parting | None:
    """None if two answers to one prompt are the same; `engine` judges, which may be a plain one."""
    assert wanted.prompt == found.prompt
    if wanted.ids == found.ids:
        return None
    pairs = enumerate(zip(wanted.ids, found.ids, strict=False))
    index = next((i for i, (one, other) in pairs if one != other), -1)
    if index < 0:  # one goes on where the other one has ended
        return Parting(min(len(wanted.ids), len(found.ids)), math.inf)
    best = likeliest(engine, [*wanted.prompt, *wanted.ids[:index]])
    return Parting(index, best.top[0][1] - dict(best.top).get(found.ids[index], -math.inf))


def summary(drafts: int, rows: int, parted: Sequence[Parting | None]) -> str:
    """How many answers part."""
    apart = [one for one in parted if one is not None]
    worst = f", at most {max(one.deficit for one in apart):.3f} logits behind" if apart else ""
    return f"{drafts} drafts, {rows} at a time: {len(apart)} of {len(parted)} answers part{worst}"


def _table(
    asked: Sequence[tuple[str, Task]],
    plain: Sequence[Answer],
    fast: Sequence[Answer],
    parted: Sequence[Parting | None],
) -> None:
    print(
        "task                 tokens same  behind plain ms  ms/round  faster drafted accepted  %    lengths"
    )
    for (name, _), one, other, part in zip(asked, plain, fast, parted, strict=True):
        before, after = one.statistics, other.statistics
        spec = after.speculation
        print(
            f"{name:20} {len(other.ids):6} {'yes' if part is None else f'@{part.index}':5}"
            f" {'' if part is None else f'{part.deficit:.3f}':6}"
            f" {1e3 * before.decode_seconds / max(before.rounds, 1):8.3f}"
            f" {1e3 * after.decode_seconds / max(after.rounds, 1):9.3f}"
            f" {(after.decode_rate or 0) / (before.decode_rate or 1):7.2f}"
            f" {spec.drafted:8} {spec.accepted:8} {100 * spec.accepted / max(spec.drafted, 1):5.1f}"
            f"  {spec.histogram()} {spec.fallback_steps} without"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("-k", "--draft-tokens", default="3", help="with commas")
    parser.add_argument("--rows", default="1", help="answers at a time, with commas")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--tasks", default=DEFAULT, help="with commas, or all")
    parser.add_argument("--count", type=int, default=2)
    parser.add_argument("--penalty", type=float, default=0.0)
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--no-cuda-graph", action="store_true")
    parser.add_argument("--lm-head-draft", action="store_true", help="drafts by the artifact's proposal head")
    given = parser.parse_args()
    names = generators() if given.tasks == "all" else given.tasks.split(",")
    asked = list(tasks(names, given.count))
    several = [*map(int, given.rows.split(","))]

    def load(drafts: int) -> Engine:
        rows = max(several)
        options = EngineOptions(
            max_context=4096, device=given.device, threads=given.threads, warm_up=True,
            cuda_graph=not given.no_cuda_graph, spec="mtp" if drafts else None, draft_tokens=drafts,
            lm_head_draft=bool(drafts) and given.lm_head_draft, max_concurrency=rows,
            kv_capacity=4096 * rows, pending_timeout=None,
        )  # fmt: skip
        return Engine.load(given.model, options)

    with load(0) as engine:
        answers(engine, asked[:1], penalty=given.penalty)
        plain = {rows: answers(engine, asked, rows=rows, penalty=given.penalty) for rows in several}
        for drafts in map(int, given.draft_tokens.split(",")):
            with load(drafts) as drafting:
                answers(drafting, asked[:1], penalty=given.penalty)
                fast = {rows: answers(drafting, asked, rows=rows, penalty=given.penalty) for rows in several}
                head = "the proposal head" if given.lm_head_draft else "the whole head"
                print(f"{drafts} drafts, scored by {head}, on {drafting.description.computes_on}")
            for rows in several:
                parted = [parting(engine, *pair) for pair in zip(plain[rows], fast[rows], strict=True)]
                _table(asked, plain[rows], fast[rows], parted)
                every = [one.statistics.speculation for one in fast[rows]]
                drafted, accepted = sum(s.drafted for s in every), sum(s.accepted for s in every)
                share = 100 * accepted / max(drafted, 1)
                print(f"{summary(drafts, rows, parted)}; {share:.1f} % of the drafts accepted\n")


if __name__ == "__main__":
    main()
