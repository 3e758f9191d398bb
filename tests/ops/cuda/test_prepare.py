"""Preparation of heads on the GPU: rotation against float64, appended codes bit by bit."""

# pyright: reportCallIssue=false

from __future__ import annotations

import math

import pytest
import torch

from ninfer.errors import OptionError
from ninfer.formats import KvFormat, kv_codec
from ninfer.models import KvLayout
from ninfer.ops import PAGE, KvPages, Rope
from ninfer.ops.cuda.prepare import qk_prepare
from ninfer.runtime.memory import allocate_pages
from tests.ops.criteria import ELEMENTWISE
from tests.ops.test_attention import prepared

BF16 = torch.bfloat16
CUDA = torch.cuda.is_available()
GEOMETRIES = [(32, 1, 1), (96, 1, 1)] + [(64, 9, 3), (96, 3, 3), (128, 5, 1), (256, 6, 1)] * CUDA
"""(head width, query heads, key heads); the interpreter is slow"""
ROPES = [(24, 2, 1, 12, (2, 2, 2), 1e5), (16, 1, 1, 2, None, 1e4)] + [
    (64, 9, 3, 64, None, 1e4),
    (256, 4, 2, 64, (11, 11, 10), 1e7),
    (40, 2, 2, 40, None, 1e4),
] * CUDA
every = pytest.mark.parametrize("format", KvFormat)
quantized = pytest.mark.parametrize("format", [f for f in KvFormat if f is not KvFormat.BF16])


def planes(pages: KvPages) -> list[torch.Tensor]:
    """As bytes, on the CPU."""
    found = [p for p in (pages.k, pages.k_scales, pages.v, pages.v_scales) if p is not None]
    return [p.view(torch.uint8).cpu() for p in found]


def expected_planes(plain: KvPages, format: KvFormat) -> list[torch.Tensor]:
    """What the CPU codes of bf16 pages."""
    return [
        part.view(torch.uint8)
        for x, side in ((plain.k.cpu(), format.keys), (plain.v.cpu(), format.values))
        for part in kv_codec.encode(x, side)
        if part is not None
    ]


def run(arguments, pages: KvPages, table, places, device) -> torch.Tensor:
    """`qk_prepare` of arguments on any device."""
    moved = [a.to(device) if isinstance(a, torch.Tensor) else a for a in arguments]
    return qk_prepare(*moved, pages, table.to(device), places.to(device)).cpu()


@pytest.mark.parametrize(("width", "q_heads", "k_heads", "rotary", "sections", "theta"), ROPES)
@pytest.mark.parametrize("with_norm", [False, True])
def test_prepared_heads(width, q_heads, k_heads, rotary, sections, theta, with_norm, device) -> None:
    pages = allocate_pages(KvLayout(1, k_heads, width, BF16, KvFormat.BF16), 8, device)
    pages.k.normal_()
    pages.v.normal_()
    k_before, v_before = pages.k.clone(), pages.v.clone()
    table = torch.randperm(8).int().view(2, 4)
    places = torch.tensor([62, 63, 64, 0, 1, 2], dtype=torch.int32)
    positions = torch.randint(0, 262_144, (3, 6), dtype=torch.int32) if sections else places + 250_000
    wide = torch.randn(6, (q_heads + 2 * k_heads) * width + 8).to(BF16).to(device)
    q, k, v = (
        part.view(6, -1, width)
        for part in wide[:, :-8].split((q_heads * width, k_heads * width, k_heads * width), -1)
    )
    q_norm = torch.randn(width).bfloat16() if with_norm else None
    k_norm = torch.randn(width) if with_norm else None
    rope = Rope(rotary, theta, sections)
    out = run((q, k, v, positions, rope, q_norm, k_norm, 1e-6), pages, table, places, device)
    ELEMENTWISE.check(out, prepared(q.cpu(), positions, rope, q_norm, 1e-6))
    k_reference = prepared(k.cpu(), positions, rope, k_norm, 1e-6)
    for t, place in enumerate(places.tolist()):
        page, row = table[t // 3, place // PAGE], place % PAGE
        ELEMENTWISE.check(pages.k[page, row].cpu(), k_reference[t])
        assert torch.equal(pages.v[page, row], v[t])
        if not with_norm:
            assert torch.equal(pages.k[page, row, :, rotary:], k[t, :, rotary:])
        pages.k[page, row], pages.v[page, row] = k_before[page, row], v_before[page, row]
    assert torch.equal(pages.k, k_before)
    assert torch.equal(pages.v, v_before)


def test_angles_of_long_contexts(device) -> None:
    """One turned pair at a time, near the float64 angle: a float32 angle would be wrong by up to 0.03."""
    width, rope = 128, Rope(128, 1e7)
    positions = torch.tensor([0, 1, 77_777, 262_143, 1_000_003], dtype=torch.int32)
    pairs = range(0, 64, 1 if CUDA else 21)
    q = torch.zeros(len(pairs), width, dtype=BF16)
    q[range(len(pairs)), pairs] = 1
    q = q.expand(5, -1, -1)
    pages = allocate_pages(KvLayout(1, 1, width, BF16, KvFormat.BF16), 1, device)
    masked, table = torch.full((5,), -1, dtype=torch.int32), torch.zeros(1, 1, dtype=torch.int32)
    out = run((q, q[:, :1], q[:, :1], positions, rope, None, None, 1e-6), pages, table, masked, device)
    for t, position in enumerate(positions.tolist()):
        for i, pair in enumerate(pairs):
            angle = position * 1e7 ** (-2 * pair / width)
            assert abs(float(out[t, i, pair]) - math.cos(angle)) <= 2**-9
            assert abs(float(out[t, i, pair + 64]) - math.sin(angle)) <= 2**-9
    assert not pages.k.any()


@quantized
@pytest.mark.parametrize(
    ("width", "q_heads", "k_heads", "with_norm"),
    [(*shape, index % 2 == 1) for index, shape in enumerate(GEOMETRIES)],
)
def test_appended_codes(format, width, q_heads, k_heads, with_norm, device) -> None:
    """The codes of what a bf16 cache would have got; nothing where a column is masked, nothing elsewhere."""
    plain, pages = (
        allocate_pages(KvLayout(1, k_heads, width, BF16, f), 4, device) for f in (KvFormat.BF16, format)
    )
    for found in (pages.k, pages.k_scales, pages.v, pages.v_scales):
        if found is not None:
            found.view(torch.uint8).fill_(0xA5)
    before = planes(pages)
    places = torch.tensor([63, 64, -1, 0, -1, 1, 2, 130], dtype=torch.int32)
    table = torch.tensor([[2, 0, 1], [3, 3, 1]], dtype=torch.int32)
    size = 4.0 ** torch.arange(-4, 4)[:, None, None]
    q, k = torch.randn(8, q_heads, width).to(BF16), (torch.randn(8, k_heads, width) * size).to(BF16)
    v = (torch.randn(8, k_heads, width) * size).to(BF16)
    v[0, 0], v[1, 0, 5:], k[3] = 0, 0, 0
    norm = torch.randn(width) if with_norm else None
    arguments = (q, k, v, places.clamp(min=0), Rope(32, 1e4), norm, norm, 1e-6)
    out = run(arguments, plain, table, places, device)
    assert torch.equal(run(arguments, pages, table, places, device), out)
    written = torch.zeros(4, 64, dtype=torch.bool)
    for t, place in enumerate(places.tolist()):
        if place >= 0:
            written[table[t // 4, place // 64], place % 64] = True
    assert written.sum() == 6
    for now, then, codes in zip(planes(pages), before, expected_planes(plain, format), strict=True):
        assert torch.equal(now[written], codes[written])
        assert torch.equal(now[~written], then[~written])


def check_codes(format: KvFormat, x: torch.Tensor, device) -> None:
    """Append `x [T, 1, D]` as keys and values and compare all planes with the CPU's."""
    count, width = len(x), x.shape[-1]
    held = -(-count // 64)
    plain, pages = (
        allocate_pages(KvLayout(1, 1, width, BF16, f), held, device) for f in (KvFormat.BF16, format)
    )
    places, table = torch.arange(count, dtype=torch.int32), torch.arange(held, dtype=torch.int32)[None]
    for target in (plain, pages):
        run((x, x, x, 0 * places, Rope(2, 1e4), None, None, 1e-6), target, table, places, device)
    for now, codes in zip(planes(pages), expected_planes(plain, format), strict=True):
        assert torch.equal(now.flatten(0, 1)[:count], codes.flatten(0, 1)[:count])


@quantized
@pytest.mark.parametrize("width", [64, 96, 256] if CUDA else [64])
def test_appended_codes_of_anything(format, width: int, device) -> None:
    """Zeros, subnormals, huge numbers, infinities and NaN."""
    exponents = torch.arange(-42, 18, 1 if CUDA else 12)
    wild = torch.randn(len(exponents), 1, width) * 10.0 ** exponents[:, None, None]
    x = torch.randn(9, 1, width)
    x[0], x[1, 0, 3:], x[2], x[3, 0, 2] = 0, 0, -0.0, float("nan")
    x[4, 0, 60], x[5, 0, 1], x[6], x[7, 0, ::3] = float("inf"), -float("inf"), 3.3e38, 0
    check_codes(format, torch.cat((wild, x)).to(BF16), device)


@pytest.mark.gpu
@pytest.mark.skipif(not CUDA, reason="needs a CUDA device")
@quantized
@pytest.mark.parametrize("width", [64, 96, 128, 256])
@pytest.mark.parametrize("seed", range(3))
def test_codes_of_every_number(format, width: int, seed: int, device) -> None:
    """All bf16 bit patterns in random company, and vectors of like magnitudes full of ties."""
    torch.manual_seed(seed)
    words = torch.randperm(1 << 16)[: (1 << 16) // width * width].to(torch.int32).to(torch.int16)
    check_codes(format, words.view(BF16).view(-1, 1, width), device)
    steps = torch.randint(-16, 17, (512, 1, width)) * 2.0 ** torch.randint(-60, 60, (512, 1, 1))
    check_codes(format, steps.to(BF16), device)
    wild = torch.randint(-(1 << 15), 1 << 15, (512, 1, width)).to(torch.int16).view(BF16)
    calm = wild.isfinite() & (wild.float().abs() < 1e30)
    check_codes(format, torch.where(calm, wild, 0), device)
    check_codes(format, torch.randn(2048, 1, width).to(BF16), device)


def test_float32_is_refused(device) -> None:
    pages = allocate_pages(KvLayout(1, 1, 32, torch.float32, KvFormat.BF16), 1, device)
    q, places = torch.randn(1, 1, 32), torch.zeros(1, dtype=torch.int32)
    with pytest.raises(OptionError, match=r"bf16, got torch\.float32"):
        run((q, q, q, places, Rope(2, 1e4), None, None, 1e-6), pages, places[None], places, device)
