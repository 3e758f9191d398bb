"""Carrying out the tests of `ninfer-bench` on a loaded engine."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ninfer.api.throughput import Case, Repetition, mean_and_deviation, measure, random_ids
from ninfer.errors import OptionError

if TYPE_CHECKING:
    from ninfer.api import Engine

_PRIMING = Case(generated=2)


@dataclass(frozen=True)
class Settings:
    """How tests are run. `corpus`: where the ids come from, None for pseudo-random ones. `assumed`: the share
    of drafts of which rates are told as if they had stood."""

    repetitions: int
    warmup: int
    profile_measured: bool
    corpus: Path | None
    corpus_tokens: int | None
    quiet: bool
    assumed: float | None = None


@dataclass(frozen=True)
class Measured:
    """A test's measured repetitions; `workspace_peak`: bytes that the device's allocator needed beyond what
    was taken before (None on the CPU)."""

    case: Case
    repetitions: tuple[Repetition, ...]
    workspace_peak: int | None


def run_tests(
    engine: Engine, tests: Sequence[Case], ids: Sequence[int] | None, settings: Settings
) -> Iterator[Measured]:
    """Prime the decode graph, then each test: its warm-ups, its measured repetitions."""
    public = engine.frontend.public_tokens
    if ids is None:
        longest = max(case.prompt_tokens for case in tests)
        ids = random_ids(public, engine.frontend.stop_token_ids, longest + 1024)
    elif max(ids) >= public:
        raise OptionError(
            f"the corpus {settings.corpus} has the id {max(ids)}, but the model's tokenizer knows only "
            f"{public}; use the corpus of its own tokenizer, or none"
        )
    is_cuda = engine.description.device.startswith("cuda")
    if settings.profile_measured and not is_cuda:
        raise OptionError("--profile-measured needs a GPU; this engine computes on the CPU")
    if is_cuda and any(case.generated for case in tests):
        measure(engine, _PRIMING, ids)
    for case in tests:
        for _ in range(settings.warmup):
            measure(engine, case, ids)
        with _peak(engine) as peak, _profiled(settings.profile_measured):
            runs = tuple(measure(engine, case, ids) for _ in range(settings.repetitions))
        found = Measured(case, runs, peak[0] if peak else None)
        if not settings.quiet:
            print(_line(found), file=sys.stderr, flush=True)
        yield found


def _line(measured: Measured) -> str:
    shown = []
    if measured.case.prompt:
        mean, deviation = mean_and_deviation(run.prefill_tok_s for run in measured.repetitions)
        shown.append(f"prefill {mean or 0:.2f} ± {deviation or 0:.2f} tok/s")
    if measured.case.generated:
        mean, deviation = mean_and_deviation(run.decode_output_tok_s for run in measured.repetitions)
        shown.append(f"decode {mean or 0:.2f} ± {deviation or 0:.2f} tok/s")
    return f"{measured.case.label}: {', '.join(shown)}"


@contextmanager
def _peak(engine: Engine) -> Iterator[list[int]]:
    """Filled at the end: bytes above those held at the beginning."""
    found: list[int] = []
    if not engine.description.device.startswith("cuda"):
        yield found
        return
    import torch

    device = torch.device(engine.description.device)
    torch.cuda.reset_peak_memory_stats(device)
    held = torch.cuda.memory_allocated(device)
    yield found
    found.append(torch.cuda.max_memory_allocated(device) - held)


@contextmanager
def _profiled(wanted: bool) -> Iterator[None]:
    """Bracketed by the profiler's start and stop, after the device has done everything before."""
    if not wanted:
        yield
        return
    import torch

    torch.cuda.synchronize()
    torch.cuda.profiler.start()
    try:
        yield
        torch.cuda.synchronize()
    finally:
        torch.cuda.profiler.stop()
