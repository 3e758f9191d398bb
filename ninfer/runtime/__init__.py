"""Runtime: the memory of a sequence and the units of work on it; token ids in, token ids out."""

from ninfer.ops import SamplingParams
from ninfer.runtime.plan import DEFAULT_CHUNK, Plan
from ninfer.runtime.program import Program
from ninfer.runtime.records import Admission, Decoded, Prefilled
from ninfer.runtime.scoring import Scoring

__all__ = [
    "DEFAULT_CHUNK",
    "Admission",
    "Decoded",
    "Plan",
    "Prefilled",
    "Program",
    "SamplingParams",
    "Scoring",
]
