"""Runtime: memory and the units of work on it; records of numbers in, records of numbers out.

What needs PyTorch is imported on first use.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ninfer.ops import SamplingParams
    from ninfer.runtime.plan import DEFAULT_CHUNK, Limits, Plan
    from ninfer.runtime.program import Program, plan_model
    from ninfer.runtime.scoring import Scoring

__all__ = ["DEFAULT_CHUNK", "Limits", "Plan", "Program", "SamplingParams", "Scoring", "plan_model"]

_LAZY = {
    "DEFAULT_CHUNK": "ninfer.runtime.plan",
    "Limits": "ninfer.runtime.plan",
    "Plan": "ninfer.runtime.plan",
    "Program": "ninfer.runtime.program",
    "SamplingParams": "ninfer.ops",
    "Scoring": "ninfer.runtime.scoring",
    "plan_model": "ninfer.runtime.program",
}


def __getattr__(name: str) -> object:
    if name in _LAZY:
        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'ninfer.runtime' has no attribute {name!r}")
