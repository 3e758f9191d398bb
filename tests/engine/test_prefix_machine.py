"""The prefix cache under random use by lanes, with pools so small that everything runs out."""

from __future__ import annotations

import random

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

_CUTS = (0, 0, 0, 1, 2, 30, 64, 100)
_LENGTHS = (1, 2, 30, 63, 64, 65, 100, 128, 150)
_CHUNKS = (1, 20, 63, 64, 65, 200, 500)
_RUNS = st.lists(st.tuples(st.integers(0, 2), st.sampled_from(_LENGTHS)), min_size=1, max_size=3)
_PICK = st.integers(0, 1000)
_KINDS = st.sampled_from(list(Kind))


class Users:
    """Lanes of a world, and the sequences from which they make prompts."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.known: list[list[int]] = [[]]

    def lane(self, pick: int) -> Lane:
        return self.world.lanes[pick % len(self.world.lanes)]

    def prompt(self, pick: int, back: int, runs: list[tuple[int, int]]) -> list[int]:
        """A known sequence, some of its end cut off, and something new."""
        old = self.known[pick % len(self.known)]
        prompt = old[: max(0, len(old) - back)]
        for token, length in runs:
            prompt = prompt + [token] * length
        return prompt[: 64 * self.world.pages.capacity]

    def tap(self, lane: Lane, kind: Kind, *, with_slot: bool) -> None:
        if lane.begun:
            self.world.publish(lane, kind, active=True, with_slot=with_slot)

    def finish(self, lane: Lane, kind: Kind, *, publish: bool) -> None:
        self.world.finish(lane, kind, publish=publish)
        self.known = [*self.known, lane.tokens[: lane.frontier]][-8:]

    def end(self) -> None:
        """Everybody leaves: nothing may be lost."""
        world = self.world
        world.prove_promises()
        for lane in list(world.lanes):
            self.finish(lane, Kind.ENDPOINT, publish=True)
            world.check()
        assert world.pages.available == world.pages.capacity
        world.clear()
        assert (world.cache.blocks, world.cache.snapshots_in_use) == (0, 0)
        assert world.pages.free == world.pages.capacity
        assert world.slots.free == world.slots.capacity
        world.check()


class CacheMachine(RuleBasedStateMachine):
    users: Users

    @initialize(
        pages=st.integers(4, 14),
        lanes=st.integers(1, 3),
        snapshots=st.integers(0, 4),
        recurrent=st.booleans(),
        ahead=st.integers(0, 1),
    )
    def begin(self, pages: int, lanes: int, snapshots: int, recurrent: bool, ahead: int) -> None:
        world = World(pages=pages, lanes=lanes, snapshots=snapshots, recurrent=recurrent, ahead=ahead)
        self.users = Users(world)

    @precondition(lambda self: len(self.users.world.lanes) < self.users.world.max_lanes)
    @rule(
        pick=_PICK,
        back=st.sampled_from(_CUTS),
        runs=_RUNS,
        extra=st.integers(0, 70),
        choice=st.sampled_from([0, 0, 0, 1, 2]),
        chunk=st.sampled_from([0, 64, 500]),
    )
    def admit(
        self, pick: int, back: int, runs: list[tuple[int, int]], extra: int, choice: int, chunk: int
    ) -> None:
        lane = self.users.world.admit(self.users.prompt(pick, back, runs), extra, choice)
        if lane is not None and chunk:
            self.users.world.unit(lane, chunk, 0)

    @precondition(lambda self: self.users.world.lanes)
    @rule(pick=_PICK, chunk=st.sampled_from(_CHUNKS), token=st.integers(0, 2), kind=st.none() | _KINDS)
    def unit(self, pick: int, chunk: int, token: int, kind: Kind | None) -> None:
        lane = self.users.lane(pick)
        self.users.world.unit(lane, chunk, token)
        if kind is not None:
            self.users.tap(lane, kind, with_slot=True)

    @precondition(lambda self: self.users.world.lanes)
    @rule(pick=_PICK, kind=_KINDS, with_slot=st.booleans())
    def tap(self, pick: int, kind: Kind, with_slot: bool) -> None:
        self.users.tap(self.users.lane(pick), kind, with_slot=with_slot)

    @precondition(lambda self: self.users.world.lanes)
    @rule(pick=_PICK, kind=_KINDS, publish=st.sampled_from([True, True, True, False]))
    def finish(self, pick: int, kind: Kind, publish: bool) -> None:
        self.users.finish(self.users.lane(pick), kind, publish=publish)

    @precondition(lambda self: self.users.world.lanes)
    @rule(pick=_PICK)
    def speculate(self, pick: int) -> None:
        self.users.world.speculate(self.users.lane(pick))

    @rule(pick=_PICK, back=st.sampled_from(_CUTS), runs=_RUNS)
    def look(self, pick: int, back: int, runs: list[tuple[int, int]]) -> None:
        self.users.world.verify(self.users.prompt(pick, back, runs))
        self.users.world.prove_promises()

    @invariant()
    def books_balance(self) -> None:
        if hasattr(self, "users"):
            self.users.world.check()


def walk(seed: int, steps: int) -> World:
    """A random walk: cheaper than the machine, so it gets farther; the seed is the counterexample."""
    dice = random.Random(seed)
    world = World(
        pages=dice.randint(4, 16),
        lanes=dice.randint(1, 3),
        snapshots=dice.randint(0, 5),
        recurrent=dice.random() < 0.7,
        ahead=dice.randint(0, 1),
    )
    users = Users(world)
    for _ in range(steps):
        action, pick, kind = dice.random(), dice.randrange(1000), dice.choice(list(Kind))
        runs = [(dice.randrange(3), dice.choice(_LENGTHS)) for _ in range(dice.randint(1, 3))]
        prompt = users.prompt(pick, dice.choice(_CUTS), runs)
        if action < 0.3 and len(world.lanes) < world.max_lanes:
            # Now and then what another lane is working on.
            if world.lanes and dice.random() < 0.3:
                prompt = list(users.lane(pick).tokens)
            lane = world.admit(prompt, dice.randint(0, 70), dice.choice([0, 0, 0, 1, 2]))
            if lane is not None and dice.random() < 0.8:
                world.unit(lane, dice.choice(_CHUNKS), 0)
        elif action < 0.33:
            world.verify(prompt)
        elif action < 0.335:
            world.clear()
        elif action < 0.35:
            world.prove_promises()
        elif world.lanes:
            lane = users.lane(pick)
            if action < 0.6:
                world.unit(lane, dice.choice(_CHUNKS), dice.randrange(3))
            elif action < 0.8:
                users.tap(lane, kind, with_slot=dice.random() < 0.8)
            elif action < 0.85:
                world.speculate(lane)
            else:
                users.finish(lane, kind, publish=dice.random() < 0.8)
        world.check()
    users.end()
    return world


def test_rules() -> None:
    run_state_machine_as_test(
        CacheMachine, settings=settings(max_examples=30, stateful_step_count=30, deadline=None)
    )


def test_walks() -> None:
    worlds = [walk(seed, 100) for seed in range(40)]
    assert sum(world.cache.evicted_blocks for world in worlds) > 100
    assert sum(world.cache.evicted_snapshots for world in worlds) > 100


@pytest.mark.soak
def test_rules_for_long() -> None:
    run_state_machine_as_test(
        CacheMachine, settings=settings(max_examples=1000, stateful_step_count=60, deadline=None)
    )


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(1000, 1060))
def test_long_walks(seed: int) -> None:
    walk(seed, 1500)
