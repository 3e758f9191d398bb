"""Train ninfer-nano on one GPU, in legs of less than ten minutes: `python -m tools.nano.train --help`."""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch

from ninfer.errors import NInferError, OptionError
from tools.nano import delta, shards
from tools.nano.batches import IGNORED, Batch, Workers, read_texts
from tools.nano.commands import exit_code
from tools.nano.evaluate import evaluate
from tools.nano.geometry import CONTEXT
from tools.nano.mix import SOURCES, WEIGHTS
from tools.nano.model import (
    MATRICES,
    Model,
    Parameters,
    attend_fused,
    attend_plain,
    initialize,
    losses,
    unbind,
)
from tools.nano.muon import Optimizer
from tools.nano.packing import CHUNK, cut, packing, to_device
from tools.nano.proof import prove_operators
from tools.nano.quantized import with_nvfp4

_LOG_EVERY = 50


@dataclass(frozen=True)
class Schedule:
    """Learning rates of a leg.

    steps: of this leg. seconds: the leg ends then at the latest, its schedule running by the clock if that
    is ahead of the steps. constant: the part of the leg before the rates fall linearly to zero (1 = they
    stay). quantized: the part of the leg after which every other step sees its matrices in NVFP4.
    """

    steps: int
    seconds: float
    constant: float
    quantized: float
    warm_up: int = 100
    peak: float = 1.0

    def factor(self, step: int, progress: float) -> float:
        """Of the peak rates."""
        falling = 1.0 if progress < self.constant else (1 - progress) / (1 - self.constant)
        return self.peak * min((step + 1) / self.warm_up, falling)


class Trainer:
    """Parameters, optimizer and one step."""

    def __init__(self, parameters: Parameters, *, distilled: bool, device: str = "cuda") -> None:
        """distilled: whether the MTP layer learns the trunk's best tokens instead of the text's."""
        self.parameters = parameters
        self.model = build_model(device)
        self._optimizer = Optimizer(parameters, frozenset(MATRICES), matrix_rate=0.012, other_rate=3e-3)
        self._distilled, self._device = distilled, device
        build = partial(torch.compile, dynamic=False) if device == "cuda" else (lambda function: function)
        self._losses, self._quantize = build(losses), build(with_nvfp4)
        self._weights = torch.tensor([WEIGHTS.get(name, 1.0) for name in SOURCES], device=device)
        self._dtype = torch.bfloat16 if device == "cuda" else torch.float32
        self.sums = torch.zeros(3, IGNORED + 1, device=device)  # losses, MTP losses, tokens by source

    def step(self, batch: Batch, factor: float, *, quantized: bool) -> None:
        """One update; losses are added to `sums`."""
        device, half = self._device, len(batch.tokens) // 2
        tokens = to_device(batch.tokens.astype(np.int64), device)
        sources = to_device(batch.sources.astype(np.int64), device)
        whole, first = packing(batch.ends, device), packing(cut(batch.ends, half), device)
        p = unbind(self._quantize(self.parameters) if quantized else self.parameters, self._dtype)
        hidden = self.model.hidden(p, tokens, whole)
        loss, best = self._losses(hidden, p["embedding"][0], tokens.roll(-1))
        learned = sources != IGNORED
        weight = self._weights[sources.clamp(max=len(SOURCES) - 1)] * learned
        total = (loss * weight).sum() / weight.sum()

        # The MTP layer learns beside the trunk, from half of the batch, and changes nothing else.
        frozen = p | {"embedding": [p["embedding"][0].detach()]}
        following = tokens.roll(-1)[:half]
        drafted = self.model.draft(frozen, hidden[:half].detach(), following, first)
        target = (best if self._distilled else tokens.roll(-1)).roll(-1)[:half]
        draft_loss, _ = self._losses(drafted, frozen["embedding"][0], target)
        draft_weight = weight.roll(-1)[:half]
        total = total + (draft_loss * draft_weight).sum() / draft_weight.sum()
        total.backward()
        self._optimizer.step(factor)

        with torch.no_grad():
            self.sums[0].index_add_(0, sources, loss.detach())
            self.sums[2].index_add_(0, sources, torch.ones_like(loss))
            self.sums[1].index_add_(0, sources.roll(-1)[:half], draft_loss.detach() * 2)


def build_model(device: str) -> Model:
    """With the kernels that fit the device."""
    if device == "cuda":
        return Model(delta.fused(), attend_fused(), device=device, compiled=True)
    return Model(delta.plain, attend_plain, device=device, compiled=False)


def train_leg(
    trainer: Trainer, workers: Workers, schedule: Schedule, log: Callable[[dict[str, object]], None]
) -> int:
    """Run a leg; returns the steps taken. Raises NInferError when the loss is no number."""
    begin = time.monotonic()
    step = 0
    for step, batch in enumerate(workers):
        elapsed = time.monotonic() - begin
        progress = max(step / schedule.steps, elapsed / schedule.seconds)
        if progress >= 1:
            break
        quantized = progress >= schedule.quantized and step % 2 == 1
        trainer.step(batch, schedule.factor(step, progress), quantized=quantized)
        if (step + 1) % _LOG_EVERY == 0:
            loss, draft, count = trainer.sums.tolist()
            trainer.sums.zero_()
            seen = {name: i for i, name in enumerate(SOURCES) if count[i]}
            mean = sum(loss[:IGNORED]) / max(1.0, sum(count[:IGNORED]))
            if not math.isfinite(mean):
                raise NInferError(f"the loss is {mean} after step {step + 1}; a lower --peak may help")
            log(
                {
                    "step": step + 1,
                    "seconds": round(time.monotonic() - begin, 1),
                    "loss": round(mean, 4),
                    "mtp": round(sum(draft[:IGNORED]) / max(1.0, sum(count[:IGNORED])), 4),
                    "sources": {name: round(loss[i] / count[i], 4) for name, i in seen.items()},
                    "ready": workers.waiting(),
                }
            )
    return step


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.nano.train", description=__doc__)
    parser.add_argument("--corpus", type=Path, required=True, help="folder made by tools.nano.corpus")
    parser.add_argument("--out", type=Path, required=True, help="folder for the leg's shards and log")
    parser.add_argument(
        "--leg", type=int, required=True, help="0, or the number of the leg that follows --resume"
    )
    parser.add_argument("--resume", type=Path, help="the shards of the leg before")
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument(
        "--seconds", type=float, default=480.0, help="the leg's training ends then at the latest"
    )
    parser.add_argument("--last", action="store_true", help="let the learning rates fall to zero")
    parser.add_argument(
        "--peak", type=float, default=1.0, help="of the learning rates, for a leg after the last"
    )
    parser.add_argument("--tokens", type=int, default=65_536, help="tokens of a step")
    parser.add_argument("--workers", type=int, default=14)
    parser.add_argument("--seed", type=int, default=2026)
    options = parser.parse_args(arguments)
    return exit_code(lambda: _leg(options))


def check_machine(corpus: Path, tokens: int, workers: int, steps: int) -> None:
    """OptionError or NInferError for what would end a leg, or a check before it, only after minutes."""
    if tokens < CONTEXT or tokens % (2 * CHUNK):
        raise OptionError(f"--tokens must be a multiple of {2 * CHUNK} and at least {CONTEXT}, not {tokens}")
    for flag, value in (("--workers", workers), ("--steps", steps)):
        if value < 1:
            raise OptionError(f"{flag} must be at least 1, not {value}")
    for split in ("train", "heldout"):
        read_texts(corpus, split)
    if not torch.cuda.is_available():
        raise NInferError("training needs a CUDA device, and PyTorch finds none on this machine")


def _leg(options: argparse.Namespace) -> None:
    """Train a leg and leave its shards, log and evaluation."""
    if options.leg < 0 or (options.leg == 0) != (options.resume is None):
        raise OptionError("leg 0 starts from nothing; later legs need --resume FOLDER")
    if not options.seconds > 0:
        raise OptionError(f"--seconds must be more than 0, not {options.seconds}")
    report_path = options.out / "evaluation.json"
    if report_path.exists():
        raise OptionError(f"{options.out} holds a leg that is done; name another folder with --out")
    check_machine(options.corpus, options.tokens, options.workers, options.steps)

    # Workers are forked before this process uses CUDA.
    workers = Workers(
        options.corpus, seed=options.seed, leg=options.leg, tokens=options.tokens, count=options.workers
    )
    torch.manual_seed(options.seed)
    parameters = initialize(options.seed, "cuda")
    if options.resume:
        shards.restore(options.resume, parameters)
    prove_operators()
    schedule = Schedule(
        options.steps,
        options.seconds,
        constant=0.3 if options.last else 1.0,
        quantized=0.5 if options.last else 1.0,
        peak=options.peak,
    )
    trainer = Trainer(parameters, distilled=options.leg > 0)
    options.out.mkdir(parents=True, exist_ok=True)
    with (options.out / "log.jsonl").open("w") as records:

        def log(record: dict[str, object]) -> None:
            records.write(json.dumps({"leg": options.leg, **record}) + "\n")
            records.flush()
            print(*(record[key] for key in ("step", "seconds", "loss", "mtp", "ready")), flush=True)

        taken = train_leg(trainer, workers, schedule, log)
    workers.close()
    paths = shards.save(parameters, options.out)
    report = evaluate(trainer.model, parameters, options.corpus)
    found = {"leg": options.leg, "steps": taken, "tokens": options.tokens, "schedule": asdict(schedule)}
    report_path.write_text(json.dumps(found | report, indent=1))
    print(json.dumps(report, indent=1))
    print(f"{taken} steps, {len(paths)} shards in {options.out}")


if __name__ == "__main__":
    sys.exit(main())
