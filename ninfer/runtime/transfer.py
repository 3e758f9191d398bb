"""How a unit's record reaches the device, and how its results come back: one copy each way.

On the CPU the model reads and writes the records themselves. On another device they have a copy each: the
host's half lies in pinned memory, so that both copies run on the unit's stream, between its kernels, and the
host waits once, at the end.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from time import perf_counter

import numpy as np
import torch

from ninfer.runtime.records import Shape, egress, ingress


class HostTransfer:
    """Nothing is copied. `ingress` and `egress` are the records, `fields` and `results` their arrays as
    tensors where the model computes, without the record's own axis; scalars aren't among them.

    A unit runs `within` the context manager, between `send` and `receive`.
    """

    def __init__(self, shape: Shape) -> None:
        self.ingress, self.egress = ingress(shape), egress(shape)
        self.fields, self.results = _tensors(self.ingress), _tensors(self.egress)
        self.within: AbstractContextManager[object] = nullcontext()
        self._begin = 0.0

    def send(self) -> None:
        """Make the record what the device's `fields` hold."""
        self._begin = perf_counter()

    def receive(self) -> float:
        """Wait for the unit, whose `results` stand in `egress` then; the seconds that the device took."""
        return perf_counter() - self._begin


class DeviceTransfer(HostTransfer):
    """Both records on the host, pinned, and once more on a CUDA device, with a stream of its own."""

    def __init__(self, shape: Shape, device: torch.device) -> None:
        self.ingress, sent, arrived = _pair(ingress(shape), device)
        self.egress, returned, made = _pair(egress(shape), device)
        self.fields = _views(self.ingress.dtype, arrived)
        self.results = _views(self.egress.dtype, made)
        assert self.ingress.dtype.fields is not None
        begin = self.ingress.dtype.fields["masks"][1]
        self._head = arrived[:begin], sent[:begin]
        self._masks = self.fields["masks"], _views(self.ingress.dtype, sent)["masks"]
        self._mask_row = self.ingress["mask_row"]
        self._back = returned, made
        self._stream = torch.cuda.Stream(device)
        self.within = torch.cuda.stream(self._stream)
        self._started = torch.cuda.Event(enable_timing=True)
        self._ended = torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize(device)  # what was made so far was made on another stream

    def send(self) -> None:
        self._started.record()
        to, source = self._head
        to.copy_(source, non_blocking=True)
        used = int(self._mask_row.max()) + 1
        if used > 0:
            to, source = self._masks
            to[:used].copy_(source[:used], non_blocking=True)

    def receive(self) -> float:
        to, source = self._back
        to.copy_(source, non_blocking=True)
        self._ended.record()
        self._ended.synchronize()
        return self._started.elapsed_time(self._ended) / 1e3


def transfer(shape: Shape, device: torch.device) -> HostTransfer:
    """What a device needs."""
    return HostTransfer(shape) if device.type == "cpu" else DeviceTransfer(shape, device)


def _tensors(record: np.ndarray) -> dict[str, torch.Tensor]:
    return {
        name: torch.from_numpy(record[name][0]) for name in record.dtype.names or () if record[name].ndim > 1
    }


def _pair(record: np.ndarray, device: torch.device) -> tuple[np.ndarray, torch.Tensor, torch.Tensor]:
    """The record in pinned memory, the same as bytes, and bytes of the device with the same contents."""
    host = torch.empty(record.nbytes, dtype=torch.uint8, pin_memory=True)
    view = host.numpy().view(record.dtype)
    view[:] = record
    return view, host, host.to(device)


def _views(layout: np.dtype, data: torch.Tensor) -> dict[str, torch.Tensor]:
    """The arrays of a record of this layout in these bytes."""
    views = {}
    for name, (kind, begin, *_) in (layout.fields or {}).items():
        if kind.shape:
            dtype = torch.from_numpy(np.empty(0, kind.base)).dtype
            views[name] = data[begin : begin + kind.itemsize].view(dtype).view(kind.shape)
    return views
