"""NInfer: low-latency inference of selected Qwen3.5-family checkpoints.

Importing this package is light; PyTorch is imported when a model is loaded.
"""

from importlib import import_module

__version__ = "0.1.0"

_API = frozenset()


def __getattr__(name: str) -> object:
    if name in _API:
        return getattr(import_module("ninfer.api"), name)
    raise AttributeError(f"module 'ninfer' has no attribute {name!r}")
