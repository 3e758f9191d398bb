"""JSONL records by rule: the 32-record task of the measurements, and its variants with other numbers."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from bench.tasks.draft import Draft, exact, task_of
from bench.tasks.task import Task

Pick = Callable[[Sequence[str]], str]


@dataclass(frozen=True, slots=True)
class Layout:
    """Field names: a counter, a constant text, two rising numbers, a state with its rare and usual value."""

    counter: str
    constant: str
    first: str
    second: str
    state: str
    rare: str
    usual: str
    constants: tuple[str, ...]

    @property
    def fields(self) -> tuple[str, ...]:
        return self.counter, self.constant, self.first, self.second, self.state


RUNS = Layout(
    "id",
    "model",
    "prompt_tokens",
    "completion_tokens",
    "status",
    "warn",
    "ok",
    (
        "qwen3.8-27b",
        "qwen3.5-9b",
        "qwen3.6-35b",
        "ninfer-nano",
        "nano-23m",
        "llama-8b",
        "mistral-7b",
        "alpha-1",
        "delta-70b",
        "gamma-2b",
        "qwen3.5-4b",
        "qwen3.8-27b",
    ),
)
LAYOUTS = (
    Layout(
        "row",
        "sensor",
        "pressure",
        "humidity",
        "state",
        "alarm",
        "normal",
        ("north-1", "roof-3", "hall-2", "cellar-7", "tank-12"),
    ),
    Layout(
        "step",
        "host",
        "memory_mb",
        "latency_ms",
        "result",
        "slow",
        "fast",
        ("node-a", "node-b", "db-01", "web-14", "cache-5"),
    ),
    Layout(
        "number",
        "customer",
        "amount",
        "items",
        "type",
        "refund",
        "sale",
        ("Miller", "Novak", "Reed & Co", "Stone", "Olsen"),
    ),
)


@dataclass(frozen=True, slots=True)
class Rule:
    """Record k (1 to count): start + k - 1, base + step k, base2 + step2 k; rare if k % period == 0."""

    layout: Layout
    constant: str
    order: tuple[str, ...]
    count: int
    start: int
    base: int
    step: int
    base2: int
    step2: int
    period: int
    compact: bool = False

    @property
    def numbers(self) -> tuple[int, ...]:
        """All that decides the numbers of the records but their count."""
        return self.start, self.base, self.step, self.base2, self.step2, self.period


CANONICAL = Rule(RUNS, "qwen3.8-27b", RUNS.fields, 32, 1, 1000, 16, 64, 2, 5)


def records(rule: Rule) -> str:
    """The records, one a line, without a final line feed."""
    layout = rule.layout
    comma, colon = (",", ":") if rule.compact else (", ", ": ")
    values = {
        layout.counter: "%(counter)d",
        layout.constant: '"' + rule.constant + '"',
        layout.first: "%(first)d",
        layout.second: "%(second)d",
        layout.state: '"%(state)s"',
    }
    line = "{" + comma.join(f'"{field}"{colon}{values[field]}' for field in rule.order) + "}"
    return "\n".join(
        line
        % {
            "counter": rule.start + k - 1,
            "first": rule.base + rule.step * k,
            "second": rule.base2 + rule.step2 * k,
            "state": layout.usual if k % rule.period else layout.rare,
        }
        for k in range(1, rule.count + 1)
    )


_OPENINGS = (
    "Write exactly {count} JSONL records, one JSON object per line.",
    "Produce exactly {count} lines of JSONL.",
    "Generate {count} JSONL records.",
    "I need a JSONL file with exactly {count} records.",
    "Please output {count} JSON objects, one per line (JSONL).",
    "Make JSONL test data: exactly {count} records.",
)
_ORDERS = (
    "Every record has the fields {fields}, in this order.",
    "The fields are, in this order: {fields}.",
    "Fields in order: {fields}.",
    "Keep this field order: {fields}.",
)
_SPACED = (
    'Write each record as {pattern}, with ", " between fields and ": " after each key.',
    "Each line has the form {pattern} with one space after every comma and colon.",
    'Format: {pattern} (separators ", " and ": ").',
)
_COMPACT = (
    "Write compact JSON without spaces, as in {pattern}.",
    "Each line has the form {pattern}, with no space after commas and colons.",
)
_CLOSINGS = (
    "Output only the records and nothing else.",
    "Write nothing else: no heading, no code fence, no explanation.",
    "No other text.",
    "Answer with the lines only.",
)
_FORMULA = (
    'Record i (i = 1 to {count}) has {counter} = i, {constant} = "{text}", {first} = {base} + {step} * i '
    "(so {a} in the first record), {second} = {base2} + {step2} * i (so {b} in the first record), and "
    '{state} = "{rare}" if i is divisible by {period}, otherwise "{usual}".',
    'For record i, counting from 1 to {count}: {counter} is i, {constant} is "{text}", {first} is {base} + '
    '{step} * i, {second} is {base2} + {step2} * i, and {state} is "{rare}" when i is a multiple of {period} '
    'and "{usual}" otherwise.',
    'Rules for record i = 1, 2, ..., {count}:\n- {counter}: i\n- {constant}: always "{text}"\n- {first}: '
    "{base} + {step} * i ({a}, {a2}, ...)\n- {second}: {base2} + {step2} * i ({b}, {b2}, ...)\n- {state}: "
    '"{rare}" if i % {period} == 0, else "{usual}"',
    'Rules: {constant}="{text}", {counter}=i, {first}={base}+{step}i, {second}={base2}+{step2}i, '
    '{state}="{rare}" if i%{period}==0 else "{usual}", for i from 1 to {count}.',
)
_STEPS = (
    '{counter} counts up from {start} to {last}. {constant} is always "{text}". {first} starts at {a} and '
    'grows by {step} with every record. {second} starts at {b} and grows by {step2}. {state} is "{rare}" in '
    'every record whose position is a multiple of {period}, and "{usual}" in all others.',
    'Rules:\n- {counter}: {start}, {start2}, and so on up to {last}\n- {constant}: "{text}"\n- {first}: {a} '
    "in the first record, then {step} more in each\n- {second}: {b} in the first record, then {step2} more "
    'in each\n- {state}: "{rare}" in records number {period}, {period2}, ...; "{usual}" in the rest',
    '{constant} stays "{text}"; {counter} rises from {start} to {last} by 1; {first} begins at {a} and '
    "rises by {step}; {second} begins at {b} and rises by {step2}. Every {ordinal} record has {state} "
    '"{rare}", the others have "{usual}".',
)


_ORDINALS = ("", "", "2nd", "3rd", "4th", "5th", "6th", "7th", "8th", "9th")


def prompt(rule: Rule, pick: Pick) -> str:
    """The request for `records(rule)`, worded by `pick`.

    The formulas count from 1; records that count from elsewhere are described by first value and step.
    """
    layout, order = rule.layout, rule.order
    comma, colon = (",", ":") if rule.compact else (", ", ": ")
    shown = {
        layout.counter: str(rule.start),
        layout.constant: f'"{rule.constant}"',
        layout.first: str(rule.base + rule.step),
        layout.second: str(rule.base2 + rule.step2),
        layout.state: f'"{layout.usual}"',
    }
    pattern = "{" + comma.join(f'"{field}"{colon}{shown[field]}' for field in order[:2]) + comma + "...}"
    rules = pick(_FORMULA + _STEPS if rule.start == 1 else _STEPS).format(
        count=rule.count,
        counter=layout.counter,
        constant=layout.constant,
        text=rule.constant,
        first=layout.first,
        second=layout.second,
        state=layout.state,
        rare=layout.rare,
        usual=layout.usual,
        start=rule.start,
        start2=rule.start + 1,
        last=rule.start + rule.count - 1,
        base=rule.base,
        base2=rule.base2,
        step=rule.step,
        step2=rule.step2,
        a=rule.base + rule.step,
        a2=rule.base + 2 * rule.step,
        b=rule.base2 + rule.step2,
        b2=rule.base2 + 2 * rule.step2,
        period=rule.period,
        period2=2 * rule.period,
        ordinal=_ORDINALS[rule.period],
    )
    gap = "\n" if "\n" in rules else " "
    return gap.join(
        (
            pick(_OPENINGS).format(count=rule.count),
            pick(_ORDERS).format(fields=", ".join(order)),
            rules,
            pick(_COMPACT if rule.compact else _SPACED).format(pattern=pattern),
            pick(_CLOSINGS),
        )
    )


def _number(rng: random.Random, top: int) -> int:
    """Often a round number: people write 1000 more than 1387."""
    unit = rng.choice((100, 100, 50, 10, 10, 1) if top > 1000 else (10, 8, 4, 1))
    return rng.randrange(top // unit) * unit


def _start(rng: random.Random) -> int:
    return 1 if rng.random() < 0.65 else rng.choice((rng.randint(0, 99), rng.randint(100, 999)))


def _rule(rng: random.Random) -> Rule:
    """A rule of the canonical form (32 records, canonical layout) with other starts and steps."""
    while True:
        rule = replace(
            CANONICAL,
            constant=rng.choice(RUNS.constants),
            start=_start(rng),
            base=_number(rng, 6001),
            step=rng.randint(1, 40),
            base2=_number(rng, 301),
            step2=rng.randint(1, 20),
            period=rng.randint(2, 9),
        )
        if rule.numbers != CANONICAL.numbers:
            return rule


def _variant(rng: random.Random) -> Rule:
    """Any variant: other counts, layouts, field orders, compact JSON."""
    rule = _rule(rng)
    layout = RUNS if rng.random() < 0.6 else rng.choice(LAYOUTS)
    order = list(layout.fields)
    if layout is not RUNS and rng.random() < 0.5:
        rng.shuffle(order)
    return replace(
        rule,
        layout=layout,
        constant=rule.constant if layout is RUNS else rng.choice(layout.constants),
        order=tuple(order),
        count=32 if rng.random() < 0.4 else rng.randint(4, 40),
        compact=rng.random() < 0.15,
    )


def _draft(rule: Rule, pick: Pick) -> Draft:
    text = records(rule)
    return Draft(prompt(rule, pick), text, exact(text), (f"jsonl {rule.count} {rule.numbers}",))


def draw_32(rng: random.Random) -> Draft:
    """32 records in the canonical layout, never with the canonical numbers."""
    return _draft(_rule(rng), rng.choice)


def draw_canonical(rng: random.Random) -> Draft:
    """The canonical records in any wording: for the held-out split alone."""
    return _draft(CANONICAL, rng.choice)


def draw_variant(rng: random.Random) -> Draft:
    return _draft(_variant(rng), rng.choice)


def canonical_jsonl() -> Task:
    """The one 32-record task that measurements use; its numbers are in no training instance."""
    draft = _draft(CANONICAL, lambda options: options[0])
    return task_of("jsonl32", "structured", draft, [{"role": "user", "content": draft.prompt}])
