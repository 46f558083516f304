"""What a piece can do: bytes kept against extra seconds, the best of each kind.

With ``r[o]`` = 1 where operator ``o`` runs again and ``y[t]`` = 1 where a tensor that no backward needs is kept for it,

    seconds(r)  = sum of seconds[o] r[o]
    bytes(r, y) = sum of freed[o] (1 - r[o]) + sum of size[t] y[t]
    y[t] >= r[reader of t] - r[maker of t]                                                      (``_rows``)

At a price ``p`` per byte, seconds + p bytes is least along a minimum cut: the matrix is that of a cut, so the
linear program has whole solutions (``_cheapest``). Prices found by halving give all options on the convex hull
(``hull``). Those between come from the integer program with a limit on bytes (``within``), which is the same with one
row more.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from weft.base.quiet import quiet_stdout
from weft.model.graph import F64
from weft.search.recompute.pieces import Piece

MAX_NODES = 2000
"""Of the integer program, for one limit on bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """Which operators of a piece run again, and what that comes to."""

    again: tuple[bool, ...]
    kept_bytes: float
    extra_s: float
    again_bytes: float


def option_of(piece: Piece, again: tuple[bool, ...]) -> Option:
    """Return the option in which these operators run again."""
    return Option(again=again, kept_bytes=piece.kept_bytes(again), extra_s=piece.extra_seconds(again),
                  again_bytes=piece.again_bytes(again))


@lru_cache(1024)
def hull(piece: Piece) -> tuple[Option, ...]:
    """Return the options that are best at some price per byte, the one that keeps everything first."""
    program = _Program(piece)
    all_kept, least = option_of(piece, (False,) * piece.num_ops), program.cheapest(float("inf"))
    least = program.within(least.kept_bytes)[0] or least  # of several with as few bytes the quickest
    found = {all_kept.kept_bytes: all_kept, least.kept_bytes: least}
    stack = [(all_kept, least)]
    while stack:
        more, less = stack.pop()
        if more.kept_bytes - less.kept_bytes <= 0.5:
            continue
        price = (less.extra_s - more.extra_s) / (more.kept_bytes - less.kept_bytes)
        between = program.cheapest(price)
        value = between.extra_s + price * between.kept_bytes
        if value < (more.extra_s + price * more.kept_bytes) * (1 - 1e-9) and between.kept_bytes not in found:
            found[between.kept_bytes] = between
            stack += [(more, between), (between, less)]
    return tuple(sorted(found.values(), key=lambda item: -item.kept_bytes))


@lru_cache(4096)
def within(piece: Piece, limit: float) -> tuple[Option | None, float]:
    """Return the option of least seconds that keeps at most so many bytes, and a bound of these; None if none does."""
    return _Program(piece).within(limit)


class _Program:
    """The variables and rows of a piece, in shares of its seconds and bytes."""

    def __init__(self, piece: Piece) -> None:
        self.piece = piece
        self.unit_s = float(sum(piece.seconds)) or 1.0
        self.unit_bytes = piece.total_bytes or 1.0
        count, size = piece.num_ops, piece.num_ops + len(piece.lent)
        self.seconds: F64 = np.concatenate((piece.seconds, np.zeros(len(piece.lent)))) / self.unit_s
        self.bytes: F64 = np.concatenate((-np.array(piece.freed), [item.num_bytes for item in piece.lent])
                                         ) / self.unit_bytes
        rows = [(count + number, item.maker, reader) for number, item in enumerate(piece.lent)
                for reader in item.readers]
        self.matrix = np.zeros((len(rows), size))
        for number, (lent, maker, reader) in enumerate(rows):
            self.matrix[number, reader] += 1.0
            self.matrix[number, lent] -= 1.0
            if maker >= 0:
                self.matrix[number, maker] -= 1.0
        self.upper = np.concatenate((np.array(piece.may_repeat, dtype=np.float64), np.ones(len(piece.lent))))

    def cheapest(self, price: float) -> Option:
        """Return the option of least seconds and bytes at this price of a byte; of least bytes first if infinite."""
        from scipy.optimize import linprog

        scaled = price * self.unit_bytes / self.unit_s
        cost = self.bytes + 1e-6 * self.seconds if np.isinf(price) else self.seconds + scaled * self.bytes
        with quiet_stdout():
            result = linprog(cost, A_ub=self.matrix if len(self.matrix) else None,
                             b_ub=np.zeros(len(self.matrix)) if len(self.matrix) else None,
                             bounds=np.stack([np.zeros(len(cost)), self.upper], axis=1), method="highs-ds")
        return self._option(result.x)

    def within(self, limit: float) -> tuple[Option | None, float]:
        """Return the option of least seconds within the limit, and a bound."""
        from scipy.optimize import Bounds, LinearConstraint, milp

        room = (limit - self.piece.total_bytes) / self.unit_bytes + 1e-9
        matrix = np.concatenate((self.matrix, self.bytes[None, :]))
        limits = np.concatenate((np.zeros(len(self.matrix)), [room]))
        whole = np.concatenate((np.ones(self.piece.num_ops), np.zeros(len(self.piece.lent))))
        with quiet_stdout():
            result = milp(self.seconds, integrality=whole, bounds=Bounds(0.0, self.upper),
                          constraints=LinearConstraint(matrix, -np.inf, limits),
                          options={"node_limit": MAX_NODES, "mip_rel_gap": 1e-4})
        if result.x is None:
            return None, 0.0
        return self._option(result.x), float(result.mip_dual_bound or 0.0) * self.unit_s

    def _option(self, values: F64) -> Option:
        return option_of(self.piece, tuple((values[:self.piece.num_ops] > 0.5).tolist()))
