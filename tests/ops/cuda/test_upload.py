"""Weights through pinned buffers."""

from __future__ import annotations

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"),
]


@pytest.mark.parametrize("threads", [1, 5])
def test_bytes_arrive_whatever_their_sizes(threads: int) -> None:
    from ninfer.ops.cuda.upload import Uploader

    told: list[tuple[str, int, int]] = []
    generator = torch.Generator().manual_seed(threads)
    sizes = [1, 255, 256, 257, 0, 4096, 5 << 20, (1 << 20) - 1, 3, (1 << 20) + 1, 64 << 10] * 3
    sources = [torch.randint(256, (size,), dtype=torch.uint8, generator=generator) for size in sizes]
    sources += [torch.rand(3, 5), torch.tensor(2.5), torch.arange(7, dtype=torch.int32)]
    total = sum(source.nbytes for source in sources)
    device = torch.device("cuda", 0)
    with Uploader(
        device,
        total=total,
        progress=lambda *now: told.append(now),
        slots=3,
        slot_bytes=1 << 20,
        threads=threads,
        piece=100_000,
    ) as upload:
        # Results are used at once, on the same stream.
        made = [upload(source.clone()).clone() for source in sources]
        assert upload.bytes == total
    for source, copy in zip(sources, made, strict=True):
        assert (copy.shape, copy.dtype) == (source.shape, source.dtype)
        assert torch.equal(copy.cpu(), source)
    assert told[-1] == ("loading weights", total, total)
    assert [done for _, done, _ in told] == sorted(done for _, done, _ in told)
