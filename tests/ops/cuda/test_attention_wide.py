"""Attention of many columns on the GPU against float64 over what the pages mean."""

# pyright: reportCallIssue=false

from __future__ import annotations

import math

import pytest
import torch

from ninfer.errors import OptionError
from ninfer.formats import KvFormat, kv_codec
from ninfer.ops import KvPages
from ninfer.ops.cuda import attend_wide
from ninfer.ops.cuda.attend_wide import (
    Tiling,
    paged_attention_wide,
    split_of,
    tiling,
    wide_attention_bytes,
)
from tests.ops.criteria import ATTENTION
from tests.ops.test_attention import Cache, attention_reference
from tests.ops.test_quantized_attention import CRITERIA

BF16 = torch.bfloat16
every = pytest.mark.parametrize("format", KvFormat)


def on(pages: KvPages, device) -> KvPages:
    k_scales, v_scales = (None if p is None else p.to(device) for p in (pages.k_scales, pages.v_scales))
    return KvPages(pages.format, pages.k.to(device), pages.v.to(device), k_scales, v_scales)


def attend(q, pages: KvPages, table, positions, scale: float, extent: int | None, device) -> torch.Tensor:
    """On the device, from the CPU and back."""
    q, table, positions = q.to(device), table.to(device), positions.to(device)
    return paged_attention_wide(q, on(pages, device), table, positions, scale, extent).cpu()


@every
@pytest.mark.parametrize(
    ("start", "count", "width", "q_heads", "k_heads"),
    [(0, 17, 32, 2, 1), (63, 20, 32, 6, 2), (64, 33, 64, 3, 1), (1, 18, 96, 2, 2)],
)
def test_attention_of_many_columns(format, start, count, width, q_heads, k_heads, device) -> None:
    """Two requests, one further on than the other."""
    cache = Cache(2, 3, k_heads, width, BF16, format)
    starts = (start, start + 40)
    positions = torch.cat([torch.arange(s, s + count) for s in starts]).int()
    q = torch.randn(2 * count, q_heads, width).to(BF16)
    reference = attention_reference(q, cache, positions, width**-0.5)
    extent = None if start == 63 else start + 40 + count
    out = attend(q, cache.pages, cache.table, positions, width**-0.5, extent, device)
    CRITERIA[format].check(out, reference)


@every
@pytest.mark.parametrize("split", [0, 64, 128])
def test_segments_and_splits(format, split: int, device, monkeypatch) -> None:
    """The state of the softmax is carried over, also for columns that end in an earlier segment."""
    monkeypatch.setattr(attend_wide, "SEGMENT", 128)
    monkeypatch.setattr(attend_wide, "split_of", lambda *_: split)
    cache = Cache(1, 4, 1, 32, BF16, format)
    positions = torch.arange(110, 110 + 20, dtype=torch.int32)
    positions[18:] = -1
    q = torch.randn(20, 2, 32).to(BF16)
    out = attend(q, cache.pages, cache.table, positions, 0.2, 138, device)
    CRITERIA[format].check(out[:18], attention_reference(q[:18], cache, positions[:18], 0.2))
    assert not out[18:].any()


@every
def test_masked_columns(format, device) -> None:
    """Their output is zero; what the table says for their request, and what stands in other rows, is not
    looked at."""
    cache = Cache(3, 2, 1, 32, BF16, format)
    count = 20
    positions = torch.arange(70, 70 + count, dtype=torch.int32).repeat(3)
    positions[count : 2 * count] = -1
    positions[2 * count + 15 :] = -1
    q = torch.randn(3 * count, 2, 32).to(BF16)
    table = cache.table.clone()
    table[1] = -(2**30)
    out = attend(q, cache.pages, table, positions, 0.2, None, device)
    assert not out[positions < 0].any()
    seen = positions >= 0
    CRITERIA[format].check(out[seen], attention_reference(q, cache, positions, 0.2)[seen])


@every
def test_rows_beyond_the_frontier_are_not_read(format, device) -> None:
    """Stale bytes of a page may be anything, also NaN."""
    cache = Cache(1, 3, 1, 32, BF16, format)
    positions = torch.arange(66, 66 + 20, dtype=torch.int32)
    q = torch.randn(20, 2, 32).bfloat16()
    before = attend(q, cache.pages, cache.table, positions, 0.2, 86, device)
    for plane in (cache.pages.k, cache.pages.v, cache.pages.k_scales, cache.pages.v_scales):
        if plane is not None:
            plane.view(torch.uint8)[cache.table[0, 1], 86 - 64 :] = 0xFF
            plane.view(torch.uint8)[cache.table[0, 2]] = 0xFF
    assert torch.equal(attend(q, cache.pages, cache.table, positions, 0.2, 86, device), before)
    assert torch.equal(attend(q, cache.pages, cache.table, positions, 0.2, None, device), before)


def test_what_does_not_fit_is_refused(device) -> None:
    cache = Cache(1, 1, 2, 32, BF16)
    q, places = torch.randn(3, 4, 32).bfloat16(), torch.arange(3, dtype=torch.int32)
    with pytest.raises(OptionError, match=r"bf16, got torch\.float32"):
        attend(q.float(), cache.pages, cache.table, places, 1.0, None, device)
    with pytest.raises(OptionError, match="do not fit pages"):
        attend(q[:, :3], cache.pages, cache.table, places, 1.0, None, device)


def test_scratch() -> None:
    assert wide_attention_bytes(4096, 65, 24, 4, 256) == 4 * 128 * 4 * 256 + 64
    one = 4 * 4096 * 24 * 258
    assert wide_attention_bytes(4096, 40000, 24, 4, 256) == 4 * 32768 * 4 * 256 + one + 64
    assert split_of(4096, 6, 4, 128) == 0
    assert split_of(17, 6, 4, 128) == 1024


GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def reference_on_gpu(q, k, v, start: int, scale: float) -> torch.Tensor:
    """float64, of neighbouring columns from `start` on; `k`, `v` `[keys, heads, D]`."""
    out = []
    group = q.shape[1] // k.shape[1]
    for head in range(q.shape[1]):
        keys, values = k[:, head // group].double(), v[:, head // group].double()
        scores = q[:, head].double() @ keys.T * scale
        places = torch.arange(start, start + len(q), device=q.device)
        scores.masked_fill_(torch.arange(len(k), device=q.device)[None] > places[:, None], -torch.inf)
        out.append(torch.softmax(scores, 1) @ values)
    return torch.stack(out, 1)


STARTS, COUNTS = (0, 1, 63, 64, 5000, 60000), (17, 63, 64, 65, 127, 128, 129, 1000, 4096)
SOME = [(60000, 17), (0, 63), (64, 64), (63, 65), (1, 127), (5000, 129), (60000, 1000), (5000, 4096)]
CASES = [(KvFormat.BF16, start, count) for start in STARTS for count in COUNTS] + [
    (format, *case) for format in KvFormat if format is not KvFormat.BF16 for case in SOME
]


@pytest.mark.gpu
@GPU
@pytest.mark.parametrize(("format", "start", "count"), CASES)
def test_attention_of_models(format, start, count, device) -> None:
    """24 heads over 4 of 256; of longer calls the first and last columns and some between."""
    scale, end = 1 / 16, start + count
    torch.manual_seed(start + count)
    pages, table, k, v = gpu_cache(format, 4, 256, end, device)
    q = torch.randn(count, 24, 256, device=device).to(BF16)
    positions = torch.arange(start, end, dtype=torch.int32, device=device)
    out = paged_attention_wide(q, pages, table, positions, scale, end)
    for first in sorted({0, max(0, count // 2 - 16), max(0, count - 32)}):
        part = slice(first, min(count, first + 32))
        reference = reference_on_gpu(q[part], k, v, start + first, scale)
        CRITERIA[format].check(out[part], reference)
        if format is KvFormat.BF16:
            ATTENTION.check(out[part], reference)


def gpu_cache(format: KvFormat, heads: int, width: int, keys: int, device):
    """Pages in random order with random codes, their table, and float32 keys and values as they mean."""
    held = -(-keys // 64)
    table = torch.randperm(held, device=device).int()[None]
    rows = torch.randn(2, held, 64, heads, width, device=device).to(BF16)
    rows[1] /= 4
    planes, meant = [], []
    for x, side in zip(rows, (format.keys, format.values), strict=True):
        codes, scales = kv_codec.encode(x, side)
        planes.append((codes, scales))
        found = kv_codec.decode(codes, scales, side)
        if side.rotation(width):
            found = (found.double() @ signs(width).to(device)).float()
        meant.append(found[table[0].long()].flatten(0, 1)[:keys])
    (k, k_scales), (v, v_scales) = planes
    return KvPages(format, k, v, k_scales, v_scales), table, *meant


def signs(width: int) -> torch.Tensor:
    """The orthonormal Hadamard matrix by its definition, float64."""
    rows = [[(-1.0) ** (i & j).bit_count() for j in range(width)] for i in range(width)]
    return torch.tensor(rows, dtype=torch.float64) / math.sqrt(width)


@every
def test_images(format, device) -> None:
    """Chunk c of 16 bytes of key n stands at c ^ (n & 7), 64 dimensions of all keys of a head together."""
    width, heads = 128, 2
    pages = on(Cache(1, 2, heads, width, BF16, format).pages, device)
    table = torch.tensor([[2, 0]], dtype=torch.int32, device=device)
    last = torch.tensor([70], dtype=torch.int32, device=device)
    plain, images = (
        [torch.empty(2, 64, heads, width, dtype=BF16, device=device) for _ in "kv"] for _ in "01"
    )
    attend_wide._decode(pages, table, last, 0, 128, *plain, False)
    attend_wide._decode(pages, table, last, 0, 128, *images, True)
    order = torch.arange(8)[None] ^ torch.arange(64)[:, None] & 7
    for a, b in zip(plain, images, strict=True):
        parts = a.cpu().permute(0, 2, 1, 3).reshape(2, heads, 64, width // 64, 8, 8).transpose(2, 3)
        swizzled = parts.gather(4, order[:, :, None].expand(parts.shape))
        assert torch.equal(swizzled, b.cpu().view(swizzled.shape))
        assert not a[1, 7:].any()


def test_the_rule_for_devices() -> None:
    """Shared memory of a program: up to 192 KB on Hopper, 104 on the A100, 99 elsewhere."""
    assert tiling(None, 256, KvFormat.BF16, 17) == Tiling(32, 4, 1, False)
    assert tiling((9, 0), 256, KvFormat.INT8, 17).hopper == attend_wide.HOPPER_KERNEL
    assert not tiling((9, 0), 256, KvFormat.BF16, 17).hopper
    assert tiling((9, 0), 128, KvFormat.BF16, 4096) == Tiling(128, 8, 2, True)
    assert not tiling((9, 0), 96, KvFormat.BF16, 4096).bulk
    for capability in ((8, 0), (8, 6), (8, 9), (12, 0)):
        cut = tiling(capability, 256, KvFormat.BF16, 4096)
        assert cut.rows == 64
        assert cut.stages == (2 if capability == (8, 0) else 1)
