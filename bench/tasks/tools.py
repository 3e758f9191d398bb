"""Tool calls: choosing a declared function, filling its arguments from natural words, reporting a result."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Sequence
from typing import Any

from bench.tasks.catalogue import FUNCTIONS
from bench.tasks.functions import Function
from bench.tasks.task import Generator, Reply, Split, Task
from bench.tasks.turns import opening

Call = tuple[str, dict[str, Any]]

# The answer where no function fits: the first to a request, the second to a question; a check accepts all.
REFUSALS = (
    "Sorry, I can't do that here.",
    "Sorry, I can't find that out here.",
    "I can't do that.",
    "I can't find that out.",
    "Sorry, I can't do that.",
    "Sorry, I can't find that out.",
)
ERRORS = ("service not available", "permission denied", "request timed out", "not found", "invalid input")


class _Variant:
    """A function under one choice of its names, with its declaration."""

    def __init__(self, function: Function, index: int) -> None:
        self.function = function
        self.name = function.names[index]
        parameters = function.parameters.items()
        self.aliases = {key: parameter.names[index % len(parameter.names)] for key, parameter in parameters}
        schema = {
            "type": "object",
            "properties": {self.aliases[key]: parameter.schema for key, parameter in parameters},
            "required": [self.aliases[key] for key, parameter in parameters if not parameter.clauses],
        }
        self.tool = {
            "type": "function",
            "function": {"name": self.name, "description": function.description, "parameters": schema},
        }


_VARIANTS = [[_Variant(function, index) for index in range(len(function.names))] for function in FUNCTIONS]


class _Request:
    """One request to one function: its words, and the call that answers it."""

    def __init__(self, rng: random.Random, split: Split, variant: _Variant) -> None:
        function = variant.function
        self.function = function
        self.name = variant.name
        self.arguments: dict[str, Any] = {}
        self.said: dict[str, str] = {}  # words of all parameters in the request
        for key, parameter in function.parameters.items():
            if parameter.clauses and rng.random() < 0.55:
                self.said[key] = ""
                continue
            value = parameter.draw(rng, split)
            while isinstance(value, str) and value in self.arguments.values():  # no way from a city to itself
                value = parameter.draw(rng, split)
            self.arguments[variant.aliases[key]] = value
            words = parameter.said.get(value, str(value))
            self.said[key] = rng.choice(parameter.clauses).format(words) if parameter.clauses else words
        self.text = rng.choice(function.asks).format_map(self.said)
        if self.text.endswith(".") and not self.text.startswith(("I ", "New ", "Please ")):
            polite = rng.random()
            if polite < 0.2:
                self.text = f"Please {self.text[0].lower()}{self.text[1:]}"
            elif polite < 0.3:
                self.text = f"Could you {self.text[0].lower()}{self.text[1:-1]}?"

    @property
    def call(self) -> Call:
        return self.name, self.arguments


def _draw(rng: random.Random, split: Split, fits: bool) -> tuple[list[dict[str, Any]], list[_Request]]:
    """One to four declared functions, and one request or two; without `fits`, one to a function that is not
    declared."""
    declared = [
        rng.choice(variants) for variants in rng.sample(_VARIANTS, rng.choice((1, 2, 2, 3, 3, 4)) + 1)
    ]
    if fits:
        declared.pop()
        targets = [declared[0]]
        if rng.random() < 0.15:
            targets.append(rng.choice(declared))
    else:
        targets = [declared.pop()]
    requests = [_Request(rng, split, target) for target in targets]
    rng.shuffle(declared)
    return [variant.tool for variant in declared], requests


JOINS = (" ", " Also: ", " And then: ", " After that: ")


def _question(rng: random.Random, requests: list[_Request]) -> str:
    return rng.choice(JOINS).join(request.text for request in requests)


def _message(calls: Sequence[Call], thought: str = "") -> dict[str, Any]:
    message: dict[str, Any] = {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {"type": "function", "function": {"name": name, "arguments": arguments}}
            for name, arguments in calls
        ],
    }
    if thought:
        message["reasoning_content"] = thought
    return message


def _same(one: Any, other: Any) -> bool:
    """Equal values; numbers by value, but true is not 1."""
    return one == other and isinstance(one, bool) == isinstance(other, bool)


def _same_call(one: Call, other: Call) -> bool:
    return (
        one[0] == other[0]
        and one[1].keys() == other[1].keys()
        and all(_same(value, other[1][key]) for key, value in one[1].items())
    )


def calls_check(wanted: Sequence[Call]) -> Callable[[Reply], bool]:
    """Whether a reply makes exactly the wanted calls, in any order, and says nothing else."""

    def check(reply: Reply) -> bool:
        left = list(wanted)
        for call in reply.tool_calls:
            match = next((index for index, other in enumerate(left) if _same_call(call, other)), None)
            if match is None:
                return False
            del left[match]
        return not left and not reply.content.strip()

    return check


def refusal_check(reply: Reply) -> bool:
    """Whether a reply is one of the refusals and calls nothing."""
    return not reply.tool_calls and reply.content.strip() in REFUSALS


def report_check(values: Sequence[str]) -> Callable[[Reply], bool]:
    """Whether every value occurs in the reply, not as part of a longer number or word, and nothing is
    called."""

    def check(reply: Reply) -> bool:
        return not reply.tool_calls and all(
            re.search(rf"(?<![\w-])(?<!\d\.){re.escape(value)}(?!\w|\.\d)", reply.content, re.IGNORECASE)
            for value in values
        )

    return check


def _refusal(request: _Request) -> str:
    question = request.text.endswith("?") and not request.text.startswith("Could you")
    return REFUSALS[1] if question else REFUSALS[0]


def _thought(requests: list[_Request], fits: bool) -> str:
    if not fits:
        return "None of the functions helps here, so I answer directly."
    steps = []
    for request in requests:
        values = ", ".join(f"{key} = {json.dumps(value)}" for key, value in request.arguments.items())
        steps.append(f"The function {request.name} fits, with {values}.")
    return "\n".join(steps)


def _calling(name: str, thinking: bool) -> Generator:
    def generate(rng: random.Random, split: Split) -> Task:
        fits = rng.random() >= 0.15
        tools, requests = _draw(rng, split, fits)
        messages = opening(rng, system=0.1)
        messages.append({"role": "user", "content": _question(rng, requests)})
        thought = _thought(requests, fits) if thinking else ""
        if fits:
            calls = [request.call for request in requests]
            answer, right = _message(calls, thought), calls_check(calls)
        else:
            answer, right = {"content": _refusal(requests[0])}, refusal_check
            if thinking:
                answer["reasoning_content"] = thought
        answer.pop("role", None)
        names = [request.name for request in requests] if fits else []

        def named(reply: Reply) -> bool:
            return right(reply) and bool(reply.reasoning) and all(name in reply.reasoning for name in names)

        check = named if thinking else right
        return Task(
            name,
            "tools",
            messages,
            answer,
            check,
            thinking=thinking,
            tools=tools,
            max_new=512 if thinking else 384,
        )

    return generate


def _result(rng: random.Random, split: Split, request: _Request) -> tuple[str, str, list[str]]:
    """A tool's result, the sentence that reports it, and the values that a report must contain."""
    function = request.function
    facts = {key: draw(rng, split) for key, draw in function.facts.items()}
    if function.group == "random":
        low, high = request.arguments.values()
        facts["number"] = rng.randint(low, high)
    known = request.said | {key: str(value) for key, value in facts.items()}
    result = json.dumps(facts) if rng.random() < 0.6 else function.text.format_map(known)
    return result, function.says.format_map(known), [known[key] for key in function.shows]


def tool_result(rng: random.Random, split: Split) -> Task:
    """The function was called and gave a result; the answer reports it in a sentence."""
    tools, requests = _draw(rng, split, fits=True)
    messages = opening(rng, system=0.1)
    messages.append({"role": "user", "content": _question(rng, requests)})
    messages.append(_message([request.call for request in requests]))
    failed = len(requests) == 1 and rng.random() < 0.08
    said: list[str] = []
    shown: list[str] = []
    for request in requests:
        result, sentence, values = _result(rng, split, request)
        if failed:
            error = rng.choice(ERRORS)
            result, sentence, values = json.dumps({"error": error}), f"That did not work: {error}.", [error]
        messages.append({"role": "tool", "content": result})
        said.append(sentence)
        shown += values
    answer = {"content": " ".join(said)}
    return Task("tool_result", "tools", messages, answer, report_check(shown), tools=tools, max_new=160)


GENERATORS: dict[str, Generator] = {
    "tool_call": _calling("tool_call", thinking=False),
    "tool_result": tool_result,
    "tool_thinking": _calling("tool_thinking", thinking=True),
}
