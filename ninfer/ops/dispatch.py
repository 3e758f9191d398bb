"""From a device type to the package that implements the operators on it."""

from __future__ import annotations

import functools
import importlib
from types import ModuleType

from ninfer.errors import OptionError

_BACKENDS = {"cpu": "ninfer.ops.cpu", "cuda": "ninfer.ops.cuda"}


@functools.cache
def backend(device_type: str) -> ModuleType:
    """The operators of a device; imported at first use, since a backend pulls in its compiler."""
    module = _BACKENDS.get(device_type)
    if module is None:
        raise OptionError(f"no operators for device '{device_type}'; available: {', '.join(_BACKENDS)}")
    return importlib.import_module(module)
