"""Structured output: JSONL and CSV by rule, JSON by schema, sorting, copying."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

from bench.tasks.draft import Draft, exact, generator
from bench.tasks.facts import THINGS, joined
from bench.tasks.jsonl import canonical_jsonl, draw_32, draw_canonical, draw_variant
from bench.tasks.pools import CITIES, COLOURS, FRUITS, NAMES, WORDS
from bench.tasks.task import Generator, Reply

__all__ = ["GENERATORS", "canonical_jsonl"]

# --- csv

_COLUMNS = (
    ("day", "hour", "index", "id", "row", "week"),
    ("count", "price", "total", "score", "distance", "weight", "level", "votes", "stock"),
)
_CYCLES = (
    ("city", CITIES),
    ("colour", COLOURS),
    ("fruit", FRUITS),
    ("name", NAMES),
    ("state", ("open", "closed", "busy", "idle", "done")),
    ("team", ("A", "B", "C", "D", "E")),
    ("day", ("Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Sun")),
)
_CSV = (
    "Write a CSV table with the header {header} and {rows} rows. {rules} Output only the table.",
    "Produce CSV: a header line ({header}), then exactly {rows} data lines. {rules} No other text.",
    "I need {rows} rows of CSV data under the header {header}. {rules} Write nothing else.",
    "Make a CSV file. Header: {header}. Rows: {rows}. {rules} Answer with the file only.",
)
_RISES = (
    "{column} starts at {start} and {verb} by {step} per row.",
    "{column}: first {start}, then {step} {more} in each row.",
    "The column {column} begins with {start} and {verb} by {step} each time.",
)
_CYCLE = (
    "{column} repeats {values}.",
    "{column} cycles through {values}, in this order.",
    "{column}: {values}, then again from the first.",
)


def draw_csv(rng: random.Random) -> Draft:
    rows = rng.randint(3, 16)
    first, second = (rng.choice(names) for names in _COLUMNS)
    columns: list[tuple[str, list[str]]] = []
    rules: list[str] = []
    for column, high in ((first, 20), (second, 500))[: rng.choice((1, 2, 2))]:
        step, start = rng.randint(1, 25 if high > 20 else 5), rng.randint(0, high)
        falls = column == second and rng.random() < 0.25
        if falls:
            start += step * rows
        signed = -step if falls else step
        columns.append((column, [str(start + signed * row) for row in range(rows)]))
        verb, more = ("falls", "less") if falls else ("rises", "more")
        rules.append(rng.choice(_RISES).format(column=column, start=start, step=step, verb=verb, more=more))
    for name, pool in rng.sample(_CYCLES, rng.choice((1, 1, 2))):
        if name == first:
            continue
        values = rng.sample(pool, rng.randint(2, 4))
        columns.append((name, [values[row % len(values)] for row in range(rows)]))
        rules.append(rng.choice(_CYCLE).format(column=name, values=", ".join(values)))
    order = list(range(len(columns)))
    if rng.random() < 0.3:
        rng.shuffle(order)
    header = ",".join(columns[index][0] for index in order)
    lines = zip(*(columns[index][1] for index in order), strict=True)
    text = "\n".join([header, *map(",".join, lines)])
    request = rng.choice(_CSV).format(header=header, rows=rows, rules=" ".join(rules))
    return Draft(request, text, exact(text), ("csv " + text,))


# --- json_schema

_SCHEMA = (
    "Here is a JSON schema:\n{schema}\n\nFacts: {facts}\n\nWrite the JSON object that the facts give, in "
    "the order of the schema, on one line. Leave out what the facts do not say.",
    "{facts}\n\nPut this into a JSON object that follows the schema\n{schema}\n\nOne line, properties in "
    "the schema's order, nothing that the text does not say.",
    "Extract the data from the text as JSON.\nSchema: {schema}\nText: {facts}\nAnswer with one JSON "
    "object on one line; omit unknown properties.",
    "Fill this schema: {schema}\nUse only these facts: {facts}\nReply with the object alone, on one line.",
)


def same_json(expected: Any) -> Callable[[Reply], bool]:
    """A check that wants a JSON text whose value is `expected`, types included, whatever its spacing."""
    wanted = json.dumps(expected, sort_keys=True)

    def check(reply: Reply) -> bool:
        try:
            return json.dumps(json.loads(reply.content), sort_keys=True) == wanted
        except (ValueError, RecursionError):
            return False

    return check


def draw_schema(rng: random.Random) -> Draft:
    thing = rng.choice(THINGS)
    value, subject = thing.subject(rng)
    key = rng.choice(thing.keys)
    entries: list[tuple[str, dict[str, Any], Any]] = [(key, {"type": "string"}, value)]
    said: list[str] = []
    required = [key]
    for fact in rng.sample(thing.facts, rng.randint(2, min(5, len(thing.facts)))):
        # A fact may be told but not asked for, or asked for but not told.
        told, asked = rng.choice(((True, True),) * 6 + ((True, False), (False, True)))
        value, words = fact.draw(rng)
        if told:
            said.append(words)
        if asked:
            key = rng.choice(fact.keys)
            entries.append((key, fact.schema, value if told else None))
            if told and rng.random() < 0.7:
                required.append(key)
    if rng.random() < 0.5:
        rng.shuffle(entries)
    schema: dict[str, Any] = {
        "type": "object",
        "properties": {key: shape for key, shape, _ in entries},
        "required": [key for key, _, _ in entries if key in required],
    }
    answer = {key: value for key, _, value in entries if value is not None}
    facts = f"{subject} {joined(said)}." if said else f"{subject} is all that is known."
    text = json.dumps(answer)
    request = rng.choice(_SCHEMA).format(schema=json.dumps(schema), facts=facts)
    return Draft(request, text, same_json(answer), ("schema " + text,))


# --- sort

_SORT = (
    "Sort these {what} {how}: {entries}. Answer with the sorted list only.",
    "Put the following {what} in order, {how}: {entries}",
    "Please sort {how}:\n{entries}",
    "{entries}\n\nList these {what} sorted {how}, separated by commas.",
)
_HOWS = {
    ("numbers", False): ("in ascending order", "from smallest to largest", "in increasing order"),
    ("numbers", True): ("in descending order", "from largest to smallest", "in decreasing order"),
    ("words", False): ("alphabetically", "in alphabetical order", "from a to z"),
    ("words", True): ("in reverse alphabetical order", "from z to a"),
}


def draw_sort(rng: random.Random) -> Draft:
    count = rng.randint(4, 12)
    down = rng.random() < 0.35
    if rng.random() < 0.6:
        what = "numbers"
        numbers = rng.sample(range(rng.choice((100, 1000))), count)
        entries = list(map(str, numbers))
        answer = list(map(str, sorted(numbers, reverse=down)))
    else:
        what = "words"
        entries = rng.sample(WORDS, count)
        answer = sorted(entries, reverse=down)
    text = ", ".join(answer)
    request = rng.choice(_SORT).format(
        what=what, how=rng.choice(_HOWS[what, down]), entries=", ".join(entries)
    )
    return Draft(request, text, exact(text), ("sort " + " ".join(entries),))


# --- copy

_COPY = (
    "Repeat the following text exactly:\n\n{text}",
    "Copy this text word for word and write nothing else:\n{text}",
    "{text}\n\nWrite the text above again, unchanged.",
    "Echo exactly what follows.\n\n{text}",
    "Return this unchanged:\n```\n{text}\n```\nDo not write the fence.",
)
_REVERSE = (
    "Reverse this list: {text}",
    "Write this list in reverse order, last entry first: {text}",
    "List these entries backwards, separated by commas: {text}",
    "{text}\n\nWrite the entries above in reverse order.",
)


def _entry(rng: random.Random) -> str:
    kind = rng.random()
    if kind < 0.5:
        return rng.choice(WORDS)
    if kind < 0.75:
        return str(rng.randrange(1000))
    return f"{rng.choice(WORDS)}-{rng.randrange(100)}"


def _sentence(rng: random.Random) -> str:
    words = rng.choices(WORDS, k=rng.randint(4, 10))
    if rng.random() < 0.3:
        words[rng.randrange(len(words))] = rng.choice((rng.choice(NAMES), str(rng.randrange(10_000))))
    return " ".join(words).capitalize() + rng.choice(".....!?")


def _code(rng: random.Random) -> str:
    return f"{rng.choice(WORDS)}_{rng.choice(WORDS)} = {rng.randrange(1000)}"


def _digits(rng: random.Random) -> str:
    return f"{rng.choice(WORDS)}: {rng.getrandbits(rng.choice((16, 24, 32))):x}"


def _copied(rng: random.Random) -> str:
    """Some 20 to 200 tokens."""
    kind = rng.random()
    if kind < 0.4:
        return " ".join(_sentence(rng) for _ in range(rng.randint(2, 12)))
    if kind < 0.6:
        return ", ".join(_entry(rng) for _ in range(rng.randint(6, 30)))
    if kind < 0.8:
        return "\n".join(_code(rng) for _ in range(rng.randint(3, 15)))
    return "\n".join(_digits(rng) for _ in range(rng.randint(2, 12)))


def draw_copy(rng: random.Random) -> Draft:
    if rng.random() < 0.3:
        entries = [_entry(rng) for _ in range(rng.randint(3, 8))]
        shown, text, wordings = ", ".join(entries), ", ".join(reversed(entries)), _REVERSE
    else:
        text = shown = _copied(rng)
        wordings = _COPY
    return Draft(rng.choice(wordings).format(text=shown), text, exact(text), ("copy " + text,))


GENERATORS: dict[str, Generator] = {
    "jsonl32": generator("jsonl32", "structured", draw_32, draw_canonical),
    "jsonl32_variant": generator("jsonl32_variant", "structured", draw_32),
    "jsonl": generator("jsonl", "structured", draw_variant),
    "csv": generator("csv", "structured", draw_csv),
    "json_schema": generator("json_schema", "structured", draw_schema),
    "sort": generator("sort", "structured", draw_sort),
    "copy": generator("copy", "structured", draw_copy),
}
