"""On the GPU, before training: the fused operators and their gradients, and the time of a step."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from tools.nano.batches import Sampler, Workers, read_texts
from tools.nano.commands import exit_code
from tools.nano.documents import Encoder
from tools.nano.model import initialize
from tools.nano.proof import prove_operators
from tools.nano.train import Trainer, check_machine


def speed(corpus: Path, tokens: int, workers: int, steps: int) -> None:
    """Milliseconds of a step, with batches ready and with the workers behind it."""
    sampler = Sampler(read_texts(corpus, "train"), Encoder(), "check", "train")
    begin = time.monotonic()
    batches = [sampler.batch(tokens) for _ in range(4)]
    print(f"one worker: {4 * tokens / (time.monotonic() - begin):,.0f} tokens/s", flush=True)
    feed = Workers(corpus, seed=0, leg=0, tokens=tokens, count=workers)
    trainer = Trainer(initialize(1, "cuda"), distilled=True)
    for quantized in (False, True):
        begin = time.monotonic()
        for batch in batches[:2]:
            trainer.step(batch, 0.1, quantized=quantized)
        torch.cuda.synchronize()
        print(f"first steps, quantized {quantized}: {time.monotonic() - begin:.1f} s", flush=True)
        begin = time.monotonic()
        for index in range(steps):
            trainer.step(batches[index % 4], 0.1, quantized=quantized)
        torch.cuda.synchronize()
        print(f"step, quantized {quantized}: {(time.monotonic() - begin) / steps * 1e3:.1f} ms", flush=True)
    with torch.profiler.profile(activities=list(torch.profiler.supported_activities())) as profile:
        for batch in batches:
            trainer.step(batch, 0.1, quantized=False)
        torch.cuda.synchronize()
    print(
        profile.key_averages().table(sort_by="self_cuda_time_total", row_limit=28, max_name_column_width=60)
    )
    begin = time.monotonic()
    for batch, _ in zip(feed, range(steps), strict=False):
        trainer.step(batch, 0.5, quantized=False)
    torch.cuda.synchronize()
    print(f"step, fed: {(time.monotonic() - begin) / steps * 1e3:.1f} ms, {feed.waiting()} batches wait")
    loss, _, count = trainer.sums.tolist()
    print(
        "loss",
        sum(loss[:255]) / sum(count[:255]),
        f"memory {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB",
    )
    feed.close()


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.nano.check", description=__doc__)
    parser.add_argument("--corpus", type=Path, required=True)
    parser.add_argument("--tokens", type=int, default=65_536)
    parser.add_argument("--workers", type=int, default=14)
    parser.add_argument("--steps", type=int, default=60)
    options = parser.parse_args(arguments)

    def run() -> None:
        check_machine(options.corpus, options.tokens, options.workers, options.steps)
        prove_operators()
        speed(options.corpus, options.tokens, options.workers, options.steps)

    return exit_code(run)


if __name__ == "__main__":
    sys.exit(main())
