"""Engines that end with their test."""

from collections.abc import Callable, Iterator

import pytest

from ninfer.engine import Core
from tests.engine.harness import Gate, make_core


@pytest.fixture
def build() -> Iterator[Callable[..., Core]]:
    """`make_core`, with everything stopped at the end (gates are opened first)."""
    cores: list[Core] = []
    gates: list[Gate] = []

    def make(**options: object) -> Core:
        gate = options.get("gate")
        if isinstance(gate, Gate):
            gates.append(gate)
        cores.append(make_core(**options))  # type: ignore[arg-type]
        return cores[-1]

    yield make
    for gate in gates:
        gate.open()
    for core in cores:
        core.stop()
