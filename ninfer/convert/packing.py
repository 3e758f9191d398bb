"""Which parameters share one parent object."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from ninfer.convert.parameters import Parameter
from ninfer.convert.recipe import Choices, Selection
from ninfer.errors import ConversionError

_CANDIDATES = (
    ("attention/query", "attention/key", "attention/gate", "attention/value"),
    ("attention/query", "attention/key", "attention/value"),
    ("attention/query", "attention/key"),
    ("attention/gate", "attention/value"),
    ("gdn/query", "gdn/key", "gdn/value", "gdn/z"),
    ("gdn/query", "gdn/key"),
    ("gdn/value", "gdn/z"),
    ("gdn/a_projection", "gdn/b_projection"),
    ("mlp/gate", "mlp/up"),
)

Divisor = Callable[[str, Selection], float | None]


def groups(
    parameters: Mapping[str, Parameter], choices: Choices, divisor: Divisor
) -> list[tuple[tuple[str, ...], tuple[int, ...] | None]]:
    """Members of every parent of several parameters, and its shape where the recipe states one.

    `divisor` tells the weight divisor of an imported NVFP4 matrix: one parent has one divisor.
    """
    found = []
    used: set[str] = set()
    for members, shape in choices.groups:
        reason = _conflict(members, parameters, choices, divisor, used)
        if reason:
            raise ConversionError(f"the recipe cannot group {', '.join(members)}: {reason}")
        used.update(members)
        found.append((members, shape))
    used |= choices.separate
    for members in _candidates(parameters):
        if not _conflict(members, parameters, choices, divisor, used):
            used.update(members)
            found.append((members, None))
    return found


def _candidates(parameters: Mapping[str, Parameter]) -> Iterator[tuple[str, ...]]:
    """Candidate groups block by block, in declaration order."""
    prefixes = dict.fromkeys(_block(name) for name in parameters if "/layers/" in name)
    for prefix in prefixes:
        is_gated = prefix + "attention/gate" in parameters
        for names in _CANDIDATES:
            members = tuple(prefix + name for name in names)
            is_plain = names == _CANDIDATES[1]
            if all(name in parameters for name in members) and not (is_plain and is_gated):
                yield members


def _block(name: str) -> str:
    """`text/layers/3/` of `text/layers/3/mlp/up`."""
    component, layers, index, _ = name.split("/", 3)
    return f"{component}/{layers}/{index}/"


def _conflict(
    members: tuple[str, ...],
    parameters: Mapping[str, Parameter],
    choices: Choices,
    divisor: Divisor,
    used: set[str],
) -> str | None:
    """Why the members cannot be one parent, or None if they can."""
    first = members[0]
    for name in members:
        if name in used or name in choices.shares:
            return f"'{name}' is shared, separated or already grouped"
        if len(choices.segments[name]) != 1:
            return f"'{name}' is split into row ranges"
        if parameters[name].component != parameters[first].component:
            return f"'{name}' and '{first}' belong to different components"
        if parameters[name].is_direct != parameters[first].is_direct or (
            parameters[name].shape[1:] != parameters[first].shape[1:]
        ):
            return f"'{name}' and '{first}' have rows of different kinds"
    selections = [choices.segments[name][0].selection for name in members]
    if len({(selection.format, selection.layout, selection.method) for selection in selections}) != 1:
        return "their formats, layouts or methods differ"
    divisors = {divisor(name, selection) for name, selection in zip(members, selections, strict=True)}
    return "their imported weight divisors differ" if len(divisors) != 1 else None
