"""Reasoning: sums answered at once; sums, word problems, orders and counts after a thinking block."""

from __future__ import annotations

import random
from itertools import pairwise

from bench.tasks.draft import Draft, exact, generator, numbered
from bench.tasks.pools import COLOURS, FRUITS, NAMES, WORDS
from bench.tasks.task import Generator

# --- sums


def pair_key(sign: str, left: int, right: int) -> str:
    """The identity of a sum or product: the same for both orders of its operands where they commute."""
    if sign != "-":
        left, right = min(left, right), max(left, right)
    return f"{left}{sign}{right}"


def pair_keys(sign: str, left: int, right: int) -> tuple[str, ...]:
    """The key of a step inside another task, if `add2` could ask it: so held-out pairs are met nowhere."""
    asked = sign in "+-" and 10 <= left <= 99 and 10 <= right <= 99
    return (pair_key(sign, left, right),) if asked else ()


_SUMS = {
    "+": (
        "What is {a} + {b}? Answer with the number only.",
        "{a} + {b} =",
        "Add {a} and {b}.",
        "Compute {a} + {b}.",
        "How much is {a} plus {b}?",
        "Give the sum of {a} and {b} as a number.",
    ),
    "-": (
        "What is {a} - {b}? Answer with the number only.",
        "{a} - {b} =",
        "Subtract {b} from {a}.",
        "Compute {a} - {b}.",
        "How much is {a} minus {b}?",
        "Give the difference {a} - {b} as a number.",
    ),
    "*": (
        "What is {a} * {b}? Answer with the number only.",
        "{a} * {b} =",
        "Multiply {a} by {b}.",
        "Compute {a} * {b}.",
        "How much is {a} times {b}?",
        "Give the product of {a} and {b} as a number.",
    ),
}


def draw_add2(rng: random.Random) -> Draft:
    a, b = rng.randint(10, 99), rng.randint(10, 99)
    sign = "+" if rng.random() < 0.6 else "-"
    if sign == "-" and a < b:
        a, b = b, a
    value = a + b if sign == "+" else a - b
    return Draft(
        rng.choice(_SUMS[sign]).format(a=a, b=b), str(value), numbered(value), (pair_key(sign, a, b),)
    )


_PLACES = ("ones", "tens", "hundreds", "thousands", "ten thousands")


def added(a: int, b: int) -> str:
    """`a + b` by columns from the right; every line ends with the digits found so far."""
    lines, carry, found = [], 0, ""
    left, right = str(a)[::-1], str(b)[::-1]
    for place in range(max(len(left), len(right))):
        x = int(left[place]) if place < len(left) else 0
        y = int(right[place]) if place < len(right) else 0
        total = x + y + carry
        terms = f"{x}+{y}+1" if carry else f"{x}+{y}"
        carry = total // 10
        found = str(total % 10) + found
        lines.append(f"{_PLACES[place]}: {terms}={total}, {'carry 1, ' if carry else ''}so {found}")
    if carry:
        lines.append(f"carry: 1, so 1{found}")
    return "\n".join(lines)


def subtracted(a: int, b: int) -> str:
    """`a - b` (not negative) by columns from the right; the last line drops the leading zeros."""
    lines, borrow, found = [], 0, ""
    left, right = str(a)[::-1], str(b)[::-1]
    for place in range(len(left)):
        x = int(left[place])
        y = int(right[place]) if place < len(right) else 0
        terms = f"{x}-{y}-1" if borrow else f"{x}-{y}"
        digit = x - y - borrow
        borrow = digit < 0
        step = f"{terms}={digit}" if not borrow else f"1{terms}={digit + 10}, borrow 1"
        found = str(digit % 10) + found
        lines.append(f"{_PLACES[place]}: {step}, so {found}")
    lines.append(f"result: {a - b}")
    return "\n".join(lines)


def multiplied(a: int, b: int) -> str:
    """One-digit `a` times `b` by columns from the right."""
    lines, carry, found = [], 0, ""
    digits = str(b)[::-1]
    for place, digit in enumerate(digits):
        total = a * int(digit) + carry
        terms = f"{a}*{digit}+{carry}" if carry else f"{a}*{digit}"
        last = place == len(digits) - 1
        carry = 0 if last else total // 10
        found = str(total if last else total % 10) + found
        lines.append(f"{_PLACES[place]}: {terms}={total}, {f'carry {carry}, ' if carry else ''}so {found}")
    return "\n".join(lines)


def draw_arith(rng: random.Random) -> Draft:
    sign = rng.choice("++--*")
    if sign == "*":
        a, b = rng.randint(2, 9), rng.randint(10, 99)
        value, work = a * b, multiplied(a, b)
        if rng.random() < 0.5:
            a, b = b, a
    else:
        a, b = (rng.randrange(10 ** (size - 1), 10**size) for size in rng.choices((2, 3, 4), k=2))
        if sign == "-" and a < b:
            a, b = b, a
        value, work = (a + b, added(a, b)) if sign == "+" else (a - b, subtracted(a, b))
    request = rng.choice(_SUMS[sign]).format(a=a, b=b)
    return Draft(request, str(value), numbered(value), (pair_key(sign, a, b),), work)


# --- chain: word problems. A story is a start, events that add, take or multiply, and a question.

_MORE, _LESS, _TIMES = "+", "-", "*"
# Start; what adds; what takes away; what multiplies; question. {n} number, {who} the actor, {x} things.
_STORIES = (
    (
        "{who} has {n} {x}s.",
        ("{who} buys {n} more.", "{who} finds {n}.", "A friend gives {who} {n}."),
        ("{who} gives away {n}.", "{who} loses {n}.", "{who} eats {n}."),
        ("Then the number is multiplied by {n}.",),
        "How many {x}s does {who} have now?",
        tuple(fruit for fruit in FRUITS if fruit[-1] not in "hyo"),  # plurals in -s
    ),
    (
        "A bus leaves with {n} passengers.",
        ("{n} people get on.", "At the next stop {n} more get on.", "{n} pupils board."),
        ("{n} get off.", "At the market {n} people leave the bus."),
        (),
        "How many passengers are on the bus?",
        WORDS,
    ),
    (
        "{who} has {n} euros.",
        ("{who} earns {n} euros.", "{who} gets {n} euros from an aunt.", "{who} is paid {n} euros."),
        (
            "{who} spends {n} euros.",
            "{who} pays {n} euros for a new {x}.",
            "{who} lends {n} euros to a neighbour.",
        ),
        ("A prize makes the sum {n} times as large.",),
        "How many euros does {who} have in the end?",
        WORDS,
    ),
    (
        "A shelf holds {n} books.",
        ("{who} adds {n} books.", "{n} books are brought back.", "{n} new ones arrive."),
        ("{who} borrows {n} of them.", "{n} are sold.", "{n} old ones are thrown away."),
        (),
        "How many books are on the shelf now?",
        WORDS,
    ),
    (
        "A tank holds {n} litres of water.",
        ("{who} pours in {n} litres.", "The rain adds {n} litres."),
        ("{who} takes out {n} litres.", "{n} litres leak away."),
        (),
        "How many litres are left in the tank?",
        WORDS,
    ),
    (
        "There are {n} boxes in a cellar.",
        ("{who} carries in {n} boxes.", "A van brings {n}."),
        ("{who} carries away {n}.", "{n} boxes break."),
        ("Then every box is replaced by {n} smaller ones.",),
        "How many boxes are there at the end?",
        WORDS,
    ),
    (
        "{who} has read {n} pages.",
        ("On Monday {who} reads {n} pages.", "Later {who} reads {n} more."),
        (),
        (),
        "How many pages has {who} read in all?",
        WORDS,
    ),
)
_ENDINGS = ("", "", " Answer with the number only.", " Give the final number.")


def draw_chain(rng: random.Random) -> Draft:
    start, more, less, times, question, things = rng.choice(_STORIES)
    who, thing = rng.choice(NAMES), rng.choice(things)
    value = rng.randint(2, 60)
    sentences = [start.format(n=value, who=who, x=thing)]
    work: list[str] = []
    keys: list[str] = []
    multiplied_once = False
    for _ in range(rng.choice((2, 2, 3))):
        signs = _MORE
        if less and value > 4:
            signs += _LESS
        if times and not multiplied_once and value <= 20:
            signs += _TIMES
        sign = rng.choice(signs)
        if sign == _MORE:
            amount = rng.randint(2, 40)
            told, result = more, value + amount
        elif sign == _LESS:
            amount = rng.randint(2, min(value - 1, 40))
            told, result = less, value - amount
        else:
            amount = rng.randint(2, 4)
            told, result = times, value * amount
            multiplied_once = True
        keys += pair_keys(sign, value, amount)
        sentences.append(rng.choice(told).format(n=amount, who=who, x=thing))
        work.append(f"{value} {sign} {amount} = {result}")
        value = result
    sentences.append(question.format(who=who, x=thing) + rng.choice(_ENDINGS))
    request = " ".join(sentences)
    return Draft(request, str(value), numbered(value), (request, *keys), "\n".join(work))


# --- logic

# More; less; the most; the least; the list from most to least.
_RELATIONS = (
    ("is taller than", "is shorter than", "tallest", "shortest", "from tallest to shortest"),
    ("is older than", "is younger than", "oldest", "youngest", "from oldest to youngest"),
    ("is faster than", "is slower than", "fastest", "slowest", "from fastest to slowest"),
    ("is heavier than", "is lighter than", "heaviest", "lightest", "from heaviest to lightest"),
    ("is richer than", "is poorer than", "richest", "poorest", "from richest to poorest"),
    ("came in before", "came in after", "first", "last", "from first to last"),
)
_LIST_QUESTIONS = (
    "List them {how}.",
    "Put the names in order, {how}.",
    "Write all names {how}, separated by commas.",
)
_ONE_QUESTIONS = ("Who is the {what}?", "Name the {what} of them.", "Which of them is the {what}?")


def draw_logic(rng: random.Random) -> Draft:
    more, less, most, least, how = rng.choice(_RELATIONS)
    order = rng.sample(NAMES, rng.choice((3, 3, 4)))
    pairs = list(pairwise(order))
    rng.shuffle(pairs)
    clues = [f"{b} {less} {a}." if rng.random() < 0.4 else f"{a} {more} {b}." for a, b in pairs]
    kind = rng.random()
    if kind < 0.4:
        question, answer = rng.choice(_LIST_QUESTIONS).format(how=how), ", ".join(order)
    else:
        what, answer = (most, order[0]) if kind < 0.7 else (least, order[-1])
        question = rng.choice(_ONE_QUESTIONS).format(what=what)
    work = "\n".join([*(f"{a} > {b}" for a, b in pairs), " > ".join(order)])
    request = " ".join([*clues, question])
    return Draft(request, answer, exact(answer), ("logic " + work,), work)


# --- count

_LETTERS = (
    'How many times does the letter "{what}" occur in "{where}"?',
    "Count the letter {what} in the word {where}.",
    "How often does {where} contain the letter {what}?",
)
_ITEMS = (
    "How many times does {what} occur in this list: {where}?",
    "Count the entries {what} in: {where}",
    "{where}\n\nHow many of these are {what}?",
)
_ALL = (
    "How many entries does this list have: {where}?",
    "Count the entries: {where}",
    "{where}\n\nHow many are these?",
)


def draw_count(rng: random.Random) -> Draft:
    kind = rng.random()
    if kind < 0.4:
        where = rng.choice(WORDS)
        parts = list(where)
        what = rng.choice(parts) if rng.random() < 0.85 else rng.choice("abcdefghijklmnoprstuvw")
        wordings = _LETTERS
    else:
        pool = rng.sample(rng.choice((FRUITS, COLOURS, WORDS)), 5)
        parts = rng.choices(pool[: rng.randint(2, 5)], k=rng.randint(3, 12))
        where, what = ", ".join(parts), rng.choice(pool)
        wordings = _ITEMS if kind < 0.8 else _ALL
    every = wordings is _ALL
    found, work = 0, []
    for part in parts:
        hit = every or part == what
        found += hit
        work.append(f"{part} {found}" if hit else part)
    key = f"count {where}" if every else f"count {what} in {where}"
    return Draft(
        rng.choice(wordings).format(what=what, where=where),
        str(found),
        numbered(found),
        (key,),
        "\n".join(work),
    )


GENERATORS: dict[str, Generator] = {
    "add2": generator("add2", "reasoning", draw_add2),
    "arith": generator("arith", "reasoning", draw_arith),
    "chain": generator("chain", "reasoning", draw_chain),
    "logic": generator("logic", "reasoning", draw_logic),
    "count": generator("count", "reasoning", draw_count),
}
