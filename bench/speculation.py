"""`python -m bench.speculation MODEL -k 3`: MTP drafts against plain decoding, the same tasks one after the
other.

Greedy. Says for each task whether the ids are the same, where they part if not, how many drafts stood at each
place, and the time of a round with and without.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence

from bench.tasks import generators
from bench.tasks.task import Task, rng_for
from ninfer.api import Done, Engine, EngineOptions, GenerationOptions, Statistics

DEFAULT = "jsonl32_variant,csv,story,function"


def tasks(names: Sequence[str], count: int) -> Iterator[tuple[str, Task]]:
    for name in names:
        for index in range(count):
            yield f"{name}/{index}", generators()[name](rng_for(name, "heldout", index), "heldout")


def answers(engine: Engine, asked: Sequence[tuple[str, Task]], *, penalty: float) -> list[Statistics]:
    found = []
    for _, task in asked:
        options = GenerationOptions(
            max_new=min(task.max_new, 400), thinking=task.thinking, prefix_reuse=False,
            temperature=0.0, presence_penalty=penalty, frequency_penalty=0.0,
        )  # fmt: skip
        *_, done = engine.chat(task.messages, options, tools=task.tools or None)
        assert isinstance(done, Done)
        found.append(done.statistics)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("-k", "--draft-tokens", default="3", help="with commas")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--tasks", default=DEFAULT)
    parser.add_argument("--count", type=int, default=2)
    parser.add_argument("--penalty", type=float, default=0.0)
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--no-cuda-graph", action="store_true")
    parser.add_argument("--lm-head-draft", action="store_true", help="drafts by the artifact's proposal head")
    given = parser.parse_args()
    asked = list(tasks(given.tasks.split(","), given.count))

    def load(drafts: int) -> Engine:
        options = EngineOptions(
            max_context=4096, device=given.device, threads=given.threads, warm_up=True,
            cuda_graph=not given.no_cuda_graph, spec="mtp" if drafts else None, draft_tokens=drafts,
            lm_head_draft=bool(drafts) and given.lm_head_draft,
        )  # fmt: skip
        return Engine.load(given.model, options)

    with load(0) as engine:
        answers(engine, asked[:1], penalty=given.penalty)
        plain = answers(engine, asked, penalty=given.penalty)
    for drafts in map(int, given.draft_tokens.split(",")):
        with load(drafts) as engine:
            answers(engine, asked[:1], penalty=given.penalty)
            fast = answers(engine, asked, penalty=given.penalty)
        head = "the proposal head" if given.lm_head_draft else "the whole head"
        print(f"{drafts} drafts, scored by {head}, on {engine.description.computes_on}")
        print(
            "task                 tokens same  plain ms  ms/round  faster drafted accepted  %     by position"
        )
        for (name, _), one, other in zip(asked, plain, fast, strict=True):
            ids, mine = one.token_ids, other.token_ids
            parted = next(
                (i for i, pair in enumerate(zip(ids, mine, strict=False)) if pair[0] != pair[1]), None
            )
            spec = other.speculation
            print(
                f"{name:20} {len(mine):6} {'yes' if ids == mine else f'@{parted}':5}"
                f" {1e3 * one.decode_seconds / max(one.rounds, 1):8.3f}"
                f" {1e3 * other.decode_seconds / max(other.rounds, 1):9.3f}"
                f" {(other.decode_rate or 0) / (one.decode_rate or 1):7.2f}"
                f" {spec.drafted:8} {spec.accepted:8} {100 * spec.accepted / max(spec.drafted, 1):5.1f}"
                f"  {spec.histogram()} {spec.fallback_steps} without"
            )
        total = [sum(getattr(s.speculation, name) for s in fast) for name in ("drafted", "accepted")]
        same = sum(a.token_ids == b.token_ids for a, b in zip(plain, fast, strict=True))
        print(f"{same} of {len(asked)} the same; {100 * total[1] / max(total[0], 1):.1f} % accepted in all\n")


if __name__ == "__main__":
    main()
