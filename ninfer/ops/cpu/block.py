"""What a kernel finds at its address: arguments, and counters by which a team shares out work.

The block is 32 integers, one cache line with the number of arrivals, the team's size and a shared counter,
then a line with a counter for each thread. A kernel claims work until none is left, so it is complete with
whatever number of threads turns up.
"""

from __future__ import annotations

from ninfer.ops.cpu.instructions import device
from ninfer.ops.cpu.simd import fetch_add, get_i64

ARGUMENTS = 32
DYNAMIC = 12
"""Arguments that a call with constants passes itself; the constants follow."""
ARRIVALS = ARGUMENTS * 8
THREADS = ARRIVALS + 8
SHARED = ARRIVALS + 16
COUNTERS = ARRIVALS + 64
MAX_THREADS = 64


@device
def argument(data, index):
    return get_i64(data + 8 * index)


@device
def arrive(data):
    """This thread's number in the team: 0, 1, ... in order of arrival."""
    return fetch_add(data + ARRIVALS, 1)


@device
def team_size(data):
    return get_i64(data + THREADS)


@device
def next_shared(data, step):
    """Claim the next `step` items of one common list."""
    return fetch_add(data + SHARED, step)


@device
def next_of(data, member, step):
    """Claim the next `step` items of a member's own list: one's own first, then what others left."""
    return fetch_add(data + COUNTERS + 64 * member, step)
