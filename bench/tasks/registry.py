"""All task generators by name."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from bench.tasks import code, reasoning, retrieval, story, structured, tools, translation
from bench.tasks.task import Generator

_ROOMS = (structured, reasoning, code, retrieval, story, translation, tools)


def generators() -> Mapping[str, Generator]:
    """Every generator by the name that its tasks carry."""
    return _ALL


def _merged() -> Mapping[str, Generator]:
    merged: dict[str, Generator] = {}
    for room in _ROOMS:
        if twice := merged.keys() & room.GENERATORS.keys():
            raise ValueError(f"two generators are called {sorted(twice)}: rename one in {room.__name__}")
        merged.update(room.GENERATORS)
    return MappingProxyType(merged)


_ALL = _merged()
