"""Local search around the best placement: rounds of annealing, from warm and from hot, as long as they pay."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np

from weft.search.common.budget import Budget
from weft.search.place.anneal import Annealer
from weft.search.place.problem import PlaceProblem
from weft.search.place.timetable import Timetable, make_timetable

HEAT: Final = (0.02, 0.005, 0.05, 0.01)
"""Starting temperatures in turn, as parts of the value."""
COLD: Final = 0.0002
PRICE: Final = 0.3
"""Of a byte over a device's memory, at first, as a part of the best time by byte."""
SECONDS_PER_STEP: Final = 50e-9
"""CPU seconds of timing one operator, about."""
ROUNDS: Final = 4


class Local:
    """Local search on one problem."""

    def __init__(self, problem: PlaceProblem, seed: int) -> None:
        self.problem = problem
        self.seed = seed
        self.annealer = Annealer(problem)
        self.num_runs = 0
        self.bytes_held = float(problem.weight_bytes.sum()) or float(problem.tensor_bytes.sum())

    def improve(self, best: Timetable, budget: Budget, *, effort: float) -> Iterator[Timetable]:
        """Yield the better timetables that rounds of annealing end with; each starts from the best so far."""
        steps = max(10_000, int(effort / ROUNDS / SECONDS_PER_STEP))
        for index in range(ROUNDS):
            if budget.is_spent:
                break
            found = self._anneal(best, budget, steps=steps, hot=HEAT[index], is_priced=index % 2 == 0)
            if found is not None and found.latency_s < best.latency_s:
                best = found
                yield best

    def make_fit(self, start: Timetable, budget: Budget, *, effort: float) -> Timetable | None:
        """Return what annealing comes to from a timetable that need not fit, None if it finds none that does."""
        return self._anneal(start, budget, steps=max(10_000, int(effort / SECONDS_PER_STEP)), hot=HEAT[0],
                            is_priced=True)

    def _anneal(self, best: Timetable, budget: Budget, *, steps: int, hot: float, is_priced: bool) -> Timetable | None:
        """Return what a run ends with, None if nothing that it met fits.

        With ``is_priced`` it may pass through what does not fit, where memory is tight at all.
        """
        self.num_runs += 1
        price = PRICE * best.latency_s / self.bytes_held if is_priced and self.problem.is_tight else 0.0
        found = self.annealer.run(best.device, best.order, steps=steps, hot=hot, cold=COLD, price=price,
                                  seed=self.seed + 97 * self.num_runs, is_spent=lambda: budget.is_spent)
        budget.effort -= found.num_steps * SECONDS_PER_STEP
        return make_timetable(self.problem, found.device, found.order) if np.isfinite(found.value) else None
