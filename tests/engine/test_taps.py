from hypothesis import given
from hypothesis import strategies as st

from ninfer.engine.snapshots import Kind
from ninfer.engine.taps import Tap, next_cut, plan_taps


def plan(**changes: object) -> list[tuple[int, str]]:
    settings = {
        "prompt_tokens": 3000,
        "base": 0,
        "boundaries": [0, 500, 900, 2000, 2990],
        "preamble": 500,
        "opener": 2990,
        "turn_anchors": 1,
        "chunk": 1024,
        "limit": 8,
    }
    return [(tap.position, tap.kind.value) for tap in plan_taps(**{**settings, **changes})]  # type: ignore[arg-type]


def test_a_conversation() -> None:
    assert plan() == [(500, "preamble"), (2000, "anchor"), (2990, "opener")]
    assert plan(turn_anchors=0) == [(500, "preamble"), (2990, "opener")]
    assert plan(turn_anchors=2) == [(500, "preamble"), (900, "anchor"), (2000, "anchor"), (2990, "opener")]
    # More anchors than messages; the first message is the preamble's, and nothing is to be kept at 0.
    assert plan(turn_anchors=9) == plan(turn_anchors=2)


def test_nothing_at_or_before_the_base_nor_at_the_end() -> None:
    assert plan(base=500) == [(2000, "anchor"), (2990, "opener")]
    assert plan(base=499)[0] == (500, "preamble")
    assert plan(base=2995) == []
    assert plan(prompt_tokens=2990) == [(500, "preamble"), (2000, "anchor")]
    assert plan(prompt_tokens=2991)[-1] == (2990, "opener")


def test_without_opener_the_last_message_is_the_last_boundary_and_the_end_gets_a_tap() -> None:
    # 900 + 1024 + 1024 = 2948 is the last chunk end after the anchor.
    expected = [(500, "preamble"), (900, "anchor"), (2948, "tap")]
    assert plan(boundaries=[0, 500, 900], opener=None) == expected
    # The end of the last chunk counts from the base.
    assert plan(prompt_tokens=2600, base=10, boundaries=[], preamble=None, opener=None) == [(2058, "tap")]
    # Not if it is too close after another tap, or the chunk isn't full.
    assert plan(boundaries=[0, 500], opener=None, chunk=60, prompt_tokens=565, preamble=500) == [
        (500, "preamble")
    ]
    assert plan(boundaries=[0, 500], opener=None, chunk=2600, preamble=500) == [(500, "preamble")]
    assert plan(prompt_tokens=1024, boundaries=[], preamble=None, opener=None) == []
    assert plan(prompt_tokens=1025, boundaries=[], preamble=None, opener=None) == [(1024, "tap")]


def test_the_ladder_doubles_and_snaps() -> None:
    # Goals 99,999 - 4096·2^k = 95903, 91807, 83615, 67231, 34463; chunk ends count from the tap before.
    taps = plan(prompt_tokens=100_000, boundaries=[0, 67_000, 99_990], preamble=None, opener=99_990, limit=16)
    assert taps == [
        (34463 // 1024 * 1024, "tap"),
        (67_000, "anchor"),
        (67_000 + (83_615 - 67_000) // 1024 * 1024, "tap"),
        (67_000 + (91_807 - 67_000) // 1024 * 1024, "tap"),
        (67_000 + (95_903 - 67_000) // 1024 * 1024, "tap"),
        (99_990, "opener"),
    ]
    # A message start within a chunk before the goal is better than a chunk end.
    # There chunks begin anew.
    starts = [0, 33_500, 60_000, 67_000, 99_990]
    assert plan(
        prompt_tokens=100_000, boundaries=starts, preamble=None, opener=99_990, turn_anchors=0, limit=16
    ) == [
        (33_500, "tap"),
        (67_000, "tap"),
        (67_000 + (83_615 - 67_000) // 1024 * 1024, "tap"),
        (67_000 + (91_807 - 67_000) // 1024 * 1024, "tap"),
        (67_000 + (95_903 - 67_000) // 1024 * 1024, "tap"),
        (99_990, "opener"),
    ]


def test_the_ladder_keeps_its_distance() -> None:
    # Goals 5903 and 1807, so 5120 and 1024; 5120 is 1024 before 6144.
    for anchor, kept in ((6143, [1024]), (6144, [1024, 5120])):
        taps = plan(prompt_tokens=10_000, boundaries=[0, anchor, 9990], preamble=None, opener=9990)
        assert taps == [*((position, "tap") for position in kept), (anchor, "anchor"), (9990, "opener")]
    # Large chunks: two of them from the end, not 4096 tokens.
    assert plan(prompt_tokens=20_001, boundaries=[], preamble=None, opener=20_000, chunk=4096) == [
        (8192, "tap"),
        (20_000, "opener"),
    ]


def test_too_many_taps_lose_the_ladder_then_the_anchors_then_the_preamble() -> None:
    def kinds(limit: int) -> list[tuple[int, str]]:
        boundaries = [0, 500, 900, 2000, 29_990]
        return plan(prompt_tokens=30_000, boundaries=boundaries, opener=29_990, turn_anchors=2, limit=limit)

    assert [kind for _, kind in kinds(9)].count("tap") == 3
    ladder = [tap for tap in kinds(9) if tap[1] == "tap"]
    assert [tap for tap in kinds(6) if tap[1] == "tap"] == ladder[1:]
    assert [kind for _, kind in kinds(4)] == ["preamble", "anchor", "anchor", "opener"]
    assert kinds(3) == [(500, "preamble"), (2000, "anchor"), (29_990, "opener")]
    assert kinds(2) == [(500, "preamble"), (29_990, "opener")]
    assert kinds(1) == [(29_990, "opener")]
    assert kinds(0) == []


@given(st.data())
def test_taps_are_where_they_may_be(data: st.DataObject) -> None:
    prompt_tokens = data.draw(st.integers(1, 60_000))
    place = st.integers(0, prompt_tokens)
    base = data.draw(place)
    boundaries = sorted(data.draw(st.sets(place, max_size=8)))
    opener = data.draw(st.sampled_from([None, *boundaries[-1:]]))
    preamble = data.draw(st.none() | place)
    anchors, limit = data.draw(st.integers(0, 3)), data.draw(st.integers(0, 9))
    chunk = data.draw(st.sampled_from([64, 500, 1024, 4096]))
    taps = plan_taps(
        prompt_tokens=prompt_tokens,
        base=base,
        boundaries=boundaries,
        preamble=preamble,
        opener=opener,
        turn_anchors=anchors,
        chunk=chunk,
        limit=limit,
    )
    positions = [tap.position for tap in taps]
    assert positions == sorted(set(positions))
    assert len(taps) <= limit
    assert all(base < position < prompt_tokens for position in positions)
    starts = [start for start in boundaries if start != opener]
    for tap in taps:
        if tap.kind is Kind.PREAMBLE:
            assert tap.position == preamble
        elif tap.kind is Kind.OPENER:
            assert tap.position == opener
        elif tap.kind is Kind.ANCHOR:
            assert tap.position in starts[max(0, len(starts) - anchors) :]
        else:
            assert tap.kind is Kind.TAP
            before = max((other for other in positions if other < tap.position), default=base)
            assert tap.position - before > 64
            assert tap.position in boundaries or (tap.position - before) % chunk == 0
    exact = {tap.position for tap in taps if tap.kind is not Kind.TAP}
    wanted = {place for place in (preamble, opener, *(starts[-1:] if anchors else [])) if place is not None}
    wanted = {position for position in wanted if base < position < prompt_tokens}
    assert wanted <= exact or len(taps) == limit
    # The prefill ends a chunk at every tap, and needs one chunk more for each at most.
    cuts = [base]
    while cuts[-1] < prompt_tokens:
        cut = next_cut(cuts[-1], prompt_tokens, chunk, taps)
        assert 0 < cut - cuts[-1] <= chunk
        cuts.append(cut)
    assert set(positions) <= set(cuts)
    assert len(cuts) - 1 <= -(-(prompt_tokens - base) // chunk) + sum(
        tap.position in exact for tap in taps
    ) + sum(tap.position in boundaries for tap in taps if tap.kind is Kind.TAP)


def test_next_cut() -> None:
    taps = (Tap(10, Kind.ANCHOR), Tap(25, Kind.TAP))
    assert [next_cut(frontier, 40, 12, taps) for frontier in (0, 9, 10, 13, 24, 25, 30)] == [
        10, 10, 22, 25, 25, 37, 40,
    ]  # fmt: skip
