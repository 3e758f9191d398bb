"""Allocating what the plan counted."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

from ninfer.formats import KvCode
from ninfer.formats.kv_codec import plane_types
from ninfer.models import Cache, KvLayout, Records, StateLayout
from ninfer.ops import PAGE, DeltaRecords, KvPages

_ALIGNMENT = 256


def allocate(kv: KvLayout, state: StateLayout, *, pages: int, slots: int, device: torch.device) -> Cache:
    """A zeroed cache of `pages` KV pages and `slots` state slots."""

    def each(layers: int, shape: tuple[int, ...], dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
        return tuple(zeros(shape, dtype, device) for _ in range(layers))

    return Cache(
        kv=tuple(allocate_pages(kv, pages, device) for _ in range(kv.layers)),
        conv=each(state.layers, (slots, state.history, state.channels), state.dtype),
        recurrent=each(
            state.layers, (slots, state.value_heads, state.value_dim, state.key_dim), torch.float32
        ),
        hidden=zeros((slots, state.hidden), state.dtype, device) if state.hidden else None,
    )


def allocate_pages(kv: KvLayout, pages: int, device: torch.device) -> KvPages:
    """Zeroed pages of one layer; a width that the format can't store is refused."""
    kv.format.check(kv.head_dim)

    def side(code: KvCode) -> tuple[torch.Tensor, torch.Tensor | None]:
        codes, scales = plane_types(code, kv.dtype)
        rows = (pages, PAGE, kv.heads)
        return (
            zeros((*rows, code.codes(kv.head_dim)), codes, device),
            None if scales is None else zeros((*rows, code.scales(kv.head_dim)), scales, device),
        )

    (k, k_scales), (v, v_scales) = side(kv.format.keys.code), side(kv.format.values.code)
    return KvPages(kv.format, k, v, k_scales, v_scales)


def allocate_records(state: StateLayout, columns: int, device: torch.device) -> Records:
    """Zeroed records of `columns` columns, those of all rows together."""

    def delta() -> DeltaRecords:
        gate = (columns, state.value_heads)
        return DeltaRecords(
            k=zeros((columns, state.key_heads, state.key_dim), state.dtype, device),
            v=zeros((columns, state.value_heads, state.value_dim), state.dtype, device),
            g=zeros(gate, torch.float32, device),
            beta=zeros(gate, torch.float32, device),
        )

    return Records(
        conv=tuple(zeros((columns, state.channels), state.dtype, device) for _ in range(state.layers)),
        delta=tuple(delta() for _ in range(state.layers)),
    )


def tensors_of(cache: Cache, records: Records | None = None) -> Iterator[torch.Tensor]:
    """All that `allocate` and `allocate_records` made."""
    for pages in cache.kv:
        yield from (
            plane for plane in (pages.k, pages.v, pages.k_scales, pages.v_scales) if plane is not None
        )
    yield from (*cache.conv, *cache.recurrent)
    if cache.hidden is not None:
        yield cache.hidden
    if records is not None:
        yield from records.conv
        for layer in records.delta:
            yield from (layer.k, layer.v, layer.g, layer.beta)


def zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros aligned to 256 bytes; on the CPU mapped at first touch, so a large context starts fast."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    size = math.prod(shape) * dtype.itemsize
    raw = np.zeros(size + _ALIGNMENT, np.uint8)
    begin = -raw.ctypes.data % _ALIGNMENT
    return torch.from_numpy(raw[begin : begin + size]).view(dtype).view(shape)


def available_bytes(device: torch.device) -> int | None:
    """Memory that could be taken now, or None where the system doesn't tell."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    known = (machine_bytes(), group_bytes())
    return min((size for size in known if size is not None), default=None)


def machine_bytes() -> int | None:
    """What the whole machine has left."""
    try:
        with open("/proc/meminfo", encoding="ascii") as lines:
            for line in lines:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    if "SC_PHYS_PAGES" in os.sysconf_names:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return None


def group_bytes(root: Path = Path("/sys/fs/cgroup")) -> int | None:
    """What the limit of our container leaves (cgroups v2 or v1), or None without one. Like the machine's
    figure it counts cached files as free."""
    for folder, limit, used, prefix in (
        (root, "memory.max", "memory.current", ""),
        (root / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
    ):
        try:
            free = int((folder / limit).read_text()) - int((folder / used).read_text())
            counts = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
            files = sum(int(counts[f"{prefix}{kind}_file"]) for kind in ("active", "inactive"))
        except (OSError, ValueError, KeyError):
            continue  # no such version, no limit ("max"), or nothing that we could read
        return max(0, free + files)
    return None
