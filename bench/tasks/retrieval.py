"""Retrieval: values looked up in lists of up to 8,192 tokens, and sentences planted in long documents."""

from __future__ import annotations

import math
import random
import re
from collections.abc import Callable
from typing import Any

from bench.tasks.pools import words
from bench.tasks.splits import in_split
from bench.tasks.task import Generator, Reply, Split, Task
from bench.tasks.turns import opening

KV_SIZES = (512, 2048, 8192)
TURN_TOKENS = 14  # chat markers and the empty thinking block around a question

FIRST = words(
    """
    amber ancient bitter black blue bold brave brief bright broad bronze brown busy calm careful cheap
    clean clear clever cold cool copper cosy crimson curved damp dark dear deep distant double dry dull
    dusty eager early east easy empty equal even faint fair famous fancy fast final fine firm flat fresh
    friendly frozen gentle giant glad golden good grand grave great green grey happy hard heavy hidden
    high hollow honest huge icy idle inner ivory jolly keen kind large late lazy left light little local
    lonely long loose loud low lucky main mellow mild misty modern narrow neat new nice noble north odd
    old open orange outer pale patient pink plain polite poor proud pure purple quick quiet rapid rare raw
    ready red rich right ripe rough round royal rusty sad safe salty secret shallow sharp short shy silent
    silver simple slim slow small smooth soft solid sour south square steady steep stone strange strict
    strong sunny sweet swift tall tame tender thick thin tidy tiny tough upper vast violet warm weak west
    wet white wide wild wise wooden yellow young
    """
)
SECOND = words(
    """
    anchor apple arrow badge ball barn basin basket beach bear bell bench bird boat book boot bottle bowl
    box branch bread bridge broom brush bucket button cabin cable camel candle canoe card carpet castle
    cat chain chair cheese church circle clock cloud coat coin corner cottage cow crane crown cup curtain
    desert desk dog door dragon drum duck eagle engine falcon farm feather fence ferry field finger fire
    fish flag flower flute forest fountain fox frog garden gate glass glove goat grape hammer harbour hat
    hawk hill horse house island jacket jar kettle key kite knife ladder lake lamp leaf lemon letter
    library lion lock map market meadow mill mirror mountain mouse nail needle nest oak ocean orchard
    otter oven owl palace paper path pear pearl pencil piano pillow pine pipe planet plate pocket pond
    potato rabbit raven ring river road robin rock roof room rope rose sail salmon school shelf shell ship
    shirt shoe shop signal sky snake spoon spring star station stove street summit swan table tailor
    temple tent thread tiger tower town trail train tree trumpet tunnel turtle valley vase village violin
    wagon wall well whale wheel willow window wing winter wolf yard
    """
)
VALUE_WORDS = words(
    """
    acorn basil cedar cobalt coral cotton fern flax ginger granite hazel honey indigo iron jade jasmine
    juniper lava lilac linen lotus maple marble mint moss nickel nutmeg olive onyx opal pepper plum quartz
    ruby saffron sage sand satin silk slate steel sugar thyme tin topaz tulip velvet walnut wheat wool
    zinc
    """
)

_PIECE = re.compile(r" ?[A-Za-z]+|-[A-Za-z]+|[0-9]|\n+| (?=[0-9])| ?[^\w\s]")
WORD_TOKENS = 1.10  # tokens an English word of these lists takes in our vocabulary, a little too many


def estimated_tokens(text: str) -> float:
    """Tokens of `text` in a vocabulary of about 8,000: a digit or a mark is one, a word a little more."""
    pieces = _PIECE.findall(text)
    words = sum(1 for piece in pieces if piece[-1].isalpha())
    return len(pieces) + (WORD_TOKENS - 1.0) * words


def value_check(value: str) -> Callable[[Reply], bool]:
    """Whether the reply is the value alone; case, a final full stop and quotes don't matter."""
    wanted = value.lower()

    def check(reply: Reply) -> bool:
        return not reply.tool_calls and reply.content.strip().strip("\"'`.").lower() == wanted

    return check


HEADERS = (
    "Here is a list of keys and values.",
    "Below is a list of entries, one a line.",
    "These are the entries of a register:",
    "Read the following entries carefully.",
    "The table holds one key and one value a line.",
    "Remember these keys and values:",
    "List of entries:",
    "This is a key-value list.",
)
QUESTIONS = (
    "What is the value of {}?",
    "Which value belongs to {}?",
    "Give the value of the key {}.",
    "Look up the key {}.",
    "Find the value that belongs to {}.",
    "What does the list say for {}?",
    "Tell me the value of {}.",
    "Which value does the key {} have?",
)
ONLY = ("Answer with the value only.", "Reply with the value only.", "Give only the value.", "")


def _ask(rng: random.Random, key: str) -> str:
    return f"{rng.choice(QUESTIONS).format(key)} {rng.choice(ONLY)}".rstrip()


class _Entries:
    """Draws keys and values of one list: one style a list, nothing twice."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.pairs = rng.random() < 0.75
        style = rng.random()
        self.width = rng.choice((4, 5, 6)) if style < 0.5 else 0  # 0: widths differ from line to line
        self.numbers = style < 0.75
        self.seen: set[str] = set()

    def key(self, split: Split | None = None) -> str:
        """A new key; of `split` where given.

        A pair's halves come from two lists, so no two keys are mirrored; a number occurs with one word only.
        """
        choice = self.rng.choice
        while True:
            if self.pairs:
                key = mark = f"{choice(FIRST)}-{choice(SECOND)}"
            else:
                mark = str(self.rng.randrange(100, 1000))  # of equal width: no key begins another one
                key = choice(SECOND) + mark
            if mark not in self.seen and (split is None or in_split(key, split)):
                self.seen.add(mark)
                return key

    def value(self) -> str:
        while True:
            if self.numbers:
                width = self.width or self.rng.choice((4, 5, 6))
                value = str(self.rng.randrange(10 ** (width - 1), 10**width))
            else:
                value = f"{self.rng.choice(VALUE_WORDS)} {self.rng.randrange(10, 1000)}"
            if "=" + value not in self.seen:
                self.seen.add("=" + value)
                return value


def _key_values(
    rng: random.Random,
    split: Split,
    name: str,
    tokens: float,
    depths: list[float],
    count: Callable[[str], float],
    *,
    question_first: bool = False,
) -> Task:
    """A list that fills a prompt of `tokens`, then one question per depth, each in a turn of its own.

    question_first: the first question stands before the list, so that it must be kept in mind.
    """
    entries = _Entries(rng)
    header = rng.choice(HEADERS)
    asked = [entries.key(split) for _ in depths]
    questions = [_ask(rng, key) for key in asked]

    lines: list[str] = []
    values = [entries.value() for _ in asked]
    messages = opening(rng)
    used = count(header) + 4 + sum(count(message["content"]) for message in messages)
    used += sum(count(question) + TURN_TOKENS for question in questions)
    used += sum(count(value) for value in values[:-1])
    used += sum(count(f"{key}: {value}\n") for key, value in zip(asked, values, strict=True))
    while True:
        line = f"{entries.key()}: {entries.value()}"
        used += count(line + "\n")
        if used > tokens:
            break
        lines.append(line)
    # Of n lines the question at depth d gets line floor(d n); deeper insertions don't shift it.
    total = len(lines) + len(asked)
    for depth, key, value in sorted(zip(depths, asked, values, strict=True)):
        lines.insert(min(int(depth * total), len(lines)), f"{key}: {value}")

    block = header + "\n\n" + "\n".join(lines)
    for index, question in enumerate(questions):
        text = question
        if index == 0:
            text = f"{question}\n\n{block}" if question_first else f"{block}\n\n{question}"
        messages.append({"role": "user", "content": text})
        if index < len(questions) - 1:
            messages.append({"role": "assistant", "content": values[index]})
    answer = values[-1]
    return Task(name, "retrieval", messages, {"content": answer}, value_check(answer), max_new=24)


def kv_at(
    rng: random.Random,
    split: Split,
    tokens: int,
    depth: float,
    count: Callable[[str], float] = estimated_tokens,
) -> Task:
    """Retrieval from a prompt of 90 to 98 % of `tokens`; the asked line is at `depth` (0 first, 1 last).

    count: tokens of a text; pass a tokenizer's for exact sizes.
    """
    name = f"kv{tokens}"
    return _key_values(rng, split, name, tokens * rng.uniform(0.955, 0.98), [depth], count)


def _sized(tokens: int) -> Generator:
    def generate(rng: random.Random, split: Split) -> Task:
        return kv_at(rng, split, tokens, rng.random())

    return generate


def kv_first(rng: random.Random, split: Split) -> Task:
    """A list of 256 to 2,048 tokens that follows its question."""
    tokens = math.exp(rng.uniform(math.log(256), math.log(2048)))
    return _key_values(
        rng, split, "kv_first", tokens * 0.95, [rng.random()], estimated_tokens, question_first=True
    )


def kv_many(rng: random.Random, split: Split) -> Task:
    """A list of 256 to 4,096 tokens and two to four questions about it, in following turns."""
    tokens = math.exp(rng.uniform(math.log(256), math.log(4096)))
    depths = [rng.random() for _ in range(rng.choice((2, 3, 3, 4)))]
    return _key_values(rng, split, "kv_many", tokens * 0.95, depths, estimated_tokens)


PEOPLE = words(
    """
    Ada Ben Clara David Emma Felix Greta Hugo Ines Jonas Karla Leon Mara Nils Olga Paul Rosa Simon Tessa
    Viktor
    """
)
# What is hidden: the sentence, the question, and whether the value is a number (else a word and a number).
NEEDLES = (
    ("The access code of the {s} is {v}.", "What is the access code of the {s}?", True),
    ("The password for the {s} is {v}.", "What is the password for the {s}?", False),
    ("{p} hid {v} coins under the {s}.", "How many coins did {p} hide under the {s}?", True),
    ("The number painted on the {s} is {v}.", "Which number is painted on the {s}?", True),
    ("The secret word of the {s} is {v}.", "What is the secret word of the {s}?", False),
    ("The safe behind the {s} opens with {v}.", "With what does the safe behind the {s} open?", True),
    ("{p} gave the {s} the code name {v}.", "Which code name did {p} give the {s}?", False),
    ("The key of the {s} carries the mark {v}.", "Which mark does the key of the {s} carry?", False),
)
FILLERS = (
    "In the morning the {a} {n} lay quiet and nobody was in a hurry.",
    "{p} walked past the {a} {n} and thought about the weather.",
    "Some people say that a {n} is worth more than a {m}.",
    "The {a} {n} stood beside the {m}, as it had always done.",
    "After lunch {p} and {q} talked about the {n} for a while.",
    "Nothing much happened near the {m} that day.",
    "It rained a little, and the {n} looked {a} in the grey light.",
    "{p} had read in the paper that the {a} {m} was to be sold.",
    "There was a {n} on the table, but nobody looked at it.",
    "The children drew a {a} {n} and a {b} {m}.",
    "Later the wind turned, and the smell of the sea came over the {n}.",
    "{q} asked whether the {m} was {a}, and {p} did not know.",
    "The road went on between the {n} and the {m}.",
    "Every week somebody cleaned the {a} {n} with great care.",
    "{p} liked the {m} better when it was {b}.",
    "In the evening the lights went on, first at the {n}, then at the {m}.",
    "An old song tells of a {a} {n} that turned into a {m}.",
    "The market was full, and {q} bought a {b} {n}.",
    "Perhaps the {m} will be {a} again next year.",
    "{p} wrote a long letter about the {n} and sent it to {q}.",
    "The weather stayed {a} for the rest of the week.",
    "Behind the {n} a path led down to the {b} {m}.",
    "Nobody could say who had put the {n} next to the {m}.",
    "At noon the bells rang, and {p} closed the {a} window.",
)
READ = ("Read the following text.", "Here is a text.", "Read this carefully.", "This is a report.", "Text:")


def needle(rng: random.Random, split: Split) -> Task:
    """A document of 300 to 3,000 tokens in which one sentence holds what the question asks for."""
    choice, draw = rng.choice, rng.random
    sentence, question, number = choice(NEEDLES)
    subject = f"{choice(FIRST)} {choice(SECOND)}"
    while not in_split(subject, split):
        subject = f"{choice(FIRST)} {choice(SECOND)}"
    value = (
        str(rng.randrange(1000, 1_000_000)) if number else f"{choice(VALUE_WORDS)} {rng.randrange(10, 1000)}"
    )
    person = choice(PEOPLE)
    planted = sentence.format(s=subject, v=value, p=person)
    asked = f"{question.format(s=subject, p=person)} {choice(ONLY)}".rstrip()

    tokens = math.exp(rng.uniform(math.log(300), math.log(3000))) * 0.95
    used = estimated_tokens(planted) + estimated_tokens(asked) + TURN_TOKENS + 8
    sentences: list[str] = []
    while True:
        p, q = rng.sample(PEOPLE, 2)
        n, m = rng.sample(SECOND, 2)
        text = choice(FILLERS).format(a=choice(FIRST), b=choice(FIRST), n=n, m=m, p=p, q=q)
        used += estimated_tokens(text)
        if used > tokens:
            break
        sentences.append(text)
    sentences.insert(int(draw() * (len(sentences) + 1)), planted)

    paragraphs: list[str] = []
    start = 0
    while start < len(sentences):
        end = start + rng.randrange(4, 9)
        paragraphs.append(" ".join(sentences[start:end]))
        start = end
    document = choice(READ) + "\n\n" + "\n\n".join(paragraphs)
    content = f"{asked}\n\n{document}" if draw() < 0.2 else f"{document}\n\n{asked}"
    messages: list[dict[str, Any]] = [*opening(rng), {"role": "user", "content": content}]
    return Task("needle", "retrieval", messages, {"content": value}, value_check(value), max_new=24)


GENERATORS: dict[str, Generator] = {
    **{f"kv{tokens}": _sized(tokens) for tokens in KV_SIZES},
    "kv_first": kv_first,
    "kv_many": kv_many,
    "needle": needle,
}
