"""Reshapes as factors: the pieces of which the dimensions before and after are both made.

``[batch, seq, 3 * heads * size] -> [batch, seq, 3, heads, size]`` has five pieces; the last dimension before is three
of them. Where sizes do not divide one another (``[6, 4] -> [4, 6]``), the outermost and innermost common divisors are
pieces still (the first 12 entries are half of both), and what is left in between is never split.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from weft.sharding.factor_rules.common import Call
from weft.sharding.factors import Dims


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A factor of a reshape: the dimension it is in before and after, None where it is only in one of them."""

    size: int
    before: int | None
    after: int | None


def common_pieces(before: Sequence[int], after: Sequence[int]) -> tuple[Piece, ...]:
    """Return the pieces of two shapes of equally many entries; those of one dimension stand outermost first."""
    result: list[Piece] = []
    for left, right in _groups(before, after):
        outer = _matched(left, right, list(left), list(right))
        inner = _matched(left, right, list(left)[::-1], list(right)[::-1])
        result += outer
        result += [Piece(size=size, before=dim, after=None) for dim, size in left.items() if size > 1]
        result += [Piece(size=size, before=None, after=dim) for dim, size in right.items() if size > 1]
        result += inner[::-1]
    return tuple(result)


def reshape_dims(call: Call, before: Sequence[int], after: Sequence[int], *,
                 special: Collection[int] = ()) -> tuple[Dims, Dims]:
    """Return how both shapes are made of new factors; those in the dimensions ``special`` of the result are special."""
    pieces = common_pieces(before, after)
    left: list[tuple[int, ...]] = [()] * len(before)
    right: list[tuple[int, ...]] = [()] * len(after)
    for piece in pieces:
        alone = sum(other.after == piece.after for other in pieces) == 1
        name = f"from{piece.before}" if piece.after is None else f"d{piece.after}" if alone else \
            f"d{piece.after}{'abcdefghijklmnopqrstuvwxyz'[len(right[piece.after])]}"
        factor = call.factor(name, piece.size, special=piece.after in special,
                             fixed=piece.before is None or piece.after is None)
        if piece.before is not None:
            left[piece.before] += factor
        if piece.after is not None:
            right[piece.after] += factor
    return tuple(left), tuple(right)


def _groups(before: Sequence[int], after: Sequence[int]) -> Iterator[tuple[dict[int, int], dict[int, int]]]:
    """Yield the smallest runs of dimensions with equally many entries on both sides, as sizes by dimension."""
    if 0 in before:
        return
    left = [(dim, size) for dim, size in enumerate(before) if size > 1]
    right = [(dim, size) for dim, size in enumerate(after) if size > 1]
    while left:
        num_left = num_right = 1
        product_left, product_right = left[0][1], right[0][1]
        while product_left != product_right:
            if product_left < product_right:
                product_left *= left[num_left][1]
                num_left += 1
            else:
                product_right *= right[num_right][1]
                num_right += 1
        yield dict(left[:num_left]), dict(right[:num_right])
        left, right = left[num_left:], right[num_right:]


def _matched(left: dict[int, int], right: dict[int, int], left_order: list[int], right_order: list[int]) -> list[Piece]:
    """Return the pieces at one end of a group, and leave in ``left`` and ``right`` what they do not cover."""
    found: list[Piece] = []
    while left_order and right_order:
        before, after = left_order[0], right_order[0]
        if left[before] == 1:
            left_order = left_order[1:]
        elif right[after] == 1:
            right_order = right_order[1:]
        elif (size := math.gcd(left[before], right[after])) == 1:
            break
        else:
            found.append(Piece(size=size, before=before, after=after))
            left[before] //= size
            right[after] //= size
    return found
