"""Models without files: random weights of public geometries, for measuring speed and for tests.

Importing this package is light, so that every program can ask whether a path means such a model.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ninfer.api.synthetic.model import Synthetic

__all__ = ["PREFIX", "Synthetic", "is_synthetic"]

PREFIX = "synthetic:"


def is_synthetic(path: str | Path) -> bool:
    """Does the path mean `synthetic:GEOMETRY/PROFILE`? A file of that name would need a folder in front."""
    return str(path).startswith(PREFIX)


def __getattr__(name: str) -> object:
    if name == "Synthetic":
        return import_module("ninfer.api.synthetic.model").Synthetic
    raise AttributeError(f"module 'ninfer.api.synthetic' has no attribute {name!r}")
