"""Pages of random keys and values on a device, and attention over them by definition, in float64."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import torch

from ninfer.formats import KvFormat, KvSide, kv_codec
from ninfer.ops import PAGE, KvPages
from tests.ops.criteria import ATTENTION, Criterion

CRITERIA = {
    KvFormat.BF16: ATTENTION,
    KvFormat.INT8: Criterion(2e-2, 1.1e-3, 4e-2),
    KvFormat.FP8: Criterion(8e-2, 4e-3, 0.11),
    KvFormat.NVFP4: Criterion(1.5e-2, 5e-3, 1.1e-2),
    KvFormat.K8V4: Criterion(8e-2, 5e-3, 0.11),
}


@dataclass(eq=False)
class Paged:
    """Pages in a random order, all rows written; `table` int32 `[B, P]`."""

    pages: KvPages
    table: torch.Tensor

    def planes(self) -> list[torch.Tensor]:
        """As bytes `[pages, 64, ...]`."""
        found = (self.pages.k, self.pages.k_scales, self.pages.v, self.pages.v_scales)
        return [p.view(torch.uint8) for p in found if p is not None]


def paged(
    format: KvFormat, requests: int, count: int, heads: int, width: int, device, seed: int = 0
) -> Paged:
    """`count` pages a request and two spare ones. Values of about 1/4, all below one: the criterion's bounds
    are for such outputs, where they exceed the one rounding."""
    draw = torch.Generator(device).manual_seed(seed)
    shape = (requests * count + 2, PAGE, heads, width)
    k = torch.randn(shape, generator=draw, device=device, dtype=torch.bfloat16)
    v = torch.randn(shape, generator=draw, device=device, dtype=torch.bfloat16).clamp(-3.5, 3.5) / 4
    order = torch.randperm(shape[0], generator=draw, device=device)[: requests * count]
    table = order.int().view(requests, count)
    if format is KvFormat.BF16:
        return Paged(KvPages(format, k, v), table)
    planes: list[torch.Tensor | None] = []
    for x, side in ((k, format.keys), (v, format.values)):
        coded = [kv_codec.encode(part, side) for part in x.split(256)]
        planes += [None if c[0] is None else torch.cat(c) for c in zip(*coded, strict=True)]  # type: ignore
    k_codes, k_scales, v_codes, v_scales = planes
    return Paged(KvPages(format, k_codes, v_codes, k_scales, v_scales), table)  # type: ignore[arg-type]


@functools.cache
def _signs(width: int, device: torch.device) -> torch.Tensor:
    signs = [[(-1.0) ** (i & j).bit_count() for j in range(width)] for i in range(width)]
    return torch.tensor(signs, dtype=torch.float64, device=device) / math.sqrt(width)


def _meaning(codes, scales, side: KvSide, width: int) -> torch.Tensor:
    x = kv_codec.decode(codes, scales, side).double()
    if side.rotation(width):
        x = x @ _signs(width, x.device)
    return x


def reference(q, cache: Paged, positions: torch.Tensor, scale: float) -> torch.Tensor:
    """float64 `[T, Hq, D]`; zero where masked."""
    pages, width = cache.pages, q.shape[2]
    columns, group = len(q) // len(cache.table), q.shape[1] // pages.heads
    out = torch.zeros(q.shape, dtype=torch.float64, device=q.device)
    for b, pos in enumerate(positions.view(-1, columns)):
        last = int(pos.max()) + 1
        if last == 0:
            continue
        index = cache.table[b, : -(-last // PAGE)].long()
        hidden = torch.arange(last, device=q.device)[None] > pos[:, None]
        for head in range(pages.heads):
            k, v = (
                _meaning(
                    codes[index, :, head].flatten(0, 1)[:last],
                    None if scales is None else scales[index, :, head].flatten(0, 1)[:last],
                    side,
                    width,
                )
                for codes, scales, side in (
                    (pages.k, pages.k_scales, pages.format.keys),
                    (pages.v, pages.v_scales, pages.format.values),
                )
            )
            some = slice(head * group, (head + 1) * group)
            x = q[b * columns : (b + 1) * columns, some].double()
            scores = (x @ k.T * scale).masked_fill(hidden[:, None], -math.inf)
            result = torch.softmax(scores, -1) @ v
            result[pos < 0] = 0
            out[b * columns : (b + 1) * columns, some] = result
    return out


def positions_of(ends: list[int], columns: int, device) -> torch.Tensor:
    """int32: `columns` ascending positions before each end."""
    return torch.cat([torch.arange(e - columns, e, device=device) for e in ends]).int()
