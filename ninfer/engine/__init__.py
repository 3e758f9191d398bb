"""Engine: requests and their order. Knows token ids and limits; text and tensors are other rooms' work.

`Core` and what it needs of the runtime are imported on first use.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from ninfer.engine.events import (
    Done,
    Event,
    HostWork,
    Output,
    PromptProgress,
    Speculation,
    Started,
    Statistics,
    ThinkingReport,
)
from ninfer.engine.handle import Handle
from ninfer.engine.output import OutputSession
from ninfer.engine.request import Marks, Request
from ninfer.engine.reuse import ReusePath
from ninfer.engine.stats import Health, RuntimeStatistics

if TYPE_CHECKING:
    from ninfer.engine.admission import Policy
    from ninfer.engine.core import Core

__all__ = [
    "Core",
    "Done",
    "Event",
    "Handle",
    "Health",
    "HostWork",
    "Marks",
    "Output",
    "OutputSession",
    "Policy",
    "PromptProgress",
    "Request",
    "ReusePath",
    "RuntimeStatistics",
    "Speculation",
    "Started",
    "Statistics",
    "ThinkingReport",
]

_LAZY = {"Core": "core", "Policy": "admission"}


def __getattr__(name: str) -> object:
    if name in _LAZY:
        return getattr(import_module(f"ninfer.engine.{_LAZY[name]}"), name)
    raise AttributeError(f"module 'ninfer.engine' has no attribute {name!r}")
