"""NInfer: low-latency inference of selected Qwen3.5-family checkpoints.

    import ninfer

    with ninfer.Engine.load("model.ninfer") as engine:
        for event in engine.chat([{"role": "user", "content": "Hello!"}]):
            if isinstance(event, ninfer.Output):
                print(event.text, end="")

Importing this package is light: the names below arrive when they are first used. What goes wrong for a reason
outside the code is an `NInferError`, whose text is one sentence; its kinds are in `ninfer.errors`.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from ninfer.errors import NInferError

if TYPE_CHECKING:
    from ninfer.api import (
        Channel,
        Done,
        Engine,
        EngineDescription,
        EngineOptions,
        Event,
        FinishReason,
        Generation,
        GenerationOptions,
        Health,
        Output,
        PromptProgress,
        RuntimeStatistics,
        Started,
        Statistics,
        ThinkingReport,
    )

__version__ = "0.1.0"
__all__ = [
    "Channel",
    "Done",
    "Engine",
    "EngineDescription",
    "EngineOptions",
    "Event",
    "FinishReason",
    "Generation",
    "GenerationOptions",
    "Health",
    "NInferError",
    "Output",
    "PromptProgress",
    "RuntimeStatistics",
    "Started",
    "Statistics",
    "ThinkingReport",
]


def __getattr__(name: str) -> object:
    if name in __all__:
        return getattr(import_module("ninfer.api"), name)
    raise AttributeError(f"module 'ninfer' has no attribute {name!r}")
