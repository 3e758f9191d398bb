"""What an artifact's directory says, as typed records."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, overload

ALIGNMENT = 256
RAW_BYTES = "raw_bytes_v1"


@dataclass(frozen=True)
class TensorObject:
    """One encoded parent: all its planes at logical payload bytes `[offset, offset + bytes)`."""

    id: str
    shape: tuple[int, ...]
    format: str
    layout: str
    offset: int
    bytes: int

    @property
    def elements(self) -> int:
        """Number of logical elements; a scalar (shape `()`) has one."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class ResourceObject:
    """A file stored verbatim at logical payload bytes `[offset, offset + bytes)`."""

    id: str
    encoding: str
    offset: int
    bytes: int


@dataclass(frozen=True)
class Part:
    """Logical elements `[begin, end)` of an object, in C order of its shape."""

    object: str
    begin: int
    end: int


@dataclass(frozen=True)
class Binding(Sequence[Part]):
    """A logical parameter's parts, in order; reads as a sequence of them.

    whole: the binding names one object as a whole, so the parameter has exactly the object's shape.
    """

    parts: tuple[Part, ...]
    whole: bool = False

    @overload
    def __getitem__(self, index: int) -> Part: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Part, ...]: ...
    def __getitem__(self, index: int | slice) -> Part | tuple[Part, ...]:
        return self.parts[index]

    def __len__(self) -> int:
        return len(self.parts)

    @property
    def elements(self) -> int:
        """Number of logical elements of the parameter."""
        return sum(part.end - part.begin for part in self.parts)

    @classmethod
    def to(cls, tensor: TensorObject) -> Binding:
        """The whole of one object."""
        return cls((Part(tensor.id, 0, tensor.elements),), whole=True)


@dataclass(frozen=True)
class Use:
    """How one parameter meets one mathematical input: allowed activation formats, auxiliary tensors."""

    parameter: str
    input: str
    activation_policy: str | None = None
    auxiliaries: Mapping[str, Binding] = field(default_factory=dict)


@dataclass(frozen=True)
class Proposal:
    """The proposal head's vocabulary: `full`, or `indexed` with its number of rows."""

    domain: str
    rows: int | None = None


@dataclass(frozen=True)
class Component:
    """A part of the model that can be loaded. `config` is the architecture's own; treat it as read-only."""

    config: Mapping[str, Any]
    target: str | None = None
    resources: Mapping[str, str] = field(default_factory=dict)
    proposal: Proposal | None = None


@dataclass(frozen=True)
class FileEntry:
    """One file of the set: its name (None for the entry) and how many payload bytes it holds."""

    path: str | None
    payload_bytes: int


@dataclass(frozen=True)
class Directory:
    """The root record. `files` is what a reader found; a writer computes its own."""

    components: Mapping[str, Component]
    objects: Mapping[str, TensorObject | ResourceObject]
    bindings: Mapping[str, Binding]
    uses: tuple[Use, ...] = ()
    metadata: Mapping[str, Any] = field(default_factory=dict)
    provenance: Mapping[str, Any] = field(default_factory=dict)
    files: tuple[FileEntry, ...] = ()

    @property
    def payload_end(self) -> int:
        """Where the last object ends: the payload size that a writer needs."""
        return max((record.offset + record.bytes for record in self.objects.values()), default=0)


def place(objects: Sequence[TensorObject | ResourceObject]) -> dict[str, TensorObject | ResourceObject]:
    """The objects by id with offsets assigned in the given order; tensors are 256-byte aligned."""
    placed: dict[str, TensorObject | ResourceObject] = {}
    end = 0
    for record in objects:
        step = ALIGNMENT if isinstance(record, TensorObject) else 1
        offset = align_up(end, step)
        placed[record.id] = replace(record, offset=offset)
        end = offset + record.bytes
    return placed


def align_up(value: int, step: int) -> int:
    """The smallest multiple of `step` that is not below `value`."""
    return -(-value // step) * step
