"""Pages are allocated as the plan counts them."""

from __future__ import annotations

import pytest
import torch

from ninfer.errors import FormatError
from ninfer.formats import KvFormat
from ninfer.models import KvLayout
from ninfer.runtime.memory import allocate_pages

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("format", "large", "sparse"),
    [
        ("bf16", 65_536, 20_480),
        ("int8", 33_792, 10_560),
        ("fp8", 33_024, 10_320),
        ("k8v4", 25_728, 8_040),
        ("nvfp4", 18_432, 5_760),
    ],
)
def test_bytes_of_a_token(format: str, large: int, sparse: int) -> None:
    """Of the 27B and 35B-A3B geometries."""
    for layers, heads, bytes_ in ((16, 4, large), (10, 2, sparse)):
        layout = KvLayout(layers, heads, 256, torch.bfloat16, KvFormat(format))
        assert layout.page_bytes == 64 * bytes_


@pytest.mark.parametrize("format", KvFormat)
@pytest.mark.parametrize("width", [32, 96, 256])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_planes_have_the_counted_size(format: KvFormat, width: int, dtype: torch.dtype) -> None:
    layout = KvLayout(1, 3, width, dtype, format)
    pages = allocate_pages(layout, 5, CPU)
    planes = [p for p in (pages.k, pages.v, pages.k_scales, pages.v_scales) if p is not None]
    assert sum(p.numel() * p.itemsize for p in planes) == 5 * layout.page_bytes
    assert (pages.heads, pages.width) == (3, width)
    for plane in planes:
        assert plane.data_ptr() % 256 == 0
        assert not plane.view(torch.uint8).any()


def test_widths_that_cannot_be_quantized_are_refused() -> None:
    allocate_pages(KvLayout(1, 2, 40, torch.bfloat16), 1, CPU)
    with pytest.raises(FormatError, match="'nvfp4' needs a head dimension"):
        allocate_pages(KvLayout(1, 2, 40, torch.bfloat16, KvFormat.NVFP4), 1, CPU)
