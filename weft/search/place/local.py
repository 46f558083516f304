"""Local search around the best placement: rounds of annealing, from warm and from hot, as long as they pay."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np

from weft.search.cpsat import Budget
from weft.search.place.anneal import Annealer
from weft.search.place.problem import PlaceProblem
from weft.search.place.timetable import Timetable, make_timetable

HEAT: Final = (0.02, 0.005, 0.05, 0.01)
"""Starting temperatures in turn, as parts of the value."""
COLD: Final = 0.0002
SECONDS_PER_STEP: Final = 50e-9
"""CPU seconds of timing one operator, about."""
ROUNDS: Final = 4


def improve(problem: PlaceProblem, best: Timetable, budget: Budget, *, effort: float, seed: int) -> Iterator[Timetable]:
    """Yield the timetable that each round of annealing ends with; each starts from the best so far."""
    annealer = Annealer(problem)
    steps = max(10_000, int(effort / ROUNDS / SECONDS_PER_STEP))
    for index in range(ROUNDS):
        if budget.is_spent:
            break
        found = annealer.run(best.device, best.order, steps=steps, seed=seed * ROUNDS + index, hot=HEAT[index],
                             cold=COLD)
        budget.effort -= found.num_steps * SECONDS_PER_STEP
        if found.value < best.latency_s and np.isfinite(found.value):
            best = make_timetable(problem, found.device, found.order)
            yield best
