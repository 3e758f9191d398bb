import pytest
from hypothesis import given
from hypothesis import strategies as st

from ninfer.runtime.pages import PagePool
from ninfer.runtime.slots import SlotPool


def taken(pool: PagePool, count: int) -> list[int]:
    pool.reserve(count)
    return [pool.take() for _ in range(count)]


def test_a_promise_becomes_a_locked_page_and_free_again() -> None:
    pool = PagePool(4)
    pool.reserve(3)
    assert (pool.available, pool.free, pool.reserved, pool.locked) == (1, 4, 3, 0)
    page = pool.take()
    assert (pool.available, pool.free, pool.reserved, pool.locked) == (1, 3, 2, 1)
    pool.unreserve(2)
    pool.unlock(page)
    assert (pool.available, pool.free) == (4, 4)
    pool.check()


def test_pages_of_an_empty_pool_are_taken_in_order() -> None:
    assert taken(PagePool(3), 3) == [0, 1, 2]


def test_a_page_is_free_only_when_neither_lanes_nor_cache_have_it() -> None:
    pool = PagePool(2)
    (page,) = taken(pool, 1)
    pool.hold(page)
    pool.hold(page)
    pool.lock(page)
    assert (pool.users(page), pool.held(page), pool.locked) == (2, 2, 1)
    pool.unlock(page)
    pool.unlock(page)
    assert (pool.locked, pool.free, pool.available) == (0, 1, 2)
    pool.lock(page)
    assert (pool.locked, pool.available) == (1, 1)
    pool.drop(page)
    pool.drop(page)
    assert pool.free == 1
    pool.unlock(page)
    assert pool.free == 2
    pool.check()


def test_truncation_keeps_the_promise() -> None:
    pool = PagePool(2)
    first, second = taken(pool, 2)
    pool.hold(first)
    for page in (first, second):
        pool.give_back(page)
    assert (pool.reserved, pool.locked, pool.available, pool.free) == (2, 0, 0, 1)
    pool.check()


def test_the_cache_is_asked_only_when_nothing_is_free_and_told_of_released_pages() -> None:
    pool = PagePool(2)
    released, asked = [], []

    def reclaim() -> bool:
        asked.append(True)
        pool.drop(0)
        return True

    pool.reclaim, pool.released = reclaim, released.append
    (page,) = taken(pool, 1)
    pool.hold(page)
    pool.unlock(page)
    assert released == [0]
    assert taken(pool, 1) == [1]
    assert not asked
    assert taken(pool, 1) == [0]
    assert len(asked) == 1


def test_misuse_is_refused_and_changes_nothing() -> None:
    pool = PagePool(3)
    locked, cached = taken(pool, 2)
    pool.hold(cached)
    pool.unlock(cached)
    pool.reserve(2)
    for misuse in (
        lambda: pool.reserve(1),
        lambda: pool.reserve(-1),
        lambda: pool.unreserve(3),
        lambda: pool.lock(2),  # free
        lambda: pool.lock(cached),  # promised
        lambda: pool.unlock(cached),
        lambda: pool.hold(2),
        lambda: pool.drop(locked),
        lambda: pool.give_back(cached),
    ):
        with pytest.raises(ValueError):
            misuse()
        pool.check()
    assert (pool.locked, pool.reserved, pool.free) == (1, 2, 1)
    pool.lock(locked)
    with pytest.raises(ValueError, match="2 users"):
        pool.give_back(locked)
    pool.take()
    with pytest.raises(ValueError, match="can be freed"):
        pool.take()
    pool.unreserve(1)
    with pytest.raises(ValueError, match="reserved before"):
        pool.take()
    pool.check()


@given(steps=st.lists(st.tuples(st.sampled_from(["take", "give"]), st.integers(0, 5)), max_size=30))
def test_slots_have_one_owner(steps: list[tuple[str, int]]) -> None:
    pool, owned = SlotPool(4), set()
    for step, slot in steps:
        if step == "take":
            if len(owned) == 4:
                with pytest.raises(ValueError, match="all 4"):
                    pool.take()
            else:
                new = pool.take()
                assert new not in owned
                owned.add(new)
        elif slot in owned:
            pool.give(slot)
            owned.remove(slot)
        else:
            with pytest.raises(ValueError, match="isn't taken"):
                pool.give(slot)
        pool.check()
        assert pool.free == 4 - len(owned)
        assert owned == {slot for slot in range(4) if pool.taken(slot)}
