"""Work that is repeated on the same buffers, such as a decode step.

The first call runs the work, the second one notes what it does, and later calls do the same with what the
buffers hold then, without Python in between (on the CPU a list of kernel launches; the place of a CUDA
graph).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar

import torch

from ninfer.ops.dispatch import backend

T = TypeVar("T")


class Recording(Generic[T]):
    """Calls `work`, again and again; from the second call on the result is the same tensors with new
    contents.

    All that changes between calls must stand in tensors that the work reads: tokens, positions, page tables,
    slots. Python values that it looks at are those of the second call, and token ids are no longer checked.
    Work that needs more than operators of this package and views of tensors cannot be recorded: it is then
    simply run each time, and `obstacle` names the PyTorch operator that stood in the way. On a GPU it has to
    be capturable: an `EngineError` names the operator.

    `pool` (of `recording_pool`) is memory that recordings of one owner share, which must not run at the same
    time; the result of one then holds until another one runs.
    """

    def __init__(self, work: Callable[[], T], device: torch.device, pool: Any = None) -> None:
        self._work, self._device, self._pool = work, device, pool
        self._warm = False
        self._result: T | None = None
        self._tape = None
        self.obstacle: str | None = None

    @property
    def recorded(self) -> bool:
        """Do calls from now on replay?"""
        return self._tape is not None

    def __call__(self) -> T:
        if self._tape is not None:
            self._tape.replay()
        elif self._warm and self.obstacle is None:
            self._result, self._tape, self.obstacle = backend(self._device.type).record(
                self._work, self._pool
            )
        else:
            self._result, self._warm = self._work(), True
        return self._result  # type: ignore[return-value]


def recording_pool(device: torch.device) -> Any:
    """A pool for recordings on this device; nothing on the CPU, where each keeps its own memory."""
    return None if device.type == "cpu" else backend(device.type).Pool(device)
