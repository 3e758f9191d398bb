"""Work that is repeated on the same buffers, such as a decode step.

The first call runs the work, the second one notes what it does, and later calls do the same with what the
buffers hold then, without Python in between (on the CPU a list of kernel launches; the place of a CUDA
graph).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

import torch

from ninfer.ops.dispatch import backend

T = TypeVar("T")


class Recording(Generic[T]):
    """Calls `work`, again and again; from the second call on the result is the same tensors with new
    contents.

    All that changes between calls must stand in tensors that the work reads: tokens, positions, page tables,
    slots. Python values that it looks at are those of the second call, and token ids are no longer checked.
    Work that needs more than operators of this package and views of tensors cannot be recorded: it is then
    simply run each time, and `obstacle` names the PyTorch operator that stood in the way.
    """

    def __init__(self, work: Callable[[], T], device: torch.device) -> None:
        self._work, self._device = work, device
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
            self._result, self._tape, self.obstacle = backend(self._device.type).record(self._work)
        else:
            self._result, self._warm = self._work(), True
        return self._result  # type: ignore[return-value]
