"""What is stored how: the selections that named recipes and recipe files make before anything is read.

A recipe file is Python with a function `configure(recipe)`. The object it gets offers `assign`, `use`,
`separate`, `group` and `share`, and the facts to decide by: `parameters`, `components`, `config`,
`sources`, `stored(...)`. Selectors are exact parameter names or shell patterns; one that matches nothing
is an error.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ninfer import formats
from ninfer.artifact import default_layout
from ninfer.convert.catalog import Catalog
from ninfer.convert.parameters import Parameter
from ninfer.errors import ConversionError, FormatError

BASE = "base"
IMPORT = "import_encoded"
POLICIES = ("A16Only", "AllowA8", "AllowA4")
DIVISOR = "activation_input_divisor"


@dataclass(frozen=True)
class Selection:
    """How one range of rows is made. `layout` None is the format's own."""

    format: str
    method: str = "cast_direct"
    source: str = BASE
    layout: str | None = None


@dataclass(frozen=True)
class Segment:
    """Rows [begin, end) of a parameter (a direct tensor is one row) under one selection."""

    begin: int
    end: int
    selection: Selection


@dataclass(frozen=True)
class UsePlan:
    """Activation policy of one (parameter, input), and the divisor if the recipe states one."""

    policy: str = "A16Only"
    divisor: float | None = None


@dataclass(frozen=True)
class Fallback:
    """A named recipe's format that a shape rules out, and what was taken instead."""

    parameter: str
    wanted: str
    used: str
    reason: str


@dataclass
class Choices:
    """Everything a recipe decided; owned by one conversion."""

    segments: dict[str, tuple[Segment, ...]]
    uses: dict[tuple[str, str], UsePlan]
    shares: dict[str, str] = field(default_factory=dict)
    separate: set[str] = field(default_factory=set)
    groups: list[tuple[tuple[str, ...], tuple[int, ...] | None]] = field(default_factory=list)
    fallbacks: list[Fallback] = field(default_factory=list)


class Recipe:
    """The object that `configure(recipe)` gets.

    parameters: name -> Parameter, in declaration order. components: ids. config: component id -> its config.
    sources: names given with `--source`, and `base`.
    """

    def __init__(
        self,
        config: Mapping[str, Mapping[str, Any]],
        catalog: Catalog,
    ) -> None:
        parameters = catalog.parameters
        self.parameters = dict(parameters)
        self.config = config
        self.sources = tuple(catalog.sources)
        self._catalog = catalog
        segments = {
            name: (Segment(0, _rows(parameter), Selection(parameter.format)),)
            for name, parameter in parameters.items()
        }
        uses = {(name, use): UsePlan() for name, parameter in parameters.items() for use in parameter.inputs}
        self.choices = Choices(segments, uses)

    @property
    def components(self) -> tuple[str, ...]:
        return tuple(self.config)

    def names(self, selectors: str | Iterable[str]) -> list[str]:
        """Parameters that the selectors match, in declaration order."""
        selectors = [selectors] if isinstance(selectors, str) else list(selectors)
        matched: set[str] = set()
        for selector in selectors:
            found = [selector] if selector in self.parameters else fnmatch.filter(self.parameters, selector)
            if not found:
                raise ConversionError(f"the recipe's selector '{selector}' matches no parameter")
            matched.update(found)
        return [name for name in self.parameters if name in matched]

    def stored(self, name: str, source: str = BASE) -> str:
        """Name of the format in which a source holds the parameter (`bf16`, `nvfp4`, `ggml_q4_1`, ...)."""
        self._check_source(source)
        return self._catalog.stored(name, source)

    def holds(self, name: str, source: str = BASE) -> bool:
        """Whether a source has the parameter; an additional one may lack the head or the MTP layer."""
        self._check_source(source)
        return self._catalog.holds(name, source)

    def import_obstacle(self, name: str, source: str = BASE) -> str | None:
        """Why the source's codes cannot be imported although they are of a known format; None if they can."""
        self._check_source(source)
        return self._catalog.import_obstacle(name, source)

    def has_input_divisor(self, name: str, source: str = BASE) -> bool:
        """Whether the source was calibrated with an activation divisor for this parameter, as A4 needs."""
        self._check_source(source)
        return self._catalog.input_divisor(name, source) is not None

    def is_shared(self, name: str) -> bool:
        """Whether the parameter is an alias of another one."""
        return name in self.choices.shares

    def assign(
        self,
        selectors: str | Iterable[str],
        *,
        format: str | None = None,
        method: str | None = None,
        source: str | None = None,
        layout: str | None = None,
        rows: tuple[int, int] | None = None,
    ) -> None:
        """Set physical choices; what is not stated stays.

        `rows` limits them to a row range, `layout="auto"` is the format's own. Changing the format does
        not change the method: state both. Ends any share of the parameter.
        """
        if source is not None:
            self._check_source(source)
        for name in self.names(selectors):
            self.choices.shares.pop(name, None)
            count = _rows(self.parameters[name])
            begin, end = rows or (0, count)
            if not 0 <= begin < end <= count:
                raise ConversionError(
                    f"the recipe assigns rows {begin}..{end} of '{name}', which has {count}"
                )
            updated: list[Segment] = []
            for segment in self.choices.segments[name]:
                updated += _assigned(segment, begin, end, format, method, source, layout)
            self.choices.segments[name] = _joined(updated)

    def use(
        self,
        parameter: str | Iterable[str],
        input: str | None = None,
        *,
        activation_policy: str | None = None,
        auxiliaries: Mapping[str, float] | None = None,
    ) -> None:
        """Set the policy (and a divisor) of parameters for one input, or for all their inputs."""
        if activation_policy is not None and activation_policy not in POLICIES:
            raise ConversionError(
                f"unknown activation policy '{activation_policy}'; known are {', '.join(POLICIES)}"
            )
        unknown = set(auxiliaries or {}) - {DIVISOR}
        if unknown:
            raise ConversionError(f"unknown auxiliary '{min(unknown)}'; a recipe can state {DIVISOR}")
        for name in self.names(parameter):
            inputs = self.parameters[name].inputs
            if not inputs or (input is not None and input not in inputs):
                raise ConversionError(
                    f"'{name}' is not used for the input '{input}'; its inputs are "
                    f"{', '.join(inputs) or 'none'}"
                )
            for key in ((name, one) for one in inputs if input in (None, one)):
                plan = self.choices.uses[key]
                if activation_policy is not None:
                    plan = replace(plan, policy=activation_policy)
                if auxiliaries:
                    plan = replace(plan, divisor=float(auxiliaries[DIVISOR]))
                self.choices.uses[key] = plan

    def separate(self, selectors: str | Iterable[str]) -> None:
        """Keep parameters out of automatic packing."""
        self.choices.separate.update(self.names(selectors))

    def group(self, selectors: str | Iterable[str], shape: tuple[int, ...] | None = None) -> None:
        """Pack parameters into one parent, in the given order."""
        selectors = [selectors] if isinstance(selectors, str) else list(selectors)
        members = tuple(name for selector in selectors for name in self.names(selector))
        if len(set(members)) != len(members) or len(members) < 2:
            raise ConversionError(f"a group needs two or more different parameters, not {', '.join(members)}")
        self.choices.groups.append((members, shape))

    def share(self, parameter: str, target: str) -> None:
        """Bind `parameter` to what `target` stores."""
        for name in (parameter, target):
            if name not in self.parameters:
                raise ConversionError(f"the recipe shares '{name}', which is no parameter of this model")
        if self.parameters[parameter].shape != self.parameters[target].shape:
            raise ConversionError(
                f"'{parameter}' and '{target}' differ in shape; they cannot share an object"
            )
        seen = {parameter}
        step: str | None = target
        while step is not None:
            if step in seen:
                raise ConversionError(f"sharing '{parameter}' with '{target}' would be a circle")
            seen.add(step)
            step = self.choices.shares.get(step)
        self.choices.shares[parameter] = target

    def note_fallback(self, parameter: str, wanted: str, used: str, reason: str) -> None:
        """Report that a named recipe could not give a parameter its format."""
        self.choices.fallbacks.append(Fallback(parameter, wanted, used, reason))

    def _check_source(self, source: str) -> None:
        if source not in self.sources:
            given = ", ".join(self.sources)
            raise ConversionError(
                f"the recipe needs a source named '{source}' (--source {source}=PATH); given: {given}"
            )


def check(parameters: Mapping[str, Parameter], choices: Choices) -> None:
    """Refuse selections that cannot be carried out, before anything is read."""
    for name, segments in choices.segments.items():
        if name in choices.shares:
            continue
        parameter = parameters[name]
        if parameter.is_direct and [segment.selection.format for segment in segments] != [parameter.format]:
            raise ConversionError(
                f"'{name}' can be stored as {parameter.format} only; the recipe asks for another format"
            )
        for segment in segments:
            _check_selection(name, segment.selection)


def _check_selection(name: str, selection: Selection) -> None:
    try:
        known = formats.get(selection.format)
        layout = default_layout(selection.format)
    except FormatError as error:
        raise ConversionError(f"the recipe cannot store '{name}': {error}") from None
    if selection.method not in (*known.methods, IMPORT):
        methods = ", ".join((*known.methods, IMPORT))
        raise ConversionError(
            f"'{name}' is to be {selection.format} by the method {selection.method}; methods of this "
            f"format: {methods}"
        )
    if selection.layout not in (None, layout):
        raise ConversionError(
            f"'{name}' is to be {selection.format} in {selection.layout}; this format is stored in {layout}"
        )


def _rows(parameter: Parameter) -> int:
    return 1 if parameter.is_direct else parameter.shape[0]


def _assigned(
    segment: Segment,
    begin: int,
    end: int,
    format: str | None,
    method: str | None,
    source: str | None,
    layout: str | None,
) -> list[Segment]:
    inner_begin, inner_end = max(begin, segment.begin), min(end, segment.end)
    if inner_begin >= inner_end:
        return [segment]
    old = segment.selection
    kept_layout = None if format not in (None, old.format) else old.layout
    new = Selection(
        format or old.format,
        method or old.method,
        source or old.source,
        (None if layout == "auto" else layout) if layout is not None else kept_layout,
    )
    pieces = [
        Segment(segment.begin, inner_begin, old),
        Segment(inner_begin, inner_end, new),
        Segment(inner_end, segment.end, old),
    ]
    return [piece for piece in pieces if piece.begin < piece.end]


def _joined(segments: list[Segment]) -> tuple[Segment, ...]:
    joined: list[Segment] = []
    for segment in segments:
        if joined and joined[-1].selection == segment.selection:
            joined[-1] = Segment(joined[-1].begin, segment.end, segment.selection)
        else:
            joined.append(segment)
    return tuple(joined)
