"""Code: writing small functions, saying what a program prints, mending a function."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from typing import Any

from bench.tasks.draft import Draft, exact, generator
from bench.tasks.python_functions import Function, draw_function
from bench.tasks.reasoning import pair_keys
from bench.tasks.sandbox import Refused, load
from bench.tasks.task import Generator, Reply

TESTS = 32  # calls that a written function has to answer as the template does

# --- running a reply


def unfenced(text: str) -> str | None:
    """The code of a reply: all of it, or what its one closed fence holds; None if a fence is left open."""
    text = text.strip()
    if "```" not in text:
        return text
    parts = text.split("```")
    if len(parts) != 3:
        return None
    return parts[1].removeprefix("python").strip("\n") + "\n"


def _outcome(function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    """What a call returns, or None where it fails (no template returns None)."""
    copies = [list(value) if isinstance(value, list) else value for value in arguments]
    try:
        return function(*copies)
    except Exception:  # whatever the reply's code raises is a wrong answer
        return None


def _same(left: Any, right: Any) -> bool:
    return type(left) is type(right) and left == right


def does(function: Function) -> Callable[[Reply], bool]:
    """A check that runs the reply's code and wants what `function` returns on each of its tests."""

    def check(reply: Reply) -> bool:
        source = unfenced(reply.content)
        if not source:
            return False
        for arguments in function.tests(TESTS):
            # Loaded for each call, so that each has its own budget of steps.
            try:
                theirs = _outcome(load(source, function.name), arguments)
            except Refused:
                return False
            expected = _outcome(load(function.source, function.name), arguments)
            if expected is not None and not _same(theirs, expected):
                return False
        return True

    return check


# --- function

_WRITE = (
    "Write a Python function `{signature}` that {says}.",
    "Define a Python function {signature} that {says}.",
    "I need a function `{signature}` in Python. It {says}.",
    "Implement `{signature}`: it {says}.",
    "Please write Python code: a function `{signature}` which {says}.",
)
_BARE = (
    "Answer with the code only, without a code fence.",
    "Write the bare code, no fence.",
    "No Markdown, just the code.",
)
_FENCED = ("", "", "Answer with a code block only.", "Put the code into a ```python block.")


def _answer(rng: random.Random, source: str) -> tuple[str, str]:
    """What the request says about the form, and the source in that form."""
    if rng.random() < 0.2:
        return rng.choice(_BARE), source
    return rng.choice(_FENCED), f"```python\n{source}\n```"


def draw_written(rng: random.Random) -> Draft:
    function = draw_function(rng)
    form, text = _answer(rng, function.source)
    request = rng.choice(_WRITE).format(signature=function.signature, says=function.says)
    return Draft(f"{request} {form}".rstrip(), text, does(function), ("function " + function.source,))


# --- fix

_SWAPS = {
    " + ": (" - ", " * "),
    " - ": (" + ",),
    " * ": (" + ",),
    " // ": (" % ",),
    " % ": (" // ",),
    " > ": (" < ", " >= "),
    " < ": (" > ", " <= "),
    " >= ": (" > ",),
    " <= ": (" < ",),
    " == ": (" != ",),
    " += ": (" -= ",),
    " *= ": (" += ",),
    "max(": ("min(",),
    "min(": ("max(",),
    "[0]": ("[1]",),
    "[-1]": ("[-2]",),
    "[::2]": ("[1::2]",),
    "[::-1]": ("[::-2]", "[1:]"),
    ".upper(": (".lower(",),
    ".lower(": (".upper(",),
    "startswith": ("endswith",),
    "endswith": ("startswith",),
    "True": ("False",),
    " in ": (" not in ",),
    "all(": ("any(",),
}
_PLACES = re.compile(
    "|".join(re.escape(text) for text in sorted(_SWAPS, key=len, reverse=True)) + r"|\b\d+\b|\[:|:\]"
)


def _broken(rng: random.Random, source: str) -> str | None:
    """`source` with one mistake: another operator or method, or a constant off by one."""
    start = source.index("\n")
    # `for ... in` and the `in` of comprehensions stay.
    places = [
        place
        for place in _PLACES.finditer(source, start)
        if place[0] != " in " or not re.search(r"for \w+$", source[: place.start()])
    ]
    if not places:
        return None
    place = rng.choice(places)
    text = place[0]
    if text.isdigit():
        other = str(max(int(text) + rng.choice((-1, 1)), 0))
    elif text == "[:":
        other = "[1:"
    elif text == ":]":
        other = ":-1]"
    else:
        other = rng.choice(_SWAPS[text])
    return source[: place.start()] + other + source[place.end() :]


def _plain(source: str, name: str) -> Callable[..., Any] | None:
    """Our own source as a function; a mistake may leave nothing that compiles."""
    scope: dict[str, Any] = {}
    try:
        exec(source, scope)
    except SyntaxError:
        return None
    return scope[name]


_FIX = (
    "This function should be such that it {says}, but it has a "
    "mistake:\n\n```python\n{broken}\n```\n\n`{call}` gives {wrong} instead of {right}. Write the "
    "repaired function.",
    "`{call}` should return {right} but returns {wrong}. The function {says}, or it should. Repair "
    "it.\n\n```python\n{broken}\n```",
    "Find and fix the bug.\n\n```python\n{broken}\n```\n\nWhat is wanted: it {says}. For example, "
    "`{call}` must be {right}, not {wrong}.",
    "Here is a function with one mistake. Wanted: it {says}.\n```python\n{broken}\n```\nExpected `{call}` "
    "== {right}, got {wrong}. Give the corrected code.",
)


def draw_fix(rng: random.Random) -> Draft:
    while True:
        function = draw_function(rng)
        broken = _broken(rng, function.source)
        if broken is None:
            continue
        right, wrong = _plain(function.source, function.name), _plain(broken, function.name)
        if right is None or wrong is None:
            continue
        for arguments in function.tests(8):
            wanted, got = _outcome(right, arguments), _outcome(wrong, arguments)
            if (
                wanted is not None
                and got is not None
                and not _same(wanted, got)
                and len(str(arguments)) < 100
            ):
                form, text = _answer(rng, function.source)
                call = f"{function.name}({', '.join(map(repr, arguments))})"
                request = rng.choice(_FIX).format(
                    says=function.says, broken=broken, call=call, wrong=repr(got), right=repr(wanted)
                )
                return Draft(
                    f"{request}\n{form}".rstrip(), text, does(function), (f"fix {function.source} {broken}",)
                )


# --- trace

_TRACE = (
    "What does this program print?\n\n```python\n{source}\n```",
    "```python\n{source}\n```\n\nWhat is the output? Answer with it alone.",
    "Say what this Python code prints:\n\n```python\n{source}\n```",
    "Run this program in your head and give its output.\n\n{source}",
)
_VARIABLES = "abcdefghkmnpqrstuvwxyz"


class _Program:
    """A program under construction, run while it is written: its lines, its variables, the work so far."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.lines: list[str] = []
        self.work: list[str] = []
        self.values: dict[str, int] = {}
        self.keys: list[str] = []
        self.free = rng.sample(_VARIABLES, 6)

    def term(self) -> tuple[str, int]:
        """A variable or a small constant, and its value."""
        if self.rng.random() < 0.5:
            name = self.rng.choice(list(self.values))
            return name, self.values[name]
        value = self.rng.randint(1, 12)
        return str(value), value

    def compute(self, sign: str, left: int, right: int) -> int:
        self.keys += pair_keys(sign, left, right)
        return left + right if sign == "+" else left - right if sign == "-" else left * right

    def start(self) -> None:
        name, value = self.free.pop(), self.rng.randint(1, 20)
        self.lines.append(f"{name} = {value}")
        self.work.append(f"{name} = {value}")
        self.values[name] = value

    def assign(self) -> None:
        left = self.rng.choice(list(self.values))
        right, value = self.term()
        sign = self.rng.choice("++-*")
        target = self.free.pop() if self.rng.random() < 0.5 and len(self.free) > 2 else left
        result = self.compute(sign, self.values[left], value)
        self.lines.append(f"{target} = {left} {sign} {right}")
        self.work.append(f"{target} = {self.values[left]} {sign} {value} = {result}")
        self.values[target] = result

    def update(self) -> None:
        name = self.rng.choice(list(self.values))
        sign, value = self.rng.choice("+-"), self.rng.randint(1, 15)
        result = self.compute(sign, self.values[name], value)
        self.lines.append(f"{name} {sign}= {value}")
        self.work.append(f"{name} = {self.values[name]} {sign} {value} = {result}")
        self.values[name] = result

    def loop(self) -> None:
        """A loop over a range or a list that adds the item, a constant or a variable."""
        name = self.rng.choice(list(self.values))
        index = self.free.pop()
        if self.rng.random() < 0.5:
            items = list(range(self.rng.randint(2, 5)))
            head = f"range({len(items)})"
        else:
            items = [self.rng.randint(1, 12) for _ in range(self.rng.randint(2, 4))]
            head = str(items)
        other = self.rng.choice([index, index, None])
        constant = self.rng.randint(1, 9)
        sign = self.rng.choice("++-")
        self.lines.append(f"for {index} in {head}:")
        self.lines.append(f"    {name} {sign}= {other or constant}")
        for item in items:
            amount = constant if other is None else item
            result = self.compute(sign, self.values[name], amount)
            self.work.append(f"{index} = {item}: {name} = {self.values[name]} {sign} {amount} = {result}")
            self.values[name] = result

    def branch(self) -> None:
        name = self.rng.choice(list(self.values))
        limit, change = self.rng.randint(1, 20), self.rng.randint(1, 9)
        compared = self.rng.choice("<>")
        value = self.values[name]
        true = value > limit if compared == ">" else value < limit
        sign = "+" if true else "-"
        result = self.compute(sign, value, change)
        self.lines += [
            f"if {name} {compared} {limit}:",
            f"    {name} += {change}",
            "else:",
            f"    {name} -= {change}",
        ]
        self.work.append(f"{value} {compared} {limit} is {true}: {name} = {value} {sign} {change} = {result}")
        self.values[name] = result

    def show(self) -> str:
        """The last line, and what it prints."""
        names = list(self.values)
        kind = self.rng.random()
        if kind < 0.5 or len(names) < 2:
            name = names[-1] if self.rng.random() < 0.6 else self.rng.choice(names)
            self.lines.append(f"print({name})")
            return str(self.values[name])
        left, right = self.rng.sample(names, 2)
        if kind < 0.75:
            self.lines.append(f"print({left}, {right})")
            return f"{self.values[left]} {self.values[right]}"
        total = self.compute("+", self.values[left], self.values[right])
        self.lines.append(f"print({left} + {right})")
        self.work.append(f"{self.values[left]} + {self.values[right]} = {total}")
        return str(total)


def draw_trace(rng: random.Random) -> Draft:
    while True:
        program = _Program(rng)
        program.start()
        if rng.random() < 0.6:
            program.start()
        for _ in range(rng.randint(1, 3)):
            rng.choice((program.assign, program.assign, program.update, program.loop, program.branch))()
        output = program.show()
        # Small numbers keep each step one that can be known by heart.
        if all(-50 <= value <= 200 for value in program.values.values()):
            break
    source = "\n".join(program.lines)
    return Draft(
        rng.choice(_TRACE).format(source=source),
        output,
        exact(output),
        ("trace " + source, *program.keys),
        "\n".join(program.work),
    )


GENERATORS: dict[str, Generator] = {
    "function": generator("function", "code", draw_written),
    "trace": generator("trace", "code", draw_trace),
    "fix": generator("fix", "code", draw_fix),
}
