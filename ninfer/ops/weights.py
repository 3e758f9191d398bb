"""What an operator knows about a weight: encoded bytes, spans of their rows, matrices made of spans."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import IntEnum, StrEnum
from typing import Protocol

import torch

from ninfer.errors import FormatError
from ninfer.ops.dispatch import backend


class Upload(Protocol):
    """Copies a contiguous tensor of the host to `device`, in order with the current stream; it may return
    before that has happened, but the source is no longer needed then."""

    @property
    def device(self) -> torch.device: ...

    def __call__(self, data: torch.Tensor, /) -> torch.Tensor: ...


Progress = Callable[[str, int, int], None]


class ActivationPolicy(IntEnum):
    """How far a product may quantize its activations, privately; each allows what is before it."""

    A16 = 0
    A8 = 1
    A4 = 2


class Role(StrEnum):
    """What a matrix is for: a backend chooses its packing by that."""

    LINEAR = "linear"
    """`linear`, `logits`, `norm_linear`."""
    SWIGLU = "swiglu"
    """Gate rows, then as many up rows, for `linear_swiglu` and `norm_linear_swiglu`."""
    TABLE = "table"
    """Looked up by rows: `embedding`."""
    GATING = "gating"
    """A small projection of `gdn_gating`."""


@dataclass(frozen=True, eq=False)
class Encoded:
    """One complete encoded parent object of an artifact.

    `data` is uint8, 1-D, contiguous and holds the object's bytes exactly as in the file (all planes); on
    the CPU it is normally a view of the mapped file. `shape` is `(rows, columns)`.
    """

    format: str
    layout: str
    shape: tuple[int, ...]
    data: torch.Tensor

    def __post_init__(self) -> None:
        if len(self.shape) != 2 or min(self.shape) < 1:
            raise FormatError(f"a matrix needs two positive dimensions, got shape {tuple(self.shape)}")
        if self.data.dtype != torch.uint8 or self.data.dim() != 1 or not self.data.is_contiguous():
            raise FormatError(
                f"encoded bytes must be contiguous 1-D uint8, got {self.data.dtype} {tuple(self.data.shape)}"
            )


@dataclass(frozen=True, eq=False)
class RowSpan:
    """Rows `[begin, end)` of an encoded parent."""

    parent: Encoded
    begin: int
    end: int

    def __post_init__(self) -> None:
        if not 0 <= self.begin < self.end <= self.parent.shape[0]:
            raise FormatError(
                f"row span [{self.begin}, {self.end}) is outside a parent of {self.parent.shape[0]} rows"
            )


class Matrix:
    """A logical `[rows, columns]` weight: row spans of encoded parents, one below the other.

    Adjacent spans of one parent are merged. The bytes are never copied. A backend keeps what it derives
    from the spans (addresses, plane offsets, its own packing) in `plan`; nobody else reads that attribute.
    `policy` says how far activations may be quantized on the way (`ActivationPolicy`).
    """

    __slots__ = ("columns", "device", "plan", "policy", "rows", "spans")

    def __init__(self, spans: Sequence[RowSpan], policy: ActivationPolicy = ActivationPolicy.A16) -> None:
        if not spans:
            raise FormatError("a matrix needs at least one row span")
        merged: list[RowSpan] = []
        for span in spans:
            last = merged[-1] if merged else None
            if last is not None and last.parent is span.parent and last.end == span.begin:
                merged[-1] = RowSpan(span.parent, last.begin, span.end)
            else:
                merged.append(span)
        columns = {span.parent.shape[1] for span in merged}
        if len(columns) != 1:
            raise FormatError(f"row spans of different widths cannot form one matrix: {sorted(columns)}")
        self.spans: tuple[RowSpan, ...] = tuple(merged)
        self.rows: int = sum(span.end - span.begin for span in merged)
        self.columns: int = columns.pop()
        self.policy = policy
        self.device: torch.device = merged[0].parent.data.device
        self.plan: object | None = None

    @classmethod
    def of(cls, encoded: Encoded) -> Matrix:
        """The whole of one parent."""
        return cls((RowSpan(encoded, 0, encoded.shape[0]),))

    @classmethod
    def stack(cls, matrices: Iterable[Matrix]) -> Matrix:
        """The matrices one below the other, so that one call reads the input once; it allows what all
        allow."""
        members = list(matrices)
        policy = min((matrix.policy for matrix in members), default=ActivationPolicy.A16)
        return cls([span for matrix in members for span in matrix.spans], policy)

    def placed(self, device: torch.device, plan: object) -> None:
        """Note that a backend holds the weights on `device` now, and let go of the encoded bytes."""
        self.device, self.plan, self.spans = device, plan, ()

    def __repr__(self) -> str:
        formats = ", ".join(dict.fromkeys(span.parent.format for span in self.spans)) or "placed"
        return f"Matrix([{self.rows}, {self.columns}], {formats}, {len(self.spans)} spans)"


def place(matrix: Matrix, device: torch.device, role: Role, upload: Upload | None = None) -> None:
    """Bring a matrix to `device` in the layout that its kernels there like, once; afterwards its encoded
    bytes are no longer needed. On the CPU the encoded bytes themselves are that layout, and nothing happens.
    `upload` comes from `uploading`; without one, bytes are copied as PyTorch does it. Raises `FormatError` on
    a matrix that has been placed, whose bytes are gone."""
    if not matrix.spans:
        raise FormatError(f"{matrix} is on {matrix.device} already; take its weights from the artifact again")
    if device.type != "cpu":
        backend(device.type).place(matrix, device, role, upload)


@contextmanager
def uploading(device: torch.device, total: int, progress: Progress | None = None) -> Iterator[Upload | None]:
    """Around the loading of a model of about `total` bytes: what copies its weights to the device, and tells
    `progress(stage, done, total)`. None on the CPU, where weights stay in their file."""
    if device.type == "cpu":
        yield None
        return
    from ninfer.ops.cuda.upload import Uploader

    with torch.cuda.device(device), Uploader(device, total=total, progress=progress) as upload:
        yield upload
