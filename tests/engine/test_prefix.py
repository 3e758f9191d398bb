"""Examples of what the prefix cache keeps, finds and gives up; `test_prefix_machine` tries the rest."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from ninfer.engine.blocks import pack
from ninfer.engine.prefix import Kind, Match, PrefixCache
from ninfer.runtime.pages import PagePool
from ninfer.runtime.slots import SlotPool


class Bench:
    """A cache, and lanes that come and go at once."""

    def __init__(self, *, pages: int = 32, snapshots: int = 4, recurrent: bool = True) -> None:
        self.pages = PagePool(pages)
        self.slots = SlotPool(snapshots + 4)
        self.cache = PrefixCache(self.pages, self.slots, recurrent=recurrent, snapshots=snapshots)
        self.recurrent = recurrent

    def take(self, count: int) -> list[int]:
        self.pages.reserve(count)
        return [self.pages.take() for _ in range(count)]

    def publish(
        self,
        tokens: Sequence[int],
        pages: list[int],
        kind: Kind = Kind.ENDPOINT,
        *,
        lineage: int | None = None,
        active: bool = False,
        with_state: bool = True,
    ) -> int | None:
        """The slot, if the cache took one."""
        slot = self.slots.take() if self.recurrent and with_state else None
        lineage = self.cache.new_lineage() if lineage is None else lineage
        taken = self.cache.publish(
            tokens, pages, len(tokens), slot=slot, kind=kind, lineage=lineage, active=active
        )
        if slot is not None and not taken:
            self.slots.give(slot)
        return slot if taken else None

    def leave(self, pages: list[int]) -> None:
        for page in pages:
            self.pages.unlock(page)
        self.pages.check()
        self.slots.check()
        self.cache.check()

    def put(
        self,
        tokens: Sequence[int],
        kind: Kind = Kind.ENDPOINT,
        *,
        lineage: int | None = None,
        with_state: bool = True,
    ) -> bool:
        """A lane without reuse computes the tokens, publishes their end and leaves."""
        pages = self.take(-(-len(tokens) // 64))
        taken = self.publish(tokens, pages, kind, lineage=lineage, with_state=with_state)
        self.leave(pages)
        return taken is not None

    def frontiers(self, tokens: Sequence[int]) -> list[int]:
        return [match.frontier for match in self.cache.matches(tokens)]

    def has(self, tokens: Sequence[int]) -> bool:
        """Whether a request can resume after exactly these tokens."""
        return len(tokens) in self.frontiers([*tokens, 0])

    def resume(self, tokens: Sequence[int]) -> Match:
        """A request that begins with these tokens resumes after them, and leaves."""
        (match,) = [match for match in self.cache.matches([*tokens, 0]) if match.frontier == len(tokens)]
        self.cache.lock(match)
        self.cache.unlock_tail(match)
        self.leave([node.page for node in match.nodes])
        return match


def run(count: int, first: int = 1000) -> list[int]:
    return list(range(first, first + count))


@pytest.mark.parametrize("length", [1, 63, 64, 65, 127, 128, 129, 200])
def test_a_recurrent_model_resumes_exactly_where_its_state_was_kept(length: int) -> None:
    bench = Bench()
    tokens = run(length)
    assert bench.put(tokens)
    assert bench.frontiers(tokens) == []
    (match,) = bench.cache.matches([*tokens, 7])
    assert match.frontier == length
    assert [len(node.tokens) for node in match.nodes] == [64] * (length // 64)
    assert (match.tail is None) == (length % 64 == 0)
    assert match.tail is None or match.tail.tokens == tuple(tokens[length // 64 * 64 :])
    assert match.snapshot is not None
    assert match.snapshot.frontier == length
    for changed in range(length):
        other = list(tokens)
        other[changed] += 1
        assert bench.frontiers([*other, 7]) == []
    assert bench.frontiers(tokens[: length - 1]) == []


@pytest.mark.parametrize("length", [1, 63, 64, 65, 127, 128, 129])
def test_a_model_without_state_resumes_after_any_token(length: int) -> None:
    bench = Bench(recurrent=False)
    tokens = run(length)
    assert not bench.put(tokens)
    for shared in range(1, length + 1):
        aligned = {shared // 64 * 64} - {0, shared}
        assert bench.frontiers([*tokens[:shared], 7, 7]) == [shared, *aligned]
    # The last token of a prompt is always computed.
    assert max(bench.frontiers(tokens), default=0) == length - 1


def test_of_many_branches_the_one_that_shares_most_is_found() -> None:
    bench = Bench(recurrent=False, pages=64)
    for second in range(5):
        bench.put([9, second * 2, *run(70)])
        bench.put([9, second * 2, *run(20), 5, 6])
    for second in range(5):
        assert max(bench.frontiers([9, second * 2, *run(30), 4])) == 32
        assert max(bench.frontiers([9, second * 2, *run(20), 5, 4])) == 23
        assert max(bench.frontiers([9, second * 2 + 1, 4])) == 1
    assert bench.frontiers([8, 0, 4]) == []


def test_without_state_no_block_repeats_the_beginning_of_another() -> None:
    bench = Bench(recurrent=False)
    for length in (10, 30, 20, 63, 64, 40):
        bench.put(run(length))
    assert bench.cache.blocks == 1
    assert bench.pages.free == 31


def test_states_in_the_middle_of_a_block_stay_when_the_block_is_full() -> None:
    bench = Bench()
    pages = bench.take(1)
    for length in (10, 30):
        slot = bench.publish(run(length), pages, Kind.TAP, active=True)
        assert slot is not None
        bench.cache.unpin(slot)
    bench.publish(run(64), pages)
    bench.leave(pages)
    assert bench.frontiers(run(65)) == [64, 30, 10]
    assert (bench.cache.blocks, bench.pages.free) == (3, 31)


def test_lock_costs_what_nobody_uses_and_release_undoes_it() -> None:
    bench = Bench()
    bench.put(run(64))
    bench.put(run(150))
    deep, shallow = bench.cache.matches(run(160))
    assert (bench.cache.cost(deep), bench.cache.cost(shallow)) == (3, 1)
    bench.cache.lock(shallow)
    assert bench.cache.cost(deep) == 2
    bench.cache.lock(deep)
    assert bench.pages.locked == 3
    assert deep.snapshot is not None
    assert (deep.snapshot.hits, deep.snapshot.pins) == (1, 1)
    bench.cache.release(deep)
    assert (deep.snapshot.hits, deep.snapshot.pins) == (0, 0)
    assert bench.pages.locked == 1
    bench.cache.release(shallow)
    assert bench.pages.locked == 0
    with pytest.raises(ValueError, match="isn't pinned"):
        bench.cache.release(deep)


def test_a_lock_that_cannot_be_had_changes_nothing() -> None:
    bench = Bench(pages=4)
    bench.put(run(150))
    (match,) = bench.cache.matches(run(160))
    bench.pages.reserve(2)
    with pytest.raises(ValueError, match="3 pages can't be locked, 2 are available"):
        bench.cache.lock(match)
    assert bench.pages.locked == 0
    bench.pages.unreserve(2)
    bench.leave(bench.take(4))
    with pytest.raises(ValueError, match="outdated"):
        bench.cache.lock(match)


def test_a_writing_lane_changes_over_to_the_pages_that_the_cache_has() -> None:
    """Two conversations that begin alike, the second without a state to resume from: both leave snapshots."""
    bench = Bench()
    first, second = bench.take(3), bench.take(3)
    own = second[:]
    slot = bench.publish(run(64), first, active=True)
    assert slot is not None
    free = bench.pages.free
    later = bench.publish(run(130), second, active=True)
    assert later is not None
    assert second == [first[0], *own[1:]]
    assert bench.pages.users(first[0]) == 2
    assert bench.pages.free == free + 1
    assert bench.frontiers(run(200)) == [130, 64]
    bench.cache.check()
    bench.cache.unpin(slot)
    bench.leave(first)
    assert bench.pages.users(first[0]) == 1  # so nothing in use stands beneath an unused block
    bench.cache.check()
    bench.cache.unpin(later)
    bench.leave(second)
    bench.cache.check()
    bench.pages.check()


def test_changing_over_needs_no_page_that_is_promised_to_others() -> None:
    bench = Bench()
    first, second = bench.take(2), bench.take(2)
    bench.publish(run(128), first)
    bench.leave(first)
    bench.pages.reserve(bench.pages.available)
    assert bench.publish(run(128), second, active=True) is None  # the state is there already
    assert second == first
    bench.cache.check()
    bench.pages.check()


def test_a_lane_that_leaves_keeps_its_own_pages() -> None:
    bench = Bench()
    first, second = bench.take(3), bench.take(3)
    own = second[:]
    bench.publish(run(64), first)
    assert bench.publish(run(130), second, active=False) is not None
    assert second == own
    assert [node.page for node in bench.cache.matches(run(200))[0].nodes] == [first[0], second[1]]


def test_the_slot_that_a_writing_lane_gave_away_stays_until_it_has_read_it() -> None:
    bench = Bench(snapshots=1)
    pages = bench.take(1)
    slot = bench.publish(run(10), pages, active=True)
    assert slot is not None
    assert not bench.put(run(50, 1))
    bench.cache.clear()
    assert bench.has(run(10))
    bench.cache.unpin(slot)
    with pytest.raises(ValueError, match="no pinned snapshot"):
        bench.cache.unpin(slot)
    assert bench.put(run(50, 1))
    assert not bench.has(run(10))
    bench.leave(pages)


def test_without_snapshot_slots_only_blocks_are_kept() -> None:
    bench = Bench(snapshots=0)
    assert not bench.put(run(100))
    assert (bench.cache.blocks, bench.cache.snapshots_in_use) == (1, 0)


def test_blocks_without_state_are_used_by_the_next_state() -> None:
    bench = Bench()
    bench.put(run(200), with_state=False)
    assert bench.frontiers(run(201)) == []
    assert bench.cache.blocks == 3
    bench.put(run(192))
    assert bench.frontiers(run(201)) == [192]
    assert bench.cache.blocks == 3


def test_the_same_state_again_is_refreshed_and_keeps_the_better_kind() -> None:
    bench = Bench()
    for kind, kept in [
        (Kind.TAP, Kind.TAP),
        (Kind.ENDPOINT, Kind.ENDPOINT),
        (Kind.TAP, Kind.ENDPOINT),
        (Kind.PREAMBLE, Kind.PREAMBLE),
        (Kind.OPENER, Kind.PREAMBLE),
    ]:
        assert bench.put(run(70), kind) == (kind is Kind.TAP and kept is Kind.TAP)
        (match,) = bench.cache.matches(run(71))
        assert match.snapshot is not None
        assert match.snapshot.kind is kept
    assert match.snapshot.hits == 4
    assert bench.cache.snapshots_in_use == 1
    assert bench.slots.free == 7


# What goes when slots are short.


def test_a_newer_snapshot_of_a_conversation_supersedes_the_older_one_of_its_kind() -> None:
    bench = Bench(snapshots=3)
    bench.put(run(100), Kind.OPENER, lineage=77)
    bench.put(run(1000), Kind.ENDPOINT, lineage=77)
    bench.put(run(30, 1), Kind.ENDPOINT, lineage=77)
    # Worth most, but superseded; the other kind and other conversations aren't.
    bench.put(run(20, 1), Kind.ENDPOINT)
    assert not bench.has(run(1000))
    for kept in (run(100), run(30, 1), run(20, 1)):
        assert bench.has(kept)


def test_what_the_newcomer_replaces_goes_first() -> None:
    """Not the anchor, which saves little beside the old opener and nearly all without it."""
    bench = Bench(pages=80, snapshots=3)
    bench.put(run(40, 9000))
    bench.put(run(1000), Kind.OPENER, lineage=77)
    bench.put(run(1010), Kind.ANCHOR, lineage=77)
    bench.put(run(1020), Kind.OPENER, lineage=77)
    assert bench.frontiers(run(1030)) == [1020, 1010]
    assert bench.has(run(40, 9000))
    # Its going didn't age the others: the floor is where it was.
    bench.put(run(60, 5000))
    assert bench.has(run(60, 5000))
    assert bench.has(run(40, 9000))


def test_preambles_supersede_nothing() -> None:
    bench = Bench(snapshots=2)
    bench.put(run(60), Kind.PREAMBLE, lineage=5)
    bench.put(run(50, 1), Kind.PREAMBLE, lineage=5)
    bench.put(run(10, 5), Kind.TAP)
    assert bench.has(run(60))
    assert not bench.has(run(50, 1))


def test_every_conversation_that_begins_with_a_preamble_gets_its_own_lineage() -> None:
    bench = Bench()
    bench.put(run(60), Kind.PREAMBLE, lineage=1)
    lineages = []
    for _ in range(3):
        (match,) = bench.cache.matches(run(61))
        bench.cache.lock(match)
        assert match.snapshot is not None
        lineages.append(match.snapshot.lineage)
        bench.cache.unlock_tail(match)
    assert len({1, *lineages}) == 4
    bench.put(run(100), Kind.ENDPOINT, lineage=1)
    assert [bench.resume(run(100)).snapshot.lineage for _ in range(2)] == [1, 1]  # type: ignore[union-attr]


def test_a_branching_point_is_not_superseded() -> None:
    for resumptions, stays in ((1, False), (2, True)):
        bench = Bench(snapshots=2)
        bench.put(run(100), Kind.OPENER, lineage=77)
        for _ in range(resumptions):
            bench.resume(run(100))
        bench.put(run(90, 1), Kind.OPENER, lineage=77)
        bench.put(run(10, 5))
        assert bench.has(run(100)) == stays


def test_what_was_superseded_and_is_wanted_again_counts_as_new() -> None:
    bench = Bench(snapshots=2)
    bench.put(run(100), Kind.OPENER, lineage=77)
    bench.put(run(50, 1), Kind.OPENER, lineage=77)
    bench.resume(run(100))
    bench.put(run(10, 5))
    assert bench.has(run(100))
    assert not bench.has(run(50, 1))


def test_the_value_of_a_snapshot_is_what_it_saves_over_the_one_before() -> None:
    bench = Bench(snapshots=3)
    bench.put(run(100))
    bench.put(run(150))
    bench.put(run(60, 1))
    bench.put(run(64, 500))
    # 150 tokens, but only 50 more than at 100: less than the 60.
    assert not bench.has(run(150))
    bench.put(run(61, 2000))
    assert not bench.has(run(60, 1))
    assert bench.has(run(100))


@pytest.mark.parametrize(("hits", "newcomers"), [(0, 1), (2, 2), (6, 4)])
def test_hits_count_and_old_fame_fades(hits: int, newcomers: int) -> None:
    # Worth (1 + hits) · 30. The others leave at 60, 110, 160 …, a newcomer being worth 50 more than the last
    # one that left.
    bench = Bench(snapshots=2)
    bench.put(run(30))
    for _ in range(hits):
        bench.resume(run(30))
    bench.put(run(60, 1))
    survived = 0
    while bench.has(run(30)):
        bench.put(run(50, 5000 + 100 * survived))
        survived += 1
    assert survived == newcomers


def test_a_request_does_not_drive_out_its_own_snapshots() -> None:
    """Beside old ones that have saved much, those of a new conversation are worth little each."""
    bench = Bench(snapshots=3)
    for number in range(3):
        bench.put(run(60, 1000 * number + 1000))
        for _ in range(5 + 20 * number):
            bench.resume(run(60, 1000 * number + 1000))
    since = bench.cache.now()
    pages, lineage = bench.take(2), bench.cache.new_lineage()
    for length, kind in ((40, Kind.PREAMBLE), (70, Kind.ANCHOR), (90, Kind.OPENER), (100, Kind.ENDPOINT)):
        slot = bench.slots.take()
        assert bench.cache.publish(
            run(length), pages, length, slot=slot, kind=kind, lineage=lineage, active=False, since=since
        )
        assert bench.has(run(length))
    # Three places: its own went only when nothing older was left, the one of least value first (the floor had
    # risen since).
    assert bench.frontiers(run(200)) == [100, 90, 70]
    bench.leave(pages)


def test_superseded_victims_do_not_raise_the_floor() -> None:
    bench = Bench(snapshots=2)
    bench.put(run(1000), Kind.OPENER, lineage=77)
    bench.put(run(100, 1), Kind.OPENER, lineage=77)
    bench.put(run(20, 500))  # in place of the 1000
    bench.put(run(10, 600))  # in place of the 20, if the 100 aren't older than the floor
    assert bench.has(run(100, 1))
    assert not bench.has(run(20, 500))


# What goes when pages are short.


def kept_blocks(bench: Bench, *sequences: list[int]) -> list[int]:
    """Full blocks that are left of each sequence."""
    blocks = []
    for sequence in sequences:
        node, depth = bench.cache._root, 0
        while (child := node.child(pack(sequence[64 * depth : 64 * depth + 64]))) is not None:
            node, depth = child, depth + 1
        blocks.append(depth)
    return blocks


def test_the_longest_unused_path_goes_first_from_its_end() -> None:
    bench = Bench(pages=6, recurrent=False)
    old, new = run(192), run(192, 5000)
    bench.put(old)
    bench.put(new)
    bench.leave(bench.take(1))
    assert kept_blocks(bench, old, new) == [2, 3]
    bench.leave(bench.take(3))
    assert kept_blocks(bench, old, new) == [0, 3]
    assert bench.cache.evicted_blocks == 3


def test_use_makes_a_path_young_again() -> None:
    bench = Bench(pages=4, recurrent=False)
    old, new = run(128), run(128, 5000)
    bench.put(old)
    bench.put(new)
    bench.resume(old)
    bench.leave(bench.take(2))
    assert kept_blocks(bench, old, new) == [2, 0]


def test_computing_a_path_again_makes_it_young_again() -> None:
    bench = Bench(pages=6, recurrent=False)
    old, new = run(128), run(128, 5000)
    bench.put(old)
    bench.put(new)
    bench.put(old)
    bench.leave(bench.take(4))
    assert kept_blocks(bench, old, new) == [2, 0]


def test_computing_a_state_again_makes_it_young_again() -> None:
    bench = Bench(pages=3)
    old, new = run(30), run(40, 5000)
    bench.put(old)
    bench.put(new)
    bench.put(old)
    bench.leave(bench.take(2))
    assert (bench.has(old), bench.has(new)) == (True, False)


def test_used_pages_stay() -> None:
    bench = Bench(pages=4, recurrent=False)
    bench.put(run(128))
    bench.put(run(128, 5000))
    (match,) = bench.cache.matches(run(129))
    bench.cache.lock(match)
    bench.leave(bench.take(2))
    assert kept_blocks(bench, run(128), run(128, 5000)) == [2, 0]
    with pytest.raises(ValueError, match="can't be reserved"):
        bench.take(3)


def test_blocks_that_lead_to_no_state_go_first_then_superseded_ones() -> None:
    bench = Bench(pages=6)
    kept, superseded, dead = run(128), run(128, 5000), run(128, 9000)
    bench.put(kept, Kind.OPENER, lineage=1)
    bench.put(superseded, Kind.ENDPOINT, lineage=77)
    bench.put(dead, with_state=False)
    bench.leave(bench.take(1))
    assert kept_blocks(bench, kept, superseded, dead) == [2, 2, 1]
    bench.put(run(64, 20000), Kind.ENDPOINT, lineage=77)
    bench.leave(bench.take(2))
    assert kept_blocks(bench, kept, superseded, dead) == [2, 1, 0]
    assert bench.cache.evicted_snapshots == 1
    assert bench.slots.free == 8 - 2


def test_a_page_of_a_middle_state_and_a_full_block_goes_with_both_or_not_at_all() -> None:
    bench = Bench(pages=3)
    pages = bench.take(2)
    slot = bench.publish(run(30), pages, Kind.OPENER, active=True)
    assert slot is not None
    bench.cache.unpin(slot)
    bench.publish(run(128), pages)
    bench.leave(pages)
    bench.leave(bench.take(2))
    # The state at 128 went with its page; that at 30 is older, but its page was needed by the block at 128.
    assert bench.frontiers(run(200)) == [30]
    bench.leave(bench.take(3))
    assert bench.frontiers(run(200)) == []
    assert (bench.cache.blocks, bench.cache.evicted_snapshots, bench.cache.evicted_blocks) == (0, 2, 3)


def test_clear_forgets_all_but_what_lanes_use() -> None:
    bench = Bench()
    bench.put(run(100))
    bench.put(run(200, 5000))
    (match,) = bench.cache.matches(run(101))
    bench.cache.lock(match)
    bench.cache.clear()
    bench.cache.check()
    assert bench.frontiers(run(101)) == [100]
    assert bench.frontiers(run(201, 5000)) == []
    bench.cache.unlock_tail(match)
    bench.leave([node.page for node in match.nodes])
    bench.cache.clear()
    assert (bench.cache.blocks, bench.cache.snapshots_in_use) == (0, 0)
    assert (bench.pages.free, bench.slots.free) == (32, 8)
    assert (bench.cache.evicted_blocks, bench.cache.evicted_snapshots) == (0, 0)
