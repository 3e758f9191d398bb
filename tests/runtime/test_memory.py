"""Pages are allocated as the plan counts them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ninfer.errors import FormatError
from ninfer.formats import KvFormat
from ninfer.models import KvLayout
from ninfer.runtime import memory
from ninfer.runtime.memory import allocate_pages, available_bytes, group_bytes

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


STAT = "anon 100\nfile 350\n{0}inactive_file 200\n{0}active_file 100\nshmem 50\n"


@pytest.mark.parametrize(
    ("files", "free"),
    [
        ({"memory.max": "1000\n", "memory.current": "600\n", "memory.stat": STAT.format("")}, 700),
        ({"memory.max": "1000\n", "memory.current": "1900\n", "memory.stat": STAT.format("")}, 0),
        ({"memory.max": "max\n", "memory.current": "600\n", "memory.stat": STAT.format("")}, None),
        (
            {
                "memory/memory.limit_in_bytes": "1000\n",
                "memory/memory.usage_in_bytes": "600\n",
                "memory/memory.stat": STAT.format("total_"),
            },
            700,
        ),
        ({}, None),
        ({"memory.max": "1000\n"}, None),
    ],
)
def test_a_container_s_limit_is_known(tmp_path: Path, files: dict[str, str], free: int | None) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert group_bytes(tmp_path) == free


def test_the_smaller_of_machine_and_container_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    for machine, group, least in ((5, 3, 3), (3, 5, 3), (3, None, 3), (None, 5, 5), (None, None, None)):
        monkeypatch.setattr(memory, "machine_bytes", lambda machine=machine: machine)
        monkeypatch.setattr(memory, "group_bytes", lambda group=group: group)
        assert available_bytes(CPU) == least
