"""Checkpoints to artifacts: `convert` makes one, `ensure_artifact` makes it once and finds it again.

Importing this package is light; PyTorch is imported when something is converted.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ninfer.convert.cache import ensure_artifact
    from ninfer.convert.pipeline import convert
    from ninfer.convert.proposal import ProposalOptions
    from ninfer.convert.report import Report

__all__ = ["ProposalOptions", "Report", "convert", "ensure_artifact"]

_LAZY = {"ProposalOptions": "proposal", "Report": "report", "convert": "pipeline", "ensure_artifact": "cache"}


def __getattr__(name: str) -> object:
    if name in _LAZY:
        return getattr(import_module(f"ninfer.convert.{_LAZY[name]}"), name)
    raise AttributeError(f"module 'ninfer.convert' has no attribute {name!r}")
