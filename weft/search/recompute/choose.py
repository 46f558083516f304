"""Options for all pieces of a stage together: least extra seconds within a budget of bytes for each micro-batch.

    minimise    sum over sorts c and options k of extra_s[c, k] n[c, k]
    subject to  sum of kept_bytes[c, k] n[c, k] <= budget,   sum over k of n[c, k] = number of copies of c,
                again_bytes[c, k] <= room for all k with n[c, k] > 0

Copies of equal pieces share their options. The options on the hulls alone, in parts, give a bound that no choice can
beat (``_relaxed``). Where that leaves a gap, options between are added near the budget and, for few pieces, all of them
are solved as one (``within``).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from weft.base.errors import NoFeasiblePlan
from weft.base.quiet import quiet_stdout
from weft.base.units import format_bytes
from weft.model.graph import F64
from weft.search.recompute.options import Option, hull, option_of, within
from weft.search.recompute.pieces import Lent, Piece

WORTHWHILE: Final = 0.002
"""A smaller gap between choice and bound is left."""
GRID: Final = 16
"""So many limits on the bytes of one piece are tried for options between those of the hull."""
FEW: Final = 4
"""Up to so many copies of a piece alone may make up for what is missing."""
MOST_AT_ONCE: Final = 1500
"""Operators of all pieces together that are solved as one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The option of each piece."""

    options: tuple[Option, ...]
    bound_s: float
    """No choice within the budget takes fewer extra seconds."""

    @property
    def kept_bytes(self) -> float:
        """Return what is kept for each micro-batch."""
        return sum(item.kept_bytes for item in self.options)

    @property
    def extra_s(self) -> float:
        """Return the seconds that the backward takes longer."""
        return sum(item.extra_s for item in self.options)

    @property
    def again_bytes(self) -> float:
        """Return the most that is made again for one piece."""
        return max((item.again_bytes for item in self.options), default=0.0)

    @property
    def gap(self) -> float:
        """Return how far above the bound the seconds are, as a part of them."""
        return 0.0 if self.extra_s <= 0 else max(0.0, 1 - self.bound_s / self.extra_s)


class Chooser:
    """The pieces of a stage with their options, for any number of budgets."""

    def __init__(self, pieces: Sequence[Piece]) -> None:
        self.sorts = list(dict.fromkeys(pieces))
        self.copies = [sum(piece == item for piece in pieces) for item in self.sorts]
        self.sort_of = [self.sorts.index(piece) for piece in pieces]
        self.pieces = tuple(pieces)
        self.hulls = [hull(item) for item in self.sorts]
        self.options = [list(items) for items in self.hulls]

    @property
    def least_bytes(self) -> float:
        """Return the fewest bytes that can be kept."""
        return sum(items[-1].kept_bytes * count for items, count in zip(self.hulls, self.copies, strict=True))

    @property
    def most_bytes(self) -> float:
        """Return what is kept where nothing runs again."""
        return sum(item.total_bytes * count for item, count in zip(self.sorts, self.copies, strict=True))

    def __call__(self, budget: float, *, room: float = float("inf"), closely: bool = True) -> Choice:
        """Return the best choice found within the budget, with at most ``room`` bytes made again for one piece.

        Unless ``closely``, only options that are best at some price are combined, which is quick. Raise
        ``NoFeasiblePlan`` where nothing keeps so little.
        """
        bound = self._relaxed(budget)
        found = self._combine(budget, room)
        if found is None:
            raise NoFeasiblePlan(
                f"a budget of {format_bytes(int(max(0.0, budget)))} for each micro-batch is less than the "
                f"{format_bytes(int(np.ceil(self.least_bytes)))} that must be kept whatever is computed again: give at "
                "least so much", missing_bytes=int(np.ceil(self.least_bytes - budget)))
        best = Choice(options=found, bound_s=bound)
        if best.gap > WORTHWHILE and closely:
            self._add_between(self.most_bytes - budget)
            best = replace(best, options=self._combine(budget, room) or found)
        num_ops = sum(piece.num_ops for piece in self.pieces)
        if closely and best.gap > WORTHWHILE and num_ops <= MOST_AT_ONCE and np.isinf(room):
            best = self._at_once(best, budget)
        return best

    def _relaxed(self, budget: float) -> float:
        """Return the least seconds where pieces may take parts of options: the value of the convex hull."""
        steps = sorted(((less.extra_s - more.extra_s) / (more.kept_bytes - less.kept_bytes),
                        (more.kept_bytes - less.kept_bytes) * count)
                       for items, count in zip(self.hulls, self.copies, strict=True)
                       for more, less in itertools.pairwise(items))
        missing, seconds = self.most_bytes - budget, 0.0
        for price, num_bytes in steps:
            if missing <= 0:
                break
            seconds += price * min(num_bytes, missing)
            missing -= num_bytes
        return seconds

    def _combine(self, budget: float, room: float) -> tuple[Option, ...] | None:
        """Return the best options of those known, as an integer program; None if none are within the budget."""
        from scipy.optimize import Bounds, LinearConstraint, milp

        items = [(sort, option) for sort, options in enumerate(self.options) for option in options
                 if option.again_bytes <= room]
        if len({sort for sort, _ in items}) < len(self.sorts):
            return None
        unit_s = max((option.extra_s for _, option in items), default=0.0) or 1.0
        unit = self.most_bytes or 1.0
        each: F64 = np.zeros((len(self.sorts), len(items)))
        each[[sort for sort, _ in items], np.arange(len(items))] = 1.0
        with quiet_stdout():
            result = milp(np.array([option.extra_s for _, option in items]) / unit_s, integrality=np.ones(len(items)),
                          bounds=Bounds(0, np.inf), options={"node_limit": 20000, "mip_rel_gap": 1e-4},
                          constraints=[LinearConstraint(each, self.copies, self.copies), LinearConstraint(
                              np.array([[option.kept_bytes for _, option in items]]) / unit, -np.inf,
                              budget / unit + 1e-9)])
        if result.x is None:
            return None
        chosen: list[list[Option]] = [[] for _ in self.sorts]
        for (sort, option), number in zip(items, np.round(result.x).astype(int).tolist(), strict=True):
            chosen[sort] += [option] * number
        queues = [iter(options) for options in chosen]
        return tuple(next(queues[sort]) for sort in self.sort_of)

    def _add_between(self, missing: float) -> None:
        """Add options between those of the hull, and such with which few copies make up for all that is missing."""
        for sort, options in enumerate(self.options):
            if len(self.hulls[sort]) < 2:
                continue
            most, least = options[0].kept_bytes, options[-1].kept_bytes
            between = [least + float(share) * (most - least) for share in np.arange(1, GRID) / GRID]
            alone = [most - missing / number for number in range(1, 1 + min(FEW, self.copies[sort]))]
            for limit in (*between, *(item for item in alone if item > least)):
                option, _ = within(self.sorts[sort], limit)
                if option is not None and option not in options:
                    options.append(option)

    def _at_once(self, best: Choice, budget: float) -> Choice:
        """Return the better of the choice and that of all pieces solved as one; the higher bound holds for both."""
        joined = _joined(self.pieces)
        option, bound = within(joined, budget)
        if option is None:
            return best
        known = replace(best, bound_s=max(best.bound_s, bound))
        if option.extra_s >= best.extra_s or option.kept_bytes > budget * (1 + 1e-9):
            return known
        ends = np.cumsum([piece.num_ops for piece in self.pieces]).tolist()
        return replace(known, options=tuple(
            option_of(piece, option.again[end - piece.num_ops:end])
            for piece, end in zip(self.pieces, ends, strict=True)))


def _joined(pieces: Sequence[Piece]) -> Piece:
    lent: list[Lent] = []
    first = 0
    for piece in pieces:
        lent += [Lent(num_bytes=item.num_bytes, maker=item.maker if item.maker < 0 else item.maker + first,
                      readers=tuple(reader + first for reader in item.readers)) for item in piece.lent]
        first += piece.num_ops
    return Piece(seconds=tuple(item for piece in pieces for item in piece.seconds),
                 freed=tuple(item for piece in pieces for item in piece.freed),
                 made=tuple(item for piece in pieces for item in piece.made),
                 may_repeat=tuple(item for piece in pieces for item in piece.may_repeat), lent=tuple(lent))
