"""Engine: requests and their order. Knows token ids and limits; text and tensors are other rooms' work."""

from ninfer.engine.events import Done, Event, Output, PromptProgress, Started, Statistics, ThinkingReport
from ninfer.engine.loop import Request, run
from ninfer.engine.output import OutputSession

__all__ = [
    "Done",
    "Event",
    "Output",
    "OutputSession",
    "PromptProgress",
    "Request",
    "Started",
    "Statistics",
    "ThinkingReport",
    "run",
]
