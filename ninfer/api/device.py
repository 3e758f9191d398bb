"""From a device's name (`ninfer.devices`) to a device that can be used, or the reason why it can't."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING

from ninfer.errors import OptionError

if TYPE_CHECKING:
    import torch

_OLDEST = (8, 0)
"""Compute capability that kernels need at least."""


def choose_device(name: str) -> torch.device:
    """The device of a checked name, `cuda` with its number; OptionError with a remedy if it isn't there.

    `auto` is the first GPU that can be used, else the CPU.
    """
    import torch

    if name == "cpu":
        return torch.device("cpu")
    number = int(name.partition(":")[2] or 0)
    obstacle = _obstacle(number)
    if obstacle is None:
        return torch.device("cuda", number)
    if name == "auto":
        return torch.device("cpu")
    raise OptionError(f"device {name} is not available: {obstacle}, or use --device cpu")


def describe_device(device: torch.device) -> str:
    """Its model, such as `NVIDIA H200`; empty for the CPU."""
    import torch

    return torch.cuda.get_device_name(device) if device.type == "cuda" else ""


def _obstacle(number: int) -> str | None:
    """Why this GPU can't be used, and what would help."""
    import torch

    if torch.version.cuda is None:
        version = torch.__version__
        return f"this PyTorch ({version}) was built without CUDA; install a CUDA build from pytorch.org"
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not count:
        return "PyTorch finds no GPU; check the driver with nvidia-smi and CUDA_VISIBLE_DEVICES"
    if number >= count:
        return f"the last GPU here is cuda:{count - 1}; name one of those"
    if torch.cuda.get_device_capability(number) < _OLDEST:
        major, minor = torch.cuda.get_device_capability(number)
        return (
            f"{torch.cuda.get_device_name(number)} has compute capability {major}.{minor} and "
            f"{_OLDEST[0]}.{_OLDEST[1]} is needed; name a newer GPU"
        )
    if importlib.util.find_spec("triton") is None:
        return "the package triton is missing; install it (pip install triton)"
    return None
