"""From choices to objects: parents with their members, bindings, uses and auxiliaries, all sizes known."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from ninfer import formats
from ninfer.artifact import Binding, Part, TensorObject, Use, default_layout, encoded_bytes
from ninfer.convert import packing
from ninfer.convert.catalog import Catalog
from ninfer.convert.parameters import Parameter
from ninfer.convert.recipe import DIVISOR, IMPORT, Choices, Segment, Selection
from ninfer.convert.source import SourceMatrix
from ninfer.convert.views import Rows, View, Whole
from ninfer.errors import ConversionError, FormatError

HEAD_ORDER = "input_head_order"
_Q6_BLOCK = 210


@dataclass(frozen=True, eq=False)
class Member:
    """Rows [begin, end) of a parameter as a part of a parent; a direct tensor is one row."""

    parameter: str
    source: str
    view: View
    begin: int
    end: int
    matrix: SourceMatrix | None

    @property
    def elements(self) -> int:
        if isinstance(self.view, Rows):
            return (self.end - self.begin) * self.view.width
        return math.prod(self.view.shape) if isinstance(self.view, Whole) else self.view.data.numel()

    @property
    def rows(self) -> tuple[Rows, SourceMatrix]:
        """View and source matrix of a member that is cut from rows."""
        if not isinstance(self.view, Rows) or self.matrix is None:
            raise ConversionError(f"'{self.parameter}' has no rows to encode")
        return self.view, self.matrix


@dataclass(frozen=True, eq=False)
class Weight:
    """One parent object and how it is made. `q6`: of `ggml_k` rows, which are Q6_K."""

    tensor: TensorObject
    method: str
    members: tuple[Member, ...]
    q6: np.ndarray | None = None

    @property
    def matrix_shape(self) -> tuple[int, int]:
        """The parent as rows; differs from the object's shape only where a recipe states another one."""
        rows = sum(member.end - member.begin for member in self.members)
        return rows, self.tensor.elements // rows


@dataclass(frozen=True, eq=False)
class Plan:
    """All that a conversion will write, without offsets. `auxiliaries`: object -> its words."""

    weights: tuple[Weight, ...]
    auxiliaries: tuple[tuple[TensorObject, torch.Tensor], ...]
    bindings: Mapping[str, Binding]
    uses: tuple[Use, ...]


class Planner:
    """Puts a recipe's choices and the catalog together."""

    def __init__(self, catalog: Catalog, choices: Choices) -> None:
        self._catalog = catalog
        self._parameters = catalog.parameters
        self._choices = choices

    def plan(self) -> Plan:
        members = {name: self._members(name) for name in self._parameters if name not in self._choices.shares}
        packed = packing.groups(self._parameters, self._choices, self._weight_divisor)
        weights = []
        bindings: dict[str, Binding] = {}
        for names, shape in packed:
            weight = self._parent(len(weights), [members[name][0] for name in names], shape)
            weights.append(weight)
            begin = 0
            for member in weight.members:
                bindings[member.parameter] = Binding(
                    (Part(weight.tensor.id, begin, begin + member.elements),)
                )
                begin += member.elements
        for name, pieces in members.items():
            if name in bindings:
                continue
            own = [self._parent(len(weights) + i, [piece], None) for i, piece in enumerate(pieces)]
            weights += own
            bindings[name] = self._alone(self._parameters[name], own)
        for name in self._choices.shares:
            bindings[name] = bindings[self._target(name)]
        ordered = [name for name in self._parameters if name not in self._choices.shares]
        ordered += [name for name in self._parameters if name in self._choices.shares]
        uses, auxiliaries = self._uses(members)
        return Plan(tuple(weights), auxiliaries, {name: bindings[name] for name in ordered}, uses)

    def _members(self, name: str) -> list[Member]:
        segments = self._choices.segments[name]
        stays_tiled = self._stays_tiled(name)
        members = []
        for segment in segments:
            source = segment.selection.source
            view = self._catalog.view(name, source)
            matrix = self._catalog.matrix(name, source) if isinstance(view, Rows) else None
            if isinstance(view, Whole):
                view.check(self._catalog.sources[source])
            if isinstance(view, Rows):
                if stays_tiled:
                    view = replace(view, columns=None)
                self._check_segment(name, segment, view, matrix)
            members.append(Member(name, source, view, segment.begin, segment.end, matrix))
        return members

    def _check_segment(self, name: str, segment: Segment, view: Rows, matrix: SourceMatrix | None) -> None:
        selection = segment.selection
        try:
            encoded_bytes(
                selection.format,
                default_layout(selection.format),
                (segment.end - segment.begin, view.width),
                q6_rows=0,
            )
        except FormatError as error:
            raise ConversionError(f"'{name}' cannot be stored as the recipe asks: {error}") from None
        obstacle = (
            self._catalog.import_obstacle(name, segment.selection.source)
            if selection.method == IMPORT
            else None
        )
        if obstacle:
            raise ConversionError(f"'{name}' cannot be imported as {selection.format}: {obstacle}")
        if selection.method == IMPORT and matrix is not None and matrix.stored != selection.format:
            raise ConversionError(
                f"'{name}' is to be imported as {selection.format}, but the source '{selection.source}' "
                f"holds it as {matrix.stored}"
            )

    def _stays_tiled(self, name: str) -> bool:
        """Whether stored column blocks must keep their order because heads are no whole number of blocks."""
        for segment in self._choices.segments[name]:
            view = self._catalog.view(name, segment.selection.source)
            if not isinstance(view, Rows) or view.columns is None or view.columns.identity:
                continue
            unit = self._catalog.matrix(name, segment.selection.source).encoded_unit
            if segment.selection.method == IMPORT and (unit == 0 or view.columns.width % unit):
                return True
        return False

    def _parent(self, index: int, members: Sequence[Member], shape: tuple[int, ...] | None) -> Weight:
        selection = self._selection(members[0])
        total = sum(member.elements for member in members)
        natural = self._natural_shape(members, total)
        is_direct = formats.get(selection.format).kind == "direct"
        if shape is not None and (math.prod(shape) != total or (not is_direct and shape != natural)):
            raise ConversionError(
                f"the recipe's group of '{members[0].parameter}' cannot have the shape {list(shape)}; it "
                f"is {list(natural)}"
            )
        q6 = _q6_rows(members) if selection.format == "ggml_k" else None
        layout = default_layout(selection.format)
        q6_count = None if q6 is None else int(q6.sum())
        size = encoded_bytes(selection.format, layout, shape or natural, q6_rows=q6_count)
        tensor = TensorObject(f"weight/{index:06d}", shape or natural, selection.format, layout, 0, size)
        return Weight(tensor, selection.method, tuple(members), q6)

    def _natural_shape(self, members: Sequence[Member], total: int) -> tuple[int, ...]:
        view = members[0].view
        if isinstance(view, Rows):
            return total // view.width, view.width
        if len(members) == 1:
            return self._parameters[members[0].parameter].shape
        return (total,)

    def _alone(self, parameter: Parameter, weights: Sequence[Weight]) -> Binding:
        if len(weights) == 1 and weights[0].tensor.shape == parameter.shape:
            return Binding.to(weights[0].tensor)
        return Binding(tuple(Part(weight.tensor.id, 0, weight.tensor.elements) for weight in weights))

    def _uses(
        self, members: Mapping[str, Sequence[Member]]
    ) -> tuple[tuple[Use, ...], tuple[tuple[TensorObject, torch.Tensor], ...]]:
        uses = []
        auxiliaries: list[tuple[TensorObject, torch.Tensor]] = []
        orders: dict[bytes, Binding] = {}

        def auxiliary(words: torch.Tensor, format: str) -> Binding:
            layout = default_layout(format)
            shape = tuple(words.shape)
            tensor = TensorObject(
                f"auxiliary/{len(auxiliaries):06d}",
                shape,
                format,
                layout,
                0,
                encoded_bytes(format, layout, shape),
            )
            auxiliaries.append((tensor, words))
            return Binding.to(tensor)

        for name, parameter in self._parameters.items():
            target = self._target(name)
            for source in parameter.inputs:
                plan = self._choices.uses[name, source]
                roles: dict[str, Binding] = {}
                if plan.policy == "AllowA4" and self._has_nvfp4(target):
                    divisor = self._input_divisor(name, source, members[target])
                    roles[DIVISOR] = auxiliary(torch.tensor(divisor, dtype=torch.float32), "fp32")
                if self._stays_tiled(target):
                    order = self._stored_order(target)
                    key = order.tobytes()
                    if key not in orders:
                        orders[key] = auxiliary(torch.from_numpy(order), "int32")
                    roles[HEAD_ORDER] = orders[key]
                uses.append(Use(name, source, plan.policy, roles))
        return tuple(uses), tuple(auxiliaries)

    def _stored_order(self, name: str) -> np.ndarray:
        """Logical head of each stored column block: the inverse of the view's order."""
        view = self._catalog.view(name, self._choices.segments[name][0].selection.source)
        if not isinstance(view, Rows) or view.columns is None:
            raise ConversionError(f"'{name}' has row ranges from sources with different column orders")
        return np.argsort(view.columns.order).astype(np.int32)

    def _input_divisor(self, name: str, source: str, members: Sequence[Member]) -> float:
        stated = self._choices.uses[name, source].divisor
        found = (
            {member.matrix.input_divisor for member in members if member.matrix is not None}
            if stated is None
            else {stated}
        )
        value = found.pop() if len(found) == 1 else None
        if value is None or not math.isfinite(value) or value <= 0:
            raise ConversionError(
                f"the recipe allows A4 for '{name}', but no one positive activation divisor is known for "
                "it; state one with use(...)"
            )
        return value

    def _has_nvfp4(self, name: str) -> bool:
        return any(segment.selection.format == "nvfp4" for segment in self._choices.segments[name])

    def _weight_divisor(self, name: str, selection: Selection) -> float | None:
        if selection.method != IMPORT:
            return None
        return self._catalog.matrix(name, selection.source).weight_divisor

    def _target(self, name: str) -> str:
        while name in self._choices.shares:
            name = self._choices.shares[name]
        return name

    def _selection(self, member: Member) -> Selection:
        for segment in self._choices.segments[member.parameter]:
            if segment.begin == member.begin:
                return segment.selection
        raise KeyError(member.parameter)


def _q6_rows(members: Sequence[Member]) -> np.ndarray:
    flags = []
    for member in members:
        block = member.matrix.block_bytes if member.matrix is not None else 0
        flags.append(np.full(member.end - member.begin, block == _Q6_BLOCK))
    return np.concatenate(flags)
