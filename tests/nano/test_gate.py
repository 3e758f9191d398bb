"""The teacher-forced gate and prefix replay on ninfer-nano."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import ninfer

from .drafting import PROBES, Engines, check_gate, check_pairs, check_replay, engines

TEXT = (Path(ninfer.__file__).parent / "ops" / "sampling.py").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def all_() -> Iterator[Engines]:
    with engines("cpu") as found:
        yield found


@pytest.mark.parametrize("probe", PROBES, ids=lambda probe: probe[0])
def test_the_gate(all_: Engines, probe: tuple[str, int]) -> None:
    assert check_gate(all_, *probe) == []


def test_two_at_a_time(all_: Engines) -> None:
    check_pairs(all_)


@pytest.mark.parametrize("size", [1200, pytest.param(9000, marks=pytest.mark.soak)])
def test_prefix_replay(all_: Engines, size: int, record_property) -> None:
    near = check_replay(all_, TEXT[:size])
    record_property("answers that part at a near-tie", near)
    print(f"{near} answers part from cold ones at near-ties")
    assert near <= 2
