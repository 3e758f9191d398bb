"""Engines over tiny models with weights, and what a fresh forward pass says about their answers."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from ninfer.engine import Core, Handle, Marks, Policy, Request
from ninfer.engine.drafts import DraftSource, propose
from ninfer.engine.request import Ticket
from ninfer.formats import KvFormat
from ninfer.models import Batch, Model
from ninfer.ops import PAGE, SamplingParams
from ninfer.runtime import Limits, Program, plan_model
from ninfer.runtime.memory import allocate
from ninfer.runtime.records import Unit

from .harness import GREEDY, Constrained, Rule, Session, drain, settle

NEAR = 0.3
"""How far behind the best score a token may be where two ways of computing differ, in standard deviations."""


@dataclass(frozen=True)
class Reply:
    """Token ids, prompt tokens from the cache, and prompt tokens that went through the model."""

    ids: list[int]
    reused: int
    computed: int


@dataclass
class Desk:
    """An engine whose units of work are counted; `on_unit` sees each one after it has run."""

    model: Model
    concurrency: int = 1
    context: int = 1024
    chunk: int = 128
    capacity: int | None = None
    snapshots: int | None = None
    width: int = 1
    policy: Policy | None = None
    drafts: DraftSource | None = None
    kv_format: KvFormat = KvFormat.BF16
    on_unit: Callable[[Unit], None] | None = None
    prefilled: int = 0
    units: list[Unit] = field(default_factory=list)

    def __post_init__(self) -> None:
        limits = Limits(
            self.context,
            self.chunk,
            max_concurrency=self.concurrency,
            kv_capacity=self.capacity,
            state_slots=self.snapshots,
            width=self.width,
        )
        plan = plan_model(self.model, limits, kv_format=self.kv_format)
        self.program = Program(self.model, plan)
        self.core = Core(
            self._run, plan, public_tokens=self.model.public_tokens, policy=self.policy, drafts=self.drafts
        )

    def __enter__(self) -> Desk:
        return self

    def __exit__(self, *_: object) -> None:
        settle(self.core)
        self.core.stop()

    def _run(self, record: np.ndarray) -> np.ndarray:
        out = self.program.run(record)
        unit = Unit(record["unit"][0])
        self.units.append(unit)
        if unit is Unit.PREFILL:
            self.prefilled += int(record["columns"][0])
        if self.on_unit is not None:
            self.on_unit(unit)
        return out

    def submit(
        self,
        prompt: Sequence[int],
        count: int | None = 24,
        *,
        marks: Marks | None = None,
        sampling: SamplingParams = GREEDY,
        stop: int | None = None,
        rule: Rule | None = None,
        logprobs: int | None = None,
    ) -> Handle:
        session = Session(stop) if rule is None else Constrained(prompt, rule, stop=stop)
        request = Request(tuple(prompt), sampling, count, None, marks or Marks(), logprobs=logprobs)
        return self.core.submit(request, session)

    def ask(self, prompt: Sequence[int], count: int | None = 24, **options) -> Reply:
        """One request from beginning to end, alone."""
        before = self.prefilled
        ids, statistics, _ = drain(self.submit(prompt, count, **options))
        return Reply(ids, statistics.reused_tokens, self.prefilled - before)


@dataclass
class Luck:
    """Makes a share of a predictor's drafts right, which those of random weights nearly never are. `truth`
    knows what a request will say; takes the place of `ninfer.engine.core.propose`."""

    truth: Callable[[Ticket], Sequence[int]]
    share: float = 0.8
    dice: random.Random = field(default_factory=lambda: random.Random(1))

    def __call__(self, source: DraftSource | None, ticket: Ticket, *rest: Any) -> list[int]:
        drafts = list(propose(source, ticket, *rest))
        said, truth = len(ticket.output), self.truth(ticket)
        for index in range(len(drafts)):
            if said + index < len(truth) and self.dice.random() < self.share:
                drafts[index] = truth[said + index]
        return drafts


def fresh_logits(model: Model, tokens: Sequence[int], kv_format: KvFormat = KvFormat.BF16) -> torch.Tensor:
    """Scores after `tokens`, all of them fed at once."""
    count = len(tokens)
    pages = -(-count // PAGE)
    layout = replace(model.kv_layout(), format=kv_format)
    device = model.device
    memory = allocate(layout, model.state_layout(), pages=pages, slots=1, device=device)
    batch = Batch(
        tokens=torch.tensor(tokens, dtype=torch.int32, device=device),
        positions=torch.arange(count, dtype=torch.int32, device=device),
        rows=1,
        page_table=torch.arange(pages, dtype=torch.int32, device=device)[None],
        source_slots=torch.tensor([-1], dtype=torch.int32, device=device),
        target_slots=torch.tensor([0], dtype=torch.int32, device=device),
        extent=None if device.type == "cpu" else count,
    )
    with torch.inference_mode():
        return model.logits(model.forward(batch, memory)[-1:])[0]


def differences(
    model: Model,
    prompt: Sequence[int],
    ids: Sequence[int],
    cold: Sequence[int],
    kv_format: KvFormat = KvFormat.BF16,
    sampling: SamplingParams = GREEDY,
) -> int:
    """0 if two answers are equal; 1 if they part at a near-tie, or if drawn at random at tokens that could
    be drawn; otherwise an AssertionError."""
    if list(ids) == list(cold):
        return 0
    first = next(i for i, pair in enumerate(zip(ids, cold, strict=False)) if pair[0] != pair[1])
    scores = fresh_logits(model, [*prompt, *cold[:first]], kv_format).float().cpu()
    spread = scores.std()
    counts = torch.bincount(torch.tensor(cold[:first], dtype=torch.long), minlength=len(scores))
    scores = scores - sampling.presence_penalty * (counts > 0) - sampling.frequency_penalty * counts
    best = scores.max() if sampling.temperature <= 0 else scores.sort().values[-sampling.candidates]
    deficit = float((best - scores[ids[first]]) / spread)
    assert deficit <= NEAR, f"token {first} is {deficit:.2f} standard deviations behind"
    return 1
