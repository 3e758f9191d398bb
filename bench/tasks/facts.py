"""Facts about invented things as sentences and as JSON values, for the objects that a schema asks for."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from bench.tasks.pools import CITIES, COLOURS, NAMES, SURNAMES, WORDS

Draw = Callable[[random.Random], tuple[Any, str]]


@dataclass(frozen=True, slots=True)
class Fact:
    """One property: names it may have in a schema, its schema, and a draw of its value with its words."""

    keys: tuple[str, ...]
    schema: dict[str, Any]
    draw: Draw


@dataclass(frozen=True, slots=True)
class Thing:
    """What the facts are about: names for its subject's property, a draw of the subject, its facts."""

    keys: tuple[str, ...]
    subject: Draw
    facts: tuple[Fact, ...]


def _integer(keys: str, low: int, high: int, words: str) -> Fact:
    def draw(rng: random.Random) -> tuple[int, str]:
        value = rng.randint(low, high)
        return value, words.format(value)

    return Fact(tuple(keys.split()), {"type": "integer"}, draw)


def _tenths(keys: str, low: int, high: int, words: str) -> Fact:
    """A number with one decimal, drawn from `low` to `high` tenths."""

    def draw(rng: random.Random) -> tuple[float, str]:
        value = rng.randint(low, high) / 10
        return value, words.format(value)

    return Fact(tuple(keys.split()), {"type": "number"}, draw)


def _text(keys: str, pool: tuple[str, ...], words: str) -> Fact:
    def draw(rng: random.Random) -> tuple[str, str]:
        value = rng.choice(pool)
        return value, words.format(value)

    return Fact(tuple(keys.split()), {"type": "string"}, draw)


def _one_of(keys: str, pool: tuple[str, ...], words: str) -> Fact:
    fact = _text(keys, pool, words)
    return Fact(fact.keys, {"type": "string", "enum": list(pool)}, fact.draw)


def _truth(keys: str, yes: str, no: str) -> Fact:
    def draw(rng: random.Random) -> tuple[bool, str]:
        value = rng.random() < 0.5
        return value, yes if value else no

    return Fact(tuple(keys.split()), {"type": "boolean"}, draw)


def _several(keys: str, pool: tuple[str, ...], words: str) -> Fact:
    def draw(rng: random.Random) -> tuple[list[str], str]:
        value = rng.sample(pool, rng.randint(1, 3))
        return value, words.format(joined(value))

    return Fact(tuple(keys.split()), {"type": "array", "items": {"type": "string"}}, draw)


def joined(parts: list[str]) -> str:
    """`a, b and c`."""
    return parts[0] if len(parts) == 1 else ", ".join(parts[:-1]) + " and " + parts[-1]


def _person(rng: random.Random) -> tuple[str, str]:
    name = f"{rng.choice(NAMES)} {rng.choice(SURNAMES)}"
    return name, name


def _product(rng: random.Random) -> tuple[str, str]:
    name = rng.choice(WORDS)
    return name, f"The {name}"


def _host(rng: random.Random) -> tuple[str, str]:
    name = f"{rng.choice(WORDS)}-{rng.randint(1, 40)}"
    return name, f"Host {name}"


def _book(rng: random.Random) -> tuple[str, str]:
    title = f"The {rng.choice(WORDS).title()} of {rng.choice(CITIES)}"
    return title, f'"{title}"'


def _event(rng: random.Random) -> tuple[str, str]:
    name = rng.choice(("chess", "jazz", "poetry", "film", "dance", "quiz", "science")) + " evening"
    return name, f"The {name}"


_LANGUAGES = ("Dutch", "French", "German", "Greek", "Italian", "Polish", "Spanish", "Turkish")
_JOBS = ("baker", "cook", "driver", "farmer", "lawyer", "nurse", "painter", "pilot", "teacher", "tailor")
_DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
THINGS = (
    Thing(
        ("name", "full_name", "person"),
        _person,
        (
            _integer("age years", 18, 90, "is {} years old"),
            _text("city town home", CITIES, "lives in {}"),
            _text("job profession work", _JOBS, "works as a {}"),
            _several("languages speaks", _LANGUAGES, "speaks {}"),
            _truth("licence drives", "has a driving licence", "has no driving licence"),
            _integer("children kids", 0, 6, "has {} children"),
        ),
    ),
    Thing(
        ("product", "name", "article"),
        _product,
        (
            _integer("price price_eur cost", 1, 400, "costs {} euros"),
            _tenths("weight weight_kg", 1, 250, "weighs {} kg"),
            _text("colour color", COLOURS, "is {}"),
            _truth("in_stock available", "is in stock", "is sold out"),
            _one_of("size size_class", ("small", "medium", "large"), "comes in size {}"),
            _several(
                "materials made_of", ("wood", "steel", "glass", "wool", "paper", "stone"), "is made of {}"
            ),
        ),
    ),
    Thing(
        ("host", "name", "machine"),
        _host,
        (
            _integer("cores cpus", 1, 128, "has {} cores"),
            _integer("memory memory_gb ram", 1, 512, "has {} GB of memory"),
            _text("site location", CITIES, "stands in {}"),
            _truth("online up", "is online", "is offline"),
            _tenths("load load_average", 0, 99, "has a load of {}"),
            _one_of("role purpose", ("web", "database", "cache", "backup"), "serves as {} server"),
        ),
    ),
    Thing(
        ("title", "book", "name"),
        _book,
        (
            _text(
                "author writer",
                tuple(f"{n} {s}" for n in NAMES[:20] for s in SURNAMES[:12]),
                "was written by {}",
            ),
            _integer("pages page_count", 40, 900, "has {} pages"),
            _integer("year published", 1900, 2025, "appeared in {}"),
            _truth("available on_shelf", "is available", "is lent out"),
            _several("topics tags", WORDS[:60], "treats the topics {}"),
        ),
    ),
    Thing(
        ("event", "name", "title"),
        _event,
        (
            _text("city place", CITIES, "takes place in {}"),
            _one_of("day weekday", _DAYS, "is on {}"),
            _integer("seats capacity places", 10, 300, "has {} seats"),
            _truth("free free_entry", "is free of charge", "needs a ticket"),
            _several("speakers hosts", NAMES, "is hosted by {}"),
        ),
    ),
)
