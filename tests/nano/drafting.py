"""What drafts must leave as it is, asked of ninfer-nano on any device."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from statistics import median
from typing import Any

from bench.speculation import GREEDY, Parting, answers, likeliest, parting, summary, tasks
from ninfer.api import Done, Engine, EngineOptions, GenerationOptions, Output, TokenLogprob
from ninfer.frontend import Prompt

from .asking import NANO, held_out

OUTPUTS, DRAFTS = 32, 3
SAMPLED = {
    "temperature": 0.7, "top_k": 20, "top_p": 0.8, "presence_penalty": 0.5, "frequency_penalty": 0.3,
    "seed": 20260826,
}  # fmt: skip
PROBES = [("story", 0), ("kv512", 0)]
"""A short prompt, and one over more than two chunks."""


@dataclass(frozen=True)
class Told:
    """An answer: ids, what drafts came to, the scores behind the ids, and prompt tokens from the cache."""

    ids: tuple[int, ...]
    counters: tuple[object, ...]
    scores: tuple[TokenLogprob, ...]
    reused: int
    prefill_seconds: float

    @property
    def exact(self) -> tuple[object, ...]:
        """All that must be the same where the same was computed."""
        return self.ids, self.counters, self.scores


@dataclass(frozen=True)
class Engines:
    """With drafts, with drafts and without recordings, and without drafts."""

    drafting: Engine
    eager: Engine
    plain: Engine


@contextmanager
def engines(device: str, **changes: Any) -> Iterator[Engines]:
    chosen = {
        "max_context": 4096, "prefill_chunk": 256, "kv_dtype": "int8", "threads": 1, "device": device,
        "pending_timeout": None, **changes,
    }  # fmt: skip
    spec = {"spec": "mtp", "draft_tokens": DRAFTS, "max_concurrency": 2, "kv_capacity": 8192}

    with ExitStack() as stack:

        def load(**more: Any) -> Engine:
            return stack.enter_context(Engine.load(NANO, EngineOptions(**{**chosen, **more})))

        yield Engines(load(**spec), load(**spec, cuda_graph=False), load())


def probe(engine: Engine, name: str, index: int) -> list[int]:
    return list(engine.frontend.render(held_out(name, index).messages, thinking=False).tokens)


def options(**changes: Any) -> GenerationOptions:
    """Greedy, cold, of a fixed length and with scores, unless changed."""
    chosen = {
        "max_new": OUTPUTS, "ignore_model_stops": True, "raw": True, "prefix_reuse": False, "logprobs": 20,
        **GREEDY, **changes,
    }  # fmt: skip
    return GenerationOptions(**chosen)


def tell(events: Any) -> Told:
    every = list(events)
    done = every[-1]
    assert isinstance(done, Done)
    s = done.statistics
    spec = s.speculation
    counters = spec.rounds, spec.drafted, spec.accepted, spec.fallback_steps
    return Told(
        tuple(s.token_ids),
        (*counters, tuple(spec.per_position), bytes(spec.lengths)),
        tuple(one for event in every if isinstance(event, Output) for one in event.logprobs),
        s.reused_tokens,
        s.prefill_seconds,
    )


def answer(engine: Engine, prompt: Prompt | Sequence[int], **changes: Any) -> Told:
    """Alone; no more of the prompt is computed than is not reused."""
    before = engine.statistics().prefill_tokens
    generation = engine.generate(prompt, options(**changes))
    told = tell(generation)
    computed = engine.statistics().prefill_tokens - before
    assert computed == len(generation.prompt.tokens) - told.reused
    return told


def wrong(plain: Engine, prompt: Sequence[int], ids: Sequence[int]) -> list[tuple[int, float]]:
    """Each token against a prefill of all that stands before it: where it isn't the best, and how many logits
    it is behind."""
    found = []
    for index, token in enumerate(ids):
        best = likeliest(plain, [*prompt, *ids[:index]])
        if best.token_id != token:
            found.append((index, best.top[0][1] - dict(best.top).get(token, -1e9)))
    return found


def parted(plain: Engine, prompt: Sequence[int], ids: Sequence[int], cold: Sequence[int]) -> int:
    """0 if the answers are the same; 1 if they part at a near-tie, where a fresh prefill must choose what the
    cold answer has, or something that is as good in bf16."""
    if tuple(ids) == tuple(cold):
        return 0
    index = next(i for i, pair in enumerate(zip(ids, cold, strict=False)) if pair[0] != pair[1])
    best = likeliest(plain, [*prompt, *cold[:index]])
    assert best.top[0][1] - dict(best.top)[cold[index]] <= 2**-4
    assert best.top[0][1] - dict(best.top)[ids[index]] <= 0.5
    return 1


# Greedy answers to tasks


@dataclass(frozen=True)
class Compared:
    """Answers to tasks with so many drafts and at a time, against plain ones."""

    drafts: int
    rows: int
    parted: tuple[Parting | None, ...]

    @property
    def count(self) -> int:
        """Answers that part at a near-tie."""
        return sum(one is not None for one in self.parted)

    def __str__(self) -> str:
        return summary(self.drafts, self.rows, self.parted)


def compare(
    device: str, names: Iterable[str], drafts: Iterable[int], rows: Sequence[int], limit: int
) -> list[Compared]:
    """An AssertionError if a token in dispute is more than half a logit behind. The last ones come a
    second time."""
    chosen: dict[str, Any] = {
        "max_context": 4096, "threads": 1, "device": device, "pending_timeout": None
    }  # fmt: skip
    asked, found = list(tasks(names, 1)), []
    with Engine.load(NANO, EngineOptions(**chosen)) as plain:
        wanted = answers(plain, asked, limit=limit)
        for count in drafts:
            spec = {"spec": "mtp", "draft_tokens": count, "max_concurrency": 8, "kv_capacity": 32768}
            with Engine.load(NANO, EngineOptions(**chosen, **spec)) as engine:
                for together in rows:
                    told = answers(engine, asked, rows=together, limit=limit)
                    pairs = zip(wanted, told, strict=True)
                    found.append(Compared(count, together, tuple(parting(plain, *pair) for pair in pairs)))
                    print(found[-1])
                    assert all(one is None or one.deficit <= 0.5 for one in found[-1].parted), found[-1]
                    assert sum(one.statistics.drafted_tokens for one in told) > 0
                again = answers(engine, asked, rows=rows[-1], limit=limit)
                assert [one.ids for one in again] == [one.ids for one in told]
    return found


# The gate (section 11 of the measurement rules)


def check_gate(all_: Engines, name: str, index: int) -> list[tuple[int, float]]:
    """One probe, alone: steps 1 to 3; the positions at which the drafted answer isn't the best, none of them
    by more than half a logit."""
    prompt = probe(all_.plain, name, index)
    greedy = answer(all_.drafting, prompt)
    assert greedy.counters[2], "nothing was accepted"
    sampled = answer(all_.drafting, prompt, **SAMPLED)
    assert answer(all_.drafting, prompt).exact == greedy.exact
    assert answer(all_.eager, prompt).exact == greedy.exact
    assert answer(all_.eager, prompt, **SAMPLED).exact == sampled.exact
    for place in (0, 15, 31):
        fed = [*prompt, *greedy.ids[:place]]
        assert likeliest(all_.drafting, fed) == likeliest(all_.plain, fed)
    found = wrong(all_.plain, prompt, greedy.ids)
    assert all(deficit <= 0.5 for _, deficit in found), found
    return found


def check_pairs(all_: Engines) -> None:
    """Step 4: two at a time, both greedy and one of them sampled, say what each says alone."""
    prompts = [probe(all_.plain, *one) for one in PROBES]
    for changes in ({}, SAMPLED):
        seen = []
        for engine in (all_.drafting, all_.eager):
            before = engine.statistics()
            first = engine.generate(prompts[0], options())
            second = engine.generate(prompts[1], options(**changes))
            seen.append((tell(first).exact, tell(second).exact))
            after = engine.statistics()
            assert after.row_rounds - before.row_rounds > after.rounds - before.rounds, "no round of two"
        alone = answer(all_.drafting, prompts[0]), answer(all_.drafting, prompts[1], **changes)
        assert seen[0] == seen[1] == (alone[0].exact, alone[1].exact)


# Prefix replay (the same section)


def forget(engine: Engine) -> None:
    """What the cache holds; nothing may be running."""
    engine._core._pools.cache.clear()


def replay(engine: Engine, plain: Engine, text: str) -> tuple[list[Told], int]:
    """All that is asked of an engine whose cache serves a prompt again, continued or changed: every answer,
    and how many part from a cold one at a near-tie."""
    said: list[Told] = []

    def ask(prompt: Prompt | Sequence[int], reused: int | None, **changes: Any) -> Told:
        told = answer(engine, prompt, **{"prefix_reuse": True, **changes})
        assert reused is None or told.reused == reused, (told.reused, reused)
        said.append(told)
        return told

    def render(question: str) -> Prompt:
        messages = [{"role": "system", "content": text}, {"role": "user", "content": question}]
        return engine.frontend.render(messages, thinking=False)

    forget(engine)
    prompt = render("What does this say?")
    tokens = list(prompt.tokens)
    assert prompt.opener is not None
    # A checkpoint restored again and again, and what was computed directly in the same parts; sampled too.
    direct = ask(prompt, 0)
    assert direct.counters[2], "nothing was accepted"
    for _ in range(2):
        assert ask(prompt, prompt.opener).exact == direct.exact
    sampled = ask(prompt, prompt.opener, **SAMPLED)
    assert ask(prompt, prompt.opener, **SAMPLED).exact == sampled.exact
    forget(engine)
    assert ask(prompt, 0, **SAMPLED).exact == sampled.exact
    near = parted(plain, tokens, direct.ids, answer(plain, tokens).ids)

    # Another last message branches off before it.
    other = render("Write a story about this.")
    branched = ask(other, None)
    assert 0 < branched.reused < len(tokens)
    forget(engine)
    assert ask(other, 0).exact == branched.exact

    # Appended turns go on from the answer's own state.
    forget(engine)
    ask(prompt, 0)
    longer = [*tokens, *direct.ids]
    for tail in (other.tokens[-40:], other.tokens[-25:]):
        begin = len(longer) - 1
        longer = [*longer, *tail]
        told = ask(longer, begin)
        near += parted(plain, longer, told.ids, answer(plain, longer).ids)
        longer += told.ids

    # Exactly at the frontier, and behind an answer that was rewritten.
    exact = [*tokens, *direct.ids]
    told = ask(exact, len(exact) - 1)
    near += parted(plain, exact, told.ids, answer(plain, exact).ids)
    rewritten = [*tokens, *direct.ids[:9], *other.tokens[-30:]]
    told = ask(rewritten, None)
    assert told.reused > 0
    near += parted(plain, rewritten, told.ids, answer(plain, rewritten).ids)

    # A stop inside a round whose drafts stand beyond it, then another turn.
    place = stop_place(direct)
    forget(engine)
    ended = ask(prompt, 0, stop_token_ids=(direct.ids[place],))
    assert ended.ids == direct.ids[: place + 1]
    after = [*tokens, *ended.ids, *other.tokens[-20:]]
    told = ask(after, len(tokens) + place)
    near += parted(plain, after, told.ids, answer(plain, after).ids)
    cold, cached = (
        median(
            answer(engine, prompt, prefix_reuse=reuse, max_new=1, logprobs=None).prefill_seconds
            for _ in range(3)
        )
        for reuse in (False, True)
    )
    assert cached < cold
    return said, near


def stop_place(told: Told) -> int:
    """The index of a token that is new there and a draft that stood with another one behind it."""
    lengths, begin = told.counters[-1], 1
    assert isinstance(lengths, bytes)
    for length in lengths:
        for place in range(begin, begin + length - 1 if length <= DRAFTS else begin):
            if told.ids[place] not in told.ids[:place]:
                return place
        begin += 1 + (length if length <= DRAFTS else 0)
    raise AssertionError("no such round")


def check_replay(all_: Engines, text: str) -> int:
    """With recordings and without them; answers that part from a cold one."""
    said, near = replay(all_.drafting, all_.plain, text)
    again, _ = replay(all_.eager, all_.plain, text)
    assert [one.exact for one in again] == [one.exact for one in said]
    assert [one.reused for one in again] == [one.reused for one in said]
    return near
