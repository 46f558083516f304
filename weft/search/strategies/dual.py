"""The bound of a core while it rises, and what it says about strategies."""

from __future__ import annotations

from typing import Final

import numpy as np

from weft.model.graph import F64, I64
from weft.search.strategies.core import Compact
from weft.search.strategies.dual_kernel import ascend

LEAST_RISE: Final = 0.01
"""The bound has stalled when it has closed no more than this share of the gap in the last ``SWEEPS``, ..."""
LEAST_HOPE: Final = 0.02
"""... and steps of prices are too short to close more than this."""
SWEEPS: Final = 100


class Dual:
    """Messages, prices and bound of a core. Costs here are those of the core, without its constant."""

    def __init__(self, compact: Compact, before: Dual | None = None) -> None:
        core = compact.core
        self.compact = compact
        self.messages: F64 = np.zeros(int(core.message[-1]))
        self.price: F64 = np.zeros(len(core.base))
        self.reach: F64 = np.full(len(core.cost), -np.inf)
        """A bound of all choices with the strategy."""
        self.x: I64 = np.zeros(compact.num_units, dtype=np.int64)
        self._state: F64 = np.array([-np.inf, 0.0, 0.0, np.inf, 0.0])
        self._history: list[tuple[float, float]] = []
        if before is not None:
            self._take_over(before)
        self._direction: F64 = np.zeros(len(core.base))
        self.best_price: F64 = self.price.copy()
        """Those of the best bound."""
        self._best_messages: F64 = self.messages.copy()

    @property
    def bound(self) -> float:
        """Return the best bound so far."""
        return float(self._state[0])

    @property
    def is_stalled(self) -> bool:
        """Return whether going on promises little."""
        bound, hope, _, best, sweeps = self._state.tolist()
        gap = best - bound if np.isfinite(best) else 1e-3 * abs(bound)
        before = [old for count, old in self._history if count <= sweeps - SWEEPS]
        return bool(before) and bound - before[-1] < LEAST_RISE * gap and 0 < hope < LEAST_HOPE * gap

    def advance(self, sweeps: int, *, best: float) -> None:
        """Raise the bound by some sweeps, towards the least cost known."""
        self._state[3] = best
        ascend(self.compact.core, self._state, self.price, self._direction, self.messages, self.best_price,
               self._best_messages, self.reach, self.x, sweeps)
        self._history.append((float(self._state[4]), self.bound))

    def _take_over(self, before: Dual) -> None:
        """Begin with prices and messages of a larger core of the same units."""
        old, new = before.compact, self.compact
        place = np.searchsorted(old.times, new.times)
        self.price[:] = before.best_price[place]
        self._state[1] = before._state[1]
        number = {unit: index for index, unit in enumerate(old.unit)}
        arcs = {(index, int(old.core.head[arc])): arc for index in range(old.num_units)
                for arc in range(old.core.arc[index], old.core.arc[index + 1])}
        for index, unit in enumerate(new.unit):
            at = np.searchsorted(old.kept[number[unit]], new.kept[index])
            for arc in range(new.core.arc[index], new.core.arc[index + 1]):
                source = arcs.get((number[unit], number[new.unit[new.core.head[arc]]]))
                if source is not None:
                    begin = new.core.message[arc]
                    self.messages[begin : begin + len(at)] = before.messages[old.core.message[source] + at]
