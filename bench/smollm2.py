"""Decode and prefill of SmolLM2 on the CPU against transformers bf16, interleaved in one run.

    python -m bench.smollm2 --artifact models/smollm2-135m-instruct.ninfer \
        --gguf models/SmolLM2-135M-Instruct.Q4_1.gguf [--rounds 5] [--llama-cpp PYTHON]

Ours is the whole unit of work: feeding, all layers, head, greedy choice. The peer is the same model with the
GGUF's weights dequantized to bf16, called with its KV cache and an argmax. Every round measures each once,
one after the other, at the same depth; printed are the medians and their ratios. `--llama-cpp` names a Python
interpreter that has the package `llama_cpp`: its figures come from the same rounds, in its own process.
"""

import argparse
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any

PROMPT, DECODE, PEER_DECODE = 512, 64, 16

LLAMA_CPP = """
import sys, time
import llama_cpp as L
path, prompt, decode = sys.argv[1].encode(), int(sys.argv[2]), int(sys.argv[3])
model = L.llama_model_load_from_file(path, L.llama_model_default_params())
options = L.llama_context_default_params()
options.n_ctx, options.n_threads, options.n_threads_batch = 2048, 2, 2
context = L.llama_init_from_model(model, options)
def feed(ids):
    array = (L.llama_token * len(ids))(*ids)
    if L.llama_decode(context, L.llama_batch_get_one(array, len(ids))) != 0: raise SystemExit(1)
    L.llama_get_logits_ith(context, -1)[0]
for line in sys.stdin:
    L.llama_memory_clear(L.llama_get_memory(context), True)
    begin = time.perf_counter()
    feed([100 + i * 37 % 40000 for i in range(prompt)])
    middle = time.perf_counter()
    for i in range(decode): feed([1000 + i])
    print(prompt / (middle - begin), decode / (time.perf_counter() - middle), flush=True)
"""


def prompt_ids() -> list[int]:
    return [100 + i * 37 % 40000 for i in range(PROMPT)]


def ours(artifact: Path) -> Callable[[], tuple[float, float]]:
    """A function that measures (prefill, decode) in tokens per second, through the whole engine."""
    from ninfer.api import Done, Engine, GenerationOptions

    engine = Engine.load(artifact)
    options = GenerationOptions(max_new=DECODE + 1, temperature=0.0, prefix_reuse=False)

    def measure() -> tuple[float, float]:
        *_, done = engine.generate(prompt_ids(), options)
        assert isinstance(done, Done)
        prefill, decode = done.statistics.prefill_rate, done.statistics.decode_rate
        assert prefill is not None
        assert decode is not None
        return prefill, decode

    return measure


def transformers_bf16(gguf: Path) -> Callable[[], tuple[float, float]]:
    """The same for transformers in bf16, with its default attention."""
    import torch

    from tests.models.smollm2 import reference

    model: Any = reference(gguf).to(torch.bfloat16).eval()
    model.set_attn_implementation("sdpa")
    ids = torch.tensor([prompt_ids()])

    @torch.inference_mode()
    def measure() -> tuple[float, float]:
        begin = perf_counter()
        out = model(ids, use_cache=True, logits_to_keep=1)
        token = out.logits[:, -1:].argmax(-1)
        middle = perf_counter()
        for _ in range(PEER_DECODE):
            out = model(token, past_key_values=out.past_key_values, use_cache=True, logits_to_keep=1)
            token = out.logits[:, -1:].argmax(-1)
        return PROMPT / (middle - begin), PEER_DECODE / (perf_counter() - middle)

    return measure


def llama_cpp(python: str, gguf: Path) -> Callable[[], tuple[float, float]]:
    """The same for llama.cpp, which reads the GGUF's Q4_1 itself."""
    peer = subprocess.Popen(
        [python, "-c", LLAMA_CPP, str(gguf), str(PROMPT), str(DECODE)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )

    def measure() -> tuple[float, float]:
        assert peer.stdin is not None
        assert peer.stdout is not None
        peer.stdin.write("\n")
        peer.stdin.flush()
        prefill, decode = peer.stdout.readline().split()
        return float(prefill), float(decode)

    return measure


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--artifact", type=Path, required=True)
    parser.add_argument("--gguf", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--llama-cpp", metavar="PYTHON")
    arguments = parser.parse_args()
    contestants = {"ninfer": ours(arguments.artifact), "transformers bf16": transformers_bf16(arguments.gguf)}
    if arguments.llama_cpp:
        contestants["llama.cpp"] = llama_cpp(arguments.llama_cpp, arguments.gguf)
    figures: dict[str, list[tuple[float, float]]] = {name: [] for name in contestants}
    for measure in contestants.values():
        measure()
    for _ in range(arguments.rounds):
        for name, measure in contestants.items():
            figures[name].append(measure())
    print(f"{'':<20}{f'prefill {PROMPT}':>16}{'decode':>16}   (tok/s, median of {arguments.rounds})")
    medians = {}
    for name, rows in figures.items():
        medians[name] = tuple(statistics.median(column) for column in zip(*rows, strict=True))
        print(f"{name:<20}{medians[name][0]:>16.1f}{medians[name][1]:>16.1f}")
    for name, (prefill, decode) in list(medians.items())[1:]:
        mine = medians["ninfer"]
        print(f"{'ratio to ' + name:<30}{mine[0] / prefill:>5.2f}x{mine[1] / decode:>15.2f}x")


if __name__ == "__main__":
    sys.exit(main())
