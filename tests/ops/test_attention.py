"""Head preparation and paged attention against float64."""

from __future__ import annotations

import math

import pytest
import torch

from ninfer.errors import FormatError, OptionError
from ninfer.formats import KvFormat, KvSide, kv_codec
from ninfer.ops import PAGE, KvPages, Rope, paged_attention, qk_prepare
from tests.ops.criteria import ATTENTION, ELEMENTWISE, criterion

GEOMETRIES = [(64, 9, 3), (256, 4, 2), (24, 4, 1), (40, 5, 5), (128, 6, 2)]
"""(head width, query heads, key heads)"""


class Cache:
    """Random pages of B requests, the rows of a request scattered over the pages.

    `pages` hold `k` and `v` in the given format; the oracle reads `k` and `v`, which are float64 then: what
    the codes mean, turned back.
    """

    def __init__(
        self, requests: int, pages: int, heads: int, width: int, dtype: torch.dtype, format=KvFormat.BF16
    ) -> None:
        shape = (requests * pages + 2, PAGE, heads, width)
        # Values of 1/4: the criterion's bounds are for outputs below one, where they exceed the one rounding.
        self.k, self.v = torch.randn(shape).to(dtype), (torch.randn(shape) / 4).to(dtype)
        self.pages = KvPages(KvFormat.BF16, self.k, self.v)
        if format is not KvFormat.BF16:
            (k, k_scales), (v, v_scales) = (
                kv_codec.encode(x, side) for x, side in ((self.k, format.keys), (self.v, format.values))
            )
            self.pages = KvPages(format, k, v, k_scales, v_scales)
            self.k = meaning(k, k_scales, format.keys, width)
            self.v = meaning(v, v_scales, format.values, width)
        self.table = torch.randperm(shape[0], dtype=torch.int32)[: requests * pages].view(requests, pages)

    def rows(self, pages: torch.Tensor, request: int, count: int) -> torch.Tensor:
        """The first `count` rows of a request, `[count, heads, width]`."""
        return pages[self.table[request].long()].flatten(0, 1)[:count]


def meaning(codes, scales, side: KvSide, width: int) -> torch.Tensor:
    """float64: decoded and turned back by the matrix of signs."""
    x = kv_codec.decode(codes, scales, side).double()
    if side.rotation(width):
        signs = [[(-1.0) ** (i & j).bit_count() for j in range(width)] for i in range(width)]
        x = x @ torch.tensor(signs, dtype=torch.float64) / math.sqrt(width)
    return x


def attention_reference(q, cache: Cache, positions, scale: float) -> torch.Tensor:
    """One column and head at a time, by the definition."""
    per_request = len(q) // len(cache.table)
    out = torch.zeros(q.shape, dtype=torch.float64)
    group = q.shape[1] // cache.k.shape[2]
    rows = []
    for t in range(len(q)):
        count = int(positions[t]) + 1
        if t % per_request == 0:
            most = int(positions[t : t + per_request].max()) + 1
            rows = [cache.rows(p, t // per_request, most).double() for p in (cache.k, cache.v)]
        keys, values = (part[:count] for part in rows)
        for head in range(q.shape[1]):
            scores = keys[:, head // group] @ q[t, head].double() * scale
            out[t, head] = torch.softmax(scores, 0) @ values[:, head // group]
    return out


@pytest.mark.parametrize(("width", "q_heads", "k_heads"), GEOMETRIES)
@pytest.mark.parametrize("first", [0, 62, 254, 509])
def test_attention_of_few_columns(width, q_heads, k_heads, first, dtype) -> None:
    cache = Cache(2, 9, k_heads, width, dtype)
    starts = (first, max(0, first - 40))
    positions = torch.cat([torch.arange(s, s + 4) for s in starts]).int()
    q = torch.randn(8, q_heads, width).to(dtype)
    out = paged_attention(q, cache.pages, cache.table, positions, width**-0.5)
    reference = attention_reference(q, cache, positions, width**-0.5)
    criterion(ATTENTION, dtype).check(out, reference)


@pytest.mark.parametrize(("start", "count"), [(0, 17), (0, 130), (1, 64), (100, 33), (64, 64)])
def test_attention_of_many_columns(start, count, dtype) -> None:
    cache = Cache(2, 4, 2, 32, dtype)
    positions = torch.arange(start, start + count).int().repeat(2)
    q = torch.randn(2 * count, 4, 32).to(dtype)
    out = paged_attention(q, cache.pages, cache.table, positions, 32**-0.5)
    criterion(ATTENTION, dtype).check(out, attention_reference(q, cache, positions, 32**-0.5))


def test_a_column_does_not_see_its_neighbours() -> None:
    cache = Cache(2, 12, 3, 64, torch.bfloat16)
    positions = torch.tensor([254, 255, 256, 257, 700, 701, 702, 703], dtype=torch.int32)
    q = torch.randn(8, 9, 64).bfloat16()
    whole = paged_attention(q, cache.pages, cache.table, positions, 0.125)
    for t in range(8):
        table = cache.table[t // 4 : t // 4 + 1]
        alone = paged_attention(q[t : t + 1], cache.pages, table, positions[t : t + 1], 0.125)
        assert torch.equal(alone[0], whole[t])
    # A table with room for more pages changes nothing either.
    longer = torch.cat((cache.table, torch.zeros(2, 30, dtype=torch.int32)), 1)
    assert torch.equal(paged_attention(q, cache.pages, longer, positions, 0.125), whole)


def test_scores_far_apart_and_equal(dtype: torch.dtype) -> None:
    cache = Cache(1, 6, 1, 16, dtype)
    q = torch.full((1, 1, 16), 40.0).to(dtype)
    position = torch.tensor([380], dtype=torch.int32)
    out = paged_attention(q, cache.pages, cache.table, position, 1.0)
    criterion(ATTENTION, dtype).check(out, attention_reference(q, cache, position, 1.0))
    cache.k.zero_()
    out = paged_attention(q, cache.pages, cache.table, position, 1.0)
    criterion(ATTENTION, dtype).check(out, cache.rows(cache.v, 0, 381).double().mean(0)[None])


def rotated(x: torch.Tensor, positions: torch.Tensor, rope: Rope) -> torch.Tensor:
    """`x [T, heads, width]` float64, pair by pair."""
    half = rope.rotary_dim // 2
    out = x.clone()
    sections = rope.sections or (half, 0, 0)
    for t in range(len(x)):
        for i in range(half):
            axis = 0
            if i % 3 == 1 and i < 3 * sections[1]:
                axis = 1
            elif i % 3 == 2 and i < 3 * sections[2]:
                axis = 2
            position = positions[axis, t] if positions.dim() == 2 else positions[t]
            angle = float(position) * rope.theta ** (-2 * i / rope.rotary_dim)
            a, b = x[t, :, i], x[t, :, i + half]
            out[t, :, i] = a * math.cos(angle) - b * math.sin(angle)
            out[t, :, i + half] = b * math.cos(angle) + a * math.sin(angle)
    return out


def prepared(x, positions, rope, norm, eps: float) -> torch.Tensor:
    value = x.double()
    if norm is not None:
        value = value / (value.square().mean(-1, keepdim=True) + eps).sqrt() * (1 + norm.double())
        value = value.to(x.dtype).double()  # the one rounding before the rotation
    return rotated(value, positions, rope)


@pytest.mark.parametrize(
    ("width", "q_heads", "k_heads", "rotary", "sections", "theta"),
    [
        (64, 9, 3, 64, None, 1e4),
        (256, 4, 2, 64, (11, 11, 10), 1e7),
        (24, 4, 1, 12, (2, 2, 2), 1e5),
        (40, 2, 2, 40, None, 1e4),
        (16, 1, 1, 2, None, 1e4),
    ],
)
@pytest.mark.parametrize("with_norm", [False, True])
def test_prepared_heads(width, q_heads, k_heads, rotary, sections, theta, with_norm, dtype) -> None:
    cache = Cache(2, 4, k_heads, width, dtype)
    k_before, v_before = cache.k.clone(), cache.v.clone()
    places = torch.tensor([62, 63, 64, 0, 1, 2], dtype=torch.int32)
    positions = torch.randint(0, 100_000, (3, 6), dtype=torch.int32) if sections else places + 1000
    wide = torch.randn(6, (q_heads + 2 * k_heads) * width + 8).to(dtype)
    q, k, v = (
        part.view(6, -1, width)
        for part in wide[:, :-8].split((q_heads * width, k_heads * width, k_heads * width), -1)
    )
    q_norm = torch.randn(width).bfloat16() if with_norm else None
    k_norm = torch.randn(width).bfloat16() if with_norm else None
    rope = Rope(rotary, theta, sections)
    pages = (cache.pages, cache.table)
    out = qk_prepare(q, k, v, positions, rope, q_norm, k_norm, 1e-6, *pages, places)
    criterion(ELEMENTWISE, dtype).check(out, prepared(q, positions, rope, q_norm, 1e-6))
    k_reference = prepared(k, positions, rope, k_norm, 1e-6)
    for t, place in enumerate(places.tolist()):
        page, row = cache.table[t // 3, place // PAGE], place % PAGE
        criterion(ELEMENTWISE, dtype).check(cache.k[page, row], k_reference[t])
        assert torch.equal(cache.v[page, row], v[t])
        if not with_norm:
            assert torch.equal(cache.k[page, row, :, rotary:], k[t, :, rotary:])
        cache.k[page, row], cache.v[page, row] = k_before[page, row], v_before[page, row]
    assert torch.equal(cache.k, k_before)
    assert torch.equal(cache.v, v_before)


def test_angles_of_long_contexts() -> None:
    """Positions of a million tokens turn by the float64 angle, not by a float32 one."""
    cache = Cache(1, 1, 1, 32, torch.float32)
    positions = torch.tensor([1_000_003], dtype=torch.int32)
    q = torch.randn(1, 1, 32)
    rope = Rope(32, 1e4)
    out = qk_prepare(
        q, q.clone(), q.clone(), positions, rope, None, None, 1e-6, cache.pages, cache.table,
        torch.zeros(1, dtype=torch.int32),
    )  # fmt: skip
    assert (out.double() - rotated(q.double(), positions, rope)).abs().max() < 1e-6


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((7, 1e4), "even and positive, got 7"),
        ((8, -1.0), "theta must be positive"),
        ((8, 1e4, (2, 1, 0)), "do not fit 4 pairs"),
        ((8, 1e4, (0, 2, 2)), "do not fit 4 pairs"),
    ],
)
def test_bad_ropes_are_refused(arguments, message) -> None:
    with pytest.raises(OptionError, match=message):
        Rope(*arguments)


def test_shapes_that_do_not_fit_are_refused() -> None:
    cache = Cache(1, 1, 2, 16, torch.float32)
    q, k = torch.randn(3, 4, 16), torch.randn(3, 2, 16)
    places = torch.arange(3, dtype=torch.int32)

    def prepare(q=q, k=k, positions=places, rope=16):
        return qk_prepare(
            q, k, k, positions, Rope(rope, 1e4), None, None, 1e-6, cache.pages, cache.table, places
        )

    with pytest.raises(OptionError, match="heads do not match"):
        prepare(k=k[:2])
    with pytest.raises(OptionError, match="pages"):
        prepare(k=k[:, :1])
    with pytest.raises(OptionError, match="one type"):
        prepare(q=q.bfloat16())
    with pytest.raises(OptionError, match="one type"):
        prepare(q=q.bfloat16(), k=k.bfloat16())
    with pytest.raises(OptionError, match="exceeds the head's 16"):
        prepare(rope=32)
    with pytest.raises(OptionError, match="int32"):
        prepare(positions=places.long())
    with pytest.raises(OptionError, match="do not divide"):
        prepare(positions=places[:2])
    with pytest.raises(OptionError, match="do not fit pages"):
        paged_attention(q[:, :3], cache.pages, cache.table, places, 1.0)
    with pytest.raises(OptionError, match="2 heads of 16 do not fit 2 of 8"):
        paged_attention(q[..., :8], cache.pages, cache.table, places, 1.0)
    with pytest.raises(FormatError, match="multiple of 32"):
        KvPages(KvFormat.INT8, cache.k, cache.v)
    wide = torch.zeros(1, PAGE, 2, 32)
    with pytest.raises(OptionError, match="no 'int8' pages of 2 heads of 32"):
        KvPages(KvFormat.INT8, wide, wide)
    scales = torch.zeros(1, PAGE, 2, 1).half()
    with pytest.raises(OptionError, match="no 'int8' pages of 2 heads of 32"):
        KvPages(KvFormat.INT8, wide.char(), wide[..., :16].char(), scales, scales)
