"""The public operators at the shapes of a model, as the engine calls them: one row each.

Weights are a synthetic model's, placed as the loader does; bytes are those of the encoded weights, states and
pages, each once, plus activations read and written once. Every call in a graph has operands of its own, so
that none finds them in the cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from bench.ops.table import Row
from bench.ops.timing import copies, time_graph
from ninfer import ops
from ninfer.api.synthetic import weights
from ninfer.artifact import TensorObject, default_layout, encoded_bytes
from ninfer.formats import KvCode, KvFormat, KvSide
from ninfer.ops import PAGE, KvPages, Matrix, Role


@dataclass(frozen=True)
class Shapes:
    """Sizes of a Qwen3.5 model; the defaults are those of 27B."""

    hidden: int = 5120
    inner: int = 17_408
    heads: int = 24
    kv_heads: int = 4
    head_dim: int = 256
    key_heads: int = 16
    value_heads: int = 48
    gdn_dim: int = 128
    rows: int = 248_320
    tokens: int = 248_077
    depths: tuple[int, ...] = (8192, 85_000)
    chunks: tuple[int, ...] = (1024, 4096)

    @property
    def gdn_rows(self) -> int:
        return 2 * (self.key_heads + self.value_heads) * self.gdn_dim

    @property
    def attention_rows(self) -> int:
        return 2 * (self.heads + self.kv_heads) * self.head_dim


TINY = Shapes(256, 512, 4, 2, 64, 2, 4, 64, 512, 500, (100,), (128,))
_SMALL_T = (1, 4, 8)
_BUDGET = 0.06


@dataclass(frozen=True)
class Suite:
    """Where to measure, and what: `formats` and small `columns` of the products, `kv` of attention."""

    device: torch.device
    shapes: Shapes = Shapes()
    formats: tuple[str, ...] = ("nvfp4", "fp8_e4m3fn_row_bf16", "ggml_k", "q4_g64_fp16", "q5_g64_fp16")
    kv: tuple[KvFormat, ...] = (KvFormat.INT8, KvFormat.BF16)
    columns: tuple[int, ...] = _SMALL_T

    def parts(self, group: str) -> list[Suite]:
        """Suites that together are this one: products of each format by themselves."""
        alone = group in ("small", "wide")
        return [replace(self, formats=(one,)) for one in self.formats] if alone else [self]

    def rows(self, group: str) -> Iterator[Row]:
        """Rows of a group, as soon as each is there."""
        torch.manual_seed(0)
        with torch.inference_mode():
            yield from GROUPS[group](self)

    def matrix(self, format: str, rows: int, columns: int, role: Role, seed: int = 0) -> Matrix:
        """Random weights, placed."""
        layout, q6 = default_layout(format), 0 if format == "ggml_k" else None
        size = encoded_bytes(format, layout, (rows, columns), q6_rows=q6)
        tensor = TensorObject("random", (rows, columns), format, layout, 0, size)
        data = weights.encoded(tensor, columns**-0.5, self.device, seed)
        made = Matrix.of(ops.Encoded(format, layout, (rows, columns), data))
        ops.place(made, self.device, role)
        return made

    def matrices(self, format: str, rows: int, columns: int, role: Role) -> tuple[list[Matrix], int]:
        """Enough of them to rotate over, and the bytes of one."""
        size = encoded_bytes(
            format, default_layout(format), (rows, columns), q6_rows=0 if format == "ggml_k" else None
        )
        return [self.matrix(format, rows, columns, role, i) for i in range(copies(size, least=1))], size

    def normal(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, device=self.device).bfloat16()

    def time(self, calls: Sequence[Callable[[], object]]) -> float:
        return time_graph(calls, budget_s=_BUDGET)


def _small(suite: Suite) -> Iterator[Row]:
    """The products of a decode round."""
    s, wanted = suite.shapes, suite.columns
    for format in suite.formats:
        for name, rows, columns, role in (
            ("linear", 2 * s.inner, s.hidden, Role.LINEAR),
            ("norm + linear", s.gdn_rows, s.hidden, Role.LINEAR),
            ("linear + x", s.hidden, s.heads * s.head_dim, Role.LINEAR),
            ("norm + linear_swiglu", 2 * s.inner, s.hidden, Role.SWIGLU),
            ("linear + x", s.hidden, s.inner, Role.LINEAR),
        ):
            made, size = suite.matrices(format, rows, columns, role)
            for count in wanted:
                yield _product(suite, f"{name} {format} [{rows}, {columns}]", name, made, size, count)
            del made


def _wide(suite: Suite) -> Iterator[Row]:
    """The products of a prefill chunk."""
    s = suite.shapes
    for format in suite.formats:
        for name, rows, columns, role in (
            ("linear", s.gdn_rows, s.hidden, Role.LINEAR),
            ("linear + x", s.hidden, s.inner, Role.LINEAR),
            ("norm + linear_swiglu", 2 * s.inner, s.hidden, Role.SWIGLU),
        ):
            made, size = suite.matrices(format, rows, columns, role)
            for count in s.chunks:
                yield _product(suite, f"{name} {format} [{rows}, {columns}]", name, made[:2], size, count)
            del made


def _product(suite: Suite, label: str, name: str, made: Sequence[Matrix], size: int, count: int) -> Row:
    rows, columns = made[0].rows, made[0].columns
    x, gain = suite.normal(count, columns), suite.normal(columns) * 0.1
    outputs = rows // 2 if "swiglu" in name else rows
    residual = suite.normal(count, rows) if name.endswith("+ x") else None
    if name == "norm + linear":
        calls = [partial(ops.norm_linear, x, gain, 1e-6, True, w) for w in made]
    elif name == "norm + linear_swiglu":
        calls = [partial(ops.norm_linear_swiglu, x, gain, 1e-6, True, w) for w in made]
    else:
        calls = [partial(ops.linear, x, w, residual) for w in made]
    moved = size + 2 * count * (columns + outputs * (2 if residual is not None else 1))
    flops = 2 * rows * columns * count if count > 64 else 0
    return Row(f"{label} T={count}", suite.time(calls), moved, flops)


def _ends(suite: Suite) -> Iterator[Row]:
    """Embedding, head and the draw."""
    s, device = suite.shapes, suite.device
    format = "fp8_e4m3fn_row_bf16"
    size = encoded_bytes(format, default_layout(format), (s.rows, s.hidden))
    head = suite.matrix(format, s.rows, s.hidden, Role.LINEAR)
    for count in suite.columns:
        x = suite.normal(count, s.hidden)
        us = suite.time([partial(ops.logits, x, head, s.tokens)])
        yield Row(f"logits {format} [{s.rows}, {s.hidden}] T={count}", us, size + 4 * count * s.tokens)
    del head
    table = suite.matrix(format, s.rows, s.hidden, Role.TABLE)
    for count in (1, s.chunks[-1]):
        ids = [torch.randint(0, s.tokens, (count,), device=device) for _ in range(8)]
        us = suite.time([partial(ops.embedding, one, table) for one in ids])
        yield Row(f"embedding {format} T={count}", us, 3 * count * s.hidden)
    scores = torch.randn((8, s.tokens), device=device)
    counts = torch.zeros((8, s.tokens), dtype=torch.int32, device=device)
    for batch, temperature in ((1, 0.0), (1, 0.7), (8, 0.7)):
        params = [ops.SamplingParams(temperature, 20, 0.8, presence_penalty=1.5)] * batch
        draws = ops.Draws.of(params, [5] * batch, [ops.Purpose.DECODE] * batch, range(batch), device)
        us = suite.time([partial(ops.draw, scores[:batch], draws, counts)])
        yield Row(f"draw temperature {temperature} B={batch}", us, 8 * batch * s.tokens)


def _attention(suite: Suite) -> Iterator[Row]:
    """Decode attention with its gate over scattered pages, and the preparation of heads."""
    s = suite.shapes
    for format in suite.kv:
        per_key = s.kv_heads * sum(
            side.code.vector_bytes(s.head_dim, 2) for side in (format.keys, format.values)
        )
        for depth in s.depths:
            tables = -(-depth // PAGE)
            sets = copies(per_key * depth, most=16)
            pages = _pages(suite, format, tables * sets)
            order = torch.randperm(len(pages.k), device=suite.device).int().view(sets, 1, tables)
            for count in (1, 4):
                q, gate = suite.normal(count, s.heads, s.head_dim), suite.normal(count, s.heads * s.head_dim)
                positions = torch.arange(depth - count, depth, device=suite.device).int()
                calls = [
                    partial(ops.gated_attention, q, gate, pages, table, positions, s.head_dim**-0.5, depth)
                    for table in order
                ]
                moved = per_key * depth + 6 * count * s.heads * s.head_dim
                yield Row(f"attention {format} depth {depth} T={count}", suite.time(calls), moved)
            del pages
    yield from _prepared(suite, suite.kv[0], 1)


def _prefill(suite: Suite) -> Iterator[Row]:
    """Attention, recurrence and norms of a prefill chunk that ends at depths."""
    s, format = suite.shapes, suite.kv[0]
    count = s.chunks[-1]
    for depth in (count, *(d for d in s.depths if d > count)):
        pages = _pages(suite, format, -(-depth // PAGE))
        table = torch.randperm(len(pages.k), device=suite.device).int()[None]
        q, gate = suite.normal(count, s.heads, s.head_dim), suite.normal(count, s.heads * s.head_dim)
        positions = torch.arange(depth - count, depth, device=suite.device).int()
        call = partial(ops.gated_attention, q, gate, pages, table, positions, s.head_dim**-0.5, depth)
        seen = sum(range(depth - count + 1, depth + 1))
        us = suite.time([call])
        yield Row(
            f"attention {format} depth {depth} T={count}",
            us,
            6 * count * s.heads * s.head_dim,
            4 * s.heads * s.head_dim * seen,
        )
    yield from _prepared(suite, format, count)
    yield from _norms(suite, count)
    yield from _mixed(suite, count, 1)


def _prepared(suite: Suite, format: KvFormat, count: int) -> Iterator[Row]:
    s = suite.shapes
    pages = _pages(suite, format, -(-count // PAGE) + 1)
    table = torch.arange(len(pages.k), device=suite.device).int()[None]
    positions = torch.arange(count, device=suite.device).int()
    norm, rope = suite.normal(s.head_dim) * 0.1, ops.Rope(s.head_dim // 4, 1e7)
    wide = suite.normal(count, s.attention_rows).split(
        (s.heads * s.head_dim, s.kv_heads * s.head_dim, s.heads * s.head_dim, s.kv_heads * s.head_dim), 1
    )
    q, k, _, v = (part.unflatten(1, (-1, s.head_dim)) for part in wide)
    call = partial(ops.qk_prepare, q, k, v, positions, rope, norm, norm, 1e-6, pages, table, positions)
    moved = 4 * count * s.head_dim * (s.heads + 2 * s.kv_heads)
    yield Row(f"qk_prepare {format} T={count}", suite.time([call]), moved)


def _recurrence(suite: Suite) -> Iterator[Row]:
    """All of GDN between its products, for one request and for eight."""
    for batch in (1, 8):
        yield from _mixed(suite, batch, batch)
    yield from _norms(suite, 1)


def _norms(suite: Suite, count: int) -> Iterator[Row]:
    s = suite.shapes
    xs, gain = [suite.normal(count, s.hidden) for _ in range(8)], suite.normal(s.hidden) * 0.1
    us = suite.time([partial(ops.rms_norm, x, gain, 1e-6, True) for x in xs])
    yield Row(f"rms_norm [{s.hidden}] T={count}", us, 4 * count * s.hidden)


def _mixer(suite: Suite) -> ops.GdnMixer:
    s, device = suite.shapes, suite.device
    keys, values = s.key_heads * s.gdn_dim, s.value_heads * s.gdn_dim
    return ops.GdnMixer(
        s.key_heads, s.gdn_dim, s.value_heads, s.gdn_dim, 1e-6,
        suite.matrix("bf16", s.value_heads, s.hidden, Role.GATING, 1),
        suite.matrix("bf16", s.value_heads, s.hidden, Role.GATING, 2),
        torch.rand(s.value_heads, device=device), -torch.rand(s.value_heads, device=device) - 2,
        suite.normal(4, 2 * keys + values) * 0.5, suite.normal(s.gdn_dim), None,
    )  # fmt: skip


def _mixed(suite: Suite, count: int, batch: int) -> Iterator[Row]:
    s, device = suite.shapes, suite.device
    keys, values = s.key_heads * s.gdn_dim, s.value_heads * s.gdn_dim
    mixer = _mixer(suite)
    state_bytes = 4 * s.value_heads * s.gdn_dim**2
    sets = copies(2 * state_bytes * batch, most=64)
    states = torch.randn((2 * sets * batch, s.value_heads, s.gdn_dim, s.gdn_dim), device=device) * 0.1
    history = suite.normal(2 * sets * batch, 3, 2 * keys + values)
    wide, h = suite.normal(count, 2 * keys + 2 * values), suite.normal(count, s.hidden)
    qkv, z = wide.split((2 * keys + values, values), 1)
    slots = torch.arange(2 * sets * batch, device=device).int().view(sets, 2, batch)
    calls = [partial(ops.gdn_mix, mixer, qkv, z, h, history, states, a, b) for a, b in slots]
    moved = 2 * batch * (state_bytes + history[0].numel() * 2) + 4 * s.value_heads * s.hidden
    moved += 2 * count * (wide.shape[1] + s.hidden + values)
    yield Row(f"gdn_mix T={count} B={batch}", suite.time(calls), moved)


def _layers(suite: Suite) -> Iterator[Row]:
    """Whole layers of a round, one kernel behind the other: more than the sum of `small` is what lies between
    them."""
    s, sets, depth = suite.shapes, 4, suite.shapes.depths[0]
    for format in suite.formats:
        products = [_products(suite, format, i) for i in range(sets)]
        size = sum(_encoded(format, rows, columns) for rows, columns, _ in _layer_shapes(s))
        for count in suite.columns:
            x = suite.normal(count, s.hidden)
            calls = [_delta_net_layer(suite, x, made) for made in products]
            state = 8 * s.value_heads * s.gdn_dim**2
            yield Row(f"GDN layer {format} T={count}", suite.time(calls), size + state)
            for kv in suite.kv:
                calls = [_attention_layer(suite, x, made, kv, depth) for made in products]
                keys = (
                    depth * s.kv_heads * sum(v.code.vector_bytes(s.head_dim, 2) for v in (kv.keys, kv.values))
                )
                yield Row(
                    f"attention layer {format} {kv} depth {depth} T={count}", suite.time(calls), size + keys
                )
        del products


def _layer_shapes(s: Shapes) -> list[tuple[int, int, Role]]:
    return [
        (s.gdn_rows, s.hidden, Role.LINEAR),
        (s.hidden, s.value_heads * s.gdn_dim, Role.LINEAR),
        (2 * s.inner, s.hidden, Role.SWIGLU),
        (s.hidden, s.inner, Role.LINEAR),
    ]


def _products(suite: Suite, format: str, seed: int) -> list[Matrix]:
    return [suite.matrix(format, *shape, seed) for shape in _layer_shapes(suite.shapes)]


def _encoded(format: str, rows: int, columns: int) -> int:
    q6 = 0 if format == "ggml_k" else None
    return encoded_bytes(format, default_layout(format), (rows, columns), q6_rows=q6)


def _behind(x: torch.Tensor, y: torch.Tensor, made: Sequence[Matrix], gain: torch.Tensor) -> torch.Tensor:
    """What follows a mixer."""
    x = ops.linear(y, made[1], residual=x)
    return ops.linear(ops.norm_linear_swiglu(x, gain, 1e-6, True, made[2]), made[3], residual=x)


def _delta_net_layer(suite: Suite, x: torch.Tensor, made: Sequence[Matrix]) -> Callable[[], object]:
    s = suite.shapes
    mixer, gain, channels = _mixer(suite), suite.normal(s.hidden) * 0.1, 2 * s.key_heads * s.gdn_dim
    channels += s.value_heads * s.gdn_dim
    states = torch.randn((2, s.value_heads, s.gdn_dim, s.gdn_dim), device=suite.device) * 0.1
    history = suite.normal(2, 3, channels)
    source, target = torch.arange(2, device=suite.device).int().split(1)

    def call() -> torch.Tensor:
        heads, h = ops.norm_linear(x, gain, 1e-6, True, made[0])
        qkv, z = heads.split_with_sizes((channels, heads.shape[1] - channels), 1)
        y = ops.gdn_mix(mixer, qkv, z, h, history, states, source, target)
        return _behind(x, y, made, gain)

    return call


def _attention_layer(
    suite: Suite, x: torch.Tensor, made: Sequence[Matrix], kv: KvFormat, depth: int
) -> Callable[[], object]:
    s, count = suite.shapes, len(x)
    pages = _pages(suite, kv, -(-depth // PAGE))
    table = torch.randperm(len(pages.k), device=suite.device).int()[None]
    positions = torch.arange(depth - count, depth, device=suite.device).int()
    rope, norm = ops.Rope(s.head_dim // 4, 1e7), suite.normal(s.head_dim) * 0.1
    gain, q_width, k_width = suite.normal(s.hidden) * 0.1, s.heads * s.head_dim, s.kv_heads * s.head_dim

    def call() -> torch.Tensor:
        heads, _ = ops.norm_linear(x, gain, 1e-6, True, made[0])
        q, k, gate, v = heads[:, : s.attention_rows].split((q_width, k_width, q_width, k_width), 1)
        q, k, v = (part.unflatten(1, (-1, s.head_dim)) for part in (q, k, v))
        q = ops.qk_prepare(q, k, v, positions, rope, norm, norm, 1e-6, pages, table, positions)
        y = ops.gated_attention(q, gate, pages, table, positions, s.head_dim**-0.5)
        return _behind(x, y, made, gain)

    return call


def _pages(suite: Suite, format: KvFormat, count: int) -> KvPages:
    """Pages whose numbers are of the order of one."""
    (k, k_scales), (v, v_scales) = (_plane(suite, side, count) for side in (format.keys, format.values))
    return KvPages(format, k, v, k_scales, v_scales)


def _plane(suite: Suite, side: KvSide, count: int) -> tuple[torch.Tensor, torch.Tensor | None]:
    s, device = suite.shapes, suite.device
    rows, code = (count, PAGE, s.kv_heads), side.code
    if code is KvCode.PLAIN:
        return suite.normal(*rows, s.head_dim), None
    codes = torch.randint(0, 127, (*rows, code.codes(s.head_dim)), device=device, dtype=torch.uint8)
    codes |= torch.randint(0, 2, codes.shape, device=device, dtype=torch.uint8) << 7
    scales = (*rows, code.scales(s.head_dim))
    if code is KvCode.NVFP4:
        return codes, torch.randint(40, 56, scales, device=device, dtype=torch.uint8)
    codes = codes.view(torch.int8) if code is KvCode.INT8 else codes
    return codes, (torch.rand(scales, device=device) / 64 + 1e-3).half()


GROUPS: dict[str, Callable[[Suite], Iterator[Row]]] = {
    "small": _small,
    "layers": _layers,
    "ends": _ends,
    "attention": _attention,
    "recurrence": _recurrence,
    "wide": _wide,
    "prefill": _prefill,
}
