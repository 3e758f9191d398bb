"""Microseconds of the recurrent operators on the GPU at the geometry of the 27B model.

    python -m bench.ops.gdn [step] [wide] [variants]

Each figure is the median of replays of one CUDA graph that runs the operator of many layers one after the
other, each with its own weights and states (more than the L2 cache holds), random data.
"""

# Closures run in the iteration that makes them.
# ruff: noqa: B023
# pyright: reportCallIssue=false, reportArgumentType=false, reportIndexIssue=false

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass

import torch

from ninfer.ops import DeltaRecords, Encoded, Matrix
from ninfer.ops.cuda import convolve, gating, gdn, gdn_chunked, gdn_native, gdn_step, norms
from ninfer.ops.fused import GdnMixer

KEY_HEADS, HEADS, WIDTH, HIDDEN, TAPS = 16, 48, 128, 5120, 4
KEYS, VALUES = KEY_HEADS * WIDTH, HEADS * WIDTH
CHANNELS = 2 * KEYS + VALUES
CEILING = 4.2e12
"""Bytes a second of a large copy."""
GPU = torch.device("cuda")


def randn(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float32, device=GPU).to(dtype)


def dense(rows: int, columns: int) -> Matrix:
    matrix = Matrix.of(Encoded("bf16", "", (rows, columns), torch.zeros(1, dtype=torch.uint8)))
    matrix.placed(GPU, (randn(rows, columns, dtype=torch.float32) / columns**0.5).bfloat16())
    return matrix


@dataclass
class Layer:
    m: GdnMixer
    conv_states: torch.Tensor
    states: torch.Tensor
    conv_records: torch.Tensor
    records: DeltaRecords

    @staticmethod
    def make(requests: int, columns: int) -> Layer:
        f32, rows = torch.float32, requests * columns
        mixer = GdnMixer(
            KEY_HEADS, WIDTH, HEADS, WIDTH, 1e-6, dense(HEADS, HIDDEN), dense(HEADS, HIDDEN),
            randn(HEADS, dtype=f32) - 2, randn(HEADS, dtype=f32), randn(TAPS, CHANNELS), randn(WIDTH),
            torch.randperm(HEADS, device=GPU).int(),
        )  # fmt: skip
        records = DeltaRecords(
            randn(rows, KEY_HEADS, WIDTH), randn(rows, HEADS, WIDTH), -randn(rows, HEADS, dtype=f32).abs(),
            randn(rows, HEADS, dtype=f32).sigmoid(),
        )  # fmt: skip
        return Layer(
            mixer, randn(requests, TAPS - 1, CHANNELS), randn(requests, HEADS, WIDTH, WIDTH, dtype=f32),
            randn(rows, CHANNELS), records,
        )  # fmt: skip


def microseconds(calls: list[Callable[[], object]], replays: int = 20) -> float:
    """Median time of a call in a graph of all of them."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for call in calls[:2]:
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    times = []
    for _ in range(replays + 3):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / len(calls))
    return statistics.median(times[3:])


def report(name: str, time: float, count: float) -> None:
    """`count`: bytes that have to move."""
    rate = count / time * 1e6
    print(f"{name:44} {time:9.2f} us {count / 1e6:8.2f} MB {100 * rate / CEILING:5.1f} %", flush=True)


def step_calls(layers: list[Layer], requests: int, columns: int, recorded: bool) -> list[Callable]:
    rows = requests * columns
    heads, h = randn(rows, CHANNELS + VALUES), randn(rows, HIDDEN)
    qkv, z = heads[:, :CHANNELS], heads[:, CHANNELS:]
    slots = torch.randperm(requests, device=GPU).int()
    return [
        lambda layer=layer: gdn.gdn_mix(
            layer.m, qkv, z, h, layer.conv_states, layer.states, slots, slots, *(
                (layer.conv_records, layer.records) if recorded else (None, None)
            ),
        )
        for layer in layers
    ]  # fmt: skip


def state_bytes(requests: int) -> int:
    return requests * HEADS * WIDTH * WIDTH * 4


def step(variants: bool) -> None:
    weights = 2 * HEADS * HIDDEN * 2 + TAPS * CHANNELS * 2
    for requests, columns in ((1, 1), (1, 4), (1, 8), (8, 1), (8, 4)):
        layers = [Layer.make(requests, columns) for _ in range(48 if requests == 1 else 16)]
        moved = weights + requests * columns * 2 * (CHANNELS + 2 * VALUES + HIDDEN)
        name = f"B={requests} T={columns}"
        plain = gdn_native._LANES, gdn_native._RESIDENT
        for lanes, resident in ((8, 4), (16, 3), (16, 4)) if variants else (plain,):
            gdn_native._LANES, gdn_native._RESIDENT = lanes, resident
            time = microseconds(step_calls(layers, requests, columns, False))
            report(f"{name} gdn_mix in place, {lanes}/{resident}", time, moved + 2 * state_bytes(requests))
            time = microseconds(step_calls(layers, requests, columns, True))
            report(f"{name} gdn_mix recorded, {lanes}/{resident}", time, moved + state_bytes(requests))
        gdn_native._LANES, gdn_native._RESIDENT = plain
        slots = torch.randperm(requests, device=GPU).int()
        counts = torch.full((requests,), columns, dtype=torch.int32, device=GPU)
        folds = [
            lambda layer=layer: gdn_step.fold_delta_net(layer.records, counts, layer.states, slots, slots)
            for layer in layers
        ]
        report(f"{name} fold_delta_net", microseconds(folds), 2 * state_bytes(requests))
        everything = (
            [layer.conv_records for layer in layers], [layer.records for layer in layers], counts,
            [layer.conv_states for layer in layers], [layer.states for layer in layers], slots, slots,
        )  # fmt: skip
        time = microseconds([lambda: gdn.fold_gdn(*everything)] * 2) / len(layers)
        report(f"{name} fold_gdn, a layer of {len(layers)}", time, 2 * state_bytes(requests))


def wide(variants: bool) -> None:
    for columns in (128, 4096):
        layers = [Layer.make(1, 1) for _ in range(8)]
        heads, h = randn(columns, CHANNELS + VALUES), randn(columns, HIDDEN)
        qkv, z = heads[:, :CHANNELS], heads[:, CHANNELS:]
        slots = torch.zeros(1, dtype=torch.int32, device=GPU)
        first, name = layers[0], f"T={columns}"
        g, beta = gdn.gating(h, first.m.a, first.m.b, first.m.a_log, first.m.dt_bias, False)
        u = convolve.causal_conv(qkv, first.m.convolution, first.conv_states, slots, slots, None)
        q, k, v = (x.view(columns, -1, WIDTH) for x in u.split_with_sizes((KEYS, KEYS, VALUES), 1))
        o = gdn.gated_delta_net(q, k, v, g, beta, first.states, slots, slots, None)
        parts: dict[str, tuple[Callable[[Layer], object], float]] = {
            "gdn_gating": (
                lambda layer: gating.gating(h, layer.m.a, layer.m.b, layer.m.a_log, layer.m.dt_bias, False),
                columns * HIDDEN * 2,
            ),
            "causal_conv": (
                lambda layer: convolve.causal_conv(
                    qkv, layer.m.convolution, layer.conv_states, slots, slots, None
                ),
                columns * CHANNELS * 4,
            ),
            "gated_delta_net": (
                lambda layer: gdn.gated_delta_net(q, k, v, g, beta, layer.states, slots, slots, None),
                columns * (CHANNELS + VALUES) * 2
                + 2 * gdn_chunked.delta_net_bytes(columns, KEY_HEADS, HEADS, WIDTH, WIDTH),
            ),
            "gated_rms_norm": (
                lambda layer: norms.gated_rms_norm(
                    o, z.view(columns, HEADS, WIDTH), layer.m.norm, 1e-6, layer.m.head_order
                ),
                columns * VALUES * 6,
            ),
            "gdn_mix": (
                lambda layer: gdn.gdn_mix(layer.m, qkv, z, h, layer.conv_states, layer.states, slots, slots),
                columns * 2 * (CHANNELS + 2 * VALUES + HIDDEN),
            ),
        }  # fmt: skip
        for part, (call, moved) in parts.items():
            calls = [lambda layer=layer, call=call: call(layer) for layer in layers]
            report(f"{name} {part}", microseconds(calls, 10), moved)
        if variants:
            stages(name, q, k, v, g, beta, first.states, slots, o)


def stages(name, q, k, v, g, beta, states, slots, out) -> None:
    """Prepare and scan apart, in several shapes."""
    columns, half = q.shape[0], torch.float16
    u = randn(columns, CHANNELS)
    layer = Layer.make(1, 1)
    for rows, wide, warps in ((16, 128, 4), (16, 256, 8), (32, 128, 8), (8, 256, 4), (32, 64, 4)):
        call = lambda: convolve.convolution_kernel[(columns // rows, 1, CHANNELS // wide)](  # noqa: E731
            u, u.stride(0), layer.m.convolution, layer.conv_states, slots, slots, out, None, columns,
            CHANNELS, 0,
            TAPS=4, PAST_ROWS=4, RECORD=False, ROWS=rows, WIDTH=wide, num_warps=warps,
        )  # fmt: skip
        out = torch.empty_like(u)
        report(
            f"{name} conv {rows} x {wide}, {warps} warps",
            microseconds([call] * 4, 10),
            columns * CHANNELS * 4,
        )
    out = torch.empty_like(v)
    chunks = columns // 64

    def scratch(*shape: int, dtype: torch.dtype = half) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=GPU)

    units_q, units_k = scratch(columns, KEY_HEADS, WIDTH), scratch(columns, KEY_HEADS, WIDTH)
    w, u, p = scratch(columns, HEADS, WIDTH), scratch(columns, HEADS, WIDTH), scratch(columns, HEADS, 64)
    sums = scratch(columns, HEADS, dtype=torch.float32)
    shape = {
        "HEADS": HEADS,
        "GROUP": 3,
        "DK": WIDTH,
        "DV": WIDTH,
        "KEYS": WIDTH,
        "VALUES": WIDTH,
        "CHUNK": 64,
    }
    for warps in (4, 8):
        call = lambda: gdn_chunked.prepare_kernel[(chunks, HEADS)](  # noqa: E731
            q, k, v, q.stride(0), k.stride(0), v.stride(0), g, beta, units_q, units_k, w, u, p, sums, columns,
            chunks, **shape, num_warps=warps,
        )  # fmt: skip
        report(f"{name} prepare, {warps} warps", microseconds([call] * 4, 10), 1)
    for strip, warps, deep in ((64, 4, 2), (64, 8, 2), (32, 4, 2), (64, 4, 3), (32, 4, 3)):
        call = lambda: gdn_chunked.scan_kernel[(WIDTH // strip, HEADS, 1)](  # noqa: E731
            units_q, units_k, w, u, p, sums, states, slots, slots, out, columns, chunks, **shape, STRIP=strip,
            num_warps=warps, num_stages=deep,
        )  # fmt: skip
        try:
            time = microseconds([call] * 4, 10)
        except Exception as error:
            print(f"{name} scan {strip} {warps} {deep}: {str(error)[:80]}")
            continue
        report(f"{name} scan, strips of {strip}, {warps} warps, {deep} stages", time, 1)


if __name__ == "__main__":
    torch.manual_seed(0)
    wanted = set(sys.argv[1:])
    if "wide" not in wanted or "step" in wanted:
        step("variants" in wanted)
    if "step" not in wanted or "wide" in wanted:
        wide("variants" in wanted)
