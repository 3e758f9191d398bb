"""Quantized pages: what is appended, bit by bit, and attention against float64 over what the codes mean."""

from __future__ import annotations

import pytest
import torch

from ninfer import ops
from ninfer.formats import KvFormat, kv_codec
from ninfer.models import KvLayout
from ninfer.ops import KvPages, Rope, paged_attention, qk_prepare
from ninfer.ops.cpu.attend import fused_attention
from ninfer.ops.cpu.attend_pages import attend_pages
from ninfer.runtime.memory import allocate_pages
from tests.ops.criteria import ATTENTION, FLOAT32, Criterion
from tests.ops.test_attention import Cache, attention_reference

CPU = torch.device("cpu")
QUANTIZED = [format for format in KvFormat if format is not KvFormat.BF16]
CRITERIA = {
    KvFormat.BF16: ATTENTION,
    KvFormat.INT8: Criterion(2e-2, 1.1e-3, 4e-2),
    KvFormat.FP8: Criterion(8e-2, 4e-3, 0.11),
    KvFormat.NVFP4: Criterion(1.5e-2, 5e-3, 1.1e-2),
    KvFormat.K8V4: Criterion(8e-2, 5e-3, 0.11),
}
GEOMETRIES = [(32, 4, 2), (64, 9, 3), (96, 3, 3), (128, 5, 1), (256, 6, 1)]
"""(head width, query heads, key heads)"""
every = pytest.mark.parametrize("format", KvFormat)
quantized = pytest.mark.parametrize("format", QUANTIZED)


def check(format: KvFormat, fused: bool, out: torch.Tensor, reference: torch.Tensor) -> None:
    """Our kernel reads exactly what is stored, so there bf16's criterion holds for all formats; for PyTorch,
    what was decoded is rounded to the activation type."""
    CRITERIA[format].check(out, reference)
    if out.dtype == torch.float32:
        FLOAT32.check(out, reference)
    elif not fused:
        ATTENTION.check(out, reference)


def planes(pages: KvPages) -> list[torch.Tensor]:
    """As bytes."""
    found = [p for p in (pages.k, pages.k_scales, pages.v, pages.v_scales) if p is not None]
    return [p.view(torch.uint8) for p in found]


@quantized
@pytest.mark.parametrize(("width", "q_heads", "k_heads"), GEOMETRIES)
@pytest.mark.parametrize("with_norm", [False, True])
def test_appended_codes(format, width, q_heads, k_heads, with_norm, dtype) -> None:
    """The codes of what a bf16 cache would have got; nothing where a column is masked, nothing elsewhere."""
    plain, pages = (
        allocate_pages(KvLayout(1, k_heads, width, dtype, f), 4, CPU) for f in (KvFormat.BF16, format)
    )
    for plane in (plain.k, plain.v):
        plane.normal_()
    before = [p.fill_(0xA5).clone() for p in planes(pages)]
    places = torch.tensor([63, 64, -1, 0, -1, 1, 2, 130], dtype=torch.int32)
    table = torch.tensor([[2, 0, 1], [3, 3, 1]], dtype=torch.int32)
    size = 4.0 ** torch.arange(-4, 4)[:, None, None]
    q, k = torch.randn(8, q_heads, width).to(dtype), (torch.randn(8, k_heads, width) * size).to(dtype)
    v = (torch.randn(8, k_heads, width) * size).to(dtype)
    v[0, 0], v[1, 0, 5:], k[3] = 0, 0, 0
    norm = torch.randn(width) if with_norm else None
    rope = Rope(32, 1e4)
    arguments = (q, k, v, places.clamp(min=0), rope, norm, norm, 1e-6)
    out = qk_prepare(*arguments, plain, table, places)
    assert torch.equal(qk_prepare(*arguments, pages, table, places), out)
    written = torch.zeros(4, 64, dtype=torch.bool)
    for t, place in enumerate(places.tolist()):
        if place >= 0:
            written[table[t // 4, place // 64], place % 64] = True
    assert written.sum() == 6
    expected = [
        part.view(torch.uint8)
        for x, side in ((plain.k, format.keys), (plain.v, format.values))
        for part in kv_codec.encode(x, side)
        if part is not None
    ]
    for now, then, codes in zip(planes(pages), before, expected, strict=True):
        assert torch.equal(now[written], codes[written])
        assert torch.equal(now[~written], then[~written])


@quantized
def test_appended_codes_of_anything(format, dtype) -> None:
    """Zeros, subnormals, huge numbers, infinities and NaN."""
    plain, pages = (allocate_pages(KvLayout(1, 1, 64, dtype, f), 1, CPU) for f in (KvFormat.BF16, format))
    x = torch.randn(60, 1, 64) * 10.0 ** torch.arange(-42, 18)[:, None, None]
    x[3], x[7, 0, 3:], x[9], x[11, 0, 2] = 0, 0, -0.0, float("nan")
    x[13, 0, 60], x[15, 0, 1], x[17] = float("inf"), -float("inf"), 3.3e38
    x[19:24, 0, ::3] = 0
    x = x.to(dtype)
    places = torch.arange(60, dtype=torch.int32)
    table = torch.zeros(1, 1, dtype=torch.int32)
    rope = Rope(2, 1e4)
    for target in (plain, pages):
        qk_prepare(x, x, x, 0 * places, rope, None, None, 1e-6, target, table, places)
    assert plain.k[0, :60].isnan().any()
    expected = [*kv_codec.encode(plain.k, format.keys), *kv_codec.encode(plain.v, format.values)]
    got = (pages.k, pages.k_scales, pages.v, pages.v_scales)
    for have, want in zip(got, expected, strict=True):
        assert have is not None
        assert want is not None
        assert torch.equal(have.view(torch.uint8), want.view(torch.uint8))


@every
@pytest.mark.parametrize(("width", "q_heads", "k_heads"), GEOMETRIES)
@pytest.mark.parametrize(("start", "count"), [(62, 1), (63, 1), (64, 1), (61, 4), (120, 16), (47, 17)])
def test_attention(format, width, q_heads, k_heads, start, count, dtype) -> None:
    cache = Cache(2, 3, k_heads, width, dtype, format)
    positions = torch.cat((torch.arange(start, start + count), torch.arange(3, 3 + count))).int()
    q = torch.randn(2 * count, q_heads, width).to(dtype)
    out = paged_attention(q, cache.pages, cache.table, positions, width**-0.5)
    check(format, count > 16, out, attention_reference(q, cache, positions, width**-0.5))


@pytest.fixture(params=["pages", "fused"])
def attend(request: pytest.FixtureRequest):
    """Both ways of attention of many columns, of which a machine takes one."""
    return attend_pages if request.param == "pages" else fused_attention


@every
@pytest.mark.parametrize("start", [0, 63, 64, 300])
def test_attention_of_many_columns(format, start, attend, dtype) -> None:
    cache = Cache(1, 7, 2, 64, dtype, format)
    positions = torch.arange(start, start + 130, dtype=torch.int32)
    q = torch.randn(130, 4, 64).to(dtype)
    out = attend(q, cache.pages, cache.table, positions, 0.125)
    check(format, attend is fused_attention, out, attention_reference(q, cache, positions, 0.125))


@every
def test_attention_over_long_runs(format) -> None:
    """3,300 keys: runs of 128, 256 and 512, the last one cut."""
    cache = Cache(1, 52, 1, 32, torch.bfloat16, format)
    positions = torch.tensor([3000, 3071, 3072, 3299], dtype=torch.int32)
    q = torch.randn(4, 3, 32).bfloat16() * 3
    out = paged_attention(q, cache.pages, cache.table, positions, 32**-0.5)
    check(format, False, out, attention_reference(q, cache, positions, 32**-0.5))


@every
@pytest.mark.parametrize("threads", [1, 2, 5])
def test_a_column_depends_on_its_own_keys_only(format, threads: int) -> None:
    """Not on other columns, how many requests there are, which pages hold the keys, how long the table is,
    how many threads there are."""
    torch.manual_seed(threads)
    cache = Cache(3, 24, 2, 64, torch.bfloat16, format)
    starts = [1020, 0, 254]
    positions = torch.cat([torch.arange(s, s + 5) for s in starts]).int()
    q = torch.randn(15, 6, 64).bfloat16()
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        whole = paged_attention(q, cache.pages, cache.table, positions, 0.125)
        longer = torch.cat((cache.table, torch.zeros(3, 900, dtype=torch.int32)), 1)
        assert torch.equal(paged_attention(q, cache.pages, longer, positions, 0.125), whole)
        torch.set_num_threads(1)
        for t in range(15):
            table = cache.table[t // 5 : t // 5 + 1]
            alone = paged_attention(q[t : t + 1], cache.pages, table, positions[t : t + 1], 0.125)
            assert torch.equal(alone[0], whole[t])
    finally:
        torch.set_num_threads(before)
    order = torch.randperm(len(cache.pages.k))
    k, v, *scales = (cache.pages.k, cache.pages.v, cache.pages.k_scales, cache.pages.v_scales)
    moved = KvPages(format, k[order], v[order], *(s if s is None else s[order] for s in scales))
    back = torch.empty_like(order).scatter_(0, order, torch.arange(len(order)))
    table = back[cache.table.long()].int()
    assert torch.equal(paged_attention(q, moved, table, positions, 0.125), whole)


@every
@pytest.mark.parametrize("count", [1, 4, 16, 40])
def test_masked_columns(format, count: int, attend, dtype) -> None:
    """Their output is zero; what the table says for their request, and what stands in other rows, is not
    looked at."""
    cache = Cache(3, 3, 2, 32, dtype, format)
    positions = torch.arange(70, 70 + count, dtype=torch.int32).repeat(3)
    positions[count : 2 * count] = -1
    keep = count - count // 4
    positions[2 * count + keep :] = -1
    q = torch.randn(3 * count, 4, 32).to(dtype)
    table = cache.table.clone()
    table[1] = -(2**30)
    out = attend(q, cache.pages, table, positions, 0.2)
    assert not out[positions < 0].any()
    seen = positions >= 0
    clean = attend(q[:count], cache.pages, cache.table[:1], positions[:count], 0.2)
    assert torch.equal(out[:count], clean)
    reference = attention_reference(q, cache, positions, 0.2)
    check(format, attend is fused_attention, out[seen], reference[seen])


@every
@pytest.mark.parametrize("count", [3, 20])
def test_rows_beyond_the_frontier_are_not_read(format, count: int, attend) -> None:
    """Stale bytes of a page may be anything, also NaN."""
    cache = Cache(1, 3, 1, 32, torch.bfloat16, format)
    positions = torch.arange(66, 66 + count, dtype=torch.int32)
    q = torch.randn(count, 2, 32).bfloat16()
    before = attend(q, cache.pages, cache.table, positions, 0.2)
    end = 66 + count
    for plane in planes(cache.pages):
        plane[cache.table[0, 1], end - 64 :] = 0xFF
        plane[cache.table[0, 2]] = 0xFF
    assert torch.equal(attend(q, cache.pages, cache.table, positions, 0.2), before)
    # A column reads nothing of its neighbours' later keys either.
    for plane in planes(cache.pages):
        plane[cache.table[0, 1], end - 65] = 0xFF
    after = attend(q, cache.pages, cache.table, positions, 0.2)
    if attend is attend_pages:
        assert torch.equal(after[:-1], before[:-1])


@quantized
@pytest.mark.parametrize("columns", [1, 5])
def test_recorded(format, columns: int, monkeypatch) -> None:
    """Append and attention replay: the same launches on other positions, pages and a masked column."""
    monkeypatch.undo()  # poisoning fresh memory is computing
    layout = KvLayout(1, 2, 64, torch.bfloat16, format)
    caches = [allocate_pages(layout, 8, CPU) for _ in range(2)]
    qkv = torch.randn(2 * columns, 8, 64).bfloat16()
    q, k, v = qkv.split((4, 2, 2), 1)
    table = torch.randperm(8).int().view(2, 4)
    positions = torch.zeros(2 * columns, dtype=torch.int32)
    rope = Rope(64, 1e4)

    def step(pages: KvPages) -> torch.Tensor:
        rotated = qk_prepare(q, k, v, positions, rope, None, None, 1e-6, pages, table, positions)
        return paged_attention(rotated, pages, table, positions, 0.125)

    recording = ops.Recording(lambda: step(caches[0]), CPU)
    for start in (0, 5, 63, 64, 130, 131, 200):
        qkv.copy_(torch.randn(qkv.shape))
        positions.copy_(torch.arange(start, start + columns).repeat(2))
        if start == 131:
            positions[-1] = -1
        assert torch.equal(recording(), step(caches[1]))
        for a, b in zip(planes(caches[0]), planes(caches[1]), strict=True):
            assert torch.equal(a, b)
    assert recording.recorded
