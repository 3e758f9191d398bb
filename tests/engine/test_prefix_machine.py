"""The prefix cache under random use by lanes, with pools so small that everything runs out."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from ninfer.engine.prefix import Kind
from tests.engine.lanes import Lane, World

_LENGTHS = st.sampled_from([1, 2, 30, 63, 64, 65, 100, 128, 150])
_RUNS = st.lists(st.tuples(st.integers(0, 2), _LENGTHS), min_size=1, max_size=3)
_PICK = st.integers(0, 1_000_000)
_KINDS = st.sampled_from(list(Kind))


class CacheMachine(RuleBasedStateMachine):
    world: World

    @initialize(
        pages=st.integers(4, 14), lanes=st.integers(1, 3), snapshots=st.integers(0, 4), recurrent=st.booleans()
    )
    def begin(self, pages: int, lanes: int, snapshots: int, recurrent: bool) -> None:
        self.world = World(pages=pages, lanes=lanes, snapshots=snapshots, recurrent=recurrent)
        self.known: list[list[int]] = [[]]

    def _lane(self, pick: int) -> Lane:
        return self.world.lanes[pick % len(self.world.lanes)]

    def _prompt(self, pick: int, back: int, runs: list[tuple[int, int]]) -> list[int]:
        """A known sequence, some of its end cut off, and something new."""
        old = self.known[pick % len(self.known)]
        prompt = old[: max(0, len(old) - back)]
        for token, length in runs:
            prompt = prompt + [token] * length
        return prompt[: 64 * self.world.pages.capacity]

    @precondition(lambda self: len(self.world.lanes) < self.world.max_lanes)
    @rule(
        pick=_PICK,
        back=st.sampled_from([0, 0, 0, 1, 2, 30, 64, 100]),
        runs=_RUNS,
        extra=st.integers(0, 70),
        choice=st.sampled_from([0, 0, 0, 1, 2]),
        first=st.sampled_from([0, 64, 500, 500]),
    )
    def admit(
        self, pick: int, back: int, runs: list[tuple[int, int]], extra: int, choice: int, first: int
    ) -> None:
        lane = self.world.admit(self._prompt(pick, back, runs), extra, choice)
        if lane is not None and first:
            self.world.unit(lane, first, 0)

    @precondition(lambda self: self.world.lanes)
    @rule(pick=_PICK, count=st.sampled_from([1, 20, 63, 64, 65, 200]), token=st.integers(0, 2))
    def unit(self, pick: int, count: int, token: int) -> None:
        self.world.unit(self._lane(pick), count, token)

    @precondition(lambda self: self.world.lanes)
    @rule(pick=_PICK, kind=_KINDS, with_slot=st.sampled_from([True, True, False]))
    def tap(self, pick: int, kind: Kind, with_slot: bool) -> None:
        lane = self._lane(pick)
        if lane.begun:
            self.world.publish(lane, kind, active=True, with_slot=with_slot)

    @precondition(lambda self: self.world.lanes)
    @rule(pick=_PICK)
    def speculate(self, pick: int) -> None:
        self.world.speculate(self._lane(pick))

    @precondition(lambda self: self.world.lanes)
    @rule(pick=_PICK, kind=_KINDS, publish=st.sampled_from([True, True, True, False]))
    def finish(self, pick: int, kind: Kind, publish: bool) -> None:
        lane = self._lane(pick)
        self.world.finish(lane, kind, publish=publish)
        self.known = [*self.known, lane.tokens[: lane.frontier]][-8:]

    @rule(pick=_PICK, back=st.sampled_from([0, 1, 64]), runs=_RUNS)
    def look(self, pick: int, back: int, runs: list[tuple[int, int]]) -> None:
        self.world.verify(self._prompt(pick, back, runs))

    @rule(really=st.integers(0, 9))
    def clear(self, really: int) -> None:
        if really == 0:
            self.world.clear()

    @rule()
    def prove(self) -> None:
        self.world.prove_promises()

    @invariant()
    def books_balance(self) -> None:
        if hasattr(self, "world"):
            self.world.check()

    def teardown(self) -> None:
        if not hasattr(self, "world"):
            return
        self.world.prove_promises()
        for lane in list(self.world.lanes):
            self.world.finish(lane, Kind.ENDPOINT, publish=True)
            self.world.check()
        world = self.world
        assert world.pages.available == world.pages.capacity
        world.clear()
        assert (world.cache.blocks, world.cache.snapshots_in_use) == (0, 0)
        assert world.pages.free == world.pages.capacity
        assert world.slots.free == world.slots.capacity
        world.check()


def test_random_use() -> None:
    run_state_machine_as_test(
        CacheMachine, settings=settings(max_examples=60, stateful_step_count=40, deadline=None)
    )


@pytest.mark.soak
def test_random_use_for_long() -> None:
    run_state_machine_as_test(
        CacheMachine, settings=settings(max_examples=600, stateful_step_count=100, deadline=None)
    )
