"""What operators take beside their inputs, at most, in bytes: plans count it before anything is allocated.

Each backend has formulas of its own: `workspace(device)` gives those of a device.
"""

from __future__ import annotations

import functools
import importlib
from typing import Protocol, cast

import torch

from ninfer.ops.dispatch import backend


class Workspace(Protocol):
    """`*_bytes` are outputs and scratch of a call of many columns, `recorded_*` what a recorded call of a few
    columns keeps. `size`: bytes of an activation."""

    def linear_bytes(self, columns: int, inputs: int, outputs: int, size: int) -> int: ...

    def swiglu_bytes(self, columns: int, inputs: int, outputs: int, size: int) -> int:
        """`outputs`: columns of the result, half the matrix's rows."""
        ...

    def attention_bytes(
        self, columns: int, context: int, heads: int, kv_heads: int, width: int, size: int
    ) -> int:
        """Of columns that end at the end of a context."""
        ...

    def delta_net_bytes(
        self, columns: int, key_heads: int, value_heads: int, key_dim: int, value_dim: int, size: int
    ) -> int:
        """All that stands between the projections of a Gated DeltaNet."""
        ...

    def recorded_linear(self, columns: int, inputs: int, outputs: int, size: int) -> int: ...

    def recorded_attention(self, columns: int, context: int, heads: int, width: int, size: int) -> int: ...

    def reuses(self) -> bool:
        """Does a recorded pass take no more than the pass itself, instead of keeping all that it made, and do
        recordings of one pool share even that?"""
        ...

    def fixed_bytes(self) -> int:
        """What the backend itself takes on the device while it works, whatever the model."""
        ...

    def recording_bytes(self) -> int:
        """What a recording of a round takes beside what its operators keep."""
        ...


def workspace(device: torch.device) -> Workspace:
    """The formulas of the backend of this device."""
    return _workspace(device.type)


@functools.cache
def _workspace(kind: str) -> Workspace:
    return cast(Workspace, importlib.import_module(f"{backend(kind).__name__}.workspace"))
