"""Walks: annealing and large steps in rounds, from the best choice known and from what the bound's messages suggest."""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np

from weft.model.graph import F64, I64
from weft.search.strategies.core import Core
from weft.search.strategies.dual_kernel import cost_of
from weft.search.strategies.forest_kernel import improve
from weft.search.strategies.local_kernel import anneal, repair

ROUNDS_PER_WALK: Final = 15
"""A walk cools down over so many rounds; then another begins at the best choice."""
WORTH_WALKING: Final = 2.0
"""Suggestions that cost more than this times the best are not improved."""
STEPS: Final = 100_000
"""Small steps in a round."""
LOOKED_AT: Final = 4_000_000
"""Numbers that the large steps of a round look at, about; it limits how many there are."""


class Found(NamedTuple):
    """A choice that fits."""

    cost: float
    x: I64


class Walker:
    """A walk on a core. Every round is a function of what it is given and the seed."""

    def __init__(self, core: Core, *, seed: int) -> None:
        self._core = core
        self._random = np.random.default_rng(seed)
        self._round = 0
        self._x: I64 = np.zeros(0, dtype=np.int64)
        self._hot = 1.0
        size = len(core.cost) + len(core.base) + len(core.head) + len(core.matrices) // 64
        self._tries = min(max(LOOKED_AT // (size + 1), 10), 300)

    def suggest(self, x: I64, price: F64, *, best: float, heat: float, part: float) -> Found | None:
        """Return the choice that a suggestion leads to; None if it does not fit or is far off."""
        x = x.copy()
        if not repair(self._core, x, 4 * len(x)):
            return None
        if np.isfinite(best) and cost_of(self._core, x) - best > (WORTH_WALKING - 1.0) * abs(best):
            return None
        return self._descend(x, price, heat, 0.01 * heat, part)

    def walk(self, start: I64, price: F64, *, heat: float, part: float) -> Found:
        """Return the best choice of a round of the walk, which begins at ``start`` where the last one has ended.

        ``part`` of a round's work is done.
        """
        if self._round % ROUNDS_PER_WALK == 0:
            self._x = start.copy()
            self._hot = heat * 10.0 ** self._random.uniform(-1.0, 1.0)
        hot = self._hot * 0.01 ** (self._round % ROUNDS_PER_WALK / ROUNDS_PER_WALK)
        self._round += 1
        return self._descend(self._x, price, hot, hot * 0.01 ** (1 / ROUNDS_PER_WALK), part)

    def _descend(self, x: I64, price: F64, hot: float, cold: float, part: float) -> Found:
        """Return the best choice near a walk of small steps, which moves ``x``, with large steps from there."""
        found = np.empty_like(x)
        anneal(self._core, x, found, int(part * min(STEPS, 1000 * len(x))), hot, cold, self._seed())
        most = int(min(10.0 ** self._random.uniform(0.5, 3.5), len(x)))
        return Found(improve(self._core, found, price, most, int(part * self._tries) + 3, self._seed()), found)

    def _seed(self) -> int:
        return int(self._random.integers(2**31))
