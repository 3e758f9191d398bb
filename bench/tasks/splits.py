"""Which instances are held out: a fixed part of all keys, chosen by their hash.

There are two such parts, a tenth and an eighth. A model was trained on the rest of both, so neither changes.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Sequence

from bench.tasks.task import Split

_TENTH, _EIGHTH = 10, 8

# A tenth: structured, reasoning and code, whose instances may have several keys.


def held_out(key: str) -> bool:
    """Whether `key` belongs to the tenth that is held out."""
    return hashlib.blake2b(key.encode(), digest_size=4).digest()[0] * _TENTH < 256


def keys_in_split(keys: Sequence[str], split: Split) -> bool:
    """Whether an instance with `keys` may be drawn: for training none of them, else the first is held out."""
    return held_out(keys[0]) if split == "heldout" else not any(map(held_out, keys))


# An eighth: retrieval, story, translation and tools, whose instances have one key.


def in_split(key: str, split: Split) -> bool:
    """Whether `key` belongs to `split`: every key belongs to exactly one."""
    return (zlib.crc32(key.encode()) % _EIGHTH == 0) == (split == "heldout")


def part(values: Sequence[str], split: Split) -> list[str]:
    """Those of `values` that belong to `split`: an eighth, and at least one, is held out."""
    ordered = sorted(values, key=lambda value: zlib.crc32(value.encode()))
    held = max(1, len(ordered) // _EIGHTH)
    return ordered[:held] if split == "heldout" else ordered[held:]
