"""What runs next and who may go first: the pure decisions, and the order of units that follows from them."""

from collections.abc import Callable
from itertools import product

import pytest

from ninfer.engine import Core, Policy, Request, Started
from ninfer.engine.scheduler import Choice, Protection, choose, may_admit
from ninfer.runtime.records import Unit
from tests.engine.harness import Gate, Note, Session, drain, request, settle
from tests.runtime.toy import expected_answer

Build = Callable[..., Core]
NO_REUSE = Policy(reuse=False, max_pending=64)


def prompt(first: int, tokens: int) -> list[int]:
    """A prompt known by its first token."""
    return [first, *((13 * i + 5 * first) % 97 for i in range(tokens - 1))]


def begun(notes: list[Note]) -> list[int]:
    """The first tokens of the prompts whose prefill began, in order."""
    return [note.tokens[0] for note in notes if note.unit is Unit.PREFILL and note.positions[0] == 0]


# Decisions


def test_prefill_and_decode_alternate_and_forced_spans_go_first() -> None:
    for control, prefill, decode, last in product((False, True), repeat=4):
        choice = choose(control=control, prefill=prefill, decode=decode, decoded_last=last)
        if control:
            assert choice is Choice.CONTROL
        elif prefill and decode:
            assert choice is (Choice.PREFILL if last else Choice.DECODE)
        elif prefill:
            assert choice is Choice.PREFILL
        else:
            assert choice is (Choice.DECODE if decode else Choice.WAIT)


def test_the_queue_is_looked_at_when_that_may_help() -> None:
    for waiting, changed, prefill, decode, last in product((False, True), repeat=5):
        allowed = may_admit(
            waiting=waiting, changed=changed, prefill=prefill, decode=decode, decoded_last=last
        )
        assert allowed == (waiting and changed and not prefill and (last or not decode))


def test_a_borrower_needs_room_beside_the_head_and_all_other_borrowers() -> None:
    guard = Protection(1, frozenset({10, 11}))

    def allows(pages: int, *, lanes: int = 4, active: dict[int, int]) -> bool:
        return guard.allows(pages, head_pages=6, capacity=10, lanes=lanes, active=active)

    donors = {10: 3, 11: 3}
    assert allows(4, active=donors)
    assert not allows(5, active=donors), "the head couldn't start beside it"
    assert not allows(4, lanes=1, active={10: 3}), "a lane must be left for the head"
    guard.lend(20, 3)
    active = donors | {20: 3}
    assert allows(1, active=active)
    assert not allows(2, active=active)
    assert not allows(1, lanes=2, active=active)
    del active[20]
    assert allows(4, active=active), "what ended has given everything back"
    assert not allows(1, active={20: 3}), "no donor is left: the head is next"
    assert not allows(1, active=donors | {30: 1}), "somebody unknown runs"


def test_protection_lasts_as_long_as_its_head() -> None:
    guard = Protection.renewed(None, 1, [10])
    guard.lend(20, 2)
    assert Protection.renewed(guard, 1, [10, 20]) is guard, "a borrower doesn't become a donor"
    other = Protection.renewed(guard, 2, [10, 20])
    assert other.donors == {10, 20}
    assert not other.borrowers


# Order of units


def test_prefill_chunks_and_rounds_alternate(build: Build) -> None:
    gate = Gate()
    core = build(concurrency=2, context=1024, gate=gate, policy=NO_REUSE)
    first = core.submit(request(prompt(1, 10), 40), Session())
    for _ in range(4):
        gate.arrive()
        gate.step()
    gate.arrive()
    second = core.submit(request(prompt(2, 600), 5), Session())  # five chunks
    gate.open()
    drain(first)
    drain(second)
    units = [note.unit for note in gate.notes]
    begin = next(i for i, note in enumerate(gate.notes) if note.tokens[0] == 2 and note.positions[0] == 0)
    end = max(i for i, unit in enumerate(units) if unit is Unit.PREFILL)
    assert units[begin - 1 : end + 2] == [Unit.ROUND, *[Unit.PREFILL, Unit.ROUND] * 5]
    settle(core)


def test_one_prompt_is_prefilled_at_a_time_and_a_round_goes_between_two(build: Build) -> None:
    gate = Gate()
    core = build(concurrency=4, context=512, gate=gate, policy=NO_REUSE)
    gate.open()
    handles = [core.submit(request(prompt(i, 300), 30), Session()) for i in (1, 2, 3, 4)]
    for index, handle in enumerate(handles, 1):
        assert drain(handle)[0] == expected_answer(prompt(index, 300), 30)
    assert begun(gate.notes) == [1, 2, 3, 4]
    position = 0
    for before, note in zip([None, *gate.notes], gate.notes, strict=False):
        if note.unit is Unit.PREFILL:
            assert note.positions[0] == position, "nobody else's chunk comes between"
            position = (note.positions[-1] + 1) % 300
            if note.tokens[0] > 1 and note.positions[0] == 0:
                assert before is not None
                assert before.unit is Unit.ROUND
    settle(core)


def test_a_round_has_exactly_the_rows_that_are_ready(build: Build) -> None:
    gate = Gate(shut=False)
    core = build(concurrency=8, context=256, gate=gate, policy=NO_REUSE)
    counts = [9, 3, 14, 1, 7, 30, 2, 21, 5, 16]
    handles = [core.submit(request(prompt(i, 20 + i), n), Session()) for i, n in enumerate(counts)]
    for index, (handle, count) in enumerate(zip(handles, counts, strict=True)):
        assert drain(handle)[0] == expected_answer(prompt(index, 20 + index), count)
    rounds = [note for note in gate.notes if note.unit is Unit.ROUND]
    assert all(note.rows == len(note.tokens) <= 8 for note in rounds)
    assert sum(note.rows for note in rounds) == sum(counts) - len(counts)
    assert {note.rows for note in rounds} >= {1, 2, 3, 4}
    settle(core)


def test_requests_are_admitted_in_their_order(build: Build) -> None:
    gate = Gate()
    core = build(gate=gate, policy=NO_REUSE)
    handles = [core.submit(request(prompt(i, 5 + 20 * (i % 3)), 2), Session()) for i in range(10)]
    gate.open()
    for handle in handles:
        drain(handle)
    assert begun(gate.notes) == list(range(10))
    settle(core)


# Going first. Eight pages in all; a page has 64 tokens, and n + 1 tokens of which the last is output take n.


def sized(first: int, pages: int, output: int) -> Request:
    """A request for exactly so many pages."""
    return request(prompt(first, 64 * pages - output + 1), output)


def crowd(build: Build, gate: Gate, head_pages: int, small_pages: list[int], lanes: int = 3) -> list[int]:
    """Order of starts: 1 takes four pages for a while, 2 is blocked behind it, 3, 4, … stand behind."""
    core = build(concurrency=lanes, context=512, gate=gate, policy=NO_REUSE)
    donor = core.submit(sized(1, 4, 60), Session())
    gate.arrive()
    asked = [sized(2, head_pages, 3), *(sized(3 + i, n, 3) for i, n in enumerate(small_pages))]
    handles = [donor, *(core.submit(one, Session()) for one in asked)]
    gate.open()
    for handle in handles:
        _, statistics, _ = drain(handle)
        assert statistics.prompt_tokens
    settle(core)
    return begun(gate.notes)


def test_the_head_is_not_blocked_without_need(build: Build) -> None:
    assert crowd(build, Gate(), 4, [1, 1]) == [1, 2, 3, 4]


def test_a_small_request_goes_first_where_the_head_can_start_beside_it(build: Build) -> None:
    assert crowd(build, Gate(), 5, [3]) == [1, 3, 2]


def test_no_request_goes_first_that_fits_now_but_would_delay_the_head(build: Build) -> None:
    assert crowd(build, Gate(), 7, [2]) == [1, 2, 3]
    assert crowd(build, Gate(), 8, [1]) == [1, 2, 3]


def test_a_later_one_may_go_first_where_an_earlier_may_not(build: Build) -> None:
    assert crowd(build, Gate(), 7, [2, 1]) == [1, 4, 2, 3]


def test_a_lane_is_kept_for_the_head(build: Build) -> None:
    # Two lanes: a borrower would hold the second one when the donor has gone, and that is enough.
    assert crowd(build, Gate(), 5, [3], lanes=2) == [1, 3, 2]
    assert crowd(build, Gate(), 5, [1, 1], lanes=2)[:2] == [1, 3]


def test_borrowers_together_leave_room_for_the_head(build: Build) -> None:
    # The third would fit as well while the donor runs, but not beside the head and the two before it.
    gate = Gate()
    core = build(concurrency=4, context=512, gate=gate, policy=NO_REUSE)
    donor = core.submit(sized(1, 4, 30), Session())
    gate.arrive()
    order = [sized(2, 6, 3), *(sized(i, 1, 60) for i in (3, 4, 5))]
    handles = [core.submit(one, Session()) for one in order]
    gate.open()
    for handle in [donor, *handles]:
        drain(handle)
    assert begun(gate.notes) == [1, 3, 4, 2, 5]
    settle(core)


def test_a_stream_of_small_requests_cannot_starve_the_head(build: Build) -> None:
    gate = Gate()
    core = build(concurrency=3, context=512, gate=gate, policy=NO_REUSE)
    donor = core.submit(sized(1, 4, 40), Session())
    gate.arrive()
    head = core.submit(sized(2, 6, 3), Session())
    stream = [core.submit(sized(3 + i, 1, 4), Session()) for i in range(40)]
    gate.open()
    for handle in [donor, head, *stream]:
        drain(handle)
    order = begun(gate.notes)
    place = order.index(2)
    assert 3 < place < 30, "some went first while the donor ran, the rest after the head"
    # The head is the next to begin after the donor's last round, which feeds the end of its four pages.
    last = max(i for i, note in enumerate(gate.notes) if note.unit is Unit.ROUND and 255 in note.positions)
    assert begun(gate.notes[last:])[0] == 2
    assert order[1:place] == list(range(3, 2 + place)), "and they kept their order"
    settle(core)


def test_a_head_that_gives_up_frees_the_next(build: Build) -> None:
    gate = Gate()
    core = build(concurrency=2, context=512, gate=gate, policy=NO_REUSE)
    donor = core.submit(sized(1, 4, 60), Session())
    gate.arrive()
    head = core.submit(sized(2, 8, 3), Session())
    small = core.submit(sized(3, 2, 3), Session())
    for _ in range(5):
        gate.step()
        gate.arrive()
    assert core.statistics().waiting == 2
    head.cancel()
    gate.open()
    assert isinstance(next(iter(small)), Started)
    drain(donor)
    list(head)
    assert begun(gate.notes) == [1, 3]
    settle(core)


@pytest.mark.parametrize("recurrent", [True, False])
def test_any_mixture_of_sizes_gets_through(build: Build, recurrent: bool) -> None:
    core = build(recurrent=recurrent, concurrency=4, context=512, policy=Policy(max_pending=64))
    asked = [(prompt(i, 10 + 97 * i % 400), 1 + 31 * i % 100) for i in range(40)]
    handles = [core.submit(request(p, n), Session()) for p, n in asked]
    for handle, (p, n) in zip(handles, asked, strict=True):
        assert drain(handle)[0] == expected_answer(p, n, recurrent)
    settle(core)
