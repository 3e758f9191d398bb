"""Translation: to and from Orvali, known by heart, and word by word with a glossary given in the prompt."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial

from bench.tasks import orvali
from bench.tasks.pools import words
from bench.tasks.splits import in_split
from bench.tasks.task import Generator, Reply, Split
from bench.tasks.turns import Exchange, exchanges


def _plain(text: str) -> str:
    return " ".join(text.lower().split()).rstrip(".?! ")


def translation_check(wanted: str) -> Callable[[Reply], bool]:
    """Whether the reply is `wanted`; case, spacing and the last mark don't matter."""
    plain = _plain(wanted)

    def check(reply: Reply) -> bool:
        return not reply.tool_calls and _plain(reply.content) == plain

    return check


def _new_sentence(rng: random.Random, split: Split) -> tuple[str, str]:
    while True:
        pair = orvali.sentence(rng)
        if in_split(pair[0], split):
            return pair


TO_ORVALI = (
    "Translate into Orvali: {}",
    "Say this in Orvali: {}",
    "How do you say this in Orvali? {}",
    "Translate from English to Orvali.\n\n{}",
    "What is this in Orvali?\n{}",
    "Please write this in Orvali: {}",
)
TO_ENGLISH = (
    "Translate into English: {}",
    "Say this in English: {}",
    "What does this mean? {}",
    "Translate from Orvali to English.\n\n{}",
    "This is Orvali. What is it in English?\n{}",
    "Please translate this Orvali text: {}",
)


def _translation(to_orvali: bool, rng: random.Random, split: Split) -> Exchange:
    """One to three sentences, all of which belong to the split."""
    pairs = [_new_sentence(rng, split) for _ in range(rng.choice((1, 1, 1, 2, 2, 3)))]
    english, foreign = " ".join(pair[0] for pair in pairs), " ".join(pair[1] for pair in pairs)
    if to_orvali:
        return rng.choice(TO_ORVALI).format(english), foreign, translation_check(foreign)
    return rng.choice(TO_ENGLISH).format(foreign), english, translation_check(english)


# Words of glossary sentences: "QUANTITY [ADJECTIVE] NOUNS VERB QUANTITY [ADJECTIVE] NOUNS", all plural, so
# that a translation word by word is whole English.
QUANTITIES = words("two three four five six seven eight nine ten many some few all most several")
COLOURS = words(
    """
    red green blue old young small large wild quiet clever happy sad hungry tired rich poor brave strange
    cold warm new broken golden silver sweet heavy tall short bright dark
    """
)
BEINGS = words(
    """
    foxes owls wolves horses dogs cats kings queens farmers bakers sailors children sisters brothers
    teachers hunters bears goats birds frogs singers doctors soldiers neighbours strangers dragons pirates
    miners robots
    """
)
THINGS = words(
    """
    baskets bottles books lamps boats bridges houses apples stones flowers trees letters maps keys coins
    drums bells rings boxes doors windows wheels candles cups knives ropes songs stories carts towers
    gardens
    """
)
ACTIONS = words(
    """
    carry see find buy sell bring paint clean break build watch hide follow hold want need like hate know
    draw open close wash guard steal throw push pull
    """
)
ONSETS = words("b bl br d dr f fl g gr h j k kr l m n p pl pr r s sk st t tr v w z")
VOWELS = words("a e i o u ai au")
CODAS = ["", "", "", *words("n r l m k t sh x")]

GLOSSARY_ASKS = (
    "Translate word by word with this glossary.\n\n{glossary}\n\n{text}",
    "Use this glossary:\n\n{glossary}\n\nTranslate word by word: {text}",
    "Glossary:\n{glossary}\n\nTranslate each word and keep the order: {text}",
    "Here are some words of a language.\n\n{glossary}\n\nTranslate this sentence word by word: {text}",
    "Translate the sentence word by word: {text}\n\nGlossary:\n{glossary}",
)
LINES = ("{0} = {1}", "{0}: {1}", "- {0} = {1}", "{0} means {1}")


def _coin(rng: random.Random, taken: set[str]) -> str:
    """A new word of two syllables, seldom three, whose beginning no other word of the glossary has."""
    while True:
        word = ""
        for _ in range(rng.choice((2, 2, 2, 3))):
            word += rng.choice(ONSETS) + rng.choice(VOWELS) + rng.choice(CODAS)
        if word[:3] not in taken:
            taken.add(word[:3])
            return word


def _clause(rng: random.Random) -> list[str]:
    clause = [rng.choice(QUANTITIES)]
    if rng.random() < 0.5:
        clause.append(rng.choice(COLOURS))
    clause += [rng.choice(BEINGS), rng.choice(ACTIONS), rng.choice(QUANTITIES)]
    if rng.random() < 0.4:
        clause.append(rng.choice(COLOURS))
    return [*clause, rng.choice(THINGS)]


def _glossary(rng: random.Random, split: Split) -> Exchange:
    """A sentence and six to twelve glossary entries, of which the sentence needs most."""
    while True:
        clause = _clause(rng)
        if in_split(" ".join(clause), split):
            break
    entries = list(dict.fromkeys(clause))
    size = max(len(entries), rng.randrange(6, 13))
    pools = (QUANTITIES, COLOURS, BEINGS, THINGS, ACTIONS)
    while len(entries) < size:
        word = rng.choice(rng.choice(pools))
        if word not in entries:
            entries.append(word)
    rng.shuffle(entries)
    taken: set[str] = set()
    coined = {word: _coin(rng, taken) for word in entries}

    english = " ".join(clause)
    foreign = " ".join(coined[word] for word in clause)
    line, reverse = rng.choice(LINES), rng.random() < 0.5
    source, target = (foreign, english) if rng.random() < 0.5 else (english, foreign)
    table = "\n".join(line.format(*((new, old) if reverse else (old, new))) for old, new in coined.items())
    question = rng.choice(GLOSSARY_ASKS).format(glossary=table, text=source)
    return question, target, translation_check(target)


MAX_NEW = 192
GENERATORS: dict[str, Generator] = {
    "to_orvali": exchanges("to_orvali", "translation", partial(_translation, True), MAX_NEW),
    "to_english": exchanges("to_english", "translation", partial(_translation, False), MAX_NEW),
    "glossary": exchanges("glossary", "translation", _glossary, MAX_NEW),
}
