"""What a row gets depends on nothing but the row: not on how many stand beside it, nor on the threads.

A decode step of up to 16 columns is looked at operator by operator, bit by bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from ninfer import ops
from ninfer.formats import KvFormat
from ninfer.ops import Matrix, RowSpan
from tests.ops.weights import MAKERS, SHAPES, random_matrix, random_weight

COLUMNS = 16


@pytest.fixture(params=[1, 2, 3], autouse=True)
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def rows_of(count: int, *shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, *shape, generator=generator).to(dtype)


def check(work: Callable[[torch.Tensor], tuple[torch.Tensor, ...]], count: int = COLUMNS) -> None:
    """`work(rows)` gives tensors with an entry for each of the row numbers: are they the same in any company?

    One thread alone says what a row gets; the fixture's threads, any 2 to 8 rows and all rows must agree.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    alone = [work(torch.tensor([row])) for row in range(count)]
    torch.set_num_threads(threads)
    generator = torch.Generator().manual_seed(1)
    groups = [torch.randperm(count, generator=generator)[:n] for n in range(1, min(count, 8) + 1)]
    for rows in (*groups, torch.arange(count), torch.arange(count).flip(0)):
        for index, together in enumerate(work(rows)):
            for place, row in enumerate(rows.tolist()):
                assert torch.equal(together[place], alone[row][index][0]), f"row {row} of {len(rows)}"


@pytest.mark.parametrize("format", MAKERS)
def test_products(format: str, dtype: torch.dtype) -> None:
    rows, width = SHAPES[format]
    encoded, _ = random_weight(format, rows, width)
    w, pairs = Matrix.of(encoded), Matrix([RowSpan(encoded, 0, rows - rows % 2)])
    x, residual = rows_of(COLUMNS, width, dtype=dtype), rows_of(COLUMNS, rows, dtype=dtype, seed=1)
    check(
        lambda t: (
            ops.linear(x[t], w),
            ops.linear(x[t], w, residual[t]),
            ops.linear_swiglu(x[t], pairs),
            ops.logits(x[t], w, rows - 3),
            ops.embedding(t.int(), w, dtype),
        )
    )


@pytest.mark.parametrize("width", [2080, 4128])
def test_products_wider_than_a_panel(width: int, dtype: torch.dtype) -> None:
    w, _ = random_matrix("ggml_q4_0", 70, width)
    x = rows_of(COLUMNS, width, dtype=dtype)
    check(lambda t: (ops.linear(x[t], w), ops.linear_swiglu(x[t], w)))


@pytest.mark.parametrize("inner", [5, 53, 1100])
def test_gate_and_up_of_different_formats(inner: int, dtype: torch.dtype) -> None:
    w = Matrix.stack(
        [random_matrix("ggml_q4_0", inner, 96, 1)[0], random_matrix("q5_g64_fp16", inner, 96, 2)[0]]
    )
    x = rows_of(COLUMNS, 96, dtype=dtype)
    check(lambda t: (ops.linear_swiglu(x[t], w),))


@pytest.mark.parametrize("width", [40, 5120])
def test_norms_and_gates(width: int, dtype: torch.dtype) -> None:
    x, gate = rows_of(COLUMNS, width, dtype=dtype), rows_of(COLUMNS, width, dtype=dtype, seed=1)
    weight, head = torch.randn(width).bfloat16(), torch.randn(width // 5)
    o, z = x.view(COLUMNS, 5, -1), gate.view(COLUMNS, 5, -1)
    order = torch.tensor([4, 2, 0, 1, 3], dtype=torch.int32)
    check(
        lambda t: (
            ops.rms_norm(x[t], weight, 1e-6, True),
            ops.sigmoid_mul(x[t], gate[t]),
            ops.gated_rms_norm(o[t], z[t], head, 1e-6),
            ops.gated_rms_norm(o[t], z[t], head, 1e-6, order),
        )
    )


def test_control_values(dtype: torch.dtype) -> None:
    a, b = (random_matrix("bf16", 48, 160, seed)[0] for seed in range(2))
    a_log, bias = torch.randn(48), torch.randn(48)
    x = rows_of(COLUMNS, 160, dtype=dtype)
    check(lambda t: ops.gdn_gating(x[t], a, b, a_log, bias))


@pytest.mark.parametrize("columns", [1, 2])
@pytest.mark.parametrize("recorded", [False, True])
def test_states(columns: int, recorded: bool, dtype: torch.dtype) -> None:
    """Convolution and recurrence of 8 requests, one of them at its start; their outputs and their states."""
    requests, k_heads, v_heads, width, v_width, channels = 8, 3, 6, 24, 40, 1037
    u = rows_of(requests, columns, channels, dtype=dtype)
    q, k = (rows_of(requests, columns, k_heads, width, dtype=dtype, seed=seed) for seed in (1, 2))
    v = rows_of(requests, columns, v_heads, v_width, dtype=dtype, seed=3)
    g, beta = (torch.rand(requests, columns, v_heads) * sign for sign in (-1, 1))
    histories = rows_of(2 * requests, 3, channels, dtype=dtype)
    states = rows_of(2 * requests, v_heads, v_width, width, dtype=torch.float32)
    weight = torch.randn(4, channels).bfloat16()

    def work(rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
        count = len(rows)
        sources, targets = torch.where(rows == 5, -1, rows).int(), (rows + requests).int()
        history, state = histories.clone(), states.clone()
        inputs = [x[rows].flatten(0, 1) for x in (u, q, k, v, g, beta)]
        raw, queries, keys, values, gates, strengths = inputs
        kept_columns = kept = None
        if recorded:
            kept_columns = torch.zeros_like(raw)
            kept = ops.DeltaRecords(*(torch.zeros_like(x) for x in inputs[2:]))
        y = ops.causal_conv(raw, weight, history, sources, targets, kept_columns)
        o = ops.gated_delta_net(queries, keys, values, gates, strengths, state, sources, targets, kept)
        if kept_columns is not None and kept is not None:
            counts = (rows % 3).clamp(max=columns).int()
            ops.fold_conv(kept_columns, counts, history, sources, targets)
            ops.fold_delta_net(kept, counts, state, sources, targets)
        return y.unflatten(0, (count, -1)), o.unflatten(0, (count, -1)), history[targets], state[targets]

    check(work, requests)


@pytest.mark.parametrize("columns", [1, 2])
@pytest.mark.parametrize(("width", "heads", "k_heads"), [(64, 9, 3), (40, 4, 1), (256, 16, 2)])
def test_attention(columns: int, width: int, heads: int, k_heads: int, dtype: torch.dtype) -> None:
    """Requests at scattered positions, with scattered pages; outputs and appended keys and values."""
    requests, pages_each = 8, 7
    table = torch.randperm(requests * pages_each, dtype=torch.int32).view(requests, pages_each)
    pool = rows_of(2, len(table.view(-1)), 64, k_heads, width, dtype=dtype)
    q = rows_of(requests, columns, heads, width, dtype=dtype, seed=1)
    k, v = (rows_of(requests, columns, k_heads, width, dtype=dtype, seed=seed) for seed in (2, 3))
    starts = torch.tensor([0, 62, 63, 126, 127, 200, 300, 444])
    positions = (starts[:, None] + torch.arange(columns)).int()
    q_norm, k_norm = torch.randn(width).bfloat16(), torch.randn(width).bfloat16()
    rope = ops.Rope(width // 2, 1e4)

    def work(rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
        cache = ops.KvPages(KvFormat.BF16, pool[0].clone(), pool[1].clone())
        places = positions[rows].view(-1)
        heads_q, heads_k, heads_v = (x[rows].flatten(0, 1) for x in (q, k, v))
        ready = ops.qk_prepare(
            heads_q, heads_k, heads_v, places, rope, q_norm, k_norm, 1e-6, cache, table[rows], places
        )
        out = ops.paged_attention(ready, cache, table[rows], places, width**-0.5)
        count = len(rows)
        appended = [x[table[rows].long()] for x in (cache.k, cache.v)]
        return ready.unflatten(0, (count, -1)), out.unflatten(0, (count, -1)), *appended

    check(work, requests)


def test_draws() -> None:
    size = 5000
    scores = rows_of(8, size, dtype=torch.float32)
    counts = torch.randint(0, 3, (3, size), dtype=torch.int32)
    params = [
        ops.SamplingParams(temperature=0.4 * (b % 4), top_p=0.9, presence_penalty=b % 2, seed=b)
        for b in range(8)
    ]

    def work(rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
        own = rows.tolist()
        draws = ops.Draws.of([params[b] for b in own], own, [b % 6 for b in own], [b % 4 - 1 for b in own])
        return (ops.draw(scores[rows], draws, counts),)

    check(work, 8)
