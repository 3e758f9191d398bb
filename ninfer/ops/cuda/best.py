"""The 20 best scores of a row, in two steps: every tile's, then those of all tiles.

A score and its id are one 64-bit key: above, an integer that orders as the score does (`_WORTHLESS` for a
NaN, `_FORBIDDEN` for what takes no part, both below minus infinity); below, the id backwards, so that the
larger of two keys is the one with the higher score, or with the lower id among equals.

Sorting is what costs here, so little is sorted. A tile's scores form groups of `GROUP` neighbours: whatever
is among the best 20 stands in one of the 20 groups with the best maxima, and only those are sorted. The
tiles' lists are sorted already: number j of the list whose head is number r of the heads has r + j better
ones above it, which leaves 210 of all keys.
"""

# pyright: reportUnreachable=false, reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false
# pyright: reportIndexIssue=false, reportAttributeAccessIssue=false

from __future__ import annotations

import triton
import triton.language as tl

from ninfer.ops.sampling import CANDIDATES

TILE = 2048
GROUP = 16
_BEST = tl.constexpr(CANDIDATES)
_SORTED = tl.constexpr(32)
_PAIRS = tl.constexpr(256)
_FORBIDDEN = tl.constexpr(-(1 << 31))
_WORTHLESS = tl.constexpr(1 - (1 << 31))
_BACKWARDS = tl.constexpr((1 << 31) - 1)
_LOWEST = tl.constexpr(-(1 << 63))


def padded_tiles(tiles: int) -> int:
    """A power of two, the same for all usual vocabularies, so that one compiled kernel serves them."""
    return max(128, triton.next_power_of_2(tiles))


@triton.jit
def order_of(x, allowed):
    """int32 that orders as the allowed scores do; both zeros are one."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return tl.where(allowed, tl.where(x == x, ordered, _WORTHLESS), _FORBIDDEN)


@triton.jit
def score_of(order):
    """The score again."""
    return (order ^ ((order >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def key_of(order, ids):
    return (order.to(tl.int64) << 32) | (ids ^ _BACKWARDS).to(tl.int64)


@triton.jit
def order_in(key):
    return (key >> 32).to(tl.int32)


@triton.jit
def id_in(key):
    return (key & 0x7FFFFFFF).to(tl.int32) ^ _BACKWARDS


@triton.jit
def is_number(order):
    """Does it stand for an allowed score that is not NaN?"""
    return order > _WORTHLESS


@triton.jit
def is_forbidden(order):
    return order == _FORBIDDEN


@triton.jit
def best_groups(order, GROUPS: tl.constexpr):
    """Which 32 groups of `order` [GROUPS, group] have the best maxima; lower ones first among equals."""
    groups = tl.arange(0, GROUPS)
    return id_in(tl.topk(key_of(tl.max(order, axis=1), groups), _SORTED))


@triton.jit
def merged(partial, tiles, TILES: tl.constexpr, TILE: tl.constexpr):
    """The row's 32 best keys, descending (the first 20 are right), from its tiles' best 20 each."""
    tile = tl.arange(0, TILES)
    heads = tl.load(partial + tile * _BEST, mask=tile < tiles, other=_LOWEST)
    first = id_in(tl.topk(heads, _SORTED)) // TILE
    # Lane -> (r, j) with r + j < 20: the 20 - r of list r and the r + 1 of list 19 - r make 21.
    lane = tl.arange(0, _PAIRS)
    pair, place = lane // (_BEST + 1), lane % (_BEST + 1)
    folded = place + pair >= _BEST
    rank = tl.where(folded, -pair + (_BEST - 1), pair)
    place = tl.where(folded, place + pair - _BEST, place)
    wanted = tl.gather(first, rank, 0)
    present = (lane < _BEST * (_BEST + 1) // 2) & (wanted < tiles)
    keys = tl.load(partial + wanted * _BEST + place, mask=present, other=_LOWEST)
    return tl.topk(keys, _SORTED)
