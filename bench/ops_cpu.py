"""Time of every operator of a SmolLM2-shaped decode step and prefill chunk on this CPU.

    python bench/ops_cpu.py [--format ggml_q4_1] [--head ggml_q8_0] [--context 128] [--prefill 512] [--repeat
    7]

Weights are random and every layer has its own, so that a step streams them from memory as a model does. Each
figure is the least of `--repeat` passes over the 30 layers; `GB/s` counts the weight bytes of that operator.
"""

from __future__ import annotations

import argparse
import time
from collections import defaultdict
from collections.abc import Callable

import torch

from ninfer import ops
from ninfer.formats import KvFormat

LAYERS, HIDDEN, Q_HEADS, KV_HEADS, WIDTH, FFN, VOCABULARY = 30, 576, 9, 3, 64, 1536, 49152
_BLOCKS = {"ggml_q4_0": (32, 18), "ggml_q4_1": (32, 20), "ggml_q8_0": (32, 34)}


def matrix(format: str, rows: int, columns: int) -> ops.Matrix:
    """Random weights of about unit output variance."""
    if format == "bf16":
        words = (torch.randn(rows, columns) * columns**-0.5).bfloat16().view(torch.uint8)
        return ops.Matrix.of(ops.Encoded("bf16", "contiguous_le_v1", (rows, columns), words.reshape(-1)))
    values, size = _BLOCKS[format]
    blocks = torch.randint(0, 256, (rows * columns // values, size), dtype=torch.uint8)
    scales = torch.full((len(blocks), 1), columns**-0.5 / (64 if size > 30 else 4), dtype=torch.float16)
    blocks[:, :2] = scales.view(torch.uint8)
    if format == "ggml_q4_1":
        blocks[:, 2:4] = (scales * -7.5).view(torch.uint8)
    return ops.Matrix.of(ops.Encoded(format, "ggml_rows_v1", (rows, columns), blocks.reshape(-1)))


def bytes_of(m: ops.Matrix) -> int:
    return sum(s.parent.data.numel() * (s.end - s.begin) // s.parent.shape[0] for s in m.spans)


class Model:
    """Weights and pages of one SmolLM2-shaped model, and its steps with a clock around every operator."""

    def __init__(self, format: str, head: str, context: int) -> None:
        qkv = (Q_HEADS + 2 * KV_HEADS) * WIDTH
        self.layers = [
            {
                "qkv": matrix(format, qkv, HIDDEN),
                "o": matrix(format, HIDDEN, Q_HEADS * WIDTH),
                "gate_up": matrix(format, 2 * FFN, HIDDEN),
                "down": matrix(format, HIDDEN, FFN),
                "norm": torch.ones(HIDDEN, dtype=torch.bfloat16),
            }
            for _ in range(LAYERS)
        ]
        self.head = matrix(head, VOCABULARY, HIDDEN)
        pages = -(-(context + 1) // 64)
        shape = (pages, 64, KV_HEADS, WIDTH)
        self.k = [torch.randn(shape).bfloat16() for _ in range(LAYERS)]
        self.v = [torch.randn(shape).bfloat16() for _ in range(LAYERS)]
        self.table = torch.randperm(pages, dtype=torch.int32)[None]
        self.rope = ops.Rope(WIDTH, 10000.0)
        self.spent: dict[str, float] = defaultdict(float)

    def _timed(self, name: str, call: Callable):
        start = time.perf_counter()
        result = call()
        self.spent[name] += time.perf_counter() - start
        return result

    def step(self, tokens: torch.Tensor, positions: torch.Tensor) -> list[int]:
        return self.sample(self.forward(tokens, positions), positions)

    def sample(self, scores: torch.Tensor, positions: torch.Tensor) -> list[int]:
        params, position = [ops.SamplingParams(temperature=0.7, top_p=0.9)], [int(positions[-1])]
        return self._timed("sample", lambda: ops.sample(scores, params, position, ops.Purpose.DECODE))

    def forward(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Scores of the last column."""
        timed = self._timed
        x = timed("embedding", lambda: ops.embedding(tokens, self.head))
        count = len(tokens)
        for layer, k_pages, v_pages in zip(self.layers, self.k, self.v, strict=True):
            h = timed("rms_norm", lambda x=x, w=layer["norm"]: ops.rms_norm(x, w, 1e-5, False))
            qkv = timed("linear qkv", lambda h=h, w=layer["qkv"]: ops.linear(h, w))
            q, k, v = (
                part.view(count, -1, WIDTH)
                for part in qkv.split((Q_HEADS * WIDTH, KV_HEADS * WIDTH, KV_HEADS * WIDTH), -1)
            )
            pages = (ops.KvPages(KvFormat.BF16, k_pages, v_pages), self.table)
            args = (q, k, v, positions, self.rope, None, None, 1e-5, *pages, positions)
            q = timed("qk_prepare", lambda args=args: ops.qk_prepare(*args))
            args = (q, *pages, positions, WIDTH**-0.5)
            a = timed("paged_attention", lambda args=args: ops.paged_attention(*args))
            a = a.view(count, -1)
            x = timed("linear o + x", lambda a=a, w=layer["o"], x=x: ops.linear(a, w, x))
            h = timed("rms_norm", lambda x=x, w=layer["norm"]: ops.rms_norm(x, w, 1e-5, False))
            h = timed("linear_swiglu", lambda h=h, w=layer["gate_up"]: ops.linear_swiglu(h, w))
            x = timed("linear down + x", lambda h=h, w=layer["down"], x=x: ops.linear(h, w, x))
        last = timed("rms_norm", lambda x=x: ops.rms_norm(x[-1:], self.layers[0]["norm"], 1e-5, False))
        return timed("logits", lambda: ops.logits(last, self.head, VOCABULARY))

    def weight_bytes(self) -> dict[str, int]:
        layer = self.layers[0]
        return {
            "linear qkv": LAYERS * bytes_of(layer["qkv"]),
            "linear o + x": LAYERS * bytes_of(layer["o"]),
            "linear_swiglu": LAYERS * bytes_of(layer["gate_up"]),
            "linear down + x": LAYERS * bytes_of(layer["down"]),
            "logits": bytes_of(self.head),
        }


def replayed(model: Model, tokens: torch.Tensor, positions: torch.Tensor, repeat: int) -> None:
    """The least time of a recorded step and its sample, alternating with nothing else."""
    recording = ops.Recording(lambda: model.forward(tokens, positions), torch.device("cpu"))
    best = [float("inf")] * 2
    for turn in range(2 + repeat):
        start = time.perf_counter()
        scores = recording()
        middle = time.perf_counter()
        model.sample(scores, positions)
        end = time.perf_counter()
        if turn >= 2:
            best = [min(best[0], middle - start), min(best[1], end - middle)]
    rate = sum(model.weight_bytes().values()) / best[0] / 1e9
    print(f"  replayed: {best[0] * 1e3:.2f} ms ({rate:.1f} GB/s), sample {best[1] * 1e3:.3f} ms, ", end="")
    print(f"{len(tokens) / sum(best):.0f} tokens/s")


def report(model: Model, title: str, tokens: torch.Tensor, positions: torch.Tensor, repeat: int) -> None:
    best: dict[str, float] = {}
    whole = float("inf")
    model.step(tokens, positions)
    for _ in range(repeat):
        model.spent.clear()
        start = time.perf_counter()
        model.step(tokens, positions)
        whole = min(whole, time.perf_counter() - start)
        for name, spent in model.spent.items():
            best[name] = min(best.get(name, spent), spent)
    sizes = model.weight_bytes()
    print(f"\n{title}: {whole * 1e3:.2f} ms, {len(tokens) / whole:.0f} tokens/s, least whole pass")
    for name, spent in best.items():
        calls = LAYERS if name not in ("embedding", "logits", "sample") else 1
        calls = 2 * LAYERS + 1 if name == "rms_norm" else calls
        rate = f"{sizes[name] / spent / 1e9:7.1f} GB/s" if name in sizes else ""
        print(f"  {name:16s} {spent * 1e6 / calls:9.1f} us x {calls:3d} = {spent * 1e3:8.3f} ms {rate}")
    print(f"  {'sum':16s} {sum(best.values()) * 1e3:33.3f} ms")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--format", default="ggml_q4_1", choices=[*_BLOCKS, "bf16"])
    parser.add_argument("--head", default="ggml_q8_0", choices=[*_BLOCKS, "bf16"])
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--prefill", type=int, default=512)
    parser.add_argument("--columns", type=int, nargs="*", default=[])
    parser.add_argument("--repeat", type=int, default=7)
    options = parser.parse_args()
    torch.manual_seed(0)
    model = Model(options.format, options.head, max(options.context, options.prefill) + 16)
    print(f"{torch.get_num_threads()} threads, weights {options.format}, head {options.head}")
    for columns in (1, *options.columns):
        positions = torch.arange(options.context, options.context + columns, dtype=torch.int32)
        title = f"decode of {columns} at {options.context}"
        tokens = torch.randint(0, VOCABULARY, (columns,))
        report(model, title, tokens, positions, 3 * options.repeat)
        replayed(model, tokens, positions, 10 * options.repeat)
    if options.prefill:
        positions = torch.arange(options.prefill, dtype=torch.int32)
        tokens = torch.randint(0, VOCABULARY, (options.prefill,))
        report(model, f"prefill of {options.prefill}", tokens, positions, options.repeat)


if __name__ == "__main__":
    main()
