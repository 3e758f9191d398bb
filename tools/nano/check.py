"""On the GPU, before training: the fused operators and their gradients, and the time of a step."""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import numpy as np
import torch

from tools.nano import delta, geometry
from tools.nano.batches import Sampler, Workers, read_texts
from tools.nano.documents import Encoder
from tools.nano.model import Packing, attend_fused, attend_plain, initialize
from tools.nano.train import Trainer

_LIMIT = 2e-2  # of the norm, BF16 operators against float32


def _packing(lengths: list[int]) -> Packing:
    ends = torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32, device="cuda")
    return Packing(torch.cat([torch.arange(n) for n in lengths]).cuda(), ends, max(lengths))


def _compare(name: str, ours: list[torch.Tensor], expected: list[torch.Tensor], labels: str) -> None:
    for label, x, y in zip(labels.split(), ours, expected, strict=True):
        error = float((x.double() - y.double()).norm() / y.double().norm())
        print(f"{name:10} {label:6} {error:.2e}", flush=True)
        if not error < _LIMIT:
            raise SystemExit(f"{name}: {label} differs by {error:.2e} of its norm; limit {_LIMIT}")


def operators() -> None:
    """Outputs and gradients on random packed documents."""
    packing = _packing([64, 1024, 192, 4096, 64, 2752])
    tokens = int(packing.ends[-1])
    g = torch.Generator(device="cuda").manual_seed(1)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=g, device="cuda")

    unit = torch.nn.functional.normalize
    q, k = (unit(random(tokens, geometry.KEY_HEADS, 128), dim=-1).bfloat16() for _ in "qk")
    v = random(tokens, geometry.VALUE_HEADS, 128).bfloat16()
    decay = -torch.rand(tokens, geometry.VALUE_HEADS, generator=g, device="cuda") * 0.2
    beta = torch.rand(tokens, geometry.VALUE_HEADS, generator=g, device="cuda")
    outer = random(tokens, geometry.VALUE_HEADS, 128)
    ours = _run(delta.fused(), (q, k, v, decay, beta), packing.ends, outer)
    inputs = tuple(x.float() for x in (q, k, v, decay, beta))
    expected = _run(delta.plain, inputs, packing.ends, outer)
    _compare("delta", ours, expected, "out dq dk dv dg dbeta")
    q, k, v = (random(tokens, geometry.HEADS, geometry.HEAD_DIM).bfloat16() for _ in "qkv")
    outer = random(tokens, geometry.HEADS, geometry.HEAD_DIM)
    ours = _run(attend_fused(), (q, k, v), packing, outer)
    expected = _run(attend_plain, (q.float(), k.float(), v.float()), packing, outer)
    _compare("attention", ours, expected, "out dq dk dv")


def _run(operator, inputs, where, outer) -> list[torch.Tensor]:
    leaves = [x.detach().requires_grad_() for x in inputs]
    output = operator(*leaves, where)
    (output.float() * outer).sum().backward()
    return [output.detach(), *(leaf.grad for leaf in leaves)]


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


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m tools.nano.check", description=__doc__)
    parser.add_argument("--corpus", type=Path, required=True)
    parser.add_argument("--tokens", type=int, default=65_536)
    parser.add_argument("--workers", type=int, default=14)
    parser.add_argument("--steps", type=int, default=60)
    options = parser.parse_args()
    operators()
    speed(options.corpus, options.tokens, options.workers, options.steps)
