"""The public Python interface: load a model, get an engine with its frontend."""

from ninfer.api.engine import Engine, EngineDescription, Generation
from ninfer.api.options import EngineOptions, GenerationOptions, ScorerOptions
from ninfer.api.scorer import Scorer, ScorerDescription
from ninfer.engine import (
    Done,
    Event,
    Health,
    HostWork,
    Output,
    PromptProgress,
    RuntimeStatistics,
    Speculation,
    Started,
    Statistics,
    ThinkingReport,
)
from ninfer.events import Channel, FinishReason, TokenLogprob

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
    "HostWork",
    "Output",
    "PromptProgress",
    "RuntimeStatistics",
    "Scorer",
    "ScorerDescription",
    "ScorerOptions",
    "Speculation",
    "Started",
    "Statistics",
    "ThinkingReport",
    "TokenLogprob",
]
