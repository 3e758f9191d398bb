"""What a function that tool tasks declare consists of."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from bench.tasks.argument_values import Draw


@dataclass(frozen=True, slots=True)
class Parameter:
    """names: by variant of the function. clauses: forms in which a request mentions an optional parameter
    (slot `{}`); none for a required one. said: words for values that aren't written as they are."""

    names: tuple[str, ...]
    schema: dict[str, Any]
    draw: Draw
    clauses: tuple[str, ...] = ()
    said: dict[Any, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Function:
    """names: by variant. Functions of one group answer alike requests and are never declared together.

    A request (`asks`) has its parameters as slots; an optional one stands for a whole clause or for nothing.
    facts: what the result adds. text: the result as plain text. says: the sentence that reports it. shows:
    what of parameters and facts a report must contain.
    """

    group: str
    names: tuple[str, ...]
    description: str
    parameters: dict[str, Parameter]
    asks: tuple[str, ...]
    facts: dict[str, Draw]
    text: str
    says: str
    shows: tuple[str, ...]


def text(description: str, choices: tuple[str, ...] = ()) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string", "description": description}
    return {**schema, "enum": list(choices)} if choices else schema


def number(description: str, kind: str = "integer") -> dict[str, Any]:
    return {"type": kind, "description": description}


def switch(description: str) -> dict[str, Any]:
    return {"type": "boolean", "description": description}
