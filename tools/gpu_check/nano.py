"""Does ninfer-nano say on a GPU what it says on the CPU? Perplexities and tasks, by weights and KV format.

    python -m tools.gpu_check.nano perplexity [--kv bf16,int8] [--weights shipped,quasar] [--workers 6]
    python -m tools.gpu_check.nano tasks [--kv bf16,int8] [--weights shipped,quasar] [--workers 6]

Profiles other than the shipped one are made of `models/ninfer-nano.ninfer` if they aren't in the folder
`--profiles` yet; `--workers` combinations run at a time. What the CPU said is in `nano_cpu.json` beside this
file; `--device cpu --update` measures it anew. The exit code is 0 if all perplexities are within 0.1 % of the
CPU's and no combination's tasks differ (McNemar, p < 0.05), 1 if not.

Where an artifact allows it, a GPU multiplies FP8 weights with FP8 codes of many columns, which the CPU does
not. `--columns bf16` forbids that; `--columns fp8 --device cpu` does the same on the CPU, and what it says is
what a GPU is held against.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from time import perf_counter
from typing import Any

CPU = Path(__file__).parent / "nano_cpu.json"
ROOT = Path(__file__).parents[2]
WEIGHTS = ("shipped", "bf16", "nvfp4-official", "quasar", "groupwise-int", "q4_k_m")
WITH_FP8 = ("nvfp4-official", "quasar")
"""Profiles with weights that take FP8 columns."""
_FEW = 64
"""So few columns are never turned into codes."""
KV = ("bf16", "int8", "fp8", "k8v4", "nvfp4")
CONTEXT, STRIDE = 4096, 2048
PER_TASK = 12
LEFT_OUT = "kv8192"
"""A task so long that it would take most of the time."""
TOLERANCE = 1e-3
SIGNIFICANT = 0.05


@cache
def plain_columns() -> None:
    """From here on no product of this process takes FP8 columns."""
    from ninfer.models import binding
    from ninfer.ops import ActivationPolicy

    binding._POLICIES = dict.fromkeys(binding._POLICIES, ActivationPolicy.A16)


@cache
def coded_columns() -> None:
    """From here on products on the CPU with many columns take them as a GPU's FP8 products do."""
    import torch

    from ninfer.ops import ActivationPolicy, Matrix, cpu

    def coded(x: torch.Tensor, w: Matrix) -> torch.Tensor:
        formats = {span.parent.format for span in w.spans}
        if len(x) <= _FEW or w.policy < ActivationPolicy.A8 or formats != {"fp8_e4m3fn_row_bf16"}:
            return x
        scales = x.float().abs().amax(1, keepdim=True) / 448
        codes = torch.where(scales > 0, x.float() / scales, 0.0).to(torch.float8_e4m3fn)
        return (codes.float() * scales).to(x.dtype)

    linear, swiglu, logits = cpu.linear, cpu.linear_swiglu, cpu.logits
    cpu.linear = lambda x, w, residual: linear(coded(x, w), w, residual)
    cpu.linear_swiglu = lambda x, w: swiglu(coded(x, w), w)
    cpu.logits = lambda x, w, rows: logits(coded(x, w), w, rows)


def perplexities(
    model: str, kv: Sequence[str], device: str, threads: int | None, columns: str
) -> dict[str, Any]:
    """By KV format and domain: scored tokens and the sum of their -log p."""
    _choose(columns, device)
    from ninfer.api import Scorer, ScorerOptions
    from ninfer.api.corpus import read_manifest
    from ninfer.api.perplexity import score_stream, total, window_plan

    streams = read_manifest(ROOT / "bench" / "heldout" / "manifest.json").streams
    found: dict[str, Any] = {}
    for name in kv:
        options = ScorerOptions(context=CONTEXT, kv_dtype=name, device=device, threads=threads)
        domains: dict[str, list[Any]] = {}
        with Scorer.load(model, options) as scorer:
            for stream in streams:
                ids = scorer.encode(stream.text)
                scores = score_stream(scorer, ids, window_plan(len(ids), CONTEXT, STRIDE), lambda _: None)
                domains.setdefault(stream.domain, []).append(scores.score)
        found[name] = {
            domain: [total(scores).scored_tokens, total(scores).total_nll]
            for domain, scores in domains.items()
        }
    return found


def _choose(columns: str, device: str) -> None:
    if columns == "bf16":
        plain_columns()
    elif columns == "fp8" and device == "cpu":
        coded_columns()


def tasks(model: str, kv: Sequence[str], device: str, threads: int | None, columns: str) -> dict[str, Any]:
    """By KV format and task: "1" for each instance that passed, else "0"."""
    _choose(columns, device)
    from dataclasses import replace

    from bench.tasks.run import Outcome, engine_options, run_groups, subject
    from bench.tasks.suite import available, choose
    from ninfer.api import Engine

    names = [entry.name for entry in available() if entry.name != LEFT_OUT]
    groups = choose(available(), names, PER_TASK)
    item = subject("nano", Path(model), groups)
    found: dict[str, Any] = {}
    for name in kv:
        options = engine_options(item, groups, kv_dtype=name, concurrency=8, threads=threads)
        with Engine.load(item.path, replace(options, device=device)) as engine:
            found[name] = {
                group.name: "".join(str(int(run.outcome is Outcome.PASSED)) for run in group.runs)
                for group in run_groups(engine, groups, item.prompts, concurrency=8)
            }
    return found


KINDS: dict[str, Callable[[str, Sequence[str], str, int | None, str], dict[str, Any]]] = {
    "perplexity": perplexities,
    "tasks": tasks,
}


def compared(kind: str, mine: Mapping[str, Any], cpu: Mapping[str, Any] | None) -> tuple[str, bool]:
    """One combination in a line, and whether it is as the CPU's."""
    if kind == "perplexity":
        found = _perplexity(mine)
        if cpu is None:
            return f"{found:9.4f}  (no figure of the CPU)", True
        parts = ", ".join(
            f"{d} {_perplexity({d: mine[d]}) / _perplexity({d: cpu[d]}) - 1:+.3%}" for d in mine
        )
        ratio = found / _perplexity(cpu) - 1
        right = abs(ratio) <= TOLERANCE
        return f"{found:9.4f}  CPU {_perplexity(cpu):9.4f}  {ratio:+.3%}  ({parts})", right
    from bench.tasks.report import mcnemar

    passed, total = sum(bits.count("1") for bits in mine.values()), sum(map(len, mine.values()))
    if cpu is None:
        return f"{passed}/{total}  (no figure of the CPU)", True
    pairs = [pair for name in mine for pair in zip(cpu[name], mine[name], strict=True)]
    lost, gained = pairs.count(("1", "0")), pairs.count(("0", "1"))
    p = mcnemar(lost, gained)
    there = sum(bits.count("1") for bits in cpu.values())
    return f"{passed}/{total}  CPU {there}  lost {lost}, gained {gained}, p = {p:.2f}", p >= SIGNIFICANT


def _perplexity(domains: Mapping[str, Sequence[float]]) -> float:
    return math.exp(sum(nll for _, nll in domains.values()) / sum(count for count, _ in domains.values()))


def models(weights: Sequence[str], folder: Path) -> dict[str, Path]:
    """Profile to artifact; what isn't there is made."""
    shipped = Path(os.environ.get("MODELS", ROOT / "models")).expanduser() / "ninfer-nano.ninfer"
    found = {name: folder / f"ninfer-nano-{name}.ninfer" for name in weights}
    if "shipped" in found:
        found["shipped"] = shipped
    if not all(path.is_file() for path in found.values()):
        from tools.nano.export import write_profiles

        write_profiles(shipped, folder)
    return found


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("--weights", default=",".join(WEIGHTS), help="profiles, with commas")
    parser.add_argument("--kv", default=",".join(KV), help="KV formats, with commas")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--columns", choices=("bf16", "fp8"), help="as which FP8 weights take columns")
    parser.add_argument("--threads", type=int, help="CPU threads of each process")
    parser.add_argument("--workers", type=int, default=1, help="profiles at a time")
    parser.add_argument(
        "--profiles", type=Path, default=ROOT / "profiles" / "nano", help="folder of the other artifacts"
    )
    parser.add_argument("--update", action="store_true", help="keep what is found as the CPU's")
    options = parser.parse_args(argv)
    weights, kv = options.weights.split(","), options.kv.split(",")
    columns = options.columns or ("bf16" if options.device == "cpu" else "fp8")
    found = models(weights, options.profiles)
    cpu = json.loads(CPU.read_text(encoding="utf-8")) if CPU.is_file() else {}
    right, begin = True, perf_counter()
    with ProcessPoolExecutor(options.workers, mp_context=get_context("spawn")) as pool:
        run = KINDS[options.kind]
        waiting = {
            pool.submit(run, str(found[name]), [one], options.device, options.threads, columns): (name, one)
            for one in kv
            for name in weights
        }
        for future in as_completed(waiting):
            name, one = waiting[future]
            label = f"{options.kind} {name:15} {one:6}"
            try:
                mine = future.result()[one]
            except Exception as error:
                print(f"{label} FAILED: {type(error).__name__}: {error}", flush=True)
                right = False
                continue
            of_kind = cpu.setdefault(f"{options.kind}{' with fp8 columns' * (columns == 'fp8')}", {})
            reference = of_kind.get(name, {}).get(one)
            if reference is None and (options.kind == "tasks" or name not in WITH_FP8):
                reference = cpu.get(options.kind, {}).get(name, {}).get(one)
            line, holds = compared(options.kind, mine, reference)
            right = right and holds
            after = perf_counter() - begin
            print(f"{label} {line}{'' if holds else '  DIFFERS'}  [{after:.0f} s]", flush=True)
            if options.update:
                of_kind.setdefault(name, {})[one] = mine
                CPU.write_text(json.dumps(cpu, indent=1) + "\n", encoding="utf-8")
    print(f"{options.kind}: {'all as on the CPU' if right else 'NOT as on the CPU'}", flush=True)
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
