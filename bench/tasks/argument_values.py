"""The values of arguments and results: names, titles, paths, dates, amounts, each of the split asked for."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

from bench.tasks.pools import words
from bench.tasks.splits import in_split, part
from bench.tasks.task import Split

Draw = Callable[[random.Random, Split], Any]


def pool(values: Sequence[str]) -> Draw:
    """One of `values`, which are divided between the splits."""
    parts: dict[Split, list[str]] = {"train": part(values, "train"), "heldout": part(values, "heldout")}
    return lambda rng, split: rng.choice(parts[split])


def any_of(*values: Any) -> Draw:
    return lambda rng, split: rng.choice(values)


def whole(low: int, high: int, step: int = 1) -> Draw:
    return lambda rng, split: rng.randrange(low, high + 1, step)


def fresh(make: Callable[[random.Random], str]) -> Draw:
    """A string that `make` puts together, of the right split."""

    def draw(rng: random.Random, split: Split) -> str:
        while True:
            value = make(rng)
            if in_split(value, split):
                return value

    return draw


CITIES = words(
    """
    Oslo Lima Paris Rome Berlin Madrid Vienna Prague Dublin Athens Cairo Tokyo Osaka Seoul Delhi Mumbai
    Sydney Perth Boston Denver Dallas Houston Toronto Montreal Geneva Zurich Basel Munich Hamburg Cologne
    Milan Turin Naples Venice Porto Lisbon Seville Valencia Lyon Nice Bordeaux Brussels Ghent Rotterdam
    Bergen Malmo Uppsala Helsinki Turku Tallinn Riga Vilnius Warsaw Krakow Budapest Bucharest Sofia
    Belgrade Zagreb Split Istanbul Ankara Tbilisi Baku Nairobi Accra Lagos Dakar Tunis Rabat Havana Quito
    Bogota Santiago Montevideo Manila Hanoi Bangkok Jakarta Auckland Wellington Leeds York Bristol Cardiff
    Glasgow Belfast Cork Galway
    """
)
_STARTS = words("Bel Cor Dal Fen Gal Har Kal Lin Mor Nor Pel Ros Sal Tor Val Ver Wes Zar")
_MIDDLES = words("a e i o u en an or il am")
_ENDS = words("burg dorf field ford ham mar mora nia stad ton vale ville wick")
PEOPLE = words(
    """
    Ada Anna Ben Bruno Carla Clara David Dora Emil Emma Erik Felix Flora Georg Greta Hanna Hugo Ida Ines
    Ivan Jonas Julia Karl Lena Leo Lina Lukas Mara Maria Milo Nadia Nils Nora Olga Oscar Otto Paul Petra
    Rosa Ruth Samuel Simon Sofia Tessa Theo Tom Vera Viktor Walter Zoe
    """
)
ADJECTIVES = words(
    """
    annual big blue cheap clean daily early final first fresh golden great green happy late little local
    long monthly new old open private public quick quiet red second secret short silent small special
    spring summer weekly winter yellow young
    """
)
NOUNS = words(
    """
    account banana bicycle book budget camera candle car chair check clock coffee concert course dance
    design dinner drill engine exam festival film flower garden guitar holiday house invoice kitchen
    ladder lamp letter lunch machine meeting menu mirror movie office order painting paper party phone
    picnic pizza plan printer project race repair report review river school ship soup station story table
    team ticket train trip walk wall window workshop
    """
)
STEMS = words(
    """
    main test data report notes budget config index setup server client model draft letter photo invoice
    backup summary table list archive readme build deploy users orders results
    """
)
ENDINGS = words("txt csv json md log py html yaml pdf xml")
FOLDERS = words(
    "docs home data src work tmp photos logs backup projects music mail notes reports shared public"
)
LANGUAGES = ("French", "German", "Spanish", "Italian", "Finnish", "Polish")
CURRENCIES = ("USD", "EUR", "GBP", "JPY", "CHF", "SEK", "NOK", "CAD")
ROOMS = words(
    """
    kitchen bathroom bedroom office garage hall cellar attic library workshop nursery studio pantry lounge
    conservatory gym laundry entrance
    """
)
OPENERS = (
    "I am late",
    "The train is delayed",
    "Dinner is ready",
    "I found the {n}",
    "Please bring the {n}",
    "The {a} {n} is here",
    "We meet at the {n}",
    "Call me about the {n}",
    "Don't forget the {n}",
    "The {n} is broken",
    "I like the {a} {n}",
    "Where is the {a} {n}?",
)


def town(rng: random.Random) -> str:
    if rng.random() < 0.7:
        return rng.choice(CITIES)
    return rng.choice(_STARTS) + rng.choice(_MIDDLES) + rng.choice(_ENDS)


def title(rng: random.Random) -> str:
    return f"{rng.choice(ADJECTIVES)} {rng.choice(NOUNS)}"


def _sentence(rng: random.Random) -> str:
    return rng.choice(OPENERS).format(a=rng.choice(ADJECTIVES), n=rng.choice(NOUNS))


def file_name(rng: random.Random) -> str:
    suffix = "" if rng.random() < 0.5 else rng.choice(("_", "-", "")) + str(rng.randrange(1, 2030))
    return f"{rng.choice(STEMS)}{suffix}.{rng.choice(ENDINGS)}"


def _folder(rng: random.Random) -> str:
    return "/" + "/".join(rng.sample(FOLDERS, rng.choice((1, 2, 2))))


def _path(rng: random.Random) -> str:
    return f"{_folder(rng)}/{file_name(rng)}"


def command_line(rng: random.Random) -> str:
    form = rng.choice(
        (
            "ls -l {d}",
            "cat {f}",
            "wc -l {f}",
            "mkdir {d}",
            "rm {f}",
            "grep {w} {f}",
            "du -sh {d}",
            "cp {f} {d}",
            "head -n {k} {f}",
            "python3 {w}.py",
            "git log -n {k}",
            "sort {f}",
        )
    )
    return form.format(d=_folder(rng), f=file_name(rng), w=rng.choice(STEMS), k=rng.randrange(2, 100))


def _date(rng: random.Random) -> str:
    return f"20{rng.randrange(24, 31)}-{rng.randrange(1, 13):02}-{rng.randrange(1, 29):02}"


def _clock(rng: random.Random) -> str:
    return f"{rng.randrange(24):02}:{rng.randrange(0, 60, 5):02}"


def code(rng: random.Random) -> str:
    return "".join(rng.choice("ABCDEFGHKLMNPRSTUVWXYZ") for _ in range(2)) + str(
        rng.randrange(1000, 1_000_000)
    )


def symbol(rng: random.Random) -> str:
    return "".join(rng.choice("ABCDEFGHIKLMNOPRSTUVWXYZ") for _ in range(rng.choice((3, 4))))


def errand(rng: random.Random) -> str:
    return f"{rng.choice(('clean', 'buy', 'repair', 'check', 'sell', 'paint'))} the {rng.choice(NOUNS)}"


def page(rng: random.Random) -> str:
    return f"https://{rng.choice(STEMS)}.example.org/{rng.choice(NOUNS)}"


def amount(rng: random.Random, split: Split) -> int | float:
    return rng.randrange(2, 1000) if rng.random() < 0.6 else cents(rng, split)


def cents(rng: random.Random, split: Split) -> float:
    """An amount with one or two decimals."""
    return (100 * rng.randrange(1, 900) + rng.randrange(1, 100)) / 100


def halves(rng: random.Random, split: Split) -> int | float:
    degrees = rng.randrange(30, 52)
    return degrees // 2 if degrees % 2 == 0 else degrees / 2


CITY, PERSON, TITLE, SENTENCE = fresh(town), pool(PEOPLE), fresh(title), fresh(_sentence)
PATH, FOLDER, DATE, CLOCK = fresh(_path), fresh(_folder), fresh(_date), fresh(_clock)
