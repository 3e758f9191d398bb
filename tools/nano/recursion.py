"""Train the MTP layer on its own recursion: `python -m tools.nano.recursion ARTIFACT --help`.

The legs teach it one step: text model's state in, the token after the next one out. Speculative decoding
asks for more: its output takes the state's place. Here all steps of the chains that start at every position
of an answer are computed at once (`Model.chains`), and each learns the text model's own best token. A step
counts where a round would come to it, that is where the guesses before it were right; early steps count
more, since all later ones depend on them. The text model stays as it is.

Leaves in --out: `mtp.safetensors` (BF16 under Hugging Face's names), which `tools.nano.export mtp` puts into
an artifact; `log.jsonl`; `evaluation.json`, before and after by source of held-out instances: of the guesses
that a round comes to, the share that is right at each step, and what that gives in accepted drafts of three.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import save_file

from ninfer.artifact import Artifact
from ninfer.errors import NInferError, OptionError
from tools.nano import checkpoint, delta, rebuild
from tools.nano.batches import IGNORED, Batch, Sampler, Workers, read_texts
from tools.nano.commands import exit_code
from tools.nano.documents import Encoder
from tools.nano.mix import RECURSION, SOURCES, WEIGHTS
from tools.nano.model import AHEAD, MATRICES, Model, Parameters, from_huggingface, initialize, to_huggingface
from tools.nano.muon import Optimizer
from tools.nano.packing import CHUNK, Packing, packing, to_device
from tools.nano.train import Schedule, check_machine

WEIGHTS_FILE, REPORT = "mtp.safetensors", "evaluation.json"
_COUNTED = 3  # drafts of a round that the evaluation's acceptance is of
_LOG_EVERY, _SAVE_EVERY = 50, 20.0  # steps, seconds


def own_rows(name: str) -> slice | None:
    """Which rows of a stacked parameter are the MTP layer's; None if it has no part in it."""
    if name in ("mtp.fc", "norm.mtp"):
        return slice(0, 2)
    if name == "norm.final":
        return slice(1, 2)
    if name.startswith(("attention.", "mlp.")) or name in ("norm.input", "norm.post"):
        return slice(-1, None)
    return None


def attend(
    q: torch.Tensor, keys: list[torch.Tensor], values: list[torch.Tensor], where: Packing, rows: int
) -> torch.Tensor:
    """Attention `[T, heads, 256]` of a chain's last step: causal in each document over the first keys, and
    over the token's own row of all others. `rows`: equal parts of T that no document crosses."""
    q, *parts = (x.unflatten(0, (rows, -1)).transpose(1, 2) for x in (q, *keys, *values))
    k, v = parts[: len(keys)], parts[len(keys) :]
    q = q * q.shape[-1] ** -0.5
    document = (where.positions == 0).cumsum(0).unflatten(0, (rows, 1, -1))
    later = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool, device=q.device).triu(1)
    hidden = (document.unsqueeze(-1) != document.unsqueeze(-2)) | later
    scores = (q @ k[0].mT).masked_fill(hidden, float("-inf"))
    found = scores.softmax(-1) @ v[0]
    if len(k) > 1:
        others = torch.stack([(q * x).sum(-1) for x in k[1:]], -1)
        share = torch.cat([scores.logsumexp(-1, keepdim=True), others], -1).softmax(-1).unsqueeze(-1)
        found = share[..., 0, :] * found
        for index, x in enumerate(v[1:], 1):
            found = found + share[..., index, :] * x
    return found.transpose(1, 2).flatten(0, 1)


@dataclass(frozen=True)
class Guesses:
    """One step of the chains, of the positions whose answer goes on for so long.

    places: int64 `[n]`. loss: float32 `[n]`, against the text model's best token. right: bool `[n]`. reached:
    bool `[n]`, whether a round that starts there comes to this step and the text shows what it meets.
    """

    places: torch.Tensor
    loss: torch.Tensor
    right: torch.Tensor
    reached: torch.Tensor


class Drafter:
    """The text model, which is fixed, with an MTP layer that learns (`own`, FP32 by stack)."""

    def __init__(self, parameters: Parameters, *, rows: int, device: str) -> None:
        self._parameters = {name: value.detach() for name, value in parameters.items()}
        parts = {name: own_rows(name) for name in parameters}
        self._parts = {name: part for name, part in parts.items() if part is not None}
        self.own = {
            name: self._parameters[name][part].clone().requires_grad_() for name, part in self._parts.items()
        }
        self._attend = partial(attend, rows=rows)
        self._model = Model(
            partial(delta.plain, rows=rows),
            lambda q, k, v, where: attend(q, [k], [v], where, rows),
            device=device,
            compiled=False,
        )
        self._device = device

    def tensors(self) -> dict[str, torch.Tensor]:
        """The MTP layer under Hugging Face's names, BF16, on the CPU."""
        merged = {name: value.clone() for name, value in self._parameters.items()}
        for name, part in self._parts.items():
            merged[name][part] = self.own[name].detach()
        return {
            name: value.to(checkpoint.dtype_of(name)).contiguous().cpu()
            for name, value in to_huggingface(merged)
            if name.startswith("mtp.")
        }

    def guesses(self, batch: Batch, steps: int) -> Iterator[Guesses]:
        """Of each step in turn; with gradients of `own` alone."""
        rows = {
            name: [value] if name == "embedding" else list(value.unbind(0))
            for name, value in self._parameters.items()
        }
        for name, part in self._parts.items():
            rows[name][part] = self.own[name].unbind(0)
        tokens = to_device(batch.tokens.astype(np.int64), self._device)
        where, embedding = packing(batch.ends, self._device), rows["embedding"][0]
        learned = batch.sources != IGNORED
        with torch.no_grad():
            hidden = self._model.hidden(rows, tokens, where)
            places = to_device(np.flatnonzero(learned), self._device)
            best = tokens.new_full(tokens.shape, -1)
            best[places] = (hidden[places] @ embedding.mT).argmax(-1)
        follows = best == tokens.roll(-1)  # the text goes on as the model would
        reached = torch.ones_like(follows)
        chains = self._model.chains(rows, hidden, tokens, where, steps, self._attend)
        for step, drafted in enumerate(chains, 1):
            learned = learned & np.roll(batch.sources != IGNORED, -step)
            places = to_device(np.flatnonzero(learned), self._device)
            logits, target = drafted[places] @ embedding.mT, best.roll(-step)[places]
            loss = F.cross_entropy(logits.float(), target, reduction="none")
            right = logits.detach().argmax(-1) == target
            yield Guesses(places, loss, right, reached[places])
            stands = torch.zeros_like(reached)
            stands[places] = right
            reached = reached & stands & follows.roll(-step)


class Trainer:
    """A drafter, its optimizer and one step."""

    def __init__(self, drafter: Drafter, steps: int, device: str) -> None:
        self._drafter, self._steps, self._device = drafter, steps, device
        matrices = frozenset(name for name in drafter.own if name in MATRICES)
        self._optimizer = Optimizer(drafter.own, matrices, matrix_rate=0.012, other_rate=3e-3)
        self._weights = torch.tensor([WEIGHTS.get(name, 1.0) for name in SOURCES], device=device)
        self.sums = torch.zeros(4, steps, device=device)  # losses, right, reached, all; by step

    def step(self, batch: Batch, factor: float) -> None:
        """One update; what it saw is added to `sums`."""
        sources = to_device(batch.sources.astype(np.int64), self._device).clamp(max=len(SOURCES) - 1)
        total, norm = torch.zeros((), device=self._device), None
        for index, guesses in enumerate(self._drafter.guesses(batch, self._steps)):
            weight = self._weights[sources[guesses.places]]
            norm = weight.sum() if norm is None else norm
            value = (self._steps - index) / self._steps
            total = total + value * (weight * guesses.reached * guesses.loss).sum() / norm
            seen = guesses.reached
            with torch.no_grad():
                counts = [(guesses.loss * seen).sum(), (guesses.right & seen).sum(), seen.sum()]
                self.sums[:3, index] += torch.stack([count.float() for count in counts])
                self.sums[3, index] += len(seen)
        total.backward()
        self._optimizer.step(factor)


@torch.no_grad()
def evaluate(
    drafter: Drafter, corpus: Path, tokens: int, rows: int, names: Sequence[str]
) -> dict[str, dict[str, object]]:
    """By source, of one batch of held-out documents: `right`, the share of the guesses reached at each step,
    and `accepted`, of three drafts a round that starts anywhere in an answer."""
    texts, encoder = read_texts(corpus, "heldout"), Encoder()
    found: dict[str, dict[str, object]] = {}
    for name in names:
        sampler = Sampler(texts, encoder, f"recursion/{name}", "heldout", {name: 1.0}, tokens // rows)
        shares, guesses = [], 0
        for step in drafter.guesses(sampler.rows(tokens, rows), _COUNTED):
            reached = int(step.reached.sum())
            guesses = guesses or reached
            shares.append(int((step.right & step.reached).sum()) / max(1, reached))
        found[name] = {
            "guesses": guesses,
            "right": [round(share, 4) for share in shares],
            "accepted": round(float(np.cumprod(shares).sum()) / _COUNTED, 4),
        }
    return found


def train(
    trainer: Trainer, batches: Iterator[Batch] | Workers, schedule: Schedule,
    log: Callable[[dict[str, object]], None], save: Callable[[], None],
) -> int:  # fmt: skip
    """Returns the steps taken. Raises NInferError when the loss is no number."""
    begin = saved = time.monotonic()
    step = 0
    for step, batch in enumerate(batches):
        elapsed = time.monotonic() - begin
        progress = max(step / schedule.steps, elapsed / schedule.seconds)
        if progress >= 1:
            break
        trainer.step(batch, schedule.factor(step, progress))
        if (step + 1) % _LOG_EVERY == 0 or step in (0, 4, 19):
            loss, right, reached, count = trainer.sums.tolist()
            trainer.sums.zero_()
            if not math.isfinite(sum(loss)):
                raise NInferError(f"the loss is {sum(loss)} after step {step + 1}; a lower --peak may help")
            log(
                {
                    "step": step + 1,
                    "seconds": round(time.monotonic() - begin, 1),
                    "loss": [round(a / max(1.0, b), 4) for a, b in zip(loss, reached, strict=True)],
                    "right": [round(a / max(1.0, b), 4) for a, b in zip(right, reached, strict=True)],
                    "reached": [round(a / max(1.0, b), 4) for a, b in zip(reached, count, strict=True)],
                    "ready": batches.waiting() if isinstance(batches, Workers) else 0,
                }
            )
            if time.monotonic() - saved > _SAVE_EVERY:
                save()
                saved = time.monotonic()
    return step


def read_parameters(artifact: Path, device: str) -> Parameters:
    """The stacked parameters that an artifact of ninfer-nano says, FP32."""
    parameters = initialize(0, device)
    with Artifact.open(artifact) as opened, torch.no_grad():
        from_huggingface(rebuild.values(opened), parameters)
    return parameters


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tools.nano.recursion",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("artifact", type=Path)
    parser.add_argument("--corpus", type=Path, required=True, help="folder made by tools.nano.corpus")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=140.0, help="of training")
    parser.add_argument("--steps", type=int, default=1_000_000, help="of training, at most")
    parser.add_argument("--depth", type=int, default=5, help="steps of a chain")
    parser.add_argument("--peak", type=float, default=0.5, help="of the legs' learning rates")
    parser.add_argument("--tokens", type=int, default=32_768, help="of a step")
    parser.add_argument("--rows", type=int, default=8, help="into which they are packed")
    parser.add_argument("--workers", type=int, default=14)
    parser.add_argument("--seed", type=int, default=2026)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--measure", default=",".join(RECURSION), help="sources of the evaluation")
    options = parser.parse_args(arguments)
    return exit_code(lambda: _run(options))


def _run(options: argparse.Namespace) -> None:
    if options.rows < 1 or options.tokens % (options.rows * CHUNK):
        raise OptionError(f"--tokens must be a multiple of {CHUNK} times --rows, not {options.tokens}")
    names = options.measure.split(",")
    for name in names:
        if name not in RECURSION:
            raise OptionError(f"--measure knows {', '.join(RECURSION)}, not {name}")
    if not 1 <= options.depth <= AHEAD:
        raise OptionError(f"--depth must be 1 to {AHEAD}, not {options.depth}")
    if (options.out / REPORT).exists():
        raise OptionError(f"{options.out} holds a training that is done; name another folder with --out")
    if options.device == "cuda":
        check_machine(options.corpus, options.tokens, options.workers, options.steps)
    started = time.monotonic()
    workers = Workers(  # forked before this process uses CUDA
        options.corpus, seed=options.seed, leg=3, tokens=options.tokens, count=options.workers,
        rows=options.rows, shares=RECURSION,
    )  # fmt: skip
    try:
        torch.manual_seed(options.seed)
        torch.set_float32_matmul_precision("high")
        parameters = read_parameters(options.artifact, options.device)
        drafter = Drafter(parameters, rows=options.rows, device=options.device)
        trainer = Trainer(drafter, options.depth, options.device)
        schedule = Schedule(options.steps, options.seconds, 0.3, 1.0, warm_up=50, peak=options.peak)
        options.out.mkdir(parents=True, exist_ok=True)

        def save() -> None:
            temporary = options.out / f".{WEIGHTS_FILE}"
            save_file(drafter.tensors(), temporary)
            os.replace(temporary, options.out / WEIGHTS_FILE)

        def measure(when: str) -> dict[str, dict[str, object]]:
            found = evaluate(drafter, options.corpus, options.tokens, options.rows, names)
            print(f"{when}, {time.monotonic() - started:.1f} s after the start", flush=True)
            for name, facts in found.items():
                print(f"  {name:14} {facts['guesses']:6} {facts['right']} {facts['accepted']}", flush=True)
            return found

        before = measure("before")
        with (options.out / "log.jsonl").open("w") as records:

            def log(record: dict[str, object]) -> None:
                records.write(json.dumps(record) + "\n")
                records.flush()
                print(*record.values(), flush=True)

            taken = train(trainer, workers, schedule, log, save)
    finally:
        workers.close()
    save()
    print(f"{taken} steps, {(options.out / WEIGHTS_FILE).stat().st_size:,} bytes of weights", flush=True)
    facts = {"steps": taken, "tokens": options.tokens, "depth": options.depth, "schedule": asdict(schedule)}
    report = facts | {"before": before, "after": measure("after")}
    (options.out / REPORT).write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
